"""A checkpoint prepared for a hub, with a reliability plot and the thresholds chosen for it."""

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure as Canvas

from decoding.models.machine import in_words
from evaluation.replay import thresholds
from evaluation.table import with_interval
from predictors.base import (
    CARD,
    FILES,
    UNREADABLE,
    Predictor,
    load_predictor,
    read_config,
    read_metrics,
)
from predictors.card import model_card
from predictors.hub import PLOT, push_to_hub, refuse_no_repository
from reports.figure import Record
from reports.figures.calibration import STAGES, draw_diagrams
from runtime.errors import UserError
from runtime.files import file_hash, only_writer, refuse_foreign, replaced_folder, write_json
from runtime.intervals import Estimate
from runtime.json_files import write_checksummed
from runtime.private import Cleaner
from runtime.text import printable
from serving.export.base import Hub

KEY = "serving.checkpoint"
MARKER = "metrics.json"  # marks a checkpoint folder
ADDED = "<!-- added when it was published -->"  # the rest is replaced
PROBABILITIES = ("token", "class")  # of the head; a predictor has one of them


def publish(hub: Hub, out: Path, chosen: str | Path | None) -> None:
    """Write a folder for the hub from a checkpoint, and send it if a repository is named. chosen:
    the file of tune.py."""
    refuse_foreign(out, MARKER)
    if hub.repository is not None:
        refuse_no_repository(hub.repository)
    checkpoint = Path(hub.checkpoint).expanduser()
    predictor = load_predictor(checkpoint, key=KEY)
    config, metrics = read_config(checkpoint, KEY), read_metrics(checkpoint, KEY)
    clean = Cleaner(config, metrics)
    config, metrics = clean.value(config), clean.value(metrics)
    tuned = None if chosen is None else thresholds_part(checkpoint, chosen)
    with only_writer(out), replaced_folder(out, MARKER) as folder:
        for name in FILES[:2]:
            shutil.copyfile(checkpoint / name, folder / name)
        write_json(folder / FILES[2], metrics)
        points = list(observed(metrics))
        parts = [_own_card(checkpoint, predictor, config, metrics).rstrip(), ADDED]
        if points:
            canvas = Canvas(layout="constrained")
            draw_diagrams(points, canvas)
            canvas.savefig(folder / PLOT, dpi=120)
            picture = f"![Predicted against observed, in bins of equal mass]({PLOT})"
            parts += ["## Reliability", picture]
        if tuned is not None:
            parts += ["## Thresholds", tuned]
        card = "\n\n".join(parts) + "\n"
        (folder / CARD).write_text(clean.text(card), encoding="utf-8")
        sums = {name: file_hash(folder / name) for name in (*FILES, CARD)}
        write_checksummed(folder / "config.json", {**config, "sha256": sums})
    print(f"saved {out}: {', '.join(sorted(path.name for path in out.iterdir()))}")
    if hub.repository is not None:
        print(f"sent to {push_to_hub(out, hub.repository, private=hub.private)}")


def _own_card(
    checkpoint: Path, predictor: Predictor, config: Mapping[str, Any], metrics: Mapping[str, Any]
) -> str:
    """Return the checkpoint's card, or one as training writes it. Raises UserError if the card is
    not text, and if the checkpoint lacks facts to write one."""
    path = checkpoint / CARD
    try:
        if path.is_file():
            return path.read_text(encoding="utf-8").split(ADDED)[0]
    except ValueError as error:
        raise UserError(
            f"{KEY}: {path} is not UTF-8. Write it so, or delete it, and it is made again"
        ) from error
    try:
        return model_card(config, metrics, predictor.calibration, predictor.caveat)
    except UNREADABLE as error:
        raise UserError(
            f"{KEY}: {checkpoint} has no {CARD}, and too little is known to write one. Write"
            " one, or train it again: python train.py"
        ) from error


def observed(metrics: Mapping[str, Any]) -> Iterator[Record]:
    """Yield a point for each harvest, stage and bin of the test rows."""
    for data, by_kind in metrics["reliability"].items():
        stages: Mapping[str, Any] = next(
            (by_kind[name] for name in PROBABILITIES if name in by_kind), {}
        )
        for stage in STAGES:
            for _, predicted, outcome in stages.get(stage, {}).get("bins", ()):
                yield {
                    "prompts of": data,
                    "probabilities": stage,
                    "mean prediction": predicted,
                    "outcome": outcome,
                }


def thresholds_part(checkpoint: Path, path: str | Path) -> str:
    """Return the choices of tuning for this checkpoint, markdown. Raises UserError if there are
    none."""
    file = thresholds.read(Path(path).expanduser())
    mine = thresholds.checkpoint_hash(checkpoint, KEY)
    rules = {name: rule for name, rule in file["rules"].items() if rule["checkpoint"] == mine}
    rows = []
    for costs, result in file["results"].items():
        for name in (name for name in rules if name in result["rules"]):
            choice = result["rules"][name]
            cells = [
                file["cost"] if costs == "chosen" else costs,
                name,
                rules[name]["setting"],
                f"{choice['threshold']:.3g}",
                with_interval(Estimate(choice["speedup"], *choice["interval"]), ".3f", "x"),
                "yes" if choice["speculate"] else "no",
            ]
            rows.append(f"| {' | '.join(cells)} |")
    if not rows:
        raise UserError(
            f"thresholds: {path} has none for {checkpoint}. Choose some with it: {file['command']}"
        )
    measured = file["measured_on"]
    where = f", measured on {in_words(measured['hardware'])}" if measured else ""
    folder = file["data"]["folder"]
    data = printable(Cleaner(folder).text(folder))
    about = (
        f"Chosen by replay of {data}; costs: {file['cost']}{where}. Speed-ups over plain decoding"
        " are modelled, with 95 % intervals over prompts."
    )
    header = "| costs | rule | setting | threshold | speed-up, modelled | does it pay |"
    return "\n".join([about, "", header, "|---|---|---|---|---|---|", *rows])
