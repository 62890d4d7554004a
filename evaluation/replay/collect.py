"""One table of many checkpoints: their settings, their scores, and the best threshold of each by
replay."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.utils import instantiate
from omegaconf import DictConfig
from tqdm import tqdm

from data_gen.storage.dataset import Harvest
from decoding.cost import CostTable
from evaluation.replay.candidates import (
    candidates_of,
    check_sizes,
    given_cost,
    refuse_foreign_checkpoint,
    replayer,
)
from evaluation.replay.tuning import Choice, choose, hindsight, span
from evaluation.table import markdown
from predictors.base import damaged, read_config, read_metrics
from predictors.inputs import Inputs
from runtime.errors import UserError
from runtime.files import checked_folder, refuse_foreign_file
from runtime.job import command_line
from runtime.text import printable

SCORES = ("brier", "ece", "auroc")
KEY = "folder"
FILES = ("metrics.json", "config.json")  # of a checkpoint: with either, it is meant to be one
Cells = dict[str, str]
LEGEND = (
    "nll, brier, ece, auroc: test split of the harvest trained on, calibrated. survival: log loss,"
    " and how far it is above that of the draft's own confidence (product of q, calibrated in the"
    " same way), with its 95 % interval over prompts. Everything else: by replay."
)


def collect(cfg: DictConfig) -> None:
    """Checkpoints and a harvest in, a table out."""
    out, folders = (
        checked_folder("out", cfg.out, "file"),
        checkpoints(checked_folder(KEY, cfg.folder)),
    )
    refuse_foreign_file(out, "tune")
    known = [(settings(folder), scores(folder)) for folder in folders]
    tuned = [[Cells()] for _ in folders] if cfg.data is None else replayed(cfg, folders)
    rows = [
        (named, measured | found)
        for (named, measured), each in zip(known, tuned, strict=True)
        for found in each
    ]
    text = table(rows)
    command = command_line()
    out.write_text(f"{text}\n\n<!-- {printable(command)} -->\n", encoding="utf-8")
    print(f"\n{text}\n\n{LEGEND}\nsaved {cfg.out}")


def checkpoints(parent: Path) -> list[Path]:
    """Folders of checkpoints, 2 before 10."""
    found = {path.parent for name in FILES for path in parent.glob(f"*/{name}")}
    if not found:
        raise UserError(
            f"{KEY}: no checkpoints in {parent}. Train some: python train.py -m ... (see --help)"
        )
    return sorted(found, key=lambda folder: _natural(folder.name))


def _natural(name: str) -> list[tuple[bool, int, str]]:
    """Orders names by the numbers in them."""
    parts = re.split(r"(\d+)", name)
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in parts]


def settings(folder: Path) -> Cells:
    config = read_config(folder, KEY)
    named = {"checkpoint": folder.name, "predictor": config["predictor"]}
    inputs = Inputs.from_dict(config["inputs"])
    read = {"layers": [*inputs.draft_layers, *inputs.target_layers], "reads": inputs.names}
    known = named | read | config["settings"] | read | _data(config)
    known.pop("inputs", None)  # those besides
    return {name: _cell(value) for name, value in known.items()}


def _data(config: dict[str, Any]) -> dict[str, Any]:
    """How many prompts it learned from, where it says so."""
    try:
        return {"prompts": config["provenance"]["data"]["splits"]["train"]["prompts"]}
    except (KeyError, TypeError):
        return {}


def _cell(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def scores(folder: Path) -> Cells:
    """On the test split of the harvest trained on, calibrated. nll: cross-entropy with the label,
    also a soft one."""
    name = read_config(folder, KEY)["predictor"]
    metrics = read_metrics(folder, KEY)
    try:
        reliability = next(iter(metrics["reliability"].values()))
        stages = reliability.get("token") or reliability["class"]
        found = {"nll": list(stages.values())[-1]["log_loss"][0]} | {
            key: metrics["test"][name][key] for key in SCORES
        }
        more = survival(metrics) | {"seconds": f"{metrics['seconds']:.0f}"}
    except (KeyError, TypeError, AttributeError, StopIteration, IndexError) as error:
        raise damaged(folder, KEY, name, error) from error
    return {key: "-" if value is None else f"{value:.4f}" for key, value in found.items()} | more


def survival(metrics: dict[str, Any]) -> Cells:
    """A column for each harvest it was scored on; none where there is no survival."""
    found = Cells()
    for data, scored in metrics.get("survival", {}).items():
        (loss, *_), (gap, low, high) = (
            next(iter(scored[kind].values())) for kind in ("log_loss", "difference")
        )
        ends = "-" if None in (low, high) else f"{low:.4f} to {high:.4f}"
        found[f"survival, {data}"] = f"{loss:.4f}, {gap:+.4f} ({ends})"
    return found


def replayed(cfg: DictConfig, folders: Sequence[Path]) -> list[list[Cells]]:
    """For each checkpoint, a row for its best threshold, or for each of `cfg.thresholds`."""
    harvest = Harvest.open(cfg.data)
    check_sizes(cfg, harvest)
    cost = given_cost(cfg.cost, harvest, "cost")
    for folder in folders:
        refuse_foreign_checkpoint(folder, harvest, KEY, cfg.gamma_max or harvest.gamma)
    bar = tqdm(folders, desc="replay", unit="checkpoint")
    return [[judged(choice) for choice in tune_one(cfg, harvest, folder, cost)] for folder in bar]


def tune_one(cfg: DictConfig, harvest: Harvest, folder: Path, cost: CostTable) -> list[Choice]:
    """The best threshold of the rule that asks this checkpoint, or each that is given."""
    name = read_config(folder, KEY)["predictor"]
    if name not in cfg.rules:
        raise UserError(
            f"rules.{name}: expected the stop rule that asks checkpoints of {name}, got none. Give"
            f" its YAML: +stop@rules.{name}=<stop rule>"
        )
    stops = {name: instantiate(cfg.rules[name], checkpoint=str(folder))}
    gamma_max = cfg.gamma_max or harvest.gamma
    first, second = (
        replayer(cfg, gamma_max, harvest, split, stops.values())
        for split in (cfg.choose, cfg.judge)
    )
    chosen_on, judged_on = (
        candidates_of(cfg, stops, found, cfg.thresholds) for found in (first, second)
    )
    least = hindsight(second, cost)
    if cfg.thresholds is None:
        return choose(chosen_on, judged_on, cost, least)
    return [
        choose([one], [other], cost, least)[0]
        for one, other in zip(chosen_on, judged_on, strict=True)
    ]


def judged(choice: Choice) -> Cells:
    return {
        "threshold": f"{choice.threshold:.3g}",
        "speed-up, modelled": f"{choice.speedup:.3f} ({span(choice.interval)})",
        "regret": f"{choice.regret:.1%}",
        "discard": f"{choice.discard_rate:.3f}",
        "verification": f"{choice.verification_rate:.3f}",
    }


def table(rows: Sequence[tuple[Cells, Cells]]) -> str:
    """rows: settings and figures; of the settings, besides the checkpoint's name, those in which
    rows differ."""
    names = list(dict.fromkeys(name for known, _ in rows for name in known))
    shown = [
        name
        for name in names
        if name == "checkpoint" or len({known.get(name) for known, _ in rows}) > 1
    ]
    measured = list(dict.fromkeys(name for _, figures in rows for name in figures))
    lines = [
        [known.get(name, "") for name in shown] + [figures.get(name, "") for name in measured]
        for known, figures in rows
    ]
    return markdown([*shown, *measured], lines)
