"""What a decode moves between host and device, and how often the host waits, on a pretend one.

python -m tests.device_report"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from data_gen.harvest import Progress, label_chunk, outputs_on
from data_gen.settings import HarvestSettings
from decoding.engines.autoregressive import AutoregressiveEngine
from decoding.engines.serial import SerialEngine
from decoding.models.cached_lm import CachedLM
from decoding.models.loading import ModelPair
from decoding.sampling import Sampler, Warp
from decoding.stopping.never import Never
from decoding.structures.chain import Chain
from decoding.trace import Trace
from decoding.verifiers.token import TokenVerifier
from tests.invariant.test_harvest import GREEDY, RECIPE, some_requests
from tests.pretend_device import Counts, Pretend, pretend
from tests.tiny_pair import EOS, tiny_models, tiny_tokenizer

PROMPT = [3, 7, 1, 9, 4]
GAMMA = 4
Make = Callable[[ModelPair, Warp], AutoregressiveEngine | SerialEngine]
ENGINES: dict[str, Make] = {
    "autoregressive": lambda pair, warp: AutoregressiveEngine(pair, warp),
    "chain x token": lambda pair, warp: SerialEngine(
        pair, Chain(GAMMA), Never(), TokenVerifier(), warp, warp
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
    """A decode, and what it cost; nothing where it is on the host."""
    before = Counts() if Pretend.counts is None else Pretend.counts.copy()
    trace = ENGINES[engine](pair, warp).decode(PROMPT, tokens, Sampler.seeded(1))
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
