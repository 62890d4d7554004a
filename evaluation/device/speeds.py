"""What a device takes: tokens per second, time outside forwards, memory."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from time import perf_counter

import torch
from torch import Tensor

from data_gen.harvest import Progress, label_chunk, outputs_on
from data_gen.requests import Request
from data_gen.settings import HarvestSettings
from decoding.models.loading import ModelPair
from decoding.sampling import Sampler, Warp
from evaluation.device.agreement import ENGINES, Engine, overlapped

TIMED = ("plain", "chain, token-wise")


@dataclass(frozen=True)
class Speed:
    """Medians over repeats. rate: tokens per second; outside: share of the time that no forward
    takes, None where it is not known."""

    rate: float
    outside: float | None = None

    def to_dict(self) -> dict[str, float | None]:
        return asdict(self)


def decoding_speeds(
    pair: ModelPair,
    generate: Engine | None,
    prompts: Sequence[Tensor],
    tokens: int,
    repeats: int,
    warp: Warp,
) -> dict[str, Speed]:
    """Of `generate` (the target alone, as transformers has it), plain and speculative decoding, in
    turn, after one turn that warms up."""
    engines: dict[str, Engine] = {name: ENGINES[name](pair, warp) for name in TIMED}
    if generate is not None:
        engines = {"generate": generate, **engines}
    if not pair.draft.reads_target:
        engines["side by side"] = overlapped(pair, warp, True)
        engines["the same in turn"] = overlapped(pair, warp, False)
    rates: dict[str, list[float]] = {name: [] for name in engines}
    outside: dict[str, list[float]] = {name: [] for name in engines}
    for repeat in range(repeats + 1):
        for name, engine in engines.items():
            rate, rest = _timed(pair, engine, prompts, tokens)
            if repeat:
                rates[name].append(rate)
                outside[name].append(rest)
    blind = ("generate", "side by side")  # nothing of ours runs there; forwards overlap
    return {
        name: Speed(median(rates[name]), None if name in blind else median(outside[name]))
        for name in engines
    }


def _timed(
    pair: ModelPair, engine: Engine, prompts: Sequence[Tensor], tokens: int
) -> tuple[float, float]:
    """Tokens per second, and the share of time outside of forwards."""
    made, seconds, inside = 0, 0.0, 0.0
    pair.draft.reset()  # an engine that has no use for it leaves it as it is
    for seed, prompt in enumerate(prompts):
        start = perf_counter()
        trace = engine.decode(prompt, tokens, Sampler.seeded(seed))
        seconds += perf_counter() - start
        inside += pair.target.seconds + pair.draft.seconds  # reset with each request
        made += len(trace.tokens)
    return made / seconds, max(0.0, 1 - inside / seconds)


def harvest_speed(
    pair: ModelPair, requests: Sequence[Request], settings: HarvestSettings, repeats: int
) -> Speed:
    """Draft tokens labelled per second."""
    rates = []
    for _ in range(repeats + 1):
        start = perf_counter()
        with outputs_on(pair, pair.target.device):
            rows = label_chunk(pair, requests, settings, Progress())
        labels = sum(int(row["drafted"].sum()) for row in rows["rounds"])
        rates.append(labels / (perf_counter() - start))
    return Speed(median(rates[1:]))


def peak_memory(devices: Sequence[torch.device], work: Callable[[], object]) -> Mapping[str, int]:
    """Most bytes of tensors on each GPU while `work` is done."""
    gpus = [device for device in dict.fromkeys(devices) if device.type == "cuda"]
    for device in gpus:
        torch.cuda.reset_peak_memory_stats(device)
    work()
    return {str(device): torch.cuda.max_memory_allocated(device) for device in gpus}
