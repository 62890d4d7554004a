"""Many requests at once, on real models: outputs are those of one request at a time, memory is
given back, and what fails or is not taken says so."""

import gc
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from decoding.engines.autoregressive import AutoregressiveEngine
from decoding.engines.batched import Asked, BatchedEngine
from decoding.engines.lookahead import LookaheadEngine
from decoding.engines.serial import SerialEngine
from decoding.models.cached_lm import CachedLM
from decoding.models.forward import Rows, TransformersForward
from decoding.models.loading import ModelPair
from decoding.pair import open_pair
from decoding.sampling import Sampler, Warp
from decoding.stopping.confidence import Confidence
from decoding.stopping.never import Never
from decoding.structures.chain import Chain
from decoding.structures.dyspec import DySpecHeap
from decoding.structures.sources import Sources
from decoding.together import Together, at_once
from decoding.verifiers.block import BlockVerifier
from decoding.verifiers.rrsw import RrswVerifier
from decoding.verifiers.token import TokenVerifier
from evaluation.lossless import broken_invariants
from runtime.errors import UserError
from tests.helpers.models.cached import random_tokens
from tests.helpers.models.tiny_pair import save_tiny_pair

WARP = Warp(0.9)
PARTS: dict[str, Callable[[], tuple[Any, ...]]] = {
    "chain": lambda: (Chain(4), Confidence(0.1), TokenVerifier()),
    "block": lambda: (Chain(4), Confidence(0.1), BlockVerifier()),
    "copies": lambda: (Sources(3, 3, 1, 1), Confidence(0.1), TokenVerifier()),
    "tree": lambda: (DySpecHeap(6), Never(), RrswVerifier()),
}


@pytest.fixture(scope="module", params=["C++", "one by one", "transformers"])
def pair(request: Any, tmp_path_factory: Any) -> ModelPair:
    """In float32 of the forward in C++, in float64 of ours in Python and of transformers'."""
    folder: Path = save_tiny_pair(tmp_path_factory.mktemp("pair"))
    dtype = "float32" if request.param == "C++" else "float64"
    made = open_pair(str(folder / "target"), str(folder / "draft"), dtype=dtype)
    if request.param == "transformers":
        for lm in (made.target, made.draft):
            lm.network = TransformersForward(lm.model)
    return made


def requests(count: int) -> Iterator[Asked]:
    """Of many lengths, some of which end at once."""
    for number in range(count):
        prompt = random_tokens(1 + 7 * number % 23, number) % 9
        yield Asked(prompt, 1 + 11 * number % 29, Sampler.seeded(number))


@pytest.mark.parametrize("parts", [*PARTS, "plain"])
@pytest.mark.parametrize("size", [2, 5, 16])
def test_outputs_are_those_of_one_at_a_time(pair: ModelPair, parts: str, size: int) -> None:
    eos = frozenset({3})
    engine: Any = AutoregressiveEngine(pair, WARP, eos)
    if parts != "plain":
        engine = SerialEngine(pair, *PARTS[parts](), WARP, WARP, eos)
    alone = [engine.decode(*vars(each).values()).tokens for each in requests(40)]
    found = dict(BatchedEngine(engine, size).decode(requests(40)))
    assert [found[number].tokens for number in range(40)] == alone


@pytest.mark.parametrize("parts", PARTS)
def test_nothing_behind_the_end_counts_as_accepted(pair: ModelPair, parts: str) -> None:
    def ending() -> Iterator[Asked]:
        for number, each in enumerate(requests(30)):
            most = len(torch.as_tensor(each.prompt_ids)) + 1 + number % 6
            yield replace(each, ends=lambda text, most=most: len(text) >= most)

    eos = frozenset({3})
    engine = SerialEngine(pair, *PARTS[parts](), WARP, WARP, eos)
    alone = [engine.decode(*vars(each).values()) for each in ending()]
    found, cut = dict(BatchedEngine(engine, 4).decode(ending())), 0
    for number, trace in enumerate(alone):
        assert not broken_invariants(found[number], 99, eos)
        rounds = [[(r.accepted, r.tokens) for r in each.rounds] for each in (trace, found[number])]
        assert rounds[0] == rounds[1]
        cut += len(trace.rounds[-1].tokens) == trace.rounds[-1].accepted
    assert cut > 3, "ends in the middle of an accepted draft"


def test_requests_may_come_at_any_time(pair: ModelPair) -> None:
    def coming() -> Iterator[Asked | None]:
        for number, each in enumerate(requests(20)):
            yield from [None] * (random_tokens(1, number).item() % 12)
            yield each

    engine = SerialEngine(pair, *PARTS["chain"](), WARP, WARP, frozenset({3}))
    alone = [engine.decode(*vars(each).values()).tokens for each in requests(20)]
    found = dict(BatchedEngine(engine, 5).decode(coming()))
    assert [found[number].tokens for number in range(20)] == alone


def test_no_more_run_than_are_allowed_at_once(pair: ModelPair) -> None:
    begun, running = 0, list[int]()

    def counted() -> Iterator[Asked]:
        nonlocal begun
        for each in requests(12):
            begun += 1
            yield each

    batch = BatchedEngine(AutoregressiveEngine(pair, WARP), 5)
    for ended, _ in enumerate(batch.decode(counted(), 2)):
        running.append(begun - ended)
    assert max(running) <= 3, "two, and one that ended in the same step"
    assert batch.size == 5


def test_calls_of_transformers_are_one(pair: ModelPair, monkeypatch: pytest.MonkeyPatch) -> None:
    if not isinstance(pair.target.network, TransformersForward):
        return
    rows, run = list[int](), TransformersForward._run

    def counting(self: Any, joined: Rows, *given: Any) -> Any:
        rows.append(joined.tokens.shape[1])
        return run(self, joined, *given)

    monkeypatch.setattr(TransformersForward, "_run", counting)
    asked = [Asked(random_tokens(n, n) % 9, 6, Sampler.seeded(n)) for n in (5, 9, 2)]
    list(BatchedEngine(AutoregressiveEngine(pair, WARP), 3).decode(asked))
    assert rows == [4 + 8 + 1, *[3] * 6]


def test_memory_is_given_back(pair: ModelPair) -> None:
    def caches() -> int:
        gc.collect()
        return sum(type(each) is CachedLM for each in gc.get_objects())

    before = caches()
    batch = BatchedEngine(AutoregressiveEngine(pair, WARP), 8)
    for _ in range(3):
        assert len(list(batch.decode(requests(20)))) == 20
        assert caches() == before + 16
    del batch
    assert caches() == before


def test_one_that_fails_ends_them_all_and_the_next_run_is_whole(pair: ModelPair) -> None:
    def broken(text: torch.Tensor) -> bool:
        raise UserError("ends: broken")

    batch = BatchedEngine(AutoregressiveEngine(pair, WARP), 3)
    failing = Asked([1, 2], 9, Sampler.seeded(0), broken)
    with pytest.raises(UserError, match="broken"):
        list(batch.decode([*requests(4), failing, *requests(4)]))
    assert not torch.is_inference_mode_enabled()
    found = dict(batch.decode(requests(9)))
    right = dict(BatchedEngine(AutoregressiveEngine(pair, WARP), 1).decode(requests(9)))
    assert {n: each.tokens for n, each in found.items()} == {n: x.tokens for n, x in right.items()}


def test_who_stops_listening_leaves_nothing_behind(pair: ModelPair) -> None:
    batch = BatchedEngine(AutoregressiveEngine(pair, WARP), 3)
    ends = batch.decode(requests(9))
    next(ends)
    ends.close()  # type: ignore[attr-defined]
    assert not torch.is_inference_mode_enabled()
    assert len(list(batch.decode(requests(9)))) == 9


def test_engines_of_other_kinds_are_refused(pair: ModelPair) -> None:
    with pytest.raises(UserError, match="batch: expected an engine that drafts and verifies in"):
        BatchedEngine(LookaheadEngine(pair, 2, 2, 2, False, WARP), 2)


def test_a_run_of_nothing_ends(pair: ModelPair) -> None:
    assert list(BatchedEngine(AutoregressiveEngine(pair, WARP), 3).decode([])) == []
    assert list(Together(None).run([], 0)) == []


def test_what_a_task_asks_while_it_is_ended_it_gets_alone() -> None:
    asked = list[object]()

    def ask() -> None:
        asked.append(at_once(torch.ones(1), "numbers", torch.Tensor.tolist))

    def task() -> None:
        try:
            together.joined(0)()
        finally:
            ask()

    def broken() -> None:
        raise UserError("broken")

    together = Together(lambda: broken())
    with pytest.raises(UserError, match="broken"):
        list(together.run([task, task], 2))
    assert asked == [[1.0], [1.0]]
