"""Trees: how far each kind gets per target call, and how their sizes change from step to step."""

from collections.abc import Sequence
from functools import partial

from matplotlib.figure import Figure as Canvas

from decoding.trace import Trace
from evaluation.table import SPEEDUP
from reports import drawing
from reports.artifacts import Evaluation
from reports.figure import Cell, Entry, Figure
from reports.figures.times import ROUND_TIMES, step_times
from reports.runs import CALLS, Method, Run, extent, runs, with_all, with_method
from reports.settings import each_setting
from runtime.intervals import METHOD, columns

COMPARED = ("SpecInfer", "Sequoia", "DySpecHeap", "DySpecLayers")
NEEDS = "python scripts/evaluate.py experiment=wide_trees"
NODES, ACCEPTED = "nodes", "accepted tokens"


def tree_table(evaluations: Sequence[Evaluation]) -> Figure:
    """Tokens per call of every kind of tree, by dataset and temperature."""
    each = trees(evaluations)
    names = ["T", "dataset", "method", "nodes/round", *columns(CALLS), *columns(SPEEDUP)]
    rows: list[list[Cell]] = [
        [
            *(run.temperature, run.dataset, run.label, run.estimate("drafted/round").value),
            *(*run.estimate(CALLS), *run.estimate(SPEEDUP)),
        ]
        for run in with_all(each)
    ]
    return Figure(
        name="tree-table",
        title="Tokens per target call: DySpec, Sequoia, SpecInfer",
        source="DySpec, tables 1 to 3",
        kind="measured",
        n=extent(each),
        interval=f"{METHOD}, repeats pooled",
        columns=names,
        rows=rows,
        draw=partial(_draw_table, drawing.records(names, rows)),
    )


def _draw_table(every: Sequence[drawing.Record], canvas: Canvas) -> None:
    records = [{**record, "temperature": f"T = {record['T']:g}"} for record in every]
    datasets, methods = (drawing.distinct(records, name) for name in ("dataset", "method"))
    panels = drawing.panels(canvas, datasets, size=(4.4, 1.2 + 0.35 * len(methods)))
    for dataset, axes in zip(datasets, panels, strict=True):
        here = [record for record in records if record["dataset"] == dataset]
        drawing.dots(axes, here, CALLS, "method", "temperature")
    drawing.legend(canvas, panels[0])


def tree_sizes(evaluations: Sequence[Evaluation]) -> Figure:
    """Tree size and accepted tokens over steps: at every temperature of the output whose trees
    differ most in size."""
    shown = _most_varied(evaluations)
    names = ["T", "dataset", "method", "prompt", "step", NODES, ACCEPTED]
    rows: list[list[Cell]] = [
        [
            *(run.temperature, run.dataset, run.label, trace.prompt_id),
            *(step, len(found.draft_tokens), found.accepted),
        ]
        for run, trace in shown
        for step, found in enumerate(trace.rounds, 1)
    ]
    return Figure(
        name="tree-sizes",
        title="Tree size and accepted tokens over steps",
        source="DySpec, figure 5",
        kind="measured",
        n=f"1 prompt at each of {len(shown)} temperatures, {len(rows)} rounds",
        interval="no interval: single rounds are shown",
        columns=names,
        rows=rows,
        draw=partial(_draw_sizes, drawing.records(names, rows)),
    )


def _most_varied(evaluations: Sequence[Evaluation]) -> list[tuple[Run, Trace]]:
    """One output for each temperature."""
    needed = f"needs a tree whose size depends on the tokens drawn: {NEEDS}"
    found = runs(with_method(evaluations, _adaptive, needed), _adaptive)
    most: dict[float, tuple[Run, Trace]] = {}
    for run in found:
        for trace in run.traces:
            best = most.setdefault(run.temperature, (run, trace))
            if _sizes(trace) > _sizes(best[1]):
                most[run.temperature] = (run, trace)
    return list(most.values())


def _draw_sizes(records: Sequence[drawing.Record], canvas: Canvas) -> None:
    temperatures = drawing.distinct(records, "T")
    canvas.set_size_inches(max(6.4, 3.4 * len(temperatures)), 4.0)
    grid = canvas.subplots(2, len(temperatures), squeeze=False, sharex="col", sharey="row")
    for column, temperature in enumerate(temperatures):
        here = [record for record in records if record["T"] == temperature]
        steps = [record["step"] for record in here]
        above, below = grid[:, column]
        above.plot(steps, [record[NODES] for record in here], color="tab:blue", marker=".")
        above.set_title(f"T = {temperature:g}, {here[0]['method']}", fontsize=10)
        above.set_ylim(bottom=0)
        below.bar(steps, [record[ACCEPTED] for record in here], color="tab:orange")
        below.set_xlabel("step (target call)")
    grid[0, 0].set_ylabel("nodes of the tree")
    grid[1, 0].set_ylabel("accepted tokens")


def tree_times(evaluations: Sequence[Evaluation]) -> Figure:
    title = "Where a round's time goes: trees"
    return step_times("tree-times", title, "DySpec, figure 4", trees(evaluations))


def trees(evaluations: Sequence[Evaluation]) -> list[Run]:
    """Of evaluations with one of the paper's kinds, with all that is compared there."""
    needed = f"needs trees decoded: {NEEDS}"
    return runs(with_method(evaluations, lambda how: how.structure in COMPARED, needed))


def _sizes(trace: Trace) -> int:
    return len({len(round_.draft_tokens) for round_ in trace.rounds})


def _adaptive(how: Method) -> bool:
    return how.structure == "DySpecLayers"


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
