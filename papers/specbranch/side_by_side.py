"""Costs of running draft and target side by side: the slowdown of an overlapped step, and the
memory of branches."""

import gc
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import torch
from omegaconf import DictConfig
from torch import Tensor
from tqdm import tqdm

from data_gen.prompts import load_prompts
from data_gen.prompts.render import prompt_ids
from decoding.draft import RoundContext
from decoding.engines.branching import Drafter, Pending
from decoding.engines.overlapped import threads_of_draft
from decoding.engines.threads import Workers, both
from decoding.interfaces import Pair as Models
from decoding.models.loading import ModelPair, load_pair
from decoding.models.mixed import refuse_mixed
from decoding.sampling import Sampler, Warp
from decoding.settings import Pair
from decoding.stopping.confidence_before import ConfidenceBefore
from decoding.stopping.policy import ALL
from decoding.structures.branch_point import BranchPoint
from decoding.verifiers.point_mass import PointMassVerifier
from evaluation.table import markdown
from runtime.errors import UserError


class StepSeconds(NamedTuple):
    """Medians for one branch stage: each worker alone, on its share of the threads, and both side
    by side."""

    target: float
    draft: float
    together: float

    @property
    def slowdown(self) -> float:
        """The slowdown of an overlapped step: 1 if overlapping is free."""
        return self.together / max(self.target, self.draft)


class _Step:
    """A branch stage to be repeated: gamma pending tokens after `context` [n], k branches of gamma
    tokens after them."""

    def __init__(self, pair: Models, context: Tensor, gamma: int, k: int) -> None:
        self.pair, self.context = pair, context
        self.verified = RoundContext(context, 2 * gamma + 2)
        # no confidence is below 0, so every stage has its full size; always k candidates
        parts = pair.draft, Warp(), _Always(k), ConfidenceBefore(0.0), BranchPoint(gamma, k)
        self.drafter = Drafter(*parts, Sampler.seeded(0))
        for lm in (pair.target, pair.draft):
            lm.reset()
            lm.forward(context[:-1], logits="none")

    @contextmanager
    def pending(self) -> Iterator[Pending]:
        """Prepare both caches for the target's call, and roll them back afterwards."""
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
    """A rule for the k most probable tokens; k is fixed, so all are taken."""

    def __init__(self, k: int) -> None:
        self.max_siblings = k


@torch.inference_mode()
def measure_step(
    pair: Models, context: Tensor, gamma: int, k: int, draft_threads: int | None, repeats: int
) -> StepSeconds:
    """Time a branch stage. The three variants take turns, so that drift of the machine affects all
    alike; the first turn warms up."""
    step = _Step(pair, context, gamma, k)
    times: dict[str, list[float]] = {"target": [], "draft": [], "together": []}
    with Workers(pair.target, pair.draft, 0.0, True, draft_threads) as workers:
        for _ in range(repeats + 1):
            for which, seconds in times.items():
                with step.pending() as pending:
                    start, jobs = perf_counter(), list[Future[Any]]()
                    if which != "draft":
                        jobs.append(workers.target.submit("verify", step.verify, pending))
                    if which != "target":
                        jobs.append(workers.draft.submit("branch stage", step.branch, pending))
                    both(jobs[0], jobs[-1])
                    seconds.append(perf_counter() - start)
    return StepSeconds(*(median(seconds[1:]) for seconds in times.values()))


@torch.inference_mode()
def branch_bytes(
    pair: ModelPair, context: Tensor, gamma: int, widths: Sequence[int]
) -> dict[int, int]:
    """Return by number of branches the bytes held at the end of a branch stage beyond those before
    it: cache rows, logits and distributions of every node. Excludes the peak inside a forward and
    spare rows of the cache's buffers."""
    held = {}
    for k in (max(widths), *widths):  # the buffers do not grow after the widest
        step = _Step(pair, context, gamma, k)
        with step.pending() as pending:
            rows, before = pair.draft.length, tensor_bytes()
            branches = step.branch(pending)
            held[k] = tensor_bytes() - before + (pair.draft.length - rows) * pair.draft.row_bytes
            del branches
    return {k: held[k] for k in widths}


def tensor_bytes() -> int:
    """Return the bytes of all dense tensors that Python can reach; shared storage counts once."""
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        if type(thing) in (Tensor, torch.nn.Parameter) and thing.layout == torch.strided:
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def compare_stages(cfg: DictConfig) -> str:
    """Return a table of the time of overlapping and the memory of branches for a branch stage.
    Raises UserError for a draft that cannot run beside its target, and for too long a context."""
    settings, pair = cfg.overlap, load_pair(Pair.of(cfg.pair))
    refuse_mixed(pair.draft)
    if pair.draft.reads_target:
        raise UserError(
            "what, pair.draft: an EAGLE-style draft that reads its target's hidden states cannot"
            " run beside it. Use an ordinary one: pair=smollm2"
        )
    longest = min(lm.max_length for lm in (pair.target, pair.draft)) - 2 * settings.gamma
    if settings.context > longest:
        raise UserError(
            f"overlap.context: {settings.context} and two drafts exceed the models' context. Use"
            f" {longest}"
        )
    prompt = max(load_prompts(cfg.dataset), key=lambda prompt: len(prompt.text))
    tokens = prompt_ids(prompt, pair.tokenizer, sys.maxsize)
    context = tokens.repeat(-(-settings.context // len(tokens)))[: settings.context]
    threads = threads_of_draft(pair, settings.draft_threads, "overlap.draft_threads")
    models = sum(part.nbytes for lm in (pair.target, pair.draft) for part in lm.model.parameters())
    held = branch_bytes(pair, context, settings.gamma, settings.branches)
    steps = {
        k: measure_step(pair, context, settings.gamma, k, threads, cfg.repeats)
        for k in tqdm(settings.branches, desc="overlap", unit="width")
    }
    rows = [
        [
            str(k),
            *(f"{1e3 * value:.1f}" for value in step),
            f"{step.slowdown:.2f}",
            f"{held[k] / 1e6:.1f}",
            f"{held[k] / models:.1%}",
        ]
        for k, step in steps.items()
    ]
    slowdowns = [step.slowdown for step in steps.values()]
    header = ["branches", "target alone, ms", "draft alone, ms", "side by side, ms"]
    return (
        f"Side by side takes {min(slowdowns):.2f} to {max(slowdowns):.2f} times as long as the"
        " slower of the two alone.\n\n"
        f"{markdown([*header, 'over the slower', 'MB', 'of models'], rows)}\n\n"
        f"{settings.gamma} pending tokens, branches of {settings.gamma}, context of {len(context)},"
        f" medians of {cfg.repeats}; CPU threads: {threads or 'not divided'} of"
        f" {torch.get_num_threads()} for the draft. MB: held at the end of the stage (cache rows,"
        f" logits, distributions); the models' weights are {models / 1e6:.0f} MB"
    )
