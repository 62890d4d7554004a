"""SpecDec++ heads by their settings."""

from collections.abc import Mapping, Sequence
from functools import partial

from matplotlib.figure import Figure as Canvas

from reports.artifacts import Artifacts, Checkpoint
from reports.checkpoint_data import training_data
from reports.drawing import COLOURS, DASHES, MARKERS, Record, reach, records
from reports.figure import Builder, Cell, Entry, Figure, Missing
from reports.row_means import cells
from runtime.intervals import METHOD
from runtime.intervals import columns as estimate_columns

COMMAND = "python train.py -m predictor.depth=0,1,2,3,4 predictor.w_rej=1,3,6,12"


def sweep(checkpoints: Sequence[Checkpoint]) -> Figure:
    """Held-out scores of SpecDec++ heads by depth and w_rej."""
    heads = [one for one in checkpoints if one.config["predictor"] == "specdecpp"]
    if len({tuple(map(one.config["settings"].get, ("depth", "w_rej"))) for one in heads}) < 2:
        raise Missing(f"needs SpecDec++ checkpoints of several depths or weights: {COMMAND}")
    columns = ["checkpoint", "context", "depth", "w_rej", *estimate_columns("log loss")]
    columns += ["kl", "ece", "auroc"]
    rows = sorted(map(_sweep_row, heads), key=lambda row: [str(row[1]), row[2], row[3]])
    tests = {f"{_test(one)['prompts']} prompts, {_test(one)['rows']:,} rows" for one in heads}
    return Figure(
        name="head-settings",
        title="SpecDec++ heads by depth and weight of rejections",
        source="SpecDec++, table 3",
        kind="measured",
        n=", ".join(sorted(tests)),
        interval=f"{METHOD}, pivotal",
        columns=columns,
        rows=rows,
        draw=partial(_draw_sweep, records(columns, rows)),
    )


def _sweep_row(one: Checkpoint) -> list[Cell]:
    settings, metrics = one.config["settings"], one.config["metrics"]
    stages = next(iter(metrics["reliability"].values()))["token"]
    scores = [metrics["test"]["specdecpp"][name] for name in ("kl", "ece", "auroc")]
    named = [one.folder.name, *(settings[name] for name in ("context", "depth", "w_rej"))]
    return [*named, *cells(stages["calibrated"]["log_loss"]), *scores]


def _test(one: Checkpoint) -> Mapping[str, int]:
    found: Mapping[str, int] = one.config["provenance"]["data"]["splits"]["test"]
    return found


def _draw_sweep(found: Sequence[Record], canvas: Canvas) -> None:
    axes = canvas.subplots()
    groups = list(dict.fromkeys((record["context"], record["w_rej"]) for record in found))
    for place, (context, weight) in enumerate(groups):
        part = [
            record for record in found if (record["context"], record["w_rej"]) == (context, weight)
        ]
        at = [record["depth"] + 0.08 * (place - (len(groups) - 1) / 2) for record in part]
        style = f"{MARKERS[place % len(MARKERS)]}{DASHES[place % len(DASHES)]}"
        y = [record["log loss"] for record in part]
        colour, label = COLOURS[place % len(COLOURS)], f"{context}, w_rej = {weight:g}"
        axes.errorbar(
            at, y, yerr=reach(part, "log loss"), fmt=style, color=colour, label=label, capsize=2
        )
    axes.set_xticks(sorted({record["depth"] for record in found}))
    axes.set(xlabel="depth (residual blocks)", ylabel="log loss")
    canvas.legend(loc="outside upper center", ncols=4, fontsize=8)


def _builders(artifacts: Artifacts) -> list[Builder]:
    """One for each harvest trained on."""
    found: dict[str, list[Checkpoint]] = {}
    for checkpoint in artifacts.checkpoints:
        if checkpoint.config["predictor"] == "specdecpp":
            found.setdefault(training_data(checkpoint), []).append(checkpoint)
    return [partial(sweep, group) for group in found.values()] or [partial(sweep, [])]


FIGURES = (
    Entry(
        "SpecDec++ heads by depth and weight",
        "Test split of the harvest trained on, after calibration, which undoes the shift of w_rej."
        " Intervals that overlap do not tell settings apart; what they are worth in speed is in"
        " scripts/tune.py what=checkpoints.",
        _builders,
    ),
)
