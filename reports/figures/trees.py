"""Trees: how far each kind gets per target call, and how their sizes change from step to step."""

from collections.abc import Sequence

from matplotlib.figure import Figure as Canvas

from decoding.trace import Trace
from evaluation.metrics import drafted_tokens
from evaluation.ratios import ratio
from reports import drawing
from reports.artifacts import Evaluation
from reports.figure import Cell, Figure
from reports.figures.speed import CALLS, SPEED, speedup, tokens_per_call
from reports.runs import Method, Run, extent, runs, with_all, with_method
from runtime.intervals import METHOD, columns

WIDE = {
    "SpecInfer": "SpecInfer",
    "Sequoia": "Sequoia",
    "DySpecHeap": "DySpec",
    "DySpecLayers": "DySpec, by layers",
}
RULES = {"RrsVerifier": "RRS", "RrswVerifier": "RRSw", "SpecHubVerifier": "SpecHub"}
NEEDS = "python scripts/evaluate.py experiment="
NODES, ACCEPTED = "nodes", "accepted tokens"


def tree_table(evaluations: Sequence[Evaluation]) -> Figure:
    """Tokens per call of every kind of tree, by dataset and temperature."""
    each = trees(evaluations)
    found = with_all(each)
    names = ["T", "dataset", "method", "nodes/round", *columns(CALLS), *columns(SPEED)]
    rows: list[list[Cell]] = [
        [run.temperature, run.dataset, run.label, _nodes(run), *tokens_per_call(run), *speedup(run)]
        for run in found
    ]

    def draw(canvas: Canvas) -> None:
        records = [{**r, "distribution": f"T = {r['T']:g}"} for r in drawing.records(names, rows)]
        datasets, methods = (
            drawing.distinct(records, "dataset"),
            drawing.distinct(records, "method"),
        )
        panels = drawing.panels(canvas, datasets, size=(4.4, 1.2 + 0.35 * len(methods)))
        for dataset, axes in zip(datasets, panels, strict=True):
            drawing.dots(
                axes,
                [r for r in records if r["dataset"] == dataset],
                CALLS,
                "method",
                "distribution",
            )
        drawing.legend(canvas, panels[0])

    return Figure(
        name="tree-table",
        title="Tokens per target call: DySpec, Sequoia, SpecInfer",
        source="DySpec, tables 1 to 3",
        kind="measured",
        n=extent(each),
        interval=f"{METHOD}, repeats pooled",
        reading=(
            "How far one target call gets, 1 is plain decoding. The speed-up says whether the tree"
            " also earns what its rows cost on this machine."
        ),
        columns=names,
        rows=rows,
        draw=draw,
    )


def tree_growth(evaluations: Sequence[Evaluation]) -> Figure:
    """Tree size and accepted tokens over steps: at every temperature of the output whose trees
    differ most in size."""
    needed = f"needs a tree whose size depends on the tokens drawn: {NEEDS}wide_trees"
    wanted = [
        run for run in runs(with_method(evaluations, _adaptive, needed), _adaptive) if run.traces
    ]
    distributions = list(dict.fromkeys(run.temperature for run in wanted))
    every = [(run, trace) for run in wanted for trace in run.traces]
    shown = [
        max(
            (each for each in every if each[0].temperature == distribution),
            key=lambda each: _sizes(each[1]),
        )
        for distribution in distributions
    ]
    names = ["T", "dataset", "method", "prompt", "step", NODES, ACCEPTED]
    rows: list[list[Cell]] = [
        [
            run.temperature,
            run.dataset,
            run.label,
            trace.prompt_id,
            step,
            len(r.draft_tokens),
            r.accepted,
        ]
        for run, trace in shown
        for step, r in enumerate(trace.rounds, 1)
    ]
    return Figure(
        name="tree-growth",
        title="Tree size and accepted tokens over steps",
        source="DySpec, figure 5",
        kind="measured",
        n=f"1 prompt at each of {len(distributions)} temperatures, {len(rows)} rounds",
        interval="no interval: single rounds are shown",
        reading=(
            "A tree grows while draws are worth more than the threshold. A sure draft makes it"
            " deep; an unsure one spends the nodes on siblings, and no path gets far."
        ),
        columns=names,
        rows=rows,
        draw=lambda canvas: _draw_growth(canvas, drawing.records(names, rows)),
    )


def _draw_growth(canvas: Canvas, records: Sequence[drawing.Record]) -> None:
    distributions = drawing.distinct(records, "T")
    canvas.set_size_inches(max(6.4, 3.4 * len(distributions)), 4.0)
    grid = canvas.subplots(2, len(distributions), squeeze=False, sharex="col", sharey="row")
    for column, distribution in enumerate(distributions):
        here = [record for record in records if record["T"] == distribution]
        steps = [record["step"] for record in here]
        above, below = grid[:, column]
        above.plot(steps, [record[NODES] for record in here], color="tab:blue", marker=".")
        above.set_title(f"T = {distribution:g}, {here[0]['method']}", fontsize=10)
        above.set_ylim(bottom=0)
        below.bar(steps, [record[ACCEPTED] for record in here], color="tab:orange")
        below.set_xlabel("step (target call)")
    grid[0, 0].set_ylabel("nodes of the tree")
    grid[1, 0].set_ylabel("accepted tokens")


def _sizes(trace: Trace) -> int:
    return len({len(round_.draft_tokens) for round_ in trace.rounds})


def sibling_rules(evaluations: Sequence[Evaluation]) -> Figure:
    """RRS, RRSw and SpecHub on the same binary trees, by depth and temperature."""
    needed = f"needs binary trees under several rules: {NEEDS}binary_trees"
    each = runs(with_method(evaluations, _binary, needed), _binary)
    found = with_all(each)
    names = ["T", "dataset", "rule", "depth", *columns(CALLS), *columns(SPEED)]
    rows: list[list[Cell]] = [
        [
            run.temperature,
            run.dataset,
            RULES[run.method.verifier],
            _depth(run),
            *tokens_per_call(run),
            *speedup(run),
        ]
        for run in found
    ]

    def draw(canvas: Canvas) -> None:
        records = drawing.together(drawing.records(names, rows))
        distributions = drawing.distinct(records, "T")
        panels = drawing.panels(canvas, drawing.titles(records), 3, (3.4, 3.0))
        for distribution, axes in zip(distributions, panels, strict=True):
            drawing.lines(
                axes, [r for r in records if r["T"] == distribution], "depth", CALLS, "rule"
            )
            axes.set_xlabel("depth of the binary tree, tokens")
            axes.set_xticks(sorted({r["depth"] for r in records}))
        drawing.legend(canvas, panels[0])

    return Figure(
        name="sibling-rules",
        title="RRS, RRSw and SpecHub on binary trees",
        source="SpecHub, tables 1, 2 and 5",
        kind="measured",
        n=extent(each),
        interval=f"{METHOD}, repeats pooled",
        reading=(
            "The same number of draft tokens under each rule: the higher line gets more out of two"
            " candidates."
        ),
        columns=names,
        rows=rows,
        draw=draw,
    )


def trees(evaluations: Sequence[Evaluation]) -> list[Run]:
    """Of evaluations with one of the three kinds, with all that is compared there."""
    return runs(
        with_method(
            evaluations,
            lambda how: how.structure in WIDE,
            f"needs trees decoded: {NEEDS}wide_trees",
        )
    )


def _adaptive(how: Method) -> bool:
    return how.structure == "DySpecLayers"


def _binary(how: Method) -> bool:
    return (
        how.structure == "WidthTree"
        and how.verifier in RULES
        and set(how.settings["structure.widths"]) == {2}
    )


def _depth(run: Run) -> int:
    return len(run.method.settings["structure.widths"])


def _nodes(run: Run) -> float:
    return ratio(run.traces, drafted_tokens, lambda trace: len(trace.rounds)).value
