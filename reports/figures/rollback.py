"""SpecBranch: what is rolled back, what each of its parts brings, and how sensitive it is to its
settings."""

from collections.abc import Sequence

from matplotlib.figure import Figure as Canvas

from evaluation.metrics import drafted_tokens
from reports import drawing
from reports.artifacts import Evaluation
from reports.figure import Cell, Figure, Missing
from reports.figures.speed import (
    CALLS,
    ROLLBACK,
    RUN,
    SPEED,
    accepted_run,
    modelled_speedup,
    ratios_of,
    rollback_rate,
    specbranch,
    speedup,
    tokens_per_call,
)
from reports.runs import Run, branches, extent, pearl, pooled, sweeps, with_all
from runtime.intervals import METHOD, columns

EPS, BRANCHES = "stop.confidence.threshold", "structure.candidates"
SETTINGS = {
    "epsilon": "the confidence below which a draft ends",
    "branches": "the number of branches",
}
EXPERIMENTS = {"epsilon": "specbranch_thresholds", "branches": "specbranch_branches"}
COMMAND = "python scripts/evaluate.py experiment="


def rollback_rates(evaluations: Sequence[Evaluation]) -> Figure:
    """RB by method, dataset and temperature."""
    found = [run for run in specbranch(evaluations) if any(map(drafted_tokens, run.traces))]
    if not found:
        raise Missing(f"needs requests in which something is drafted: {COMMAND}specbranch")
    names = ["T", "dataset", "method", *columns(ROLLBACK)]
    rows = [[run.temperature, run.dataset, run.label, *rollback_rate(run)] for run in found]

    def draw(canvas: Canvas) -> None:
        records = drawing.records(names, rows)
        distributions = drawing.distinct(records, "T")
        panels = drawing.panels(
            canvas, [f"T = {distribution:g}" for distribution in distributions], size=(4.4, 3.4)
        )
        for distribution, axes in zip(distributions, panels, strict=True):
            drawing.bars(
                axes, [r for r in records if r["T"] == distribution], "dataset", ROLLBACK, "method"
            )
            axes.set_ylim(0, 1)
            axes.set_xlabel("dataset")
        drawing.legend(canvas, panels[0])

    return Figure(
        name="rollback-rates",
        title="Rollback rate by method and dataset",
        source="SpecBranch, figures 5 and 11",
        kind="measured",
        n=extent(found),
        interval=METHOD,
        reading=(
            "Share of draft steps lost to a rejection; branches side by side take one step"
            " together. Low is good, but a method that hardly drafts has a low rate too."
        ),
        columns=names,
        rows=rows,
        draw=draw,
    )


# Ablation -----------------------------------------------------------------------------------------


def ablation(evaluations: Sequence[Evaluation]) -> Figure:
    """Measured speed of SpecBranch and of what is left without one of its parts."""
    found = _parts(evaluations)
    names = ["T", "dataset", "method", *columns(SPEED)]
    rows: list[list[Cell]] = [
        [run.temperature, run.dataset, part(run), *speedup(run)] for run in with_all(found)
    ]
    return Figure(
        name="ablation-measured",
        title="SpecBranch without its parts, measured",
        source="SpecBranch, figure 6",
        kind="measured",
        n=extent(found),
        interval=f"{METHOD}, repeats pooled",
        reading=(
            "Speed over plain decoding on this machine. Where draft and target share one processor,"
            " running side by side cannot pay."
        ),
        columns=names,
        rows=rows,
        draw=lambda canvas: _draw_ablation(
            canvas, drawing.records(names, rows), "dataset", "measured"
        ),
    )


def ablation_modelled(evaluations: Sequence[Evaluation]) -> Figure:
    """The same where each model has a device of its own, all datasets together."""
    found = pooled(_parts(evaluations))
    ratios = ratios_of(found)
    names = ["T", "method", "speed ratio c", *columns(SPEED)]
    rows: list[list[Cell]] = [
        [run.temperature, part(run), c, *modelled_speedup(run, c)] for run in found for c in ratios
    ]
    return Figure(
        name="ablation-modelled",
        title="SpecBranch without its parts, a device for each model",
        source="SpecBranch, figure 6",
        kind="modelled",
        n=extent(found),
        interval=METHOD,
        reading=(
            "Speed over plain decoding if a target forward took c draft forwards, from the counts"
            " of the run. What SpecBranch loses without a part is what that part brings."
        ),
        columns=names,
        rows=rows,
        draw=lambda canvas: _draw_ablation(
            canvas, drawing.records(names, rows), "speed ratio c", "modelled"
        ),
    )


def part(run: Run) -> str:
    """What it is in the ablation; "" for what has no place there."""
    how = run.method
    if branches(how):
        return "SpecBranch" if how.stop == "HRADStop" else "without H-RAD"
    if pearl(how):
        return "PEARL"
    chain = {"HRADStop": "without branches", "Fixed": "fixed length"}
    return chain.get(how.stop, "") if how.structure == "Chain" else ""


def _parts(evaluations: Sequence[Evaluation]) -> list[Run]:
    return sorted(
        filter(part, specbranch(evaluations)), key=lambda run: (run.temperature, run.dataset)
    )


def _draw_ablation(canvas: Canvas, records: Sequence[drawing.Record], x: str, kind: str) -> None:
    distributions = drawing.distinct(records, "T")
    panels = drawing.panels(
        canvas, [f"T = {distribution:g}" for distribution in distributions], size=(4.4, 3.4)
    )
    for distribution, axes in zip(distributions, panels, strict=True):
        drawing.bars(
            axes, [record for record in records if record["T"] == distribution], x, SPEED, "method"
        )
        axes.axhline(1, color="black", lw=0.8)
        axes.set_xlabel(x)
        axes.set_ylabel(f"speed-up, {kind}")
    drawing.legend(canvas, panels[0])


# Sensitivity --------------------------------------------------------------------------------------


def epsilon(evaluations: Sequence[Evaluation]) -> Figure:
    return _sensitivity(evaluations, EPS, "epsilon", "SpecBranch, table 4")


def epsilon_modelled(evaluations: Sequence[Evaluation]) -> Figure:
    return _sensitivity_modelled(evaluations, EPS, "epsilon", "SpecBranch, table 4")


def most_branches(evaluations: Sequence[Evaluation]) -> Figure:
    return _sensitivity(evaluations, BRANCHES, "branches", "SpecBranch, table 5")


def most_branches_modelled(evaluations: Sequence[Evaluation]) -> Figure:
    return _sensitivity_modelled(evaluations, BRANCHES, "branches", "SpecBranch, table 5")


def _sensitivity(evaluations: Sequence[Evaluation], key: str, setting: str, source: str) -> Figure:
    found = _swept(evaluations, key, setting)
    names = [
        "T",
        "dataset",
        setting,
        *columns(CALLS),
        *columns(RUN),
        *columns(ROLLBACK),
        *columns(SPEED),
    ]
    estimates = (tokens_per_call, accepted_run, rollback_rate, speedup)
    rows: list[list[Cell]] = [
        [
            run.temperature,
            run.dataset,
            run.method.settings[key],
            *(x for of in estimates for x in of(run)),
        ]
        for run in with_all(found)
    ]

    def draw(canvas: Canvas) -> None:
        records = [{**r, "distribution": f"T = {r['T']:g}"} for r in drawing.records(names, rows)]
        panels = drawing.panels(canvas, [ROLLBACK, CALLS])
        for axes, value in zip(panels, (ROLLBACK, CALLS), strict=True):
            drawing.lines(axes, drawing.together(records), setting, value, "distribution")
        drawing.legend(canvas, panels[0])

    return Figure(
        name=f"specbranch-{setting}",
        title=f"SpecBranch by {SETTINGS[setting]}",
        source=source,
        kind="measured",
        n=extent(found),
        interval=f"{METHOD}, repeats pooled",
        reading=(
            "Fewer steps rolled back are worth it only while tokens per target call do not fall as"
            " much."
        ),
        columns=names,
        rows=rows,
        draw=draw,
    )


def _sensitivity_modelled(
    evaluations: Sequence[Evaluation], key: str, setting: str, source: str
) -> Figure:
    found = pooled(_swept(evaluations, key, setting))
    ratios = ratios_of(found)
    names = ["T", setting, "speed ratio", *columns(SPEED)]
    rows: list[list[Cell]] = [
        [run.temperature, run.method.settings[key], f"c = {c:g}", *modelled_speedup(run, c)]
        for c in ratios
        for run in found
    ]

    def draw(canvas: Canvas) -> None:
        records = drawing.records(names, rows)
        distributions = drawing.distinct(records, "T")
        panels = drawing.panels(canvas, [f"T = {distribution:g}" for distribution in distributions])
        for distribution, axes in zip(distributions, panels, strict=True):
            drawing.lines(
                axes, [r for r in records if r["T"] == distribution], setting, SPEED, "speed ratio"
            )
            axes.set_ylabel("speed-up, modelled")
        drawing.legend(canvas, panels[0])

    return Figure(
        name=f"specbranch-{setting}-modelled",
        title=f"SpecBranch by {SETTINGS[setting]}, a device for each model",
        source=source,
        kind="modelled",
        n=extent(found),
        interval=METHOD,
        reading=(
            "Speed over plain decoding if a target forward took c draft forwards. A flat line means"
            " the setting does not matter."
        ),
        columns=names,
        rows=rows,
        draw=draw,
    )


def _swept(evaluations: Sequence[Evaluation], key: str, setting: str) -> list[Run]:
    found = sweeps(evaluations, branches, key)
    if not found:
        raise Missing(
            f"needs SpecBranch with several values of {key}: {COMMAND}{EXPERIMENTS[setting]}"
        )
    return sorted(found, key=lambda run: (run.temperature, run.dataset))
