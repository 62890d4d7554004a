"""SpecDec++ heads by their settings."""

from collections.abc import Sequence

from matplotlib.figure import Figure as Canvas

from reports.artifacts import Artifacts, Checkpoint, grouped
from reports.drawing import reach, style, where
from reports.figure import Builder, Entry, Figure, Missing, Record, each, estimated
from runtime.intervals import METHOD

COMMAND = "python train.py -m predictor.depth=0,1,2,3,4 predictor.w_rej=1,3,6,12"
NEEDS = f"needs SpecDec++ checkpoints of several depths or weights: {COMMAND}"


def sweep(heads: Sequence[Checkpoint]) -> Figure:
    """Return held-out scores of SpecDec++ heads by depth and w_rej."""
    settings = [one.config["settings"] for one in heads]
    if len({(one["depth"], one["w_rej"]) for one in settings}) < 2:
        raise Missing(NEEDS)
    records, tests = list[Record](), set[str]()
    for head in heads:
        metrics = head.config["metrics"]
        stages = next(iter(metrics["reliability"].values()))["token"]
        test = head.config["provenance"]["data"]["splits"]["test"]
        as_trained = "specdecpp, before calibration"
        printed = {
            f"KL as trained, {split}": metrics.get(split, {}).get(as_trained, {}).get("kl")
            for split in ("train", "test")
        }
        tests.add(f"{test['prompts']} prompts, {test['rows']:,} rows")
        records.append(
            {
                "checkpoint": head.folder.name,
                **{name: head.config["settings"][name] for name in ("context", "depth", "w_rej")},
                **printed,
                **estimated("log loss", stages["calibrated"]["log_loss"]),
                **{name: metrics["test"]["specdecpp"][name] for name in ("kl", "ece", "auroc")},
            }
        )
    return Figure(
        name="head-settings",
        title="SpecDec++ heads by depth and weight of rejections",
        source="SpecDec++, table 3",
        kind="measured",
        n=", ".join(sorted(tests)),
        interval=f"{METHOD}, pivotal",
        records=sorted(records, key=lambda one: (str(one["context"]), one["depth"], one["w_rej"])),
        draw=_draw,
    )


def _draw(records: Sequence[Record], canvas: Canvas) -> None:
    axes = canvas.subplots()
    groups = list(dict.fromkeys((record["context"], record["w_rej"]) for record in records))
    for place, (context, weight) in enumerate(groups):
        part = where(records, context=context, w_rej=weight)
        axes.errorbar(
            [record["depth"] + 0.08 * (place - (len(groups) - 1) / 2) for record in part],
            [record["log loss"] for record in part],
            yerr=reach(part, "log loss"),
            label=f"{context}, w_rej = {weight:g}",
            capsize=2,
            **style(place),
        )
    axes.set_xticks(sorted({record["depth"] for record in records}))
    axes.set(xlabel="depth (residual blocks)", ylabel="log loss")
    canvas.legend(loc="outside upper center", ncols=4, fontsize=8)


def _builders(artifacts: Artifacts) -> list[Builder]:
    """Return the builder of each harvest trained on."""
    heads = [one for one in artifacts.checkpoints if one.config["predictor"] == "specdecpp"]
    return each(grouped(heads, lambda one: one.training_data), sweep, NEEDS)


FIGURES = (
    Entry(
        "SpecDec++ heads by depth and weight",
        "Test split of the harvest trained on, after calibration, which undoes the shift of w_rej;"
        " KL as trained: what the paper prints, before it, on the rows learned from and on the test"
        " split. Intervals that overlap do not tell settings apart; what they are worth in speed is"
        " in scripts/tune.py what=checkpoints.",
        _builders,
    ),
)
