"""Energy per token by method, where the machine that decoded counts it."""

from collections.abc import Iterator, Sequence
from functools import partial

import pandas as pd
from matplotlib.figure import Figure as Canvas

from evaluation.table import compare, ratio
from reports.artifacts import Artifacts, Evaluation
from reports.drawing import Record, bars, legend, panels, records
from reports.figure import Builder, Cell, Entry, Figure, Missing, lacking
from runtime.intervals import METHOD
from runtime.intervals import columns as estimate_columns

JOULES = "energy per token (J)"
NEEDS = "needs an evaluation: python scripts/evaluate.py"


def energy(evaluation: Evaluation) -> Figure:
    """Joules per token of every method and dataset, prefill included, and their share of plain
    decoding's."""
    traces = evaluation.traces
    known = [trace.joules is not None for found in traces.values() for trace in found]
    if not all(known):
        without = f"{known.count(False)} of {len(known)} requests were decoded without one"
        raise Missing(
            f"needs an energy counter where it is decoded; of {evaluation.folder} {without}:"
            f" {_reason(evaluation)}"
        )
    columns = [
        "prompts of",
        "method",
        *estimate_columns(JOULES),
        *estimate_columns("of plain decoding"),
        "power (W)",
    ]
    rows = [
        row
        for dataset in evaluation.datasets
        for row in _rows(dataset, evaluation.measurements.query("dataset == @dataset"))
    ]
    requests = max(len(found) for found in traces.values())
    return Figure(
        name=f"energy-{evaluation.folder.name}",
        title=f"Energy per token: {evaluation.folder.name}",
        source="SpecBranch, tables 10 and 11",
        kind="measured",
        n=f"{requests} requests a method",
        interval=METHOD,
        columns=columns,
        rows=rows,
        draw=partial(_draw, records(columns, rows)),
        how_to_read=f"Counter: {_reason(evaluation)}.",
    )


def _reason(evaluation: Evaluation) -> str:
    """The counters, or why there were none."""
    return str(evaluation.results["run"].get("energy", "decode again: python scripts/evaluate.py"))


def _rows(dataset: str, measurements: pd.DataFrame) -> Iterator[list[Cell]]:
    shares = compare(measurements, above="joules", below="emitted")
    for name, rows in measurements.groupby("policy", sort=False):
        energy_per_token, power = (ratio(rows, "joules", of) for of in ("emitted", "seconds"))
        yield [dataset, str(name), *energy_per_token, *shares[str(name)], power.value]


def _draw(found: Sequence[Record], canvas: Canvas) -> None:
    axes = panels(canvas, [""])[0]
    bars(axes, found, "prompts of", JOULES, "method")
    axes.set_xlabel("prompts of")
    axes.set_ylim(bottom=0)
    legend(canvas, axes)


def _builders(artifacts: Artifacts) -> list[Builder]:
    return [partial(energy, one) for one in artifacts.evaluations] or [partial(lacking, NEEDS)]


FIGURES = (
    Entry(
        "Energy per token",
        "Counted around each request, whatever else runs there. Fewer joules than plain decoding"
        " where the share is below 1.",
        _builders,
    ),
)
