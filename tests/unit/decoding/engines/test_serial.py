from types import SimpleNamespace

import pytest
import torch

from decoding.draft import RoundContext
from decoding.engines.autoregressive import AutoregressiveEngine
from decoding.engines.serial import SerialEngine
from decoding.models.table_lm import TableLM, mixed_table, random_table
from decoding.sampling import Sampler, Warp
from decoding.stopping.fixed import Fixed
from decoding.structures.chain import Chain
from decoding.verifiers.block import BlockVerifier
from decoding.verifiers.token import TokenVerifier
from runtime.errors import UserError

GREEDY = Warp(0.0)


def pair(vocab: int = 5, max_length: int = 1000, weight: float = 0.6) -> SimpleNamespace:
    target = random_table(vocab, seed=1, concentration=0.5)
    draft = mixed_table(target, random_table(vocab, seed=2), weight)
    return SimpleNamespace(
        target=TableLM(target, max_length=max_length), draft=TableLM(draft, max_length=max_length)
    )


def serial(models: SimpleNamespace, gamma: int = 3, warp: Warp = GREEDY, **kw) -> SerialEngine:
    parts = {"structure": Chain(20), "stop": Fixed(gamma), "verifier": TokenVerifier()} | kw
    return SerialEngine(models, warp=warp, draft_warp=warp, **parts)


@pytest.mark.parametrize("verifier", [TokenVerifier(), BlockVerifier()])
@pytest.mark.parametrize("prompt", [[3], [1, 2, 3]])
@pytest.mark.parametrize("vocab", [2, 5])
def test_greedy_output_is_autoregressive(
    verifier: TokenVerifier, prompt: list[int], vocab: int
) -> None:
    models = pair(vocab)
    prompt = [token % vocab for token in prompt]
    expected = AutoregressiveEngine(models, GREEDY).decode(prompt, 40, Sampler.seeded(0))
    trace = serial(models, verifier=verifier).decode(prompt, 40, Sampler.seeded(1))
    assert trace.tokens == expected.tokens and len(trace.tokens) == 40
    assert models.target.length == len(prompt) + 39
    assert sum(r.accepted for r in trace.rounds) > 0
    assert len(trace.rounds) < len(expected.rounds) == 40


def test_rounds_add_up() -> None:
    models = pair()
    trace = serial(models, warp=Warp()).decode([1, 2], 50, Sampler.seeded(3))
    assert [token for r in trace.rounds for token in r.tokens] == trace.tokens
    for r in trace.rounds:
        assert (
            r.tokens[: r.accepted] == r.draft_tokens[: r.accepted]
            and len(r.tokens) == r.accepted + 1
        )
        assert len(r.draft_q) == len(r.draft_tokens) == r.draft_forwards and all(
            0 < q <= 1 for q in r.draft_q
        )
    assert models.draft.forwards == sum(r.draft_forwards for r in trace.rounds) + 1
    assert models.target.forwards == len(trace.rounds) + 1
    assert sum(trace.stages.values()) <= trace.decode_seconds


def test_draft_is_limited_by_what_may_still_be_committed() -> None:
    trace = serial(pair(), gamma=6).decode([1, 2], 7, Sampler.seeded(0))
    room = 7
    for r in trace.rounds:
        assert len(r.draft_tokens) <= room - 1
        room -= len(r.tokens)
    assert room == 0
    assert serial(pair(), gamma=6).decode([1], 1, Sampler.seeded(0)).rounds[0].draft_forwards == 0


def test_draft_never_exceeds_the_structure() -> None:
    trace = serial(pair(), gamma=9, structure=Chain(2)).decode([1, 2], 20, Sampler.seeded(0))
    assert max(len(r.draft_tokens) for r in trace.rounds) == 2


@pytest.mark.parametrize("eos", range(5))
def test_eos_ends_the_draft_and_the_output(eos: int) -> None:
    models, ids = pair(), frozenset({eos})
    expected = AutoregressiveEngine(models, GREEDY, ids).decode([1, 2], 30, Sampler.seeded(0))
    trace = serial(models, gamma=5, eos_ids=ids).decode([1, 2], 30, Sampler.seeded(0))
    assert trace.tokens == expected.tokens
    assert eos not in trace.tokens[:-1]
    for r in trace.rounds:
        assert eos not in r.draft_tokens[:-1]


def test_accepted_eos_has_no_bonus_token() -> None:
    always = TableLM(lambda context: torch.tensor([0.0, 1.0]).double())
    trace = serial(SimpleNamespace(target=always, draft=always), eos_ids=frozenset({1})).decode(
        [0], 9, Sampler.seeded(0)
    )
    assert trace.tokens == [1]
    assert (trace.rounds[0].draft_tokens, trace.rounds[0].accepted, trace.rounds[0].tokens) == (
        [1],
        1,
        [1],
    )


def test_output_fits_the_context() -> None:
    models = pair(max_length=8)
    assert len(serial(models).decode([1, 2, 3], 99, Sampler.seeded(0)).tokens) == 5
    assert (
        len(AutoregressiveEngine(models, GREEDY).decode([1, 2, 3], 99, Sampler.seeded(0)).tokens)
        == 5
    )


@pytest.mark.parametrize(
    ("prompt", "max_new", "key"),
    [([], 5, "prompt: empty"), ([1] * 8, 5, "max_length"), ([1], 0, "max_new_tokens")],
)
def test_bad_requests(prompt: list[int], max_new: int, key: str) -> None:
    models = pair(max_length=8)
    for engine in (serial(models), AutoregressiveEngine(models, GREEDY)):
        with pytest.raises(UserError, match=key):
            engine.decode(prompt, max_new, Sampler.seeded(0))


class Watching(Fixed):
    """A rule that reads the target, and keeps what it was shown."""

    target_layers = (-3, -2, -1)

    def __init__(self) -> None:
        super().__init__(2)
        self.seen: list[RoundContext] = []

    def begin_round(self, context: RoundContext) -> None:
        self.seen.append(context)
        self.predicted = [float(context.round)]


def test_stop_rule_sees_the_last_verified_position() -> None:
    models, stop = pair(), Watching()
    trace = serial(models, warp=Warp(), stop=stop).decode([1, 2], 30, Sampler.seeded(4))
    probe = TableLM(models.target.table)
    rows = probe.forward(torch.tensor([1, 2, *trace.tokens]), hidden=range(-3, 0)).hidden
    for number, context in enumerate(stop.seen):
        verified = len(context.committed) - 2
        assert torch.equal(context.target_hidden, rows[:, verified])
        assert trace.rounds[number].predicted == [number]
    stop.seen.clear()
    serial(models, stop=stop).decode([1], 5, Sampler.seeded(4))
    assert stop.seen[0].target_hidden is None and stop.seen[1].target_hidden is not None
