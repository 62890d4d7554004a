"""Whether a device decodes and labels as the host does, near ties listed."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from data_gen.harvest import Progress, label_chunk, outputs_on
from data_gen.requests import Request
from data_gen.settings import HarvestSettings
from decoding.engines.autoregressive import AutoregressiveEngine
from decoding.engines.overlapped import OverlappedEngine
from decoding.engines.serial import SerialEngine
from decoding.models.loading import ModelPair
from decoding.sampling import Sampler, Warp
from decoding.stopping.confidence import Confidence
from decoding.stopping.never import Never
from decoding.structures.branch_point import BranchPoint
from decoding.structures.chain import Chain
from decoding.structures.dyspec import DySpecHeap
from decoding.trace import RoundTrace, Trace
from decoding.verifiers.block import BlockVerifier
from decoding.verifiers.rrsw import RrswVerifier
from decoding.verifiers.token import TokenVerifier
from evaluation.lossless import greedy_differences

GAMMA, NODES = 4, 12
GREEDY, SAMPLED = Warp(0.0), Warp()
CLOSE = 1e-3  # two numbers of a record, in float32, that differ by rounding


class Engine(Protocol):
    def decode(self, prompt_ids: Any, max_new_tokens: int, sampler: Sampler) -> Trace: ...


Make = Callable[[ModelPair, Warp], Engine]


def _serial(structure: Any, verifier: Any) -> Make:
    def make(pair: ModelPair, warp: Warp) -> Engine:
        ends = frozenset(pair.eos_ids)
        return SerialEngine(pair, structure, Never(), verifier, warp, SAMPLED, ends)

    return make


def overlapped(pair: ModelPair, warp: Warp, overlap: bool) -> OverlappedEngine:
    """SpecBranch without H-RAD."""
    parts: dict[str, Any] = {
        "structure": BranchPoint(GAMMA, 3),
        "stop": Confidence(0.4),
        "verifier": TokenVerifier(),
        "branch_verifier": RrswVerifier(),
    }
    ends = frozenset(pair.eos_ids)
    return OverlappedEngine(
        pair, **parts, warp=warp, draft_warp=SAMPLED, overlap=overlap, eos_ids=ends
    )


ENGINES: Mapping[str, Make] = {
    "plain": lambda pair, warp: AutoregressiveEngine(pair, warp, frozenset(pair.eos_ids)),
    "chain, token-wise": _serial(Chain(GAMMA), TokenVerifier()),
    "chain, block": _serial(Chain(GAMMA), BlockVerifier()),
    "tree (DySpec), RRSw": _serial(DySpecHeap(NODES), RrswVerifier()),
    "SpecBranch, in turn": lambda pair, warp: overlapped(pair, warp, False),
}
RUNS_BESIDE = ("SpecBranch, in turn",)  # not with a draft that reads its target


@dataclass(frozen=True)
class Agreement:
    """equal: of `of` outputs or records; near_ties: first differences that rounding may make;
    faults: the others, a line each."""

    equal: int
    of: int
    near_ties: list[str]
    faults: list[str]


def engines_for(pair: ModelPair) -> dict[str, Make]:
    """Those that the draft can run in."""
    left_out = RUNS_BESIDE if pair.draft.reads_target else ()
    return {name: make for name, make in ENGINES.items() if name not in left_out}


def decodes(
    host: ModelPair, there: ModelPair, make: Make, prompts: Sequence[Tensor], tokens: int
) -> Agreement:
    """Greedy outputs of one engine on both, and sampled ones of the same seed. prompts: ids [n].

    A sampled output may also leave the host's where a coin falls within rounding of a probability.
    p and q of what was drafted are the host's up to rounding all the same."""
    traces = {
        warp: [
            [
                make(pair, warp).decode(prompt, tokens, Sampler.seeded(seed))
                for seed, prompt in enumerate(prompts)
            ]
            for pair in (host, there)
        ]
        for warp in (GREEDY, SAMPLED)
    }
    theirs, ours = traces[GREEDY]
    found = greedy_differences(host.target, prompts, ours, theirs)
    lines = {
        each: f"greedy, token {each.position}: {each.token} for {each.baseline_token}, logits"
        f" {each.gap:.1e} apart"
        for each in found
    }
    ties = [line for each, line in lines.items() if each.excused]
    faults = [line for each, line in lines.items() if not each.excused]
    other = [
        f"sampled, prompt {number}: {first_difference(b.tokens, a.tokens)}"
        for number, (a, b) in enumerate(zip(*traces[SAMPLED], strict=True))
        if a.tokens != b.tokens
    ]
    faults += [
        f"sampled, prompt {number}: {line}"
        for number, (a, b) in enumerate(zip(*traces[SAMPLED], strict=True))
        if (line := far_probabilities(b, a))
    ]
    equal = 2 * len(prompts) - len(found) - len(other)
    if len(other) > len(prompts) // 2:  # rounding rarely turns a coin
        faults, other = faults + other, []
    return Agreement(equal, 2 * len(prompts), ties + other, faults)


def far_probabilities(ours: Trace, theirs: Trace) -> str | None:
    """The first p or q of a draft token that is not the host's, in the rounds up to the one where
    the outputs part."""
    for number, (a, b) in enumerate(zip(ours.rounds, theirs.rounds, strict=False)):
        columns = zip(*(_drafted(each) for each in (a, b)), strict=False)
        for place, ((node, *mine), (other, *others)) in enumerate(columns):
            if node != other:
                return None
            for name, x, y in zip("qp", mine, others, strict=True):
                if None not in (x, y) and not abs(x - y) <= CLOSE:
                    return f"{name} of draft token {place} in round {number} is {x:.4f} for {y:.4f}"
        if a.tokens != b.tokens or a.draft_tokens != b.draft_tokens:
            return None
    return None


def _drafted(round_: RoundTrace) -> list[tuple[Any, ...]]:
    """Of each draft token itself with its parent, q and p."""
    nodes = zip(round_.draft_tokens, round_.draft_parents, strict=True)
    return list(zip(nodes, round_.draft_q, round_.draft_p, strict=True))


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> str:
    place = next((n for n, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
    if place is None:
        return f"{len(ours)} tokens for {len(theirs)}"
    return f"token {place}: {ours[place]} for {theirs[place]}"


def harvests(
    host: ModelPair, there: ModelPair, requests: Sequence[Request], settings: HarvestSettings
) -> Agreement:
    """Records of the same prompts, by column; of a prompt whose response differs, that alone."""
    theirs, ours = (_records(pair, requests, settings) for pair in (host, there))
    ties, faults, equal = list[str](), list[str](), 0
    for number, request in enumerate(requests):
        a, b = (kinds["responses"][number]["response_tokens"].tolist() for kinds in (ours, theirs))
        if a != b:
            ties.append(f"{request.prompt_id}: another response, {first_difference(a, b)}")
            continue
        far = [
            f"{request.prompt_id}: {kind}.{column} is {gap:.1e} apart"
            for kind in theirs
            for column, value in theirs[kind][number].items()
            if (gap := distance(ours[kind][number][column], value)) > CLOSE
        ]
        equal += not far
        faults += far
    if len(ties) > len(requests) // 2:
        ties, faults = [], ties + faults
    return Agreement(equal, len(requests), ties, faults)


def _records(
    pair: ModelPair, requests: Sequence[Request], settings: HarvestSettings
) -> dict[str, list[Any]]:
    with outputs_on(pair, pair.target.device):
        return label_chunk(pair, requests, settings, Progress())


def distance(ours: Any, theirs: Any) -> float:
    """The largest difference of two values of a record, relative where they are large; infinite
    where they cannot be compared."""
    if isinstance(theirs, Tensor):
        if ours.shape != theirs.shape:
            return float("inf")
        a, b = ours.detach().cpu().double(), theirs.detach().cpu().double()
        gaps = (a - b).abs() / b.abs().clamp(min=1)
        same = (a == b) | (a.isnan() & b.isnan())  # also where both are the same infinity
        gaps = gaps.nan_to_num(nan=math.inf, posinf=math.inf).masked_fill(same, 0.0)
        return float(gaps.max()) if gaps.numel() else 0.0
    if hasattr(theirs, "dtype"):  # hidden states, the bits of bfloat16
        a, b = (torch.from_numpy(x).view(torch.bfloat16).double() for x in (ours, theirs))
        if a.shape != b.shape:
            return float("inf")
        gap = float((a - b).norm() / b.norm().clamp(min=1e-9)) / 10  # rounded to 8 bits
        return gap if math.isfinite(gap) else math.inf
    return 0.0 if ours == theirs else float("inf")
