"""SpecBranch's engine: compared with other methods, without its parts, and by its settings.

The paper has no table of its threshold or its number of branches: its table 4 compares H-RAD with
confidence and entropy rules on vanilla speculative decoding, its table 5 varies the number of
feature layers."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from matplotlib.figure import Figure as Canvas

from evaluation.table import SPEEDUP
from reports import drawing
from reports.artifacts import Evaluation
from reports.figure import Entry, Figure, Missing, Record, estimated
from reports.figures.comparison import MEASURED, MODELLED, measured, modelled
from reports.figures.times import ROUND_TIMES, step_times
from reports.runs import (
    CALLS,
    LENGTH,
    ROLLBACK,
    Run,
    each_setting,
    extent,
    pooled,
    ratios_of,
    runs,
    sweeps,
    with_all,
    with_method,
)
from runtime.intervals import METHOD

COMMAND = "python scripts/evaluate.py experiment="
NEEDS = f"needs SpecBranch beside other methods: {COMMAND}specbranch"
TABLES = "SpecBranch, main tables"
WIDE = (4.4, 3.4)


def specbranch(evaluations: Sequence[Evaluation]) -> list[Run]:
    """Return the runs of evaluations that compare SpecBranch with other methods."""
    beside = [
        evaluation
        for evaluation in evaluations
        if any(run.method.pearl or run.method.structure == "Chain" for run in runs([evaluation]))
    ]
    return runs(with_method(beside, lambda how: how.branches, NEEDS))


def specbranch_speed(evaluations: Sequence[Evaluation]) -> Figure:
    title = "SpecBranch and what it is compared with"
    return measured("specbranch-speed", title, TABLES, specbranch(evaluations))


def specbranch_modelled(evaluations: Sequence[Evaluation]) -> Figure:
    title = "SpecBranch and what it is compared with, a device for each model"
    return modelled("specbranch-modelled", title, TABLES, specbranch(evaluations))


def specbranch_times(evaluations: Sequence[Evaluation]) -> Figure:
    title = "Where a round's time goes: SpecBranch and others"
    return step_times("specbranch-times", title, "SpecBranch, table 9", specbranch(evaluations))


def rollback_rates(evaluations: Sequence[Evaluation]) -> Figure:
    """Return RB by method, dataset and temperature."""
    selected = [run for run in specbranch(evaluations) if run.rows["drafted"].any()]
    if not selected:
        raise Missing(f"needs requests in which something is drafted: {COMMAND}specbranch")
    return Figure(
        name="rollback-rates",
        title="Rollback rate by method and dataset",
        source="SpecBranch, figures 5 and 11",
        kind="measured",
        n=extent(selected),
        records=[{**run.labels, **run.columns(ROLLBACK)} for run in selected],
        draw=_draw_rollback,
    )


def _draw_rollback(records: Sequence[Record], canvas: Canvas) -> None:
    for axes, part in drawing.panels_by(canvas, records, "T", size=WIDE):
        drawing.bars(axes, part, "dataset", ROLLBACK, "method")
        axes.set_ylim(0, 1)
        axes.set_xlabel("dataset")


# Without its parts --------------------------------------------------------------------------------


def part(run: Run) -> str:
    """Return the name of a run in the ablation; "" if it is not part of it."""
    how = run.method
    if how.branches:
        return "SpecBranch" if how.stop == "HRADStop" else "without H-RAD"
    if how.pearl:
        return "PEARL"
    chain = {"HRADStop": "without branches", "Fixed": "fixed length"}
    return chain.get(how.stop, "") if how.structure == "Chain" else ""


def _parts(evaluations: Sequence[Evaluation]) -> list[Run]:
    selected = filter(part, specbranch(evaluations))
    return sorted(selected, key=lambda run: (run.temperature, run.dataset))


def ablation(evaluations: Sequence[Evaluation]) -> Figure:
    """Return measured speed of SpecBranch, and of it without each of its parts."""
    selected = _parts(evaluations)
    return Figure(
        name="ablation-measured",
        title="SpecBranch without its parts, measured",
        source="SpecBranch, figure 6",
        kind="measured",
        n=extent(selected),
        interval=f"{METHOD}, repeats pooled",
        records=[
            {**run.labels, "method": part(run), **run.columns(SPEEDUP)}
            for run in with_all(selected)
        ],
        draw=partial(_draw_ablation, x="dataset", kind="measured"),
    )


def ablation_modelled(evaluations: Sequence[Evaluation]) -> Figure:
    """Return modelled speed of the ablation with a device for each model, all datasets together."""
    selected = pooled(_parts(evaluations))
    return Figure(
        name="ablation-modelled",
        title="SpecBranch without its parts, a device for each model",
        source="SpecBranch, figure 6",
        kind="modelled",
        n=extent(selected),
        records=[
            {
                **{"T": run.temperature, "method": part(run), "speed ratio c": c},
                **estimated(SPEEDUP, run.modelled_speedup(c)),
            }
            for run in selected
            for c in ratios_of(selected)
        ],
        draw=partial(_draw_ablation, x="speed ratio c", kind="modelled"),
    )


def _draw_ablation(records: Sequence[Record], canvas: Canvas, x: str, kind: str) -> None:
    for axes, of_temperature in drawing.panels_by(canvas, records, "T", size=WIDE):
        drawing.bars(axes, of_temperature, x, SPEEDUP, "method")
        axes.axhline(1, color="black", lw=0.8)
        axes.set_xlabel(x)
        axes.set_ylabel(f"speed-up, {kind}")


# By its settings ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """A setting that is varied. key: among the method's settings; source: the paper's
    counterpart."""

    name: str
    key: str
    words: str
    experiment: str
    source: str


EPSILON = Setting(
    "epsilon",
    "stop.confidence.threshold",
    "the confidence below which a draft ends",
    "specbranch_thresholds",
    "Ours, in SpecBranch's overlapped engine (the paper's table 4 is another comparison: H-RAD on"
    " vanilla speculative decoding)",
)
BRANCHES = Setting(
    "branches",
    "structure.candidates",
    "the number of branches",
    "specbranch_branches",
    "Ours, in SpecBranch's overlapped engine (the paper's table 5 varies another number: that of"
    " feature layers)",
)


def _swept(evaluations: Sequence[Evaluation], setting: Setting) -> list[Run]:
    selected = sweeps(evaluations, lambda how: how.branches, setting.key)
    if not selected:
        raise Missing(
            f"needs SpecBranch with several values of {setting.key}: {COMMAND}{setting.experiment}"
        )
    return sorted(selected, key=lambda run: (run.temperature, run.dataset))


def by_value(evaluations: Sequence[Evaluation], setting: Setting) -> Figure:
    """Return counts and measured speed, by dataset and all together."""
    selected = _swept(evaluations, setting)
    return Figure(
        name=f"specbranch-{setting.name}",
        title=f"SpecBranch by {setting.words}",
        source=setting.source,
        kind="measured",
        n=extent(selected),
        interval=f"{METHOD}, repeats pooled",
        records=[
            {
                **{"T": run.temperature, "dataset": run.dataset},
                setting.name: run.method.settings[setting.key],
                **run.columns(CALLS, LENGTH, ROLLBACK, SPEEDUP),
            }
            for run in with_all(selected)
        ],
        draw=partial(_draw_by_value, setting=setting.name),
    )


def _draw_by_value(records: Sequence[Record], canvas: Canvas, setting: str) -> None:
    shown = drawing.with_temperature(drawing.together(records))
    panels = drawing.panels(canvas, [ROLLBACK, CALLS])
    for axes, value in zip(panels, (ROLLBACK, CALLS), strict=True):
        drawing.lines(axes, shown, setting, value, "temperature")
    drawing.legend(canvas, panels[0])


def by_value_modelled(evaluations: Sequence[Evaluation], setting: Setting) -> Figure:
    """Return modelled speed with a device for each model, all datasets together."""
    selected = pooled(_swept(evaluations, setting))
    return Figure(
        name=f"specbranch-{setting.name}-modelled",
        title=f"SpecBranch by {setting.words}, a device for each model",
        source=setting.source,
        kind="modelled",
        n=extent(selected),
        records=[
            {
                **{"T": run.temperature, setting.name: run.method.settings[setting.key]},
                "speed ratio": f"c = {c:g}",
                **estimated(SPEEDUP, run.modelled_speedup(c)),
            }
            for c in ratios_of(selected)
            for run in selected
        ],
        draw=partial(_draw_by_value_modelled, setting=setting.name),
    )


def _draw_by_value_modelled(records: Sequence[Record], canvas: Canvas, setting: str) -> None:
    for axes, of_temperature in drawing.panels_by(canvas, records, "T"):
        drawing.lines(axes, of_temperature, setting, SPEEDUP, "speed ratio")
        axes.set_ylabel("speed-up, modelled")


FEWER = (
    "Fewer steps rolled back are worth it only while tokens per target call do not fall as much."
)
FLAT = (
    "Speed over plain decoding if a target forward took c draft forwards. A flat line means the"
    " setting does not matter."
)
FIGURES = (
    Entry(
        "SpecBranch and what it is compared with",
        f"{MEASURED} On one processor, running side by side cannot pay.",
        each_setting(specbranch_speed),
    ),
    Entry("SpecBranch with a device for each model", MODELLED, each_setting(specbranch_modelled)),
    Entry("Where a round's time goes: SpecBranch", ROUND_TIMES, each_setting(specbranch_times)),
    Entry(
        "Rollback rate by method and dataset",
        "Share of draft steps lost to a rejection; branches side by side take one step together."
        " Low is good, but a method that hardly drafts has a low rate too.",
        each_setting(rollback_rates),
    ),
    Entry(
        "SpecBranch without its parts",
        "Speed over plain decoding on this machine. Where draft and target share one processor,"
        " running side by side cannot pay.",
        each_setting(ablation),
    ),
    Entry(
        "SpecBranch without its parts, a device for each model",
        "Speed over plain decoding if a target forward took c draft forwards, from the counts of"
        " the run. What SpecBranch loses without a part is what that part brings.",
        each_setting(ablation_modelled),
    ),
    *(
        Entry(f"SpecBranch by {words}{more}", text, each_setting(partial(build, setting=setting)))
        for setting, words in ((EPSILON, "threshold epsilon"), (BRANCHES, "number of branches"))
        for build, text, more in (
            (by_value, FEWER, ""),
            (by_value_modelled, FLAT, ", a device for each model"),
        )
    ),
)
