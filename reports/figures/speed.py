"""Speed-up tables: measured against plain decoding of the same evaluation, and modelled for other
machines."""

from collections.abc import Sequence

from matplotlib.figure import Figure as Canvas

from decoding.trace import Trace
from evaluation.metrics import accepted_runs, draft_steps, drafted_tokens, tokens_per_second
from evaluation.ratios import Count, compared, counted, divided, ratio
from evaluation.tables import BASELINE
from evaluation.timeline import TABLES, Devices, modelled_seconds
from reports import drawing
from reports.artifacts import Evaluation
from reports.figure import Cell, Figure
from reports.runs import Run, branches, extent, pearl, runs, with_all, with_method
from runtime.intervals import METHOD, Array, Estimate, columns

DRAFTED = "drafted/round"
SPEED, CALLS, RUN, ROLLBACK = "speed-up", "tokens/target call", "accepted run M", "rollback rate RB"
SPECDECPP = "needs SpecDec++ decoded: python scripts/evaluate.py experiment=specdecpp"
SPECBRANCH = (
    "needs SpecBranch beside other methods: python scripts/evaluate.py experiment=specbranch"
)


def specdecpp_speed(evaluations: Sequence[Evaluation]) -> Figure:
    title = "SpecDec++ and what it is compared with"
    return measured("specdecpp-speed", title, "SpecDec++, tables 1 and 4", specdecpp(evaluations))


def specdecpp_modelled(evaluations: Sequence[Evaluation]) -> Figure:
    title = "SpecDec++ and what it is compared with, on other machines"
    return modelled(
        "specdecpp-modelled", title, "SpecDec++, tables 1 and 4", specdecpp(evaluations)
    )


def specbranch_speed(evaluations: Sequence[Evaluation]) -> Figure:
    title = "SpecBranch and what it is compared with"
    return measured("specbranch-speed", title, "SpecBranch, main tables", specbranch(evaluations))


def specbranch_modelled(evaluations: Sequence[Evaluation]) -> Figure:
    title = "SpecBranch and what it is compared with, a device for each model"
    return modelled(
        "specbranch-modelled", title, "SpecBranch, main tables", specbranch(evaluations)
    )


def specdecpp(evaluations: Sequence[Evaluation]) -> list[Run]:
    return runs(with_method(evaluations, lambda how: how.stop == "SpecDecPPStop", SPECDECPP))


def specbranch(evaluations: Sequence[Evaluation]) -> list[Run]:
    """Of evaluations that compare it with something else than itself."""
    beside = [
        e
        for e in evaluations
        if any(pearl(r.method) or r.method.structure == "Chain" for r in runs([e]))
    ]
    return runs(with_method(beside, branches, SPECBRANCH))


# Tables -------------------------------------------------------------------------------------------


def measured(name: str, title: str, source: str, found: Sequence[Run]) -> Figure:
    """Every method on every dataset, drawn with datasets apart."""
    names = [
        "T",
        "dataset",
        "method",
        DRAFTED,
        "tokens/s",
        *columns(SPEED),
        *columns(CALLS),
        *columns(RUN),
        *columns(ROLLBACK),
    ]
    rows = [_measured_row(run) for run in with_all(found)]

    def draw(canvas: Canvas) -> None:
        records = [
            {**r, "distribution": f"T = {r['T']:g}"}
            for r in drawing.records(names, rows)
            if r["method"] != BASELINE
        ]
        datasets, methods = (
            drawing.distinct(records, "dataset"),
            drawing.distinct(records, "method"),
        )
        panels = drawing.panels(canvas, datasets, size=(4.4, 1.2 + 0.3 * len(methods)))
        for dataset, axes in zip(datasets, panels, strict=True):
            here = [record for record in records if record["dataset"] == dataset]
            drawing.dots(axes, here, SPEED, "method", "distribution")
            axes.axvline(1, color="black", lw=0.8)
            axes.set_xlabel("speed-up, measured")
        drawing.legend(canvas, panels[0])

    return Figure(
        name=name,
        title=title,
        source=source,
        kind="measured",
        n=extent(found),
        interval=f"{METHOD}, repeats pooled",
        reading=(
            "Wall time of whole requests, prefill included, over that of plain decoding in the same"
            " run. A speed-up whose interval holds 1 is none."
        ),
        columns=names,
        rows=rows,
        draw=draw,
    )


def modelled(name: str, title: str, source: str, found: Sequence[Run]) -> Figure:
    """The same priced by the cost tables of the evaluations, drawn over the speed ratio."""
    ratios, tables = ratios_of(found), _tables(found)
    names = [
        "T",
        "dataset",
        "method",
        *(part for c in ratios for part in columns(of_ratio(c))),
        *tables,
    ]
    rows = [
        [
            run.temperature,
            run.dataset,
            run.label,
            *(x for c in ratios for x in modelled_speedup(run, c)),
            *_stored(run, tables),
        ]
        for run in with_all(found)
    ]

    def draw(canvas: Canvas) -> None:
        records = drawing.together(drawing.records(names, rows))
        points = [
            _at_ratio(record, c)
            for record in records
            for c in ratios
            if record["method"] != BASELINE
        ]
        distributions = drawing.distinct(points, "T")
        panels = drawing.panels(canvas, drawing.titles(points), size=(4.4, 3.6))
        for distribution, axes in zip(distributions, panels, strict=True):
            drawing.lines(
                axes,
                [point for point in points if point["T"] == distribution],
                "c",
                SPEED,
                "method",
            )
            axes.axhline(1, color="black", lw=0.8)
            axes.set_xlabel("speed ratio c: draft forwards per target forward")
            axes.set_ylabel("speed-up, modelled")
        drawing.legend(canvas, panels[0])

    return Figure(
        name=name,
        title=title,
        source=source,
        kind="modelled",
        n=extent(found),
        interval=f"{METHOD}; none for costs measured here, where only the sum is kept",
        reading=(
            "The counts of the run, priced: what runs side by side takes as long as the slower"
            " model, all outside the models costs nothing. At speed ratio c a target forward costs"
            " c draft forwards, however many rows it has."
        ),
        columns=names,
        rows=rows,
        draw=draw,
    )


# Estimates ----------------------------------------------------------------------------------------


def speedup(run: Run) -> Estimate:
    """Measured."""
    return _over_baseline(run, lambda trace: trace.seconds)


def modelled_speedup(run: Run, c: float) -> Estimate:
    devices = Devices.of_ratio(c)
    return _over_baseline(run, lambda trace: modelled_seconds(trace, devices))


def tokens_per_call(run: Run) -> Estimate:
    return ratio(run.traces, tokens, lambda trace: len(trace.rounds))


def accepted_run(run: Run) -> Estimate:
    """M."""
    return ratio(
        run.traces, lambda trace: sum(accepted_runs(trace)), lambda trace: len(accepted_runs(trace))
    )


def rollback_rate(run: Run) -> Estimate:
    """RB: draft steps lost to a rejection."""
    lost, drawn = (
        lambda trace, place=place: sum(draft_steps(r)[place] for r in trace.rounds)
        for place in (1, 0)
    )
    return ratio(run.traces, lost, drawn)


def tokens(trace: Trace) -> int:
    return len(trace.tokens)


def ratios_of(found: Sequence[Run]) -> list[float]:
    """The speed ratios that evaluations were asked to price, else the papers'; counts can be priced
    at any."""
    asked = {
        c for run in found for c in run.evaluation.config.get("modelled", []) if c not in TABLES
    }
    return sorted(asked) or [4, 5, 10, 15]


def of_ratio(c: float) -> str:
    return f"{SPEED}, c = {c:g}"


def _over_baseline(run: Run, seconds: Count) -> Estimate:
    if run.name == BASELINE:
        return Estimate(1.0)
    ours, theirs = counted(run.traces, tokens, seconds), counted(run.baseline, tokens, seconds)
    return compared(ours, theirs, _faster)


def _faster(ours: Array, theirs: Array) -> Array:
    speed, other = (divided(sums[..., 0], sums[..., 1]) for sums in (ours, theirs))
    faster: Array = divided(speed, other)
    return faster


def _measured_row(run: Run) -> list[Cell]:
    drafts = any(map(drafted_tokens, run.traces))
    of_draft = [*accepted_run(run), *rollback_rate(run)] if drafts else [None] * 6
    drafted = ratio(run.traces, drafted_tokens, lambda trace: len(trace.rounds)).value
    head = [run.temperature, run.dataset, run.label, drafted]
    return [*head, tokens_per_second(run.traces), *speedup(run), *tokens_per_call(run), *of_draft]


def _at_ratio(record: drawing.Record, c: float) -> drawing.Record:
    """A point of a drawing over c."""
    estimate = zip(columns(SPEED), columns(of_ratio(c)), strict=True)
    return {**record, "c": c, **{short: record[name] for short, name in estimate}}


def _tables(found: Sequence[Run]) -> dict[str, str]:
    """Column names of the cost tables that are no ratios, and the tables' own."""
    said = {"measured": f"{SPEED}, forwards as measured", "pipeline": f"{SPEED}, split target"}
    return {
        said[table]: table
        for table in TABLES
        if any(table in run.evaluation.config.get("modelled", []) for run in found)
    }


def _stored(run: Run, tables: dict[str, str]) -> list[Cell]:
    """What the evaluation has priced by other tables; None where it has priced other requests than
    the run's."""
    whole = len(run.traces) == len(run.evaluation.traces[run.name])
    priced = run.evaluation.results.get("modelled", {}).get(run.name, {}) if whole else {}
    return [priced.get(table) for table in tables.values()]
