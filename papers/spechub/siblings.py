"""RRS, RRSw and SpecHub on the same binary trees."""

from collections.abc import Sequence

from matplotlib.figure import Figure as Canvas

from evaluation.table import SPEEDUP
from reports import drawing
from reports.artifacts import Evaluation
from reports.figure import Entry, Figure, Record
from reports.runs import CALLS, Method, each_setting, extent, runs, with_all, with_method
from runtime.intervals import METHOD

RULES = {"RrsVerifier": "RRS", "RrswVerifier": "RRSw", "SpecHubVerifier": "SpecHub"}
NEEDS = "needs binary trees under several rules: python scripts/evaluate.py experiment=binary_trees"


def sibling_rules(evaluations: Sequence[Evaluation]) -> Figure:
    """Return tokens per target call, by depth and temperature."""
    selected = runs(with_method(evaluations, _binary, NEEDS), _binary)
    return Figure(
        name="sibling-rules",
        title="RRS, RRSw and SpecHub on binary trees",
        source=(
            "SpecHub, tables 5 to 9: tokens per target call (its tables 1 to 3: what siblings are"
            " worth)"
        ),
        kind="measured",
        n=extent(selected),
        interval=f"{METHOD}, repeats pooled",
        records=[
            {
                **{"T": run.temperature, "dataset": run.dataset},
                "rule": RULES[run.method.verifier],
                "depth": len(run.method.settings["structure.widths"]),
                **run.columns(CALLS, SPEEDUP),
            }
            for run in with_all(selected)
        ],
        draw=_draw,
    )


def _draw(records: Sequence[Record], canvas: Canvas) -> None:
    shown, size = drawing.together(records), (3.4, 3.0)
    for axes, part in drawing.panels_by(canvas, shown, "T", 3, size, datasets=True):
        drawing.lines(axes, part, "depth", CALLS, "rule")
        axes.set_xlabel("depth of the binary tree, tokens")
        axes.set_xticks(sorted({record["depth"] for record in shown}))


def _binary(how: Method) -> bool:
    return (
        how.structure == "WidthTree"
        and how.verifier in RULES
        and set(how.settings["structure.widths"]) == {2}
    )


FIGURES = (
    Entry(
        "RRS, RRSw and SpecHub on binary trees",
        "The same number of draft tokens under each rule: the higher line gets more out of two"
        " candidates.",
        each_setting(sibling_rules),
    ),
)
