"""Threads of the overlapped engine: the same tokens as in turn, errors that end the decode, none
left behind; a target in two halves and a draft on the idle device, where nobody runs where another
does."""

import json
import resource
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Event, Lock, Thread
from types import SimpleNamespace

import pytest
import torch
from pydantic import TypeAdapter

from decoding.draft import RoundContext
from decoding.engines.branching import Always
from decoding.engines.overlapped import OverlappedEngine
from decoding.engines.pipeline import TwoDevices, pipelined
from decoding.engines.threads import Workers
from decoding.interfaces import Classes, Verifier
from decoding.models.loading import ModelPair
from decoding.models.mixed import mix_in
from decoding.sampling import Sampler, Warp
from decoding.stopping.confidence import Confidence
from decoding.stopping.policy import ALL
from decoding.structures.branch_point import BranchPoint
from decoding.trace import Trace
from decoding.verifiers.block import BlockVerifier
from decoding.verifiers.point_mass import PointMassVerifier
from decoding.verifiers.rrsw import RrswVerifier
from evaluation.lossless import broken_invariants
from evaluation.table import summary, timed
from papers.specbranch.side_by_side import tensor_bytes
from runtime.errors import UserError
from tests.helpers.models.tiny_pair import EOS, tiny_pair

GREEDY, OFF = Warp(0.0), Warp()
PROMPT = [3, 17, 5]
PEARL = {"classes": Always(2, Confidence(0.0)), "pre_verify": True, "k_max": 1}
HALF = {"classes": Always(1, Confidence(0.4))}


class ByTarget:
    """A class read off the target's states: it is wrong wherever they are not those of the last
    verified position."""

    target_layers = range(-5, 0)
    trained_gamma, trained_age = None, 0
    confidence = Confidence(0.4)

    def __init__(self) -> None:
        self.seen: list[RoundContext] = []

    def classify(self, context: RoundContext) -> int:
        self.seen.append(context)
        embedding = context.embed(int(context.committed[-1]))
        return int(context.target_hidden.abs().sum() * 1e4 + embedding.abs().sum() * 1e4) % 3


@pytest.fixture(scope="module")
def pair() -> ModelPair:
    return tiny_pair()


def engine(
    pair: ModelPair,
    warp: Warp = OFF,
    overlap: bool = True,
    classes: Classes | None = None,
    rule: Verifier | None = None,
    **settings: object,
) -> OverlappedEngine:
    stop = classes or ByTarget()
    parts = BranchPoint(4, settings.pop("k_max", 4)), stop, BlockVerifier(), rule or RrswVerifier()
    return OverlappedEngine(pair, *parts, warp, warp, overlap, eos_ids=frozenset({EOS}), **settings)


@pytest.mark.parametrize("rule", [RrswVerifier(), PointMassVerifier()])
@pytest.mark.parametrize("warp", [GREEDY, OFF])
@pytest.mark.few(1)
def test_side_by_side_is_as_in_turn(pair, warp, rule):
    threaded, serial = engine(pair, warp, rule=rule), engine(pair, warp, overlap=False, rule=rule)
    for seed in range(8):
        prompt = [1 + seed, 2, 3 + seed // 2]
        traces = (each.decode(prompt, 24, Sampler.seeded(seed)) for each in (threaded, serial))
        assert len({tuple(trace.tokens) for trace in traces}) == 1


def test_classes_see_the_last_verified_position(pair):
    classes = ByTarget()
    trace = engine(pair, classes=classes).decode(PROMPT, 40, Sampler.seeded(3))
    pair.target.reset()
    rows = pair.target.forward(torch.tensor([*PROMPT, *trace.tokens]), hidden=range(-5, 0)).hidden
    assert len(classes.seen) > 5
    for context in classes.seen:
        verified = len(context.committed) - 2
        assert torch.allclose(context.target_hidden, rows[:, verified], atol=1e-5)


@pytest.mark.parametrize("settings", [{}, PEARL])
def test_draft_distributions_are_those_of_an_empty_cache(pair, settings):
    trace, context = engine(pair, **settings).decode(PROMPT, 40, Sampler.seeded(5)), list(PROMPT)
    for round_ in trace.rounds:
        for place, token in enumerate(round_.draft_tokens):
            # Pending, or the first candidate: drawn from the distribution as it is
            if round_.draft_parents[place] == place:
                pair.draft.reset()
                prefix = torch.tensor([*context, *round_.draft_tokens[:place]])
                distribution = OFF.probs(pair.draft.forward(prefix, logits="last").logits[-1])
                assert round_.draft_q[place] == pytest.approx(distribution[token].item(), abs=1e-5)
        context += round_.tokens


@pytest.mark.parametrize("side", ["target", "draft"])
@pytest.mark.parametrize("overlap", [True, False])
def test_a_model_that_raises_ends_the_decode(side, overlap, monkeypatch):
    models = tiny_pair()
    model, calls = getattr(models, side), []

    def broken(*arguments: object, **options: object) -> None:
        calls.append(arguments)
        if len(calls) > 4:
            raise RuntimeError("out of memory")
        return forward(*arguments, **options)

    forward = model.forward
    monkeypatch.setattr(model, "forward", broken)
    decoder, threads = engine(models, overlap=overlap), threading.active_count()
    with pytest.raises(RuntimeError, match="out of memory"):
        decoder.decode(PROMPT, 40, Sampler.seeded(0))
    assert threading.active_count() == threads
    monkeypatch.undo()
    assert len(decoder.decode(PROMPT, 10, Sampler.seeded(0)).tokens) > 0


def test_an_interrupt_returns_at_once_and_the_next_decode_is_sound(monkeypatch):
    models = tiny_pair()
    decoder = engine(models)
    expected = decoder.decode(PROMPT, 20, Sampler.seeded(0)).tokens
    forward = models.target.forward

    def slow(*arguments: object, **options: object) -> object:
        time.sleep(1.5)
        return forward(*arguments, **options)

    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(models.target, "forward", slow)
    monkeypatch.setattr("decoding.engines.overlapped.both", interrupted)
    begin = time.perf_counter()
    with pytest.raises(KeyboardInterrupt):
        decoder.decode(PROMPT, 20, Sampler.seeded(0))
    assert time.perf_counter() - begin < 1
    monkeypatch.undo()
    assert decoder.decode(PROMPT, 20, Sampler.seeded(0)).tokens == expected


@pytest.mark.full
def test_a_thousand_prompts_leave_nothing_behind(pair):
    decoder = engine(pair, classes=Always(1, Confidence(0.4)))

    def decode(prompts: range) -> tuple[int, int, int]:
        for seed in prompts:
            decoder.decode([1 + seed % 30, 2, 1 + seed // 30 % 30], 16, Sampler.seeded(seed))
        pair.target.reset()
        pair.draft.reset()
        return threading.active_count(), tensor_bytes(), resident_bytes()

    before, after = decode(range(100)), decode(range(100, 1100))
    assert after[0] == before[0]
    assert abs(after[1] - before[1]) < 1e4
    assert after[2] - before[2] < 20e6


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.parametrize(
    ("draft_threads", "of_each"),
    [(None, {"target": {3}, "draft": {1}}), (3, {"target": {1}, "draft": {3}})],
)
def test_threads_are_divided_from_the_first_forward_on(pair, draft_threads, of_each, monkeypatch):
    """A prompt of one token has no prefill."""
    seen: dict[str, set[int]] = {"target": set(), "draft": set()}

    def noting(side: str, forward: Callable, *arguments: object, **options: object) -> object:
        seen[side].add(torch.get_num_threads())
        return forward(*arguments, **options)

    for side in seen:
        model = getattr(pair, side)
        monkeypatch.setattr(model, "forward", partial(noting, side, model.forward))
    before, threads = torch.get_num_threads(), threading.active_count()
    torch.set_num_threads(4)
    decoder = engine(pair, classes=PEARL["classes"], draft_threads=draft_threads)
    try:
        for seed in range(6):
            decoder.decode([3], 12, Sampler.seeded(seed))
            assert torch.get_num_threads() == 4
            assert threading.active_count() == threads, "none outlives a request"
    finally:
        torch.set_num_threads(before)
    assert seen == of_each


@pytest.mark.parametrize("settings", [{}, PEARL, {"classes": Always(1, Confidence(0.4))}])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.few(2)
def test_every_draft_step_is_accepted_rolled_back_or_wasted(pair, overlap, settings):
    for seed in range(6):
        decoder = engine(pair, overlap=overlap, **settings)
        trace = decoder.decode([1 + seed, 2], 30, Sampler.seeded(seed))
        stages = [round_.overlap for round_ in trace.rounds]
        lost, steps = sum(s.rollback + s.waste for s in stages), sum(s.draft_steps for s in stages)
        assert steps == lost + sum(round_.accepted for round_ in trace.rounds)
        assert not broken_invariants(trace, 30, frozenset({EOS}))
        assert TypeAdapter(Trace).validate_json(json.dumps(trace.to_dict())) == trace
        first = "pre_verify" if settings is PEARL else "draft"
        anew = [True, *(round_.rejected for round_ in trace.rounds[:-1])]
        assert [s.stage for s in stages] == [first if each else "branch" for each in anew]
        assert all((s.outcome is None) == (s.stage == "pre_verify") for s in stages)
        assert not any(s.pending for s in stages if s.stage == "pre_verify")
        for stage in stages:
            jobs = {span.job: span for span in stage.spans}
            assert "target" in {span.worker for span in stage.spans}
            assert all(span.start <= span.end for span in stage.spans)
            assert "verify" in jobs and ("draft stage" not in jobs or stage.stage == "draft")


def test_an_idle_worker_is_a_bubble(pair):
    in_turn = engine(pair, overlap=False)
    traces = [in_turn.decode([2, seed], 30, Sampler.seeded(seed)) for seed in range(1, 6)]
    shares = {name: each.value for name, each in summary(timed({"m": traces}))["m"].items()}
    idle = shares["target idle"] + shares["draft idle"]
    assert 1 < idle < 2, "in turn at most one is busy"
    assert sum(shares[f"class {which}"] for which in ("none", "some", "all")) == pytest.approx(1)
    assert 0 < shares["waste"] and 0 < shares["draft stages"] < 1
    outside = 1 - shares["draft"] - shares["target"]
    assert shares["overhead"] == pytest.approx(outside), "as for any engine that runs in turn"
    assert shares["overhead"] > idle - 1, "a job of the draft's includes drawing"


@dataclass(frozen=True)
class Trained(Always):
    """As a predictor of classes that was trained for drafts of so many tokens."""

    trained_gamma: int | None = 3
    trained_age: int = 0


@pytest.mark.parametrize("a_priori", [False, True])
@pytest.mark.parametrize(("classes", "continued"), [(Trained, 3), (Always, 2)])
def test_a_class_asked_after_a_branch_is_of_its_trained_length(pair, classes, continued, a_priori):
    longest = 2 if a_priori else continued
    parts = (BranchPoint(3, 2), classes(ALL, Confidence(0.0)), BlockVerifier(), RrswVerifier())
    overlapped = OverlappedEngine(pair, *parts, OFF, OFF, overlap=False, a_priori=a_priori)
    pending = set()
    for seed in range(6):
        rounds = overlapped.decode(PROMPT, 40, Sampler.seeded(seed)).rounds
        for before, after in zip(rounds, rounds[1:], strict=False):
            if before.row > before.overlap.pending:  # a branch was accepted
                pending.add(after.overlap.pending)
    assert max(pending) == longest


@pytest.mark.parametrize("warp", [GREEDY, OFF])
@pytest.mark.parametrize(("overlap", "hand_over"), [(True, 0.0), (True, 0.002), (False, 0.0)])
def test_tokens_are_those_of_a_device_for_each_model(pair, warp, overlap, hand_over):
    alone = engine(pair, warp, overlap=False, **HALF)
    split = engine(pair, warp, overlap=overlap, pipeline=hand_over, **HALF)
    for seed in range(4):
        prompt = [1 + seed, 2, 3 + seed // 2]
        expected = alone.decode(prompt, 16, Sampler.seeded(seed)).tokens
        assert split.decode(prompt, 16, Sampler.seeded(seed)).tokens == expected


class Watched(TwoDevices):
    """Fails where two are on a device, and writes down who ran on which."""

    def __init__(self) -> None:
        super().__init__()
        self.target: list[int] = []
        self._inside = [Lock(), Lock()]

    def take(self, device: int) -> None:
        super().take(device)
        assert self._inside[device].acquire(blocking=False), "another runs there"
        self.target.append(device)

    def take_idle(self) -> int:
        device = super().take_idle()
        assert self._inside[device].acquire(blocking=False), "another runs there"
        return device

    def leave(self, device: int) -> None:
        self._inside[device].release()
        super().leave(device)


def test_nobody_runs_where_another_does(pair, monkeypatch):
    devices = Watched()
    monkeypatch.setattr("decoding.engines.pipeline.TwoDevices", lambda: devices)
    trace = engine(pair, pipeline=0.001, **HALF).decode(PROMPT, 40, Sampler.seeded(3))
    assert devices.target == [0, 1] * (len(trace.rounds) + 1), "a prefill, and a call a round"


def test_a_waiting_target_comes_first():
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


def test_models_are_as_before_after_an_error(pair):
    before = pair.target.network, pair.draft.network
    with pytest.raises(ZeroDivisionError), pipelined(pair, 0.0):
        assert pair.target.network is not before[0] and pair.draft.network is not before[1]
        _ = 1 / 0
    assert (pair.target.network, pair.draft.network) == before
    assert before[0]._half == -1


def test_what_cannot_be_split_is_refused():
    def refused(models: object, message: str) -> None:
        with pytest.raises(UserError, match=message):
            engine(models, pipeline=0.0, **HALF)  # type: ignore[arg-type]

    pair = tiny_pair()
    other = SimpleNamespace(target=pair.draft, draft=SimpleNamespace(**vars(pair.draft)))
    other.draft.reads_target = False
    refused(other, r"engine\.pipeline, pair\.draft: expected an ordinary draft on the CPU")
    mix_in(pair.draft, pair.target, 0.5)
    refused(pair, r"engine\.pipeline, pair\.draft: .* pair\.draft_mix=1")
    swapped = ModelPair(pair.draft, pair.target, pair.tokenizer, "", ())
    refused(swapped, r"engine\.pipeline, pair\.target: only a Llama, Mistral or Qwen2")
    pair.target.model.model.norm.register_forward_hook(lambda _, __, out: out)
    refused(pair, r"engine\.pipeline, pair\.target: .* without hooks and adapters")


class Stream:
    """Writes down what is asked of it."""

    def __init__(self, device: torch.device, said: list[str]) -> None:
        self.device, self.said = device, said

    def wait_stream(self, other: str) -> None:
        self.said.append(f"waits for {other}")

    def synchronize(self) -> None:
        self.said.append("is finished")


def test_jobs_exchange_finished_values_only(monkeypatch):
    said = list[str]()
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream(device, said))
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"the asking one of {device}")
    lm = SimpleNamespace(device=torch.device("cuda:0"), length=0)
    host = SimpleNamespace(device=torch.device("cpu"), length=0)
    with Workers(lm, host, 0.0, overlap=True) as workers:
        workers.target.submit("job", lambda: said.append("runs")).result()
        workers.draft.submit("job", lambda: said.append("runs on the host")).result()
    assert said == [
        "waits for the asking one of cuda:0", "runs", "is finished", "runs on the host"
    ]  # fmt: skip


def test_a_thread_whose_start_was_interrupted_is_waited_for(monkeypatch):
    """The pool forgets it."""
    start, begun, goes_on = Thread.start, Event(), Event()

    def interrupted(thread: Thread) -> None:
        start(thread)
        assert begun.wait(5)
        raise KeyboardInterrupt

    def job() -> None:
        begun.set()
        assert goes_on.wait(5)

    lm = SimpleNamespace(device=torch.device("cpu"), length=0)
    workers = Workers(lm, lm, 0.0, overlap=True)
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt), workers:
        patched.setattr(Thread, "start", interrupted)
        workers.draft.submit("job", job)
    joining = Thread(target=workers.join)
    joining.start()
    joining.join(0.2)
    assert joining.is_alive(), "the job still runs"
    goes_on.set()
    joining.join(5)
    assert not joining.is_alive()
