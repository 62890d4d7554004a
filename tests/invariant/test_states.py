"""Models that keep states besides keys and values: cached equals uncached, a rollback of any length
a fresh start, greedy decoding `generate`; in every engine that takes them each forward is that of
the text it stands on, decoding is exact, and what is refused is refused before anything runs.

Scans in chunks and steps of one token differ by rounding, for states are float32 whatever the
weights are: 5e-6 at most of logits that spread by 0.6; the tolerance is 2e-5."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from decoding.engines.lookahead import LookaheadEngine
from decoding.engines.overlapped import OverlappedEngine
from decoding.engines.serial import SerialEngine
from decoding.models.batched_lm import batch_of
from decoding.models.cached_lm import CachedLM
from decoding.models.eagle.draft import EagleDraft
from decoding.models.loading import ModelPair
from decoding.models.mixed import mix_in
from decoding.models.recurrent import STATEFUL, RecurrentLM, cached
from decoding.sampling import Sampler, Warp
from decoding.stopping.confidence import Confidence
from decoding.stopping.fixed import Fixed
from decoding.stopping.never import Never
from decoding.structures.branch_point import BranchPoint
from decoding.structures.chain import Chain
from decoding.structures.lookup import Lookup
from decoding.structures.sources import Sources
from decoding.structures.static_tree import StaticTree
from decoding.verifiers.block import BlockVerifier
from decoding.verifiers.rrs import RrsVerifier
from decoding.verifiers.rrsw import RrswVerifier
from decoding.verifiers.token import TokenVerifier
from evaluation.batched.lengths import measured
from papers.plain_harvest import all_positions
from runtime.errors import UserError
from tests.contract.enumeration import autoregressive_distribution, distribution_of, largest_error
from tests.contract.overlaps import Policy
from tests.helpers.models.cached import (
    check_batch,
    check_chunks_and_rollbacks,
    check_folder,
    check_speculates,
    close,
    random_tokens,
    without_cache,
)
from tests.helpers.models.stateful import KINDS, near, reference, stateful, uncached
from tests.helpers.models.tiny_pair import tiny_tokenizer
from tests.helpers.models.windowed import windowed
from tests.invariant.test_plain_harvest import SAMPLED, requests, with_one_by_one

pytestmark = pytest.mark.skipif(
    not hasattr(transformers.cache_utils, "DummyLayer"),
    reason="models that keep states need transformers 5.23",
)
FEW = ["Qwen3Next", "FalconH1", "Lfm2", "Mamba2"]
WARP, WITHIN = Warp(0.5), 2e-5


def pair_of(target: CachedLM, draft: CachedLM) -> ModelPair:
    return ModelPair(target, draft, tiny_tokenizer(), "stateful", ())


def dense() -> CachedLM:
    return CachedLM(windowed("Qwen2", 5).float())


def test_every_type_is_tried_and_others_take_the_code_of_keys_and_values() -> None:
    assert {stateful(kind).config.model_type for kind in KINDS} == STATEFUL
    assert all(type(cached(stateful(kind))) is RecurrentLM for kind in KINDS)
    assert type(cached(windowed("Gemma3", 5))) is CachedLM


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.few(12)
def test_chunks_and_rollbacks_equal_one_uncached_call(kind: str, seed: int) -> None:
    """Rollbacks are to the snapshot, after it and before it."""
    text = random_tokens(45, seed)
    check_chunks_and_rollbacks(cached(stateful(kind)), text, uncached(kind, text), seed, WITHIN)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.few(4)
def test_a_rollback_of_every_length(kind: str) -> None:
    """After a call of several rows, and after as many calls of one."""
    lm, text, other = cached(stateful(kind)), random_tokens(14, 1), random_tokens(14, 2)
    wrong = other[5:12]
    for length in range(12):
        for size in (1, len(wrong)):
            lm.reset()
            lm.forward(text[:5], logits="none")
            for rows in wrong.split(size):
                lm.forward(rows)
            lm.crop(length)
            kept = torch.cat([torch.cat([text[:5], wrong])[:length], text[length:]])
            found = lm.forward(text[length:]).logits
            close(found, uncached(kind, kept)[length:], WITHIN)


@pytest.mark.parametrize("kind", KINDS)
def test_hidden_states_are_those_of_the_class(kind: str) -> None:
    """Also behind a rollback, where the rows before run again in the same call."""
    lm, text = cached(stateful(kind)), random_tokens(20, 0)
    layers = list(range(-lm.hidden_states, 0))
    expected = uncached(kind, text, hidden=True)
    assert len(expected) == lm.hidden_states
    lm.record([1])
    lm.forward(text[:7], logits="none")
    close(lm.forward(text[7:15], hidden=layers).hidden, expected[:, 7:15], WITHIN)
    assert (lm.row_bytes > 0) is (kind != "Mamba2")
    lm.crop(11)
    last = lm.forward(text[11:13], hidden=layers, hidden_rows="last", logits="last")
    assert last.hidden.shape[1] == len(last.logits) == 1
    close(last.hidden, expected[:, 12:13], WITHIN)
    close(lm.states[:13], expected[[1, -1], :13].transpose(0, 1), WITHIN)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("gamma", [0, 1, 4])
@pytest.mark.few(6)
def test_greedy_decoding_is_generate(kind: str, gamma: int) -> None:
    prompt, pair = random_tokens(9, 4), pair_of(cached(stateful(kind)), cached(near(kind)))
    expected = reference(kind).generate(prompt[None], max_new_tokens=30, do_sample=False)
    engine = SerialEngine(pair, Chain(6), Fixed(gamma), TokenVerifier(), Warp(0.0), Warp(0.0))
    trace = engine.decode(prompt, 30, Sampler.seeded(0))
    assert trace.tokens == expected[0, 9:].tolist()
    accepted = sum(entry.accepted for entry in trace.rounds)
    drafted = sum(len(entry.draft_tokens) for entry in trace.rounds)
    assert not gamma or 0 < accepted < drafted


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_equals_its_sequences_and_hands_over(kind: str) -> None:
    states = lambda text: uncached(kind, text, hidden=True)[[-2]]  # noqa: E731
    lm = cached(stateful(kind))
    check_batch(lm, partial(uncached, kind), WITHIN, layers=(-2,), states=states)


def test_states_survive_leaving_inference_mode() -> None:
    lm, text = cached(stateful("Lfm2")), random_tokens(9, 0)
    with torch.inference_mode():
        lm.forward(text[:6])
    lm.crop(5)
    close(lm.forward(text[5:]).logits, uncached("Lfm2", text)[5:], WITHIN)


@pytest.mark.parametrize("kind", FEW)
@pytest.mark.few(1)
def test_a_greedy_harvest_labels_as_one_round_at_a_time_does(kind: str) -> None:
    """A target with states and a draft without."""
    pair = pair_of(cached(stateful(kind)), CachedLM(windowed("Qwen2", 5)))
    agreement = with_one_by_one(pair, replace(SAMPLED, warp=Warp(0.0)))
    assert agreement.rounds == agreement.same_tokens == agreement.same_accepted >= 30
    assert agreement.difference < 1e-4


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.few(4)
def test_it_speculates_inside_generate_and_from_a_folder(kind: str, tmp_path: Path) -> None:
    check_speculates(stateful(kind), near(kind), random_tokens(9, 4))
    check_folder(stateful(kind), tmp_path, random_tokens(9, 4))


# In engines ---------------------------------------------------------------------------------------


def overlapped(pair: ModelPair, **more: Any) -> OverlappedEngine:
    parts = {"stop": Confidence(0.3), "structure": BranchPoint(3, 1), "overlap": False, **more}
    rules = {"verifier": BlockVerifier(), "branch_verifier": RrswVerifier()}
    return OverlappedEngine(pair=pair, warp=WARP, draft_warp=WARP, **parts, **rules)


def serial(pair: ModelPair, structure: Any, stop: Any, verifier: Any = None) -> SerialEngine:
    return SerialEngine(pair, structure, stop, verifier or TokenVerifier(), WARP, WARP)


ENGINES: dict[str, Callable[[ModelPair], Any]] = {
    "chain": lambda pair: serial(pair, Chain(4), Confidence(0.3)),
    "one token": lambda pair: serial(pair, Chain(1), Never()),
    "copies": lambda pair: serial(pair, Lookup(3, 1, 5), Never()),
    "sources": lambda pair: serial(pair, Sources(3, 3, 1, 2), Never()),
    "open leaves": lambda pair: serial(pair, BranchPoint(3, 3), Confidence(0.3), RrswVerifier()),
    "SpecBranch": overlapped,
    "SpecBranch, side by side": lambda pair: overlapped(pair, overlap=True),
    "PEARL": lambda pair: overlapped(pair, pre_verify=True, stop=Never()),
}


class Followed:
    """Holds what each forward of a model says against one call without a cache, on the text that
    its calls have told so far."""

    def __init__(self, lm: CachedLM, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lm, self.text, self.forwards = lm, list[int](), 0
        self.original = lm.forward, lm.crop, lm.keep
        for name in ("forward", "crop", "keep"):
            monkeypatch.setattr(lm, name, getattr(self, name))

    def forward(self, tokens: Tensor, *given: Any, **wanted: Any) -> Any:
        output, before = self.original[0](tokens, *given, **wanted), len(self.text)
        self.text += tokens.tolist()
        expected = without_cache(self.lm.model, torch.tensor(self.text))[before:]
        close(output.logits, expected[len(expected) - len(output.logits) :], WITHIN)
        self.forwards += 1
        return output

    def crop(self, length: int) -> None:
        self.original[1](length)
        del self.text[length:]
        assert self.lm.length == len(self.text)

    def keep(self, start: int, rows: list[int]) -> None:
        self.original[2](start, rows)
        self.crop(start + len(rows))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", FEW)
@pytest.mark.few(6)
def test_each_forward_is_that_of_the_text(
    kind: str, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of one token and of more, one request after another, to the end of the context."""
    pair = pair_of(cached(stateful(kind), max_length=40), cached(near(kind), max_length=40))
    followed = [Followed(lm, monkeypatch) for lm in (pair.target, pair.draft)]
    decoder = ENGINES[engine](pair)
    for seed, (length, new) in enumerate([(1, 9), (9, 50), (2, 1)]):
        trace = decoder.decode(random_tokens(length, seed), new, Sampler.seeded(seed))
        assert len(trace.tokens) == min(new, 40 - length)
    assert followed[0].forwards > 10 and (followed[1].forwards > 10 or engine == "copies")


POLICIES = {
    "token": (Policy("token", "rrsw", 1, k_max=1), True),
    "block": (Policy("block", "rrsw", None, k_max=1), True),
    "pre-verified": (Policy("block", "rrsw", 2, k_max=1, pre_verify=True), True),
    "many": (Policy("token", "rrsw", 1, k_max=3), False),
}
EXACT = [(kind, name) for name in POLICIES for kind in ("Lfm2", "Mamba2")]
EXACT += [(kind, "chain") for kind in ("Qwen3Next", "Mamba2", "FalconH1", "Lfm2")]


@pytest.mark.parametrize(("kind", "policy"), EXACT)
@pytest.mark.few(2)
def test_the_distribution_is_the_targets(kind: str, policy: str) -> None:
    """Every draw enumerated, with p and q that are right up to the rounding of float32, with a
    draft that keeps states, too, and with one that does not."""
    small, prompt = {"vocab_size": 3}, (1, 2, 1)
    made, both = POLICIES.get(policy, (None, kind in ("Qwen3Next", "Mamba2")))
    draft = near(kind, **small) if both else windowed("Qwen2", 5, **small)
    pair, plain = pair_of(cached(stateful(kind, **small)), cached(draft)), stateful(kind, **small)
    rules = Chain(2), Fixed(2), TokenVerifier(), Warp(0.3), Warp(0.3)
    decoder = made.engine(pair, *rules[-2:]) if made else SerialEngine(pair, *rules)

    def conditional(text: tuple[int, ...]) -> Tensor:
        return Warp(0.3).probs(without_cache(plain, torch.tensor(text))[-1])

    exact = autoregressive_distribution(conditional, 3, 3, prompt)
    found = distribution_of(lambda sampler: tuple(decoder.decode(prompt, 3, sampler).tokens))
    assert largest_error(found, exact) < 1e-5


def test_two_engines_on_one_pair_take_turns() -> None:
    pair = pair_of(cached(stateful("Qwen3Next")), cached(near("Qwen3Next")))
    jobs = [(make(pair), random_tokens(n + 1, n)) for n, make in enumerate(ENGINES.values())]

    def decoded(jobs: list) -> list[list[int]]:
        return [engine.decode(p, 12, Sampler.seeded(1)).tokens for engine, p in jobs]

    assert decoded(jobs[::-1])[::-1] == decoded(jobs)


# Refused ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", FEW)
def test_a_tree_is_refused(kind: str) -> None:
    pair = pair_of(cached(stateful(kind)), cached(stateful(kind)))
    engine = serial(pair, StaticTree([0, 0, 1]), Never(), RrsVerifier())
    with pytest.raises(UserError, match=r"^pair: expected a draft of one path, .* Set structure="):
        engine.decode(random_tokens(5, 0), 5, Sampler.seeded(0))


def test_a_mixture_and_rows_of_many_texts_are_refused() -> None:
    lm, other = cached(stateful("Lfm2")), CachedLM(windowed("Gemma3", 5))
    for draft, target in ((lm, other), (other, lm)):
        with pytest.raises(UserError, match=r"^pair\.draft_mix: expected 1, .* Write"):
            mix_in(draft, target, 0.5)
    rows = torch.zeros(2, dtype=torch.long), torch.arange(2), torch.eye(2, dtype=torch.bool)
    with pytest.raises(UserError, match=r"^pair: expected rows of one text, .* warp=greedy"):
        lm.forward_masked(*rows)


@pytest.mark.parametrize("sampled", [False, True])
def test_a_harvest_that_needs_many_texts_at_once_is_refused(sampled: bool) -> None:
    """Of rollouts of such a draft, and of verdicts of such a target that samples."""
    models = [cached(stateful("Lfm2")), CachedLM(windowed("Qwen2", 5))]
    pair = pair_of(*(models if sampled else models[::-1]))
    recipe = replace(SAMPLED, warp=SAMPLED.warp if sampled else Warp(0.0))
    with pytest.raises(UserError, match=r"^pair: expected rows of one text, .* warp=greedy"):
        all_positions(pair, requests(), recipe)


def test_branches_and_windows_are_refused_before_anything_runs() -> None:
    pair = pair_of(cached(stateful("Lfm2")), cached(near("Lfm2")))
    with pytest.raises(UserError, match=r"^structure\.candidates, pair\.draft: .*candidates=1$"):
        overlapped(pair, structure=BranchPoint(3, 3))
    overlapped(pair_of(pair.target, dense()), structure=BranchPoint(3, 3))
    with pytest.raises(UserError, match=r"^engine, pair\.target: .* Use engine=serial"):
        LookaheadEngine(pair, 3, 3, 3, True, WARP)


@pytest.mark.parametrize("side", ["target", "draft"])
def test_costs_of_batches_are_refused(side: str) -> None:
    models = {"target": dense(), "draft": dense(), side: cached(stateful("Lfm2"))}
    with pytest.raises(UserError, match=rf"^batch_cost, pair\.{side}: .* Give a GPU's costs"):
        measured(pair_of(**models), [1, 2], [1, 2], 8, 1)


class Reading:
    """The last state of the target, as it is."""

    layers, described, tensors = (), "", ()

    def of_target(self, states: Tensor) -> Tensor:
        return states[..., -1, :]

    def of_own(self, hidden: Tensor) -> Tensor:
        return hidden


def test_a_draft_that_reads_states_is_refused_in_a_harvest_and_decodes() -> None:
    """The batch of such a target keeps no states for it."""
    target = cached(stateful("Lfm2"))
    draft = EagleDraft(dense().model, target, Reading(), vocab_size=target.vocab_size)
    texts = [random_tokens(5, 0), random_tokens(7, 1)]
    batch = batch_of(target, texts, 3)
    with pytest.raises(UserError, match=r"^pair\.draft: expected one that reads no states"):
        batch_of(draft, texts, 3, batch)
    target.reset()
    decoder = serial(pair_of(target, draft), Chain(3), Never())
    assert len(decoder.decode(texts[0], 12, Sampler.seeded(0)).tokens) == 12
