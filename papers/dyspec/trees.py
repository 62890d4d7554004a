"""Trees: tokens per target call of each kind, and the change of their sizes from step to step."""

from collections.abc import Sequence

from matplotlib.figure import Figure as Canvas

from evaluation.table import SPEEDUP
from reports import drawing
from reports.artifacts import Evaluation, grouped
from reports.figure import Entry, Figure, Record
from reports.figures.times import ROUND_TIMES, step_times
from reports.runs import CALLS, Method, Run, each_setting, extent, runs, with_all, with_method
from runtime.intervals import METHOD

COMPARED = ("SpecInfer", "Sequoia", "DySpecHeap", "DySpecLayers")
NEEDS = "python scripts/evaluate.py experiment=wide_trees"
NODES, ACCEPTED = "nodes", "accepted tokens"


def tree_table(evaluations: Sequence[Evaluation]) -> Figure:
    """Return tokens per call of every kind of tree, by dataset and temperature."""
    selected = trees(evaluations)
    return Figure(
        name="tree-table",
        title="Tokens per target call: DySpec, Sequoia, SpecInfer",
        source="DySpec, tables 1 to 3",
        kind="measured",
        n=extent(selected),
        interval=f"{METHOD}, repeats pooled",
        records=[
            {
                **run.labels,
                "nodes/round": run.estimate("drafted/round").value,
                **run.columns(CALLS, SPEEDUP),
            }
            for run in with_all(selected)
        ],
        draw=_draw_table,
    )


def _draw_table(records: Sequence[Record], canvas: Canvas) -> None:
    shown = drawing.with_temperature(records)
    size = (4.4, 1.2 + 0.35 * len(drawing.distinct(shown, "method")))
    for axes, part in drawing.panels_by(canvas, shown, "dataset", size=size):
        drawing.dots(axes, part, CALLS, "method", "temperature")


def tree_sizes(evaluations: Sequence[Evaluation]) -> Figure:
    """Return tree size and accepted tokens over steps, at every temperature for the output whose
    trees differ most in size."""
    needed = f"needs a tree whose size depends on the tokens drawn: {NEEDS}"
    selected = runs(with_method(evaluations, _adaptive, needed), _adaptive)
    outputs = [(run, trace) for run in selected for trace in run.traces]
    shown = [
        max(alike, key=lambda output: len({len(r.draft_tokens) for r in output[1].rounds}))
        for alike in grouped(outputs, lambda output: output[0].temperature)
    ]
    records: list[Record] = [
        {
            **run.labels,
            **{"prompt": trace.prompt_id, "step": step},
            **{NODES: len(round_.draft_tokens), ACCEPTED: round_.accepted},
        }
        for run, trace in shown
        for step, round_ in enumerate(trace.rounds, 1)
    ]
    return Figure(
        name="tree-sizes",
        title="Tree size and accepted tokens over steps",
        source="DySpec, figure 5",
        kind="measured",
        n=f"1 prompt at each of {len(shown)} temperatures, {len(records)} rounds",
        interval="no interval: single rounds are shown",
        records=records,
        draw=_draw_sizes,
    )


def _adaptive(how: Method) -> bool:
    return how.structure == "DySpecLayers"


def _draw_sizes(records: Sequence[Record], canvas: Canvas) -> None:
    temperatures = drawing.distinct(records, "T")
    canvas.set_size_inches(max(6.4, 3.4 * len(temperatures)), 4.0)
    grid = canvas.subplots(2, len(temperatures), squeeze=False, sharex="col", sharey="row")
    for column, temperature in enumerate(temperatures):
        part = drawing.where(records, T=temperature)
        steps = [record["step"] for record in part]
        above, below = grid[:, column]
        above.plot(steps, [record[NODES] for record in part], color="tab:blue", marker=".")
        above.set_title(f"T = {temperature:g}, {part[0]['method']}", fontsize=10)
        above.set_ylim(bottom=0)
        below.bar(steps, [record[ACCEPTED] for record in part], color="tab:orange")
        below.set_xlabel("step (target call)")
    grid[0, 0].set_ylabel("nodes of the tree")
    grid[1, 0].set_ylabel("accepted tokens")


def tree_times(evaluations: Sequence[Evaluation]) -> Figure:
    title = "Where a round's time goes: trees"
    return step_times("tree-times", title, "DySpec, figure 4", trees(evaluations))


def trees(evaluations: Sequence[Evaluation]) -> list[Run]:
    """Return all runs of the evaluations that have one of the paper's kinds."""
    needed = f"needs trees decoded: {NEEDS}"
    return runs(with_method(evaluations, lambda how: how.structure in COMPARED, needed))


FIGURES = (
    Entry(
        "Tokens per target call: DySpec, Sequoia, SpecInfer",
        "How far one target call gets, 1 is plain decoding. The speed-up says whether the tree also"
        " earns what its rows cost on this machine.",
        each_setting(tree_table),
    ),
    Entry(
        "Tree size and accepted tokens over steps",
        "A tree gets larger while draws are worth more than the threshold. A sure draft makes it"
        " deep; an unsure one spends the nodes on siblings, and no path gets far.",
        each_setting(tree_sizes),
    ),
    Entry("Where a round's time goes: trees", ROUND_TIMES, each_setting(tree_times)),
)
