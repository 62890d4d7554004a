"""One table of many checkpoints: their settings, their scores, and the best threshold of each by
replay."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from tqdm import tqdm

from data_gen.storage.dataset import Harvest
from decoding.stopping.base import TunableRule
from evaluation.methods import set_keys
from evaluation.replay.read import (
    check_sizes,
    given_cost,
    refuse_foreign_checkpoint,
    refuse_other_warps,
    replayer,
    tunable,
    warn_of_repeats,
)
from evaluation.replay.tune import chosen, use
from evaluation.replay.tuning import Choice, candidates_of, choose, hindsight
from evaluation.table import markdown, with_interval
from predictors.base import damaged, read_config, read_metrics
from predictors.inputs import Inputs
from runtime.errors import UserError
from runtime.files import checked_folder, refuse_foreign_file, write_atomically
from runtime.intervals import METHOD, Estimate
from runtime.job import command_line
from runtime.settings.groups import Replay
from runtime.text import printable
from runtime.tracking import tracked

SCORES = ("brier", "ece", "auroc")
KEY = "folder"
REPLAY = {*Replay.described(), "thresholds", "cost", "rules"}  # settings read with a harvest alone
FILES = ("metrics.json", "config.json")  # a folder with either is taken for a checkpoint
Cells = dict[str, str]
LEGEND = (
    "nll, brier, ece, auroc: test split of the harvest trained on, calibrated. survival: log loss,"
    " and how far it is above that of the draft's own confidence (product of q, calibrated in the"
    " same way), with its 95 % interval over prompts. Everything else: by replay."
)


def collect(cfg: DictConfig) -> None:
    """Write a row for each checkpoint and its best threshold, or each of `cfg.thresholds`; without
    a harvest, its scores alone."""
    out = checked_folder("out", cfg.out, "file")
    folders = checkpoints(checked_folder(KEY, cfg.folder))
    refuse_foreign_file(out, "tune")
    if cfg.data is None:
        refuse_unread(cfg)
    harvests = [] if cfg.data is None else [Harvest.open(cfg.data)]
    config: Any = OmegaConf.to_container(cfg, resolve=True)
    about = [harvest.context for harvest in harvests]
    with tracked(cfg.logger, "compare checkpoints", config, about) as logger:
        for harvest in harvests:
            logger.used(*harvest.artifact)
        answer, text = compared(cfg, folders)
        page = f"{text}\n\n<!-- {printable(command_line())} -->\n"
        write_atomically(out, lambda temporary: temporary.write_text(page, encoding="utf-8"))
        logger.artifact("checkpoints", "table", out)
    print(f"\n{answer}\n\n{text}\n\n{LEGEND}\nsaved {cfg.out}")


def compared(cfg: DictConfig, folders: Sequence[Path]) -> tuple[str, str]:
    """Return the answer and the table of all checkpoints."""
    settings = [settings_of(folder) for folder in folders]
    figures = [scores(folder) for folder in folders]
    if cfg.data is None:
        answer = (
            f"{lowest(settings, figures)}\nScores alone do not say what pays: with data=<harvest>,"
            " each checkpoint is replayed."
        )
    else:
        choices = list(replayed(cfg, folders))
        rows = [(number, choice) for number, each in enumerate(choices) for choice in each]
        number, best = max(rows, key=lambda row: row[1].expected)
        label = f"{settings[number]['checkpoint']} at {best.threshold:.3g}"
        speed = Estimate(best.speedup, *best.interval)
        answer = (
            f"{use(label, speed, best.speculate)}\nThreshold and checkpoint chosen on {cfg.choose}"
            f" prompts of {cfg.data}, speed of {cfg.judge} prompts ({METHOD}), costs"
            f" {chosen('cost')}."
        )
        settings = [settings[number] for number, _ in rows]
        figures = [figures[number] | judged(choice) for number, choice in rows]
    return answer, table(settings, figures)


def refuse_unread(cfg: DictConfig) -> None:
    """Raise UserError for a setting of the replay on the command line, which scores alone do not
    read."""
    for key in set_keys(HydraConfig.get().overrides.task):
        if key.partition(".")[0] in REPLAY and OmegaConf.select(cfg, key) is not None:
            raise UserError(
                f"{key}: expected nothing with data=null, which replays nothing. Leave it away, or"
                " give data=<harvest>"
            )


def lowest(settings: Sequence[Cells], figures: Sequence[Cells]) -> str:
    """Return the checkpoint of least loss, in a line, for each predictor and training harvest:
    losses with different labels or prompts do not compare."""
    rows = pd.DataFrame(settings).assign(nll=[row["nll"] for row in figures])
    rows = rows[rows["nll"] != "-"].astype({"nll": float})
    parts = [
        f"{best['checkpoint']} with an nll of {best['nll']:.4f} ({best['predictor']})"
        for _, alike in rows.groupby(["predictor", "data"], sort=False)
        for best in [alike.loc[alike["nll"].idxmin()]]
    ]
    return f"Lowest loss: {'; '.join(parts) or 'none recorded'}."


def checkpoints(parent: Path) -> list[Path]:
    """Return the folders of checkpoints in natural order (2 before 10)."""
    folders = {path.parent for name in FILES for path in parent.glob(f"*/{name}")}
    if not folders:
        raise UserError(
            f"{KEY}: no checkpoints in {parent}. Train some: python train.py -m ... (see --help)"
        )

    def natural(folder: Path) -> list[str | int]:
        parts = re.split(r"(\d+)", folder.name)  # texts and numbers alternate
        return [int(part) if part.isdecimal() else part for part in parts]

    return sorted(folders, key=natural)


def settings_of(folder: Path) -> Cells:
    config = read_config(folder, KEY)
    inputs = Inputs.from_dict(config["inputs"])
    read = {"layers": [*inputs.draft_layers, *inputs.target_layers], "reads": inputs.names}
    settings = {"checkpoint": folder.name, "predictor": config["predictor"]}
    settings |= read | config["settings"] | read
    settings.pop("inputs", None)  # those besides
    data = config.get("provenance", {}).get("data") or {}
    learned_from = data.get("splits", {}).get("train", {})
    settings |= {name: learned_from[name] for name in ("prompts",) if name in learned_from}
    settings["data"] = data.get("folder", "")
    return {
        name: " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
        for name, value in settings.items()
    }


def scores(folder: Path) -> Cells:
    """Return figures of the test split of the harvest trained on, calibrated (nll: cross-entropy
    with the label, also a soft one), and a column for each harvest that survival was scored on."""
    name = read_config(folder, KEY)["predictor"]
    metrics = read_metrics(folder, KEY)
    try:
        reliability = next(iter(metrics["reliability"].values()))
        stages = reliability.get("token") or reliability["class"]
        figures = {"nll": list(stages.values())[-1]["log_loss"][0]}
        figures |= {key: metrics["test"][name][key] for key in SCORES}
        cells = {key: "-" if each is None else f"{each:.4f}" for key, each in figures.items()}
        for data, scored in metrics.get("survival", {}).items():
            loss, *_ = next(iter(scored["log_loss"].values()))
            gap, low, high = next(iter(scored["difference"].values()))
            interval = "-" if None in (low, high) else f"{low:.4f} to {high:.4f}"
            cells[f"survival, {data}"] = f"{loss:.4f}, {gap:+.4f} ({interval})"
        return cells | {"seconds": f"{metrics['seconds']:.0f}"}
    except (KeyError, TypeError, AttributeError, StopIteration, IndexError) as error:
        raise damaged(folder, KEY, name, error) from error


def replayed(cfg: DictConfig, folders: Sequence[Path]) -> Iterator[list[Choice]]:
    """Yield for each checkpoint the best threshold of the rule that asks it, or all given
    thresholds."""
    harvest = Harvest.open(cfg.data)
    check_sizes(cfg, harvest)
    refuse_other_warps(cfg, harvest)
    cost, gamma_max = given_cost(cfg.cost, harvest, "cost"), cfg.gamma_max or harvest.gamma
    for folder in folders:
        refuse_foreign_checkpoint(folder, harvest, KEY, gamma_max)
        rule_of(cfg, folder)
    warn_of_repeats((harvest, cfg.choose), (harvest, cfg.judge))
    for folder in tqdm(folders, desc="replay", unit="checkpoint"):
        stops = rule_of(cfg, folder)
        chosen_on, judged_on = (
            replayer(cfg, gamma_max, harvest, split, stops.values())
            for split in (cfg.choose, cfg.judge)
        )
        least = hindsight(judged_on, cost)
        first, second = (
            candidates_of(cfg, stops, each, cfg.thresholds) for each in (chosen_on, judged_on)
        )
        if cfg.thresholds is None:
            yield choose(first, second, cost, least)
        else:
            pairs = zip(([each] for each in first), ([each] for each in second), strict=True)
            yield [choice for pair in pairs for choice in choose(*pair, cost, least)]


def rule_of(cfg: DictConfig, folder: Path) -> dict[str, TunableRule]:
    """Return the rule that asks a checkpoint, by the name of its predictor. Raises UserError if
    there is none, or none that can be replayed."""
    name = read_config(folder, KEY)["predictor"]
    if name not in cfg.rules:
        raise UserError(
            f"rules.{name}: expected the stop rule that asks checkpoints of {name}, got none."
            f" Give its YAML: +stop@rules.{name}=<stop rule>"
        )
    return {name: tunable(instantiate(cfg.rules[name], checkpoint=str(folder)), name)}


def judged(choice: Choice) -> Cells:
    speed = Estimate(choice.speedup, *choice.interval)
    return {
        "threshold": f"{choice.threshold:.3g}",
        "speed-up, modelled": with_interval(speed, ".3f"),
        "regret": f"{choice.regret:.1%}",
        "discard": f"{choice.discard_rate:.3f}",
        "verification": f"{choice.verification_rate:.3f}",
    }


def table(settings: Sequence[Cells], figures: Sequence[Cells]) -> str:
    """Return a table with a row for each checkpoint: its name, the settings in which rows differ,
    and its figures."""
    named, measured = (pd.DataFrame(rows).fillna("") for rows in (settings, figures))
    differing = [name for name in named if name == "checkpoint" or named[name].nunique() > 1]
    shown = pd.concat([named[differing], measured], axis=1)
    return markdown(list(map(str, shown)), shown.to_numpy().tolist())
