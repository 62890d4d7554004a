"""What running draft and target side by side costs: the slowdown of an overlapped step, and the
memory of branches."""

import gc
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from decoding.draft import RoundContext
from decoding.engines.branching import Drafter, Pending
from decoding.engines.threads import Workers, both
from decoding.interfaces import Pair
from decoding.models.loading import CachedLM, ModelPair
from decoding.sampling import Sampler, Warp
from decoding.stopping.confidence_before import ConfidenceBefore
from decoding.stopping.policy import ALL
from decoding.structures.branch_point import BranchPoint
from decoding.verifiers.point_mass import PointMassVerifier


@dataclass(frozen=True)
class StepSeconds:
    """Medians for one branch stage: each worker alone, on its share of the threads, and both side
    by side."""

    target: float
    draft: float
    together: float

    @property
    def slowdown(self) -> float:
        """1 where overlapping is free."""
        return self.together / max(self.target, self.draft)


class _Step:
    """A branch stage over and over: gamma pending tokens after `context` [n], k branches of gamma
    tokens after them."""

    def __init__(self, pair: Pair, context: Tensor, gamma: int, k: int) -> None:
        self.pair, self.context = pair, context
        self.verified = RoundContext(context, 2 * gamma + 2)
        # no confidence is below 0, so that every stage has its full size; k candidates whatever the
        # first one is
        parts = pair.draft, Warp(), _Always(k), ConfidenceBefore(0.0), BranchPoint(gamma, k)
        self.drafter = Drafter(*parts, Sampler.seeded(0))
        for lm in (pair.target, pair.draft):
            lm.reset()
            lm.forward(context[:-1], logits="none")

    @contextmanager
    def pending(self) -> Iterator[Pending]:
        """Both caches as the target's call finds them, and rolled back afterwards."""
        pending = self.drafter.start(self.verified, ALL)
        yield pending
        self.drafter.roll_back(pending, 0, len(self.context))
        self.pair.target.crop(len(self.context) - 1)

    def verify(self, pending: Pending) -> object:
        return self.pair.target.forward(
            torch.cat([self.context[-1:], torch.tensor(pending.tokens)])
        )

    def branch(self, pending: Pending) -> object:
        return self.drafter.branch(pending, self.verified, ALL, self.drafter.gamma - 1)


class _Always(PointMassVerifier):
    """The k most probable tokens; as a rule for a fixed number it takes all of them."""

    def __init__(self, k: int) -> None:
        self.max_siblings = k


@torch.inference_mode()
def measure_step(
    pair: Pair, context: Tensor, gamma: int, k: int, draft_threads: int | None, repeats: int
) -> StepSeconds:
    """The three take turns, so that drift of the machine hits all of them alike. The first turn
    warms up."""
    step = _Step(pair, context, gamma, k)
    times: dict[str, list[float]] = {"target": [], "draft": [], "together": []}
    with Workers(pair.target, pair.draft, 0.0, True, draft_threads) as workers:

        def run(which: str, pending: Pending) -> None:
            jobs = list[Future[Any]]()
            if which != "draft":
                jobs.append(workers.target.submit("verify", step.verify, pending))
            if which != "target":
                jobs.append(workers.draft.submit("branch stage", step.branch, pending))
            both(jobs[0], jobs[-1])

        for _ in range(repeats + 1):
            for which, found in times.items():
                with step.pending() as pending:
                    start = perf_counter()
                    run(which, pending)
                    found.append(perf_counter() - start)
    target, draft, together = (median(found[1:]) for found in times.values())
    return StepSeconds(target, draft, together)


@torch.inference_mode()
def branch_bytes(
    pair: ModelPair, context: Tensor, gamma: int, widths: Sequence[int]
) -> dict[int, int]:
    """Bytes held at the end of a branch stage with so many branches, over those held before it:
    cache rows, logits and distributions of every node. The peak inside a forward is not in it, nor
    what the cache's buffers keep in reserve."""
    found = {}
    for k in (max(widths), *widths):  # after the widest the buffers grow no more
        step = _Step(pair, context, gamma, k)
        with step.pending() as pending:
            rows, before = pair.draft.length, tensor_bytes()
            branches = step.branch(pending)
            found[k] = tensor_bytes() - before + (pair.draft.length - rows) * pair.draft.row_bytes
            del branches
    return {k: found[k] for k in widths}


def model_bytes(lm: CachedLM) -> int:
    """Of the parameters."""
    return sum(weight.numel() * weight.element_size() for weight in lm.model.parameters())


def tensor_bytes() -> int:
    """Of every tensor that Python can reach; storage that several share counts once."""
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        if type(thing) in (Tensor, torch.nn.Parameter) and not thing.is_mkldnn:
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())
