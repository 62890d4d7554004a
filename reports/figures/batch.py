"""The gain of a budget of rows shared by many requests, by the confidences that fill it."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure as Canvas

from reports import drawing
from reports.artifacts import Json
from reports.figure import Entry, Figure, Record, each, estimated
from runtime.intervals import METHOD

OVER, LOGGED = "speed over one length", "speed over confidences as logged"


def scheduler(schedule: Json) -> Figure:
    """Return the figure of one file of scripts/tune.py batch=[...] scheduler=true."""
    details = schedule["details"]
    return Figure(
        name=f"scheduler-{Path(schedule['file']).stem}",
        title=f"A budget of rows shared by all requests, costs {details['cost']['name']}",
        source="The schedulers of SGLang and vLLM, simulated",
        kind="modelled",
        n=f"costs {details['cost']['made']}; prompts of {', '.join(details['scheduler'])}",
        interval=f"{METHOD}, ratios paired",
        records=[
            {
                **{"judged on": prompts, "requests": way["requests"]},
                **{"rows go by": way["name"], "drafted": way["drafted"]},
                **_estimate("tokens/s", way["tokens_per_second"]),
                **_estimate(OVER, way["over_fixed"]),
                **_estimate(LOGGED, way["over_logged"]),
            }
            for prompts, ways in details["scheduler"].items()
            for way in ways
        ],
        draw=_draw,
    )


def _estimate(column: str, stored: Json) -> Record:
    return estimated(column, (stored[key] for key in ("value", "low", "high")))


def _draw(records: Sequence[Record], canvas: Canvas) -> None:
    shown = [{**record, "requests": f"{record['requests']} requests"} for record in records]
    size = (5.6, 1.2 + 0.3 * len(drawing.distinct(shown, "rows go by")))
    for axes, part in drawing.panels_by(canvas, shown, "judged on", size=size):
        drawing.dots(axes, part, OVER, "rows go by", "requests")
        axes.axvline(1, color="black", lw=0.8)


FIGURES = [
    Entry(
        "A budget of rows shared by all requests",
        "Tokens per second of all requests over one draft length for all. Where as logged and"
        " calibrated lie on each other, calibration is worth nothing; the oracle knows the true"
        " probabilities. Left of 1 one length is faster.",
        lambda artifacts: each(
            [one for one in artifacts.schedules if one["details"]["scheduler"]],
            scheduler,
            "needs a schedule: python scripts/tune.py batch=[1,64,256] scheduler=true",
        ),
    )
]
