"""What a decode moves between host and device, and how often the host waits, on a pretend one.

python -m tests.helpers.device.device_report"""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import NamedTuple

import torch

from data_gen.harvest import Progress, label_chunk, outputs_on
from data_gen.settings import HarvestSettings
from decoding.engines.autoregressive import AutoregressiveEngine
from decoding.engines.overlapped import OverlappedEngine
from decoding.engines.serial import SerialEngine
from decoding.interfaces import StopRule
from decoding.models.cached_lm import CachedLM
from decoding.models.loading import ModelPair
from decoding.sampling import Sampler, Warp
from decoding.stopping.confidence import Confidence
from decoding.stopping.hrad import HRADStop
from decoding.stopping.never import Never
from decoding.stopping.specdecpp import SpecDecPPStop
from decoding.structures.branch_point import BranchPoint
from decoding.structures.chain import Chain
from decoding.structures.dyspec import DySpecHeap
from decoding.structures.sources import Sources
from decoding.structures.static_tree import ParallelPaths, WidthTree
from decoding.trace import Trace
from decoding.verifiers.block import BlockVerifier
from decoding.verifiers.parallel import ParallelVerifier
from decoding.verifiers.rrsw import RrswVerifier
from decoding.verifiers.spechub import SpecHubVerifier
from decoding.verifiers.token import TokenVerifier
from tests.helpers.device.pretend_device import Counts, Pretend, pretend
from tests.helpers.models.tiny_pair import CONFIG, EOS, tiny_models, tiny_tokenizer
from tests.helpers.training.checkpoints import columns, write_checkpoint
from tests.invariant.test_harvest import GREEDY, RECIPE, some_requests

PROMPT = [3, 7, 1, 9, 4]
GAMMA = 4
Engine = AutoregressiveEngine | SerialEngine | OverlappedEngine
Make = Callable[[ModelPair, Warp], Engine]


@cache
def checkpoint(name: str) -> Path:
    """An untrained predictor for the tiny pair."""
    folder = Path(mkdtemp()) / name
    return write_checkpoint(folder, name, columns(name, CONFIG.hidden_size), gamma=GAMMA)


def head(order: str) -> StopRule:
    return SpecDecPPStop(checkpoint("specdecpp"), 0.6, (1, 20), order)  # type: ignore[arg-type]


def hrad() -> HRADStop:
    return HRADStop(checkpoint("hrad"), Confidence(0.4))


def chain(pair: ModelPair, warp: Warp, stop: StopRule) -> SerialEngine:
    return SerialEngine(pair, Chain(GAMMA), stop, TokenVerifier(), warp, warp)


def alone(pair: ModelPair, warp: Warp, structure: object, verifier: object) -> SerialEngine:
    """Without a stop rule."""
    return SerialEngine(pair, structure, Never(), verifier, warp, warp)  # type: ignore[arg-type]


def specbranch(pair: ModelPair, warp: Warp) -> OverlappedEngine:
    parts = BranchPoint(GAMMA, 2), hrad(), TokenVerifier(), RrswVerifier(), warp, warp
    return OverlappedEngine(pair, *parts, overlap=False)


ENGINES: dict[str, Make] = {
    "autoregressive": lambda pair, warp: AutoregressiveEngine(pair, warp),
    "chain x token": lambda pair, warp: chain(pair, warp, Never()),
    "chain x block": lambda pair, warp: alone(pair, warp, Chain(GAMMA), BlockVerifier()),
    "confidence": lambda pair, warp: chain(pair, warp, Confidence(0.3)),
    "SpecDec++, order of the paper": lambda pair, warp: chain(pair, warp, head("paper")),
    "SpecDec++, order of the code": lambda pair, warp: chain(pair, warp, head("code")),
    "H-RAD": lambda pair, warp: chain(pair, warp, hrad()),
    "SpecBranch, in turn": specbranch,
    "DySpec tree of 8 x RRSw": lambda pair, warp: alone(pair, warp, DySpecHeap(8), RrswVerifier()),
    "tree 2-2-1 x RRSw": lambda pair, warp: alone(pair, warp, WidthTree([2, 2, 1]), RrswVerifier()),
    "tree 2-2 x SpecHub": lambda pair, warp: alone(
        pair, warp, WidthTree([2, 2]), SpecHubVerifier()
    ),
    "sources": lambda pair, warp: SerialEngine(
        pair, Sources(GAMMA, 3, 1, 2), Confidence(0.3), TokenVerifier(), warp, warp
    ),
    "2 paths of 3 x block": lambda pair, warp: alone(
        pair, warp, ParallelPaths(2, 3), ParallelVerifier("block")
    ),
}
WARPS = {"greedy": Warp(0.0), "T = 1": Warp(), "T = .7, p = .9": Warp(0.7, 0, 0.9)}


class PerRound(NamedTuple):
    """Means over the rounds of a decode, its prefill among them; syncs: times the host waited."""

    to_host: float
    to_device: float
    between: float
    syncs: float
    syncs_per_drafted: float


def pair_on(target: str, draft: str) -> ModelPair:
    """The tiny pair on two devices."""
    models = zip(tiny_models(), (target, draft), strict=True)
    lms = [CachedLM(model.requires_grad_(False).float().to(device)) for model, device in models]
    return ModelPair(*lms, tiny_tokenizer(), "tiny", (EOS,))


def decoded(pair: ModelPair, engine: str, warp: Warp, tokens: int = 40) -> tuple[Trace, Counts]:
    """A decode, and what it cost; nothing where it is on the host. A head has been asked before, so
    that it is where it runs."""
    made = ENGINES[engine](pair, warp)
    made.decode(PROMPT, 6, Sampler.seeded(2))
    before = Counts() if Pretend.counts is None else Pretend.counts.copy()
    trace = made.decode(PROMPT, tokens, Sampler.seeded(1))
    return trace, Counts() if Pretend.counts is None else Pretend.counts.since(before)


def per_round(trace: Trace, counts: Counts) -> PerRound:
    rounds, drafted = len(trace.rounds), sum(len(each.draft_tokens) for each in trace.rounds)
    moved = (counts.bytes[way] / rounds for way in ("to host", "to device", "between"))
    syncs = counts.synchronisations.total()
    return PerRound(*moved, syncs / rounds, syncs / drafted if drafted else 0.0)


def harvested(pair: ModelPair, recipe: HarvestSettings) -> tuple[dict[str, list], Counts]:
    """Records of a chunk of the tests' prompts, and what they cost."""
    before = Counts() if Pretend.counts is None else Pretend.counts.copy()
    with outputs_on(pair, pair.target.device):
        rows = label_chunk(pair, some_requests(), recipe, Progress())
    return rows, Counts() if Pretend.counts is None else Pretend.counts.since(before)


def per_label(rows: dict[str, list], counts: Counts) -> tuple[float, float, float]:
    """Bytes to the host and to the device, and waits, for each token of a rollout that is
    labelled."""
    labelled = sum(row["accept_prob"].numel() for row in rows["rounds"])
    waits = counts.synchronisations.total()
    to_host, to_device = counts.bytes["to host"], counts.bytes["to device"]
    return to_host / labelled, to_device / labelled, waits / labelled


def main() -> None:
    print(
        "devices | engine | warp | bytes to host | to device | between | syncs | per drafted token"
    )
    with pretend():
        for second in ("cuda:0", "cuda:1"):
            pair = pair_on("cuda:0", second)
            for engine in ENGINES:
                for name, warp in WARPS.items():
                    found = per_round(*decoded(pair, engine, warp))
                    shown = " | ".join(f"{value:.1f}" for value in found)
                    print(f"cuda:0, {second} | {engine} | {name} | {shown}")
            for name, recipe in (("sampled", RECIPE), ("greedy", GREEDY)):
                shown = " | ".join(f"{x:.1f}" for x in per_label(*harvested(pair, recipe)))
                print(f"cuda:0, {second} | harvest, per labelled token | {name} | {shown}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
