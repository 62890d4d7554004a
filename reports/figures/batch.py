"""What a budget of rows shared by many requests is worth, by the confidences that fill it."""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from matplotlib.figure import Figure as Canvas

from reports import drawing
from reports.artifacts import Artifacts, Json
from reports.figure import Builder, Cell, Entry, Figure, lacking
from runtime.intervals import METHOD
from runtime.intervals import columns as estimate_columns

OVER, LOGGED = "speed over one length", "speed over confidences as logged"
NEEDS = "needs a schedule: python scripts/tune.py batch=[1,64,256] scheduler=true"


def scheduler(found: Json) -> Figure:
    """One file of scripts/tune.py batch=[...] scheduler=true."""
    names = ["judged on", "requests", "rows go by", "drafted", *estimate_columns("tokens/s")]
    names += [*estimate_columns(OVER), *estimate_columns(LOGGED)]
    rows, costs = list(_rows(found)), found["details"]["cost"]
    return Figure(
        name=f"scheduler-{Path(found['file']).stem}",
        title=f"A budget of rows shared by all requests, costs {costs['name']}",
        source="The schedulers of SGLang and vLLM, simulated",
        kind="modelled",
        n=f"costs {costs['made']}; prompts of {', '.join(found['details']['scheduler'])}",
        interval=f"{METHOD}, ratios paired",
        columns=names,
        rows=rows,
        draw=partial(_draw, drawing.records(names, rows)),
    )


def _rows(found: Json) -> Iterator[list[Cell]]:
    for judged_on, ways in found["details"]["scheduler"].items():
        for way in ways:
            ratios = (way[key] for key in ("tokens_per_second", "over_fixed", "over_logged"))
            values = [[one["value"], one["low"], one["high"]] for one in ratios]
            yield [
                *(judged_on, way["requests"], way["name"], way["drafted"]),
                *(value for value_and_ends in values for value in value_and_ends),
            ]


def _draw(found: Sequence[drawing.Record], canvas: Canvas) -> None:
    shown = [{**one, "requests": f"{one['requests']} requests"} for one in found]
    names = drawing.distinct(shown, "judged on")
    most = len(drawing.distinct(shown, "rows go by"))
    panels = drawing.panels(canvas, names, size=(5.6, 1.2 + 0.3 * most))
    for name, axes in zip(names, panels, strict=True):
        here = [record for record in shown if record["judged on"] == name]
        drawing.dots(axes, here, OVER, "rows go by", "requests")
        axes.axvline(1, color="black", lw=0.8)
    drawing.legend(canvas, panels[0])


def _builders(artifacts: Artifacts) -> list[Builder]:
    simulated = [one for one in artifacts.schedules if one["details"]["scheduler"]]
    return [partial(scheduler, one) for one in simulated] or [partial(lacking, NEEDS)]


FIGURES = [
    Entry(
        "A budget of rows shared by all requests",
        "Tokens per second of all requests over one draft length for all. Where as logged and"
        " calibrated lie on each other, calibration is worth nothing; the oracle knows the true"
        " probabilities. Left of 1 one length is faster.",
        _builders,
    )
]
