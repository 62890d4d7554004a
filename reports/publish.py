"""A checkpoint as a hub shows it: with a reliability plot and the thresholds chosen for it."""

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
from reports.drawing import Record
from reports.figures.calibration import STAGES, draw_diagrams
from runtime.errors import UserError
from runtime.files import file_hash, only_writer, refuse_foreign, replaced_folder, write_json
from runtime.intervals import Estimate
from runtime.json_files import write_checksummed
from runtime.private import Cleaner
from runtime.text import printable
from serving.export.base import Hub

KEY = "serving.checkpoint"
MARKER = "metrics.json"  # what a checkpoint folder is known by
ADDED = "<!-- added when it was published -->"  # what follows is made anew
PROBABILITIES = ("token", "class")  # of the head; a predictor has one of them


def publish(hub: Hub, out: Path, chosen: str | Path | None) -> None:
    """Checkpoint in, folder of the hub out, and to the hub where it is named. chosen: what
    tune.py has written."""
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
        if points:
            draw(points, folder / PLOT)
        own = own_card(checkpoint)
        own = card_again(checkpoint, predictor, config, metrics) if own is None else own
        card = card_of(own, plot=bool(points), tuned=tuned)
        (folder / CARD).write_text(clean.text(card), encoding="utf-8")
        sums = {name: file_hash(folder / name) for name in (*FILES, CARD)}
        write_checksummed(folder / "config.json", {**config, "sha256": sums})
    print(f"saved {out}: {', '.join(sorted(path.name for path in out.iterdir()))}")
    if hub.repository is not None:
        print(f"sent to {push_to_hub(out, hub.repository, private=hub.private)}")


def own_card(checkpoint: Path) -> str | None:
    """None where there is none. Raises UserError for one that is no text."""
    path = checkpoint / CARD
    try:
        return path.read_text(encoding="utf-8").split(ADDED)[0] if path.is_file() else None
    except ValueError as error:
        raise UserError(
            f"{KEY}: {path} is not UTF-8. Write it so, or delete it, and it is made again"
        ) from error


def card_again(
    checkpoint: Path, predictor: Predictor, config: Mapping[str, Any], metrics: Mapping[str, Any]
) -> str:
    """As training writes it. Raises UserError where the checkpoint does not say enough."""
    try:
        return model_card(config, metrics, predictor.calibration, predictor.caveat)
    except UNREADABLE as error:
        raise UserError(
            f"{KEY}: {checkpoint} has no {CARD}, and too little is known to write one. Write"
            " one, or train it again: python train.py"
        ) from error


def card_of(own: str, *, plot: bool, tuned: str | None) -> str:
    """The checkpoint's own card and what is added to it."""
    parts = [own.rstrip(), ADDED]
    if plot:
        parts += ["## Reliability", f"![Predicted against observed, in bins of equal mass]({PLOT})"]
    if tuned is not None:
        parts += ["## Thresholds", tuned]
    return "\n\n".join(parts) + "\n"


def observed(metrics: Mapping[str, Any]) -> Iterator[Record]:
    """A point for each harvest, stage and bin of the test rows."""
    for data, found in metrics["reliability"].items():
        stages: Mapping[str, Any] = next(
            (found[name] for name in PROBABILITIES if name in found), {}
        )
        for stage in STAGES:
            for _, predicted, outcome in stages.get(stage, {}).get("bins", ()):
                yield {
                    "prompts of": data,
                    "probabilities": stage,
                    "mean prediction": predicted,
                    "outcome": outcome,
                }


def draw(points: list[Record], path: Path) -> None:
    canvas = Canvas(layout="constrained")
    draw_diagrams(points, canvas)
    canvas.savefig(path, dpi=120)


def thresholds_part(checkpoint: Path, path: str | Path) -> str:
    """What tuning chose for this checkpoint, markdown. Raises UserError where it chose nothing."""
    found = thresholds.read(Path(path).expanduser())
    mine = thresholds.checkpoint_hash(checkpoint, KEY)
    rules = {name: rule for name, rule in found["rules"].items() if rule["checkpoint"] == mine}
    rows = list(_rows(found, rules))
    if not rows:
        raise UserError(
            f"thresholds: {path} has none for {checkpoint}. Choose some with it: {found['command']}"
        )
    measured = found["measured_on"]
    where = f", measured on {in_words(measured['hardware'])}" if measured else ""
    folder = found["data"]["folder"]
    data = printable(Cleaner(folder).text(folder))
    about = (
        f"Chosen by replay of {data}; costs: {found['cost']}{where}. Speed-ups over plain decoding"
        " are modelled, with 95 % intervals over prompts."
    )
    header = "| costs | rule | setting | threshold | speed-up, modelled | does it pay |"
    return "\n".join([about, "", header, "|---|---|---|---|---|---|", *rows])


def _rows(found: Mapping[str, Any], rules: Mapping[str, Any]) -> Iterator[str]:
    for costs, result in found["results"].items():
        for name in (name for name in rules if name in result["rules"]):
            choice = result["rules"][name]
            cells = [
                found["cost"] if costs == "chosen" else costs,
                name,
                rules[name]["setting"],
                f"{choice['threshold']:.3g}",
                with_interval(Estimate(choice["speedup"], *choice["interval"]), ".3f", "x"),
                "yes" if choice["speculate"] else "no",
            ]
            yield f"| {' | '.join(cells)} |"
