"""Replay = decode where draft and target run side by side: every round read off recorded rollouts
is that of the real engine."""

from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch

from decoding.engines.overlapped import OverlappedEngine
from decoding.models.loading import ModelPair
from decoding.sampling import Sampler, Warp
from decoding.stopping.confidence import Confidence
from decoding.stopping.confidence_before import ConfidenceBefore
from decoding.stopping.hrad import HRADStop
from decoding.stopping.never import Never
from decoding.stopping.policy import SOME
from decoding.stopping.rollout_table import RolloutTable
from decoding.structures.branch_point import BranchPoint
from decoding.trace import RoundTrace, Trace
from decoding.verifiers.point_mass import PointMassVerifier
from decoding.verifiers.rrsw import RrswVerifier
from decoding.verifiers.token import TokenVerifier
from evaluation.overlapped.walk import BranchRecords, Overlapped, traces
from evaluation.timeline import Devices, modelled_seconds
from tests.helpers.data.rollout_tables import harvested_table
from tests.helpers.models.tiny_pair import EOS, random_words, tiny_pair
from tests.helpers.training.checkpoints import write_checkpoint

GREEDY, OFF = Warp(0.0), Warp()
GAMMA, MAX_NEW, WIDTH, TRAINED = 16, 26, 24, 5
PROMPTS = [random_words(size, seed=size) for size in (3, 4, 5, 6, 7, 8, 9)]


@cache
def models(ends: bool) -> ModelPair:
    pair = tiny_pair()
    pair.eos_ids = (EOS, 31) if ends else ()
    return pair


@cache
def classes(before: bool, threshold: float) -> HRADStop:
    folder = Path(mkdtemp())
    write_checkpoint(folder, "hrad", 2 * WIDTH, gamma=TRAINED)
    rule = (ConfidenceBefore if before else Confidence)(threshold)
    stop = HRADStop(folder, rule)
    stop.predictor.head.scale.fill_(0.01)  # the classes take turns
    return stop


@cache
def table(ends: bool, draft_warp: Warp = GREEDY, seed: int = 0) -> RolloutTable:
    asked = [BranchRecords(), *(classes(*each) for each in CLASSES)]
    more = {"draft_warp": draft_warp, "seed": seed, "gamma": GAMMA, "max_new_tokens": MAX_NEW}
    return harvested_table(models(ends), PROMPTS, asked, **more)


CLASSES = [(False, 0.35), (False, 0.6), (True, 0.4)]
BEFORE = {"always": SOME, "keeps_unsure": False}
STOPS: list[tuple[Any, Overlapped]] = [
    *((Never(), Overlapped(gamma, pre_verify=True, drawn=True)) for gamma in (1, 3, 7)),
    (Never(), Overlapped(4, 3, a_priori=True)),
    *((Confidence(t), Overlapped(g, 1, t, always=SOME)) for g, t in ((4, 0.35), (7, 0.6))),
    (ConfidenceBefore(0.5), Overlapped(7, 1, 0.5, drawn=True, **BEFORE)),
    *(
        (Confidence(0.5), Overlapped(4, k, 0.5, always=SOME, a_priori=ahead, pre_verify=pre))
        for k, ahead, pre in product((1, 3), (False, True), (False, True))
    ),
    *(
        (ConfidenceBefore(0.4), Overlapped(5, k, 0.4, a_priori=ahead, **BEFORE))
        for k, ahead in product((1, 3), (False, True))
    ),
    *(
        ((before, t), Overlapped(TRAINED, k, t, "classes", keeps_unsure=not before, a_priori=ahead))
        for (before, t), k, ahead in product(CLASSES, (1, 3), (False, True))
    ),
    *(
        ((False, 0.6), Overlapped(TRAINED, k, 0.6, "classes", a_priori=ahead, pre_verify=True))
        for k, ahead in product((1, 3), (False, True))
    ),
]


def resolved(stop: Any, settings: Overlapped) -> tuple[Any, Overlapped]:
    if not isinstance(stop, tuple):
        return stop, settings
    made = classes(*stop)
    return made, replace(settings, outcomes=made.outcomes)


def decode(
    stop: Any, settings: Overlapped, ends: bool, draft_warp: Warp = GREEDY, seed: int = 0
) -> list[Trace]:
    pair = models(ends)
    engine = OverlappedEngine(
        pair,
        BranchPoint(settings.gamma, settings.candidates),
        stop,
        TokenVerifier(),
        RrswVerifier() if settings.drawn else PointMassVerifier(),
        GREEDY,
        draft_warp,
        overlap=False,
        pre_verify=settings.pre_verify,
        a_priori=settings.a_priori,
        eos_ids=frozenset(pair.eos_ids),
    )
    return [engine.decode(prompt, MAX_NEW, Sampler.seeded(seed)) for prompt in PROMPTS]


def facts(round_: RoundTrace) -> tuple[Any, ...]:
    stages = round_.overlap
    assert stages is not None
    drafted = len(round_.draft_tokens), round_.draft_tokens[: stages.pending], round_.draft_parents
    verdict = len(round_.tokens), round_.row, round_.accepted, round_.predicted
    return drafted, verdict, stages.stage, stages.outcome, stages.alone


def spent(round_: RoundTrace) -> tuple[int, ...]:
    stages = round_.overlap
    assert stages is not None
    return round_.draft_forwards, stages.draft_steps, stages.rollback + stages.waste


def unrecorded(settings: Overlapped, ends: bool) -> bool:
    """Whether a branch beside the recorded one may be shorter than the limit."""
    cut = settings.outcomes is not None or settings.always == SOME
    return ends or (settings.a_priori and cut)


@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize("number", range(len(STOPS)))
@pytest.mark.few(16)
def test_replay_is_decode(number: int, ends: bool) -> None:
    stop, settings = resolved(*STOPS[number])
    found = traces(table(ends), settings)
    decoded = decode(stop, settings, ends)
    for trace in found:
        theirs = decoded[int(trace.prompt_id)]
        assert list(map(facts, trace.rounds)) == list(map(facts, theirs.rounds))
        assert len(trace.tokens) == len(theirs.tokens)
        pairs = list(zip(trace.rounds, theirs.rounds, strict=True))
        partly = unrecorded(settings, ends)
        exact = [len(one.overlap.branches) < 2 or not partly for _, one in pairs]
        for (ours, real), is_exact in zip(pairs, exact, strict=True):
            branches = [*ours.overlap.branches, *real.overlap.branches]
            assert max(map(len, branches), default=0) <= settings.continuation + 1
            assert not is_exact or spent(ours) == spent(real)
            if not settings.a_priori:  # what is not recorded is taken to meet no end token
                assert all(a >= b for a, b in zip(spent(ours), spent(real), strict=True))
            elif not ends:  # and to stop no later than what is recorded
                assert all(a <= b for a, b in zip(spent(ours), spent(real), strict=True))
        for c in (2, 5, 9) if all(exact) else ():
            devices = Devices.of_ratio(c)
            assert modelled_seconds(trace, devices) == modelled_seconds(theirs, devices)
    wasted = any(round_.overlap.waste for trace in found for round_ in trace.rounds)
    assert wasted or settings.a_priori or settings.pre_verify


@pytest.mark.parametrize(
    ("stop", "settings"),
    [
        (Never(), Overlapped(3, pre_verify=True, drawn=True)),
        (Confidence(0.5), Overlapped(4, 3, 0.5, always=SOME)),
    ],
)
@pytest.mark.slow
def test_a_sampled_draft_has_the_same_law(stop: Any, settings: Overlapped) -> None:
    """Means over draws of the draft, whose target is greedy, by prompt."""
    seeds, devices = range(8), Devices.of_ratio(3)
    found = {name: [] for name in ("replayed", "decoded")}
    for seed in seeds:
        replayed = traces(table(False, OFF, seed), settings)
        decoded = decode(stop, settings, False, OFF, seed)
        for name, of in (("replayed", replayed), ("decoded", decoded)):
            steps = [sum(r.overlap.rollback for r in trace.rounds) for trace in of]
            seconds = [modelled_seconds(trace, devices) for trace in of]
            found[name].append([sum(steps), sum(seconds), sum(len(t.rounds) for t in of)])
    ours, theirs = (torch.tensor(found[name], dtype=torch.float64) for name in found)
    error = ((ours.var(0) + theirs.var(0)) / len(seeds)).sqrt()
    assert ((ours.mean(0) - theirs.mean(0)).abs() < 4 * error).all()
