"""A draft whose context is shorter than its target's: over the boundary the output has the target's
distribution, and no row of the draft lies beyond its context."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaForCausalLM

from decoding.engines.autoregressive import AutoregressiveEngine
from decoding.engines.serial import SerialEngine
from decoding.interfaces import LMOutput, Pair
from decoding.models.cached_lm import CachedLM
from decoding.models.eagle.draft import EagleDraft
from decoding.models.loading import ModelPair
from decoding.models.table_lm import TableLM
from decoding.sampling import Sampler, Warp
from decoding.stopping.confidence import Confidence
from decoding.stopping.fixed import Fixed
from decoding.stopping.never import Never
from decoding.structures.chain import Chain
from decoding.structures.lookup import Copies
from decoding.structures.sources import Sources
from decoding.trace import RoundTrace, Trace
from decoding.verifiers.token import TokenVerifier
from tests.contract.engines import (
    OFF,
    PROMPT,
    THREE_WORDS,
    Case,
    checked,
    engine,
    toy_pair,
    verifier,
)
from tests.contract.overlaps import PEARL, Policy, named
from tests.contract.test_eagle_distribution import config, eagle_pair
from tests.contract.test_grown_distribution import COSTS
from tests.contract.test_overlapped_distribution import MIXED, length_of
from tests.helpers.decoding.value_stub import Nosy, grown
from tests.helpers.models.tiny_pair import tiny_tokenizer

pytestmark = pytest.mark.filterwarnings("ignore:pair.draft. its context holds")


class Limited(TableLM):
    """Fails where a row lies beyond its context."""

    def forward(self, tokens: torch.Tensor, *arguments, **options) -> LMOutput:
        output = super().forward(tokens, *arguments, **options)
        assert max(map(len, self._contexts)) <= self.max_length
        return output


def short_pair(vocab: int, seed: int, context: int) -> Pair:
    """A toy pair whose draft holds `context` tokens."""
    whole = toy_pair(vocab, seed)
    table = whole.draft.table
    draft = Limited(lambda text: table(text[-2:]), order=99, max_length=context)
    return SimpleNamespace(target=whole.target, draft=draft)


def rounds_of(traces: list[Trace]) -> list[RoundTrace]:
    return [round_ for trace in traces for round_ in trace.rounds]


ALL = [case.values[0] for case in THREE_WORDS]
CHAINS = [case for case in ALL if case.builds in ("chain", "sources", "lookup")]


@pytest.mark.parametrize(
    ("case", "context"),
    [
        *((case, len(PROMPT) + 1) for case in ALL),
        *((case, len(PROMPT) + more) for case in CHAINS for more in (-1, 2)),
    ],
)
@pytest.mark.few(16)
def test_serial_engines_go_on_without_the_draft(case: Case, context: int, tmp_path: Path) -> None:
    traces = checked(engine(short_pair(3, 31, context), case, tmp_path), case.size.length)
    beyond = {round_.beyond_draft for round_ in rounds_of(traces)}
    assert beyond == ({False} if case.builds == "lookup" else {True, context <= len(PROMPT)})
    copied = [round_.draft_q for round_ in rounds_of(traces) if round_.beyond_draft]
    assert all(q == 1 for each in copied for q in each)


@pytest.mark.parametrize("context", [len(PROMPT) - 1, len(PROMPT) + 1])
@pytest.mark.parametrize("policy", named([*MIXED, *PEARL]))
def test_overlapped_engines_go_on_without_the_draft(policy: Policy, context: int) -> None:
    traces = checked(policy.engine(short_pair(3, 31, context)), length_of(policy))
    traces += checked(policy.engine(short_pair(2, 5, context)), 4)
    assert {round_.beyond_draft for round_ in rounds_of(traces)} == {True, context <= len(PROMPT)}
    assert not any(round_.draft_tokens for round_ in rounds_of(traces) if round_.beyond_draft)


def test_copies_of_the_text_go_on_beyond_the_draft() -> None:
    pair, copies = short_pair(2, 31, len(PROMPT) + 1), Copies(2, 2, 1)
    by_value = grown(Nosy(), COSTS["rows"], copies=copies, budget=3)
    parts = (Sources(2, 2, 2, 1), Fixed(2), "token"), (by_value, Never(), "rrsw")
    for structure, stop, rule in parts:
        decoder = SerialEngine(pair, structure, stop, verifier(rule), OFF, OFF)
        rounds = rounds_of(checked(decoder, 5))
        assert any(round_.draft_tokens for round_ in rounds if round_.beyond_draft)


def eagle_of(context: int) -> ModelPair:
    pair = eagle_pair(6)
    draft = pair.draft
    short = EagleDraft(draft.model, pair.target, draft.maps, max_length=context)
    return ModelPair(pair.target, short, pair.tokenizer, "tiny", ())


def ordinary_of(context: int) -> ModelPair:
    torch.manual_seed(3)
    models = [LlamaForCausalLM(config(6, 1, most)).double() for most in (32, context)]
    target, draft = map(CachedLM, models)
    return ModelPair(target, draft, tiny_tokenizer(), "tiny", ())


@pytest.mark.parametrize("made", [ordinary_of, eagle_of])
@pytest.mark.parametrize("prompt", [[1, 2, 3], [1, 2, 3, 4, 5] * 3], ids=len)
def test_greedy_equals_plain_at_every_length(made: Callable, prompt: list[int]) -> None:
    pair, greedy = made(context=12), Warp(0.0)
    parts = Chain(4), Confidence(0.1), TokenVerifier(), greedy, greedy
    for length in (7, 9, 10, 17):
        trace = SerialEngine(pair, *parts).decode(prompt, length, Sampler.seeded(0))
        plain = AutoregressiveEngine(pair, greedy).decode(prompt, length, Sampler.seeded(0))
        assert trace.tokens == plain.tokens and len(trace.tokens) == length
    drafted = [bool(round_.draft_tokens) for round_ in trace.rounds]
    assert drafted[0] == (len(prompt) < 12) and not drafted[-1] and trace.rounds[-1].beyond_draft


def test_it_is_said_once_a_request() -> None:
    decoder = SerialEngine(ordinary_of(12), Chain(4), Never(), TokenVerifier(), Warp(), Warp())
    with pytest.warns(UserWarning, match=r"pair\.draft: its context holds 12 tokens") as noted:
        decoder.decode([1, 2, 3], 20, Sampler.seeded(0))
    assert len(noted) == 1
