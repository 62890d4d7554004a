"""How sensitive SpecBranch's engine is to its threshold and to its number of branches.

The paper has no table of either: its table 4 compares H-RAD with confidence and entropy rules on
vanilla speculative decoding, its table 5 varies the number of feature layers."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from matplotlib.figure import Figure as Canvas

from evaluation.table import SPEEDUP
from reports import drawing
from reports.artifacts import Evaluation
from reports.figure import Cell, Entry, Figure, Missing
from reports.runs import (
    CALLS,
    LENGTH,
    ROLLBACK,
    Run,
    branches,
    extent,
    pooled,
    ratios_of,
    sweeps,
    with_all,
)
from reports.settings import each_setting
from runtime.intervals import METHOD, columns

COMMAND = "python scripts/evaluate.py experiment="


@dataclass(frozen=True)
class Setting:
    """What is varied. key: of the method's settings; source: what the paper has instead."""

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


def by_value(setting: Setting, evaluations: Sequence[Evaluation]) -> Figure:
    """Counts and measured speed, by dataset and all together."""
    found = _swept(evaluations, setting)
    values = (CALLS, LENGTH, ROLLBACK, SPEEDUP)
    names = ["T", "dataset", setting.name, *(name for one in values for name in columns(one))]
    rows: list[list[Cell]] = [
        [
            *(run.temperature, run.dataset, run.method.settings[setting.key]),
            *(x for name in values for x in run.estimate(name)),
        ]
        for run in with_all(found)
    ]
    return Figure(
        name=f"specbranch-{setting.name}",
        title=f"SpecBranch by {setting.words}",
        source=setting.source,
        kind="measured",
        n=extent(found),
        interval=f"{METHOD}, repeats pooled",
        columns=names,
        rows=rows,
        draw=partial(_draw, drawing.records(names, rows), setting.name),
    )


def _draw(every: Sequence[drawing.Record], setting: str, canvas: Canvas) -> None:
    records = [{**r, "temperature": f"T = {r['T']:g}"} for r in drawing.together(every)]
    panels = drawing.panels(canvas, [ROLLBACK, CALLS])
    for axes, value in zip(panels, (ROLLBACK, CALLS), strict=True):
        drawing.lines(axes, records, setting, value, "temperature")
    drawing.legend(canvas, panels[0])


def by_value_modelled(setting: Setting, evaluations: Sequence[Evaluation]) -> Figure:
    """Speed where each model has a device of its own, all datasets together."""
    found = pooled(_swept(evaluations, setting))
    ratios = ratios_of(found)
    names = ["T", setting.name, "speed ratio", *columns(SPEEDUP)]
    rows: list[list[Cell]] = [
        [run.temperature, run.method.settings[setting.key], f"c = {c:g}", *run.modelled_speedup(c)]
        for c in ratios
        for run in found
    ]
    return Figure(
        name=f"specbranch-{setting.name}-modelled",
        title=f"SpecBranch by {setting.words}, a device for each model",
        source=setting.source,
        kind="modelled",
        n=extent(found),
        interval=METHOD,
        columns=names,
        rows=rows,
        draw=partial(_draw_modelled, drawing.records(names, rows), setting.name),
    )


def _draw_modelled(records: Sequence[drawing.Record], setting: str, canvas: Canvas) -> None:
    for temperature, axes in drawing.by_temperature(canvas, records, drawing.PANEL):
        here = [record for record in records if record["T"] == temperature]
        drawing.lines(axes, here, setting, SPEEDUP, "speed ratio")
        axes.set_ylabel("speed-up, modelled")
    drawing.legend(canvas, canvas.axes[0])


def _swept(evaluations: Sequence[Evaluation], setting: Setting) -> list[Run]:
    found = sweeps(evaluations, branches, setting.key)
    if not found:
        raise Missing(
            f"needs SpecBranch with several values of {setting.key}: {COMMAND}{setting.experiment}"
        )
    return sorted(found, key=lambda run: (run.temperature, run.dataset))


FEWER = (
    "Fewer steps rolled back are worth it only while tokens per target call do not fall as much."
)
FLAT = (
    "Speed over plain decoding if a target forward took c draft forwards. A flat line means the"
    " setting does not matter."
)
FIGURES = tuple(
    Entry(f"SpecBranch by {words}{more}", text, each_setting(partial(build, setting)))
    for setting, words in ((EPSILON, "threshold epsilon"), (BRANCHES, "number of branches"))
    for build, text, more in (
        (by_value, FEWER, ""),
        (by_value_modelled, FLAT, ", a device for each model"),
    )
)
