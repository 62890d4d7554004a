"""What tuning found by replay: the rates every rule can reach, and its best threshold."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from matplotlib.figure import Figure as Canvas

from data_gen.storage.dataset import Harvest
from reports.artifacts import Artifacts, Json
from reports.drawing import (
    COLOURS,
    DASHES,
    MARKERS,
    Record,
    distinct,
    dots,
    legend,
    panels,
    records,
)
from reports.figure import Builder, Cell, Entry, Figure, lacking
from runtime.intervals import METHOD
from runtime.intervals import columns as estimate_columns

ORACLE, TICKS = "oracle", (0, 0.25, 0.5, 0.75, 1, 2, 5, 10, 20)
DISCARD, VERIFICATION = "discarded draft tokens per token", "target calls per token"
SPEED = "speed-up, modelled"
NEEDS = "needs thresholds: python scripts/tune.py"


def frontier(found: Json, harvests: Sequence[Harvest] = ()) -> Figure:
    """The best rates of every rule in one file of scripts/tune.py; with a greedy target also those
    of the oracle."""
    columns = ["rule", "threshold", DISCARD, VERIFICATION, "fixed lengths dominated, %"]
    rows: list[list[Cell]] = [
        [rule, *point, None if edge["fixed_dominated"] is None else 100 * edge["fixed_dominated"]]
        for rule, edge in found["frontier"].items()
        for point in edge["points"]
    ]
    if found["oracle_calls"]:
        draft, target = found["oracle_calls"]
        rows.append([ORACLE, None, 0.0, target / (draft + target), None])
    return Figure(
        name=f"frontier-{_name(found)}",
        title=f"Draft tokens discarded against target calls, {_distributions(found)}",
        source="SpecDec++, figures 3 and 5",
        kind="measured" if found["oracle_calls"] else "modelled",
        n=_prompts(found, harvests),
        interval="no interval: rates of all its prompts together",
        columns=columns,
        rows=rows,
        draw=partial(_draw, records(columns, rows)),
    )


def tuned(found: Json, harvests: Sequence[Harvest] = ()) -> Figure:
    """The best threshold of every rule for every cost table of one file."""
    names = ["costs", "rule", "threshold", *estimate_columns(SPEED), "regret, %"]
    names += [DISCARD, VERIFICATION, "oracle, modelled", "advice"]
    rows = list(_tuned_rows(found))
    return Figure(
        name=f"tuned-{_name(found)}",
        title=f"Best threshold of every rule, {_distributions(found)}",
        source="SpecDec++, table 1",
        kind="modelled",
        n=_prompts(found, harvests),
        interval=METHOD,
        columns=names,
        rows=rows,
        draw=partial(_draw_tuned, records(names, rows)),
        how_to_read=(
            f"Chosen on the {found['chosen_on']} split, judged on the {found['judged_on']} split."
        ),
    )


def _tuned_rows(found: Json) -> Iterator[list[Cell]]:
    for name, result in found["results"].items():
        for rule, choice in result["rules"].items():
            yield [
                *(found["cost"] if name == "chosen" else name, rule, choice["threshold"]),
                *(choice["speedup"], *choice["interval"], 100 * choice["regret"]),
                *(choice["discard_rate"], choice["verification_rate"]),
                *(result["oracle_speedup"], result["advice"]),
            ]


def _draw_tuned(found: Sequence[Record], canvas: Canvas) -> None:
    """Of the costs tuned for, which stand first."""
    costs = distinct(found, "costs")[0]
    here = [record for record in found if record["costs"] == costs]
    axes = panels(canvas, [f"costs: {costs}"], size=(6.4, 1.4 + 0.35 * len(here)))[0]
    dots(axes, here, SPEED, "rule", "costs")
    axes.axvline(1, color="black", lw=0.8)
    axes.axvline(here[0]["oracle, modelled"], color="grey", ls="--", lw=0.8, label="oracle")
    legend(canvas, axes)


def _name(found: Json) -> str:
    return f"{found['pair']['name']}-T{found['warp']['temperature']:g}-{found['cost']}"


def _distributions(found: Json) -> str:
    target, draft = (found[key]["temperature"] for key in ("warp", "draft_warp"))
    return f"T = {target:g}" if target == draft else f"T = {target:g}, draft {draft:g}"


def _prompts(found: Json, harvests: Sequence[Harvest]) -> str:
    """Of the split it was judged on; how many, where its harvest is among those known."""
    folder, split = str(found["data"]["folder"]), found["judged_on"]
    counts = [harvest.splits[split] for harvest in harvests if str(harvest.folder) == folder]
    return (
        f"{f'{counts[0]} prompts, ' if counts else ''}{split} split of"
        f" {folder.rstrip('/').split('/')[-1]}"
    )


def _draw(found: Sequence[Record], canvas: Canvas) -> None:
    canvas.set_size_inches(7.4, 4.4)
    axes = canvas.subplots()
    for place, rule in enumerate(name for name in distinct(found, "rule") if name != ORACLE):
        part = [record for record in found if record["rule"] == rule]
        style: dict[str, Any] = {
            "color": COLOURS[place % len(COLOURS)],
            "linestyle": DASHES[place % len(DASHES)],
        }
        x, y = ([record[column] for record in part] for column in (DISCARD, VERIFICATION))
        axes.plot(x, y, marker=MARKERS[place % len(MARKERS)], markersize=3, label=rule, **style)
    for record in found:
        if record["rule"] == ORACLE:
            axes.plot(record[DISCARD], record[VERIFICATION], "k*", markersize=14, label=ORACLE)
    axes.set_xscale("symlog", linthresh=1)
    axes.set_xticks(TICKS, [f"{tick:g}" for tick in TICKS])
    axes.set_xlim(-0.03, 1.1 * max(record[DISCARD] for record in found) + 0.1)
    axes.set_xlabel(DISCARD)
    axes.set_ylabel(VERIFICATION)
    axes.grid(alpha=0.3)
    canvas.legend(loc="outside upper center", ncols=4, fontsize=8)


def _each(
    build: Callable[[Json, Sequence[Harvest]], Figure], artifacts: Artifacts
) -> list[Builder]:
    """One for each file of scripts/tune.py."""
    return [partial(build, found, artifacts.harvests) for found in artifacts.thresholds] or [
        partial(lacking, NEEDS)
    ]


FIGURES = (
    Entry(
        "Best threshold of every rule",
        "Regret: time over that of the oracle, which knows what will be accepted. A rule whose"
        " interval holds 1 shows no gain over plain decoding.",
        partial(_each, tuned),
    ),
    Entry(
        "Frontiers of discarded tokens and target calls",
        "Left and low is better (beyond 1 the axis is logarithmic); prices decide which point of a"
        " curve is fastest. The oracle knows what will be accepted and discards nothing; a sampled"
        " target has no such point.",
        partial(_each, frontier),
    ),
)
