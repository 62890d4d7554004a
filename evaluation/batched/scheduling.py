"""What the scheduler of serving engines is worth: of tune.py, with scheduler=true."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hydra.utils import instantiate
from omegaconf import DictConfig

from data_gen.storage.dataset import Harvest
from decoding.batch_cost import BatchCost
from decoding.stopping.rollout_table import RolloutTable
from evaluation.batched.compared import Scheduled, chosen, judged
from evaluation.batched.confidences import POSITION, by_position, confidences, fitted
from evaluation.replay.candidates import replayer
from evaluation.replay.tuning import span
from predictors.confidences.maps import PositionMaps
from runtime.intervals import Estimate


def simulated(
    cfg: DictConfig, harvests: Sequence[Harvest], cost: BatchCost, gamma: int
) -> dict[str, list[Scheduled]]:
    """By what it is judged on. Lengths and calibrations are of the `choose` prompts of the first of
    the harvests, the others are judged on whole."""

    def rounds(harvest: Harvest, split: str) -> RolloutTable:
        return replayer(cfg, gamma, harvest, split, []).table

    home, *elsewhere = harvests
    known = rounds(home, cfg.choose)
    maps = calibrated(cfg, known, gamma)
    ways = chosen(known, maps, cost, cfg.batch, gamma)
    tables = {f"{cfg.data}, {cfg.judge} prompts": rounds(home, cfg.judge)}
    tables |= {str(other.folder): rounds(other, "all") for other in elsewhere}
    return {name: judged(table, maps, cost, ways, gamma) for name, table in tables.items()}


def calibrated(
    cfg: DictConfig, rounds: RolloutTable, gamma: int
) -> Mapping[str, PositionMaps | None]:
    rows = confidences(rounds, gamma)
    return {POSITION: by_position(rows)} | {
        str(name): fitted(rows, instantiate(one.fit), instantiate(one.sequential), one.survival)
        for name, one in cfg.calibrations.items()
    }


def facts(found: Mapping[str, Sequence[Scheduled]]) -> dict[str, Any]:
    return {name: [one.to_dict() for one in rows] for name, rows in found.items()}


def pages(found: Mapping[str, Sequence[Scheduled]]) -> Iterator[str]:
    """A table for each set of prompts; intervals are of 95 % over prompts, paired."""
    for name, rows in found.items():
        yield f"Scheduler, judged on {name}\n\n{page(rows)}"


def page(rows: Sequence[Scheduled]) -> str:
    lines = [
        "| requests | rows go by | drafted | tokens/s | over one length | over as logged"
        " | over fresh |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in rows:
        ratios = (one.over_fixed, one.over_logged, one.over_fresh)
        rate = one.tokens_per_second
        lines.append(
            f"| {one.requests} | {one.way.name} | {one.way.drafted} | {rate.value:.1f} |"
            f" {' | '.join(map(written, ratios))} |"
        )
    return "\n".join(lines)


def written(ratio: Estimate) -> str:
    same = ratio[1:] == (1, 1)  # step by step
    return "1" if same else f"{ratio.value:.3f} ({span(ratio[1:])})"
