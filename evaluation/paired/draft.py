"""The draft along the responses of plain decoding, and what its acceptance and the costs of
forwards allow."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig
from torch import Tensor

from evaluation.datasets import ByDataset
from evaluation.interleaving import Traces
from evaluation.paired.speedup_bound import Match, match, speedup_bound
from evaluation.runner import Comparison
from evaluation.tables import BASELINE
from evaluation.timeline import COST_ROWS, Devices, measured_devices


def draft_of(cfg: DictConfig, compared: Comparison, traces: Traces) -> dict[str, Any]:
    """Measured: seconds of forwards, and by dataset how the draft matches the target (`match`).
    Modelled: the bound of the speed-up (`speedup_bound`)."""
    pair, plain = compared.pair, traces[BASELINE][0]
    warp, draft_warp = instantiate(cfg.warp), instantiate(cfg.draft_warp)
    both = list(zip(compared.requests, plain, strict=True))
    texts = [[*request.tokens.tolist(), *trace.tokens] for request, trace in both]
    middle = sorted(texts, key=len)[len(texts) // 2]
    devices = measured_devices(pair, middle, cfg.longest_draft + 1)
    matches = [
        match(pair, request.tokens, trace.tokens, warp, draft_warp, cfg.longest_draft)
        for request, trace in both
    ]

    def part(dataset: str | None) -> dict[str, Any]:
        kept = [
            one
            for one, trace in zip(matches, plain, strict=True)
            if dataset in (None, trace.dataset)
        ]
        return summary(kept, devices, cfg.longest_draft)

    found = ByDataset.of((trace.dataset for trace in plain), part)
    rows = [count for count in COST_ROWS if count <= cfg.longest_draft + 1]
    costs = {"draft": devices.draft(1), "target": {count: devices.target(count) for count in rows}}
    return {"seconds": costs, "match": found}


def summary(matches: Sequence[Match], devices: Devices, longest: int) -> dict[str, Any]:
    """Of the responses of one dataset."""
    depths = max(len(one.chance) for one in matches)
    return {
        "positions": sum(len(one.overlap) for one in matches),
        "overlap": mean_of([one.overlap for one in matches]),
        "greedy": mean_of([one.greedy for one in matches]),
        "accepted": mean_of([one.chance[0] for one in matches]),
        "accepted_after": [
            mean_of([one.chance[depth, depth:] for one in matches if depth < len(one.chance)])
            for depth in range(1, depths)
        ],
        "speedup_bound": asdict(speedup_bound([one.chance for one in matches], devices, longest)),
    }


def mean_of(values: Sequence[Tensor]) -> float:
    """Over all positions of all responses."""
    return float(torch.cat(list(values)).double().mean())
