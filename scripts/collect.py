"""One table of many checkpoints: their settings, their scores, and the best threshold of each by replay.

    python train.py -m predictor.depth=0,1,2,3,4 predictor.w_rej=1,3,6,12 'out=checkpoints/sweep/${hydra:job.num}'
    python scripts/collect.py folder=checkpoints/sweep data=data/rounds

All of them are trained and replayed on one harvest. Only settings in which they differ are shown.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.utils import instantiate
from omegaconf import DictConfig
from tqdm import tqdm

from data_gen.shards import read_manifest
from data_gen.tuning_data import (
    candidates_of,
    check_out,
    check_sizes,
    check_splits,
    given_cost,
    refuse_foreign_checkpoint,
    replayer,
)
from decoding.cost import CostTable
from decoding.report import markdown
from decoding.tuning import Choice, choose, hindsight, span
from predictors.base import damaged, read_config
from predictors.cli import hydra_script
from predictors.errors import UserError

SCORES = ("kl", "brier", "ece", "auroc")
KEY = "folder"


@hydra_script("collect")
def main(cfg: DictConfig) -> None:
    """Checkpoints and a harvest in, a table out."""
    manifest = read_manifest(cfg.data)
    check_sizes(cfg, manifest)
    check_splits(cfg)
    cost, folders = given_cost(cfg.cost, manifest), checkpoints(Path(cfg.folder))
    check_out(Path(cfg.out))
    for folder in folders:
        refuse_foreign_checkpoint(folder, manifest, KEY, cfg.gamma_max or manifest["gamma"])
    known = [facts(folder) for folder in folders]
    bar = tqdm(folders, desc="replay", unit="checkpoint")
    rows = [row | judged(tune_one(cfg, manifest, folder, cost)) for row, folder in zip(known, bar, strict=True)]
    text = table(rows)
    Path(cfg.out).write_text(text + "\n", encoding="utf-8")
    print(f"\n{text}\n\nsaved {cfg.out}")


def checkpoints(parent: Path) -> list[Path]:
    found = sorted(path.parent for path in parent.glob("*/metrics.json"))
    if not found:
        raise UserError(f"{KEY}: no checkpoints in {parent}. Train some: python train.py -m ... (see --help)")
    return found


def facts(folder: Path) -> dict[str, Any]:
    """Settings and scores on the test split."""
    config = read_config(folder, KEY)
    try:
        metrics = json.loads((folder / "metrics.json").read_text())
        scores, seconds = metrics["test"][config["predictor"]], f"{metrics['seconds']:.0f}"
        shown = {name: "-" if scores[name] is None else f"{scores[name]:.4f}" for name in SCORES}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise damaged(folder, KEY, config["predictor"], error) from error
    read = {"layers": " ".join(map(str, config["features"]["layers"]))}
    named = {"checkpoint": folder.name, "predictor": config["predictor"]}
    return named | read | config["settings"] | read | shown | {"seconds": seconds}


def tune_one(cfg: DictConfig, manifest: dict[str, Any], folder: Path, cost: CostTable) -> Choice:
    """The best threshold of the rule that asks this checkpoint."""
    name = read_config(folder, KEY)["predictor"]
    stops = {name: instantiate(cfg.rules[name], checkpoint=str(folder))}
    first, second = (replayer(cfg, manifest, split, stops) for split in (cfg.choose, cfg.judge))
    chosen_on, judged_on = (candidates_of(cfg, stops, found) for found in (first, second))
    (choice,) = choose(chosen_on, judged_on, cost, hindsight(second, cost))
    return choice


def judged(choice: Choice) -> dict[str, str]:
    return {
        "threshold": f"{choice.threshold:.2f}",
        "speed-up, modelled": f"{choice.speedup:.3f} ({span(choice.interval)})",
        "regret": f"{choice.regret:.1%}",
        "discard": f"{choice.discard_rate:.3f}",
        "verification": f"{choice.verification_rate:.3f}",
    }


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Columns in which every row says the same are left out, but for the first and the figures."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    figures = {"checkpoint", *SCORES, "seconds", *list(rows[0])[-5:]}
    shown = [name for name in names if name in figures or len({str(row.get(name)) for row in rows}) > 1]
    return markdown(shown, [[str(row.get(name, "")) for name in shown] for row in rows])


if __name__ == "__main__":
    main()
