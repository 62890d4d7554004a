"""RRS, RRSw and SpecHub on the same binary trees."""

from collections.abc import Sequence
from functools import partial

from matplotlib.figure import Figure as Canvas

from evaluation.table import SPEEDUP
from reports import drawing
from reports.artifacts import Evaluation
from reports.figure import Cell, Entry, Figure
from reports.runs import CALLS, Method, Run, extent, runs, with_all, with_method
from reports.settings import each_setting
from runtime.intervals import METHOD, columns

RULES = {"RrsVerifier": "RRS", "RrswVerifier": "RRSw", "SpecHubVerifier": "SpecHub"}
NEEDS = "needs binary trees under several rules: python scripts/evaluate.py experiment=binary_trees"


def sibling_rules(evaluations: Sequence[Evaluation]) -> Figure:
    """Tokens per target call, by depth and temperature."""
    each = runs(with_method(evaluations, _binary, NEEDS), _binary)
    names = ["T", "dataset", "rule", "depth", *columns(CALLS), *columns(SPEEDUP)]
    rows: list[list[Cell]] = [
        [
            *(run.temperature, run.dataset, RULES[run.method.verifier], _depth(run)),
            *(*run.estimate(CALLS), *run.estimate(SPEEDUP)),
        ]
        for run in with_all(each)
    ]
    return Figure(
        name="sibling-rules",
        title="RRS, RRSw and SpecHub on binary trees",
        source=(
            "SpecHub, tables 5 to 9: tokens per target call (its tables 1 to 3: what siblings are"
            " worth)"
        ),
        kind="measured",
        n=extent(each),
        interval=f"{METHOD}, repeats pooled",
        columns=names,
        rows=rows,
        draw=partial(_draw, drawing.records(names, rows)),
    )


def _draw(every: Sequence[drawing.Record], canvas: Canvas) -> None:
    records = drawing.together(every)
    panels = drawing.panels(canvas, drawing.titles(records), 3, (3.4, 3.0))
    for temperature, axes in zip(drawing.distinct(records, "T"), panels, strict=True):
        here = [record for record in records if record["T"] == temperature]
        drawing.lines(axes, here, "depth", CALLS, "rule")
        axes.set_xlabel("depth of the binary tree, tokens")
        axes.set_xticks(sorted({record["depth"] for record in records}))
    drawing.legend(canvas, panels[0])


def _binary(how: Method) -> bool:
    return (
        how.structure == "WidthTree"
        and how.verifier in RULES
        and set(how.settings["structure.widths"]) == {2}
    )


def _depth(run: Run) -> int:
    return len(run.method.settings["structure.widths"])


FIGURES = (
    Entry(
        "RRS, RRSw and SpecHub on binary trees",
        "The same number of draft tokens under each rule: the higher line gets more out of two"
        " candidates.",
        each_setting(sibling_rules),
    ),
)
