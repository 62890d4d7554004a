"""A target in two halves and a draft on the idle device: the same tokens, and nobody runs where
another does."""

import time
from collections.abc import Iterator
from threading import Lock, Thread
from types import SimpleNamespace

import pytest

from decoding.engines.branching import Always
from decoding.engines.overlapped import OverlappedEngine
from decoding.engines.pipeline import TwoDevices, pipelined
from decoding.models.loading import ModelPair
from decoding.models.mixed import mix_in
from decoding.sampling import Sampler, Warp
from decoding.stopping.confidence import Confidence
from decoding.structures.branch_point import BranchPoint
from decoding.verifiers.block import BlockVerifier
from decoding.verifiers.rrsw import RrswVerifier
from runtime.errors import UserError
from tests.helpers.models.tiny_pair import EOS, tiny_pair

PARTS = BranchPoint(4, 4), Always(1, Confidence(0.4)), BlockVerifier(), RrswVerifier()


@pytest.fixture
def pair() -> ModelPair:
    return tiny_pair()


def engine(pair: ModelPair, warp: Warp, **settings: object) -> OverlappedEngine:
    return OverlappedEngine(pair, *PARTS, warp, warp, eos_ids=frozenset({EOS}), **settings)


@pytest.mark.parametrize("warp", [Warp(0.0), Warp()])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("hand_over", [0.0, 0.002])
def test_tokens_are_those_of_a_device_for_each_model(
    pair: ModelPair, warp: Warp, overlap: bool, hand_over: float
) -> None:
    alone = engine(pair, warp, overlap=False)
    split = engine(pair, warp, overlap=overlap, pipeline=hand_over)
    for seed in range(4):
        prompt = [1 + seed, 2, 3 + seed // 2]
        expected = alone.decode(prompt, 16, Sampler.seeded(seed)).tokens
        assert split.decode(prompt, 16, Sampler.seeded(seed)).tokens == expected


class Watched(TwoDevices):
    """Fails where two are on a device, and writes down who ran on which."""

    def __init__(self) -> None:
        super().__init__()
        self.target: list[int] = []
        self.draft: list[int] = []
        self._inside = [Lock(), Lock()]

    def _enter(self, device: int) -> None:
        assert self._inside[device].acquire(blocking=False), "another runs there"

    def take(self, device: int) -> None:
        super().take(device)
        self._enter(device)
        self.target.append(device)

    def take_idle(self) -> int:
        device = super().take_idle()
        self._enter(device)
        self.draft.append(device)
        return device

    def leave(self, device: int) -> None:
        self._inside[device].release()
        super().leave(device)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Watched]]:
    made: list[Watched] = []

    def make() -> Watched:
        made.append(Watched())
        return made[-1]

    monkeypatch.setattr("decoding.engines.pipeline.TwoDevices", make)
    yield made


def test_nobody_runs_where_another_does(pair: ModelPair, watched: list[Watched]) -> None:
    trace = engine(pair, Warp(), pipeline=0.001).decode([3, 17, 5], 40, Sampler.seeded(3))
    (devices,) = watched
    assert devices.target == [0, 1] * (len(trace.rounds) + 1), "a prefill, and a call a round"


def test_a_waiting_target_comes_first() -> None:
    devices, order = TwoDevices(), list[str]()
    devices.take(0)
    assert devices.take_idle() == 1

    def target() -> None:
        devices.leave(0)
        devices.take(1)
        order.append("target")

    thread = Thread(target=target)
    thread.start()
    time.sleep(0.05)
    devices.leave(1)
    assert devices.take_idle() == 0
    thread.join(5)
    assert order == ["target"] and not thread.is_alive()


def test_models_are_as_before_after_an_error(pair: ModelPair) -> None:
    before = pair.target.network, pair.draft.network
    with pytest.raises(ZeroDivisionError), pipelined(pair, 0.0):
        assert pair.target.network is not before[0] and pair.draft.network is not before[1]
        _ = 1 / 0
    assert (pair.target.network, pair.draft.network) == before
    assert before[0]._half == -1


def test_what_cannot_be_split_is_refused(pair: ModelPair) -> None:
    def refused(pair: object, message: str) -> None:
        with pytest.raises(UserError, match=message):
            engine(pair, Warp(), pipeline=0.0)  # type: ignore[arg-type]

    other = SimpleNamespace(target=pair.draft, draft=SimpleNamespace(**vars(pair.draft)))
    other.draft.reads_target = False
    refused(other, r"engine\.pipeline, pair\.draft: expected an ordinary draft on the CPU")
    mix_in(pair.draft, pair.target, 0.5)
    refused(pair, r"engine\.pipeline, pair\.draft: .* pair\.draft_mix=1")
    swapped = ModelPair(pair.draft, pair.target, pair.tokenizer, "", ())
    refused(swapped, r"engine\.pipeline, pair\.target: only a Llama, Mistral or Qwen2")
    pair.target.model.model.norm.register_forward_hook(lambda _, __, out: out)
    refused(pair, r"engine\.pipeline, pair\.target: .* without hooks and adapters")
