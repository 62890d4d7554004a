"""Results of tuning by replay: the rates every rule can reach, and its best threshold."""

from collections.abc import Callable, Sequence

from matplotlib.figure import Figure as Canvas

from data_gen.storage.dataset import Harvest
from reports.artifacts import Artifacts, Json
from reports.drawing import distinct, dots, legend, panels, style, where
from reports.figure import Builder, Entry, Figure, Record, each, estimated
from reports.harvest_data import at_temperatures
from runtime.text import plural

ORACLE, TICKS = "oracle", (0, 0.25, 0.5, 0.75, 1, 2, 5, 10, 20)
DISCARD, VERIFICATION = "discarded draft tokens per token", "target calls per token"
DOMINATED, SPEED = "fixed lengths dominated, %", "speed-up, modelled"


def frontier(tuning: Json, harvests: Sequence[Harvest] = ()) -> Figure:
    """Return the best rates of every rule in one file of scripts/tune.py; with a greedy target also
    those of the oracle."""
    records: list[Record] = []
    for rule, edge in tuning["frontier"].items():
        dominated = edge["fixed_dominated"]
        for threshold, discarded, calls in edge["points"]:
            records.append(
                {
                    **{"rule": rule, "threshold": threshold},
                    **{DISCARD: discarded, VERIFICATION: calls},
                    DOMINATED: None if dominated is None else 100 * dominated,
                }
            )
    if tuning["oracle_calls"]:
        draft, target = tuning["oracle_calls"]
        rates = {DISCARD: 0.0, VERIFICATION: target / (draft + target)}
        records.append({"rule": ORACLE, "threshold": None, **rates, DOMINATED: None})
    return Figure(
        name=f"frontier-{_name(tuning)}",
        title=f"Draft tokens discarded against target calls, {_distributions(tuning)}",
        source="SpecDec++, figures 3 and 5",
        kind="measured" if tuning["oracle_calls"] else "modelled",
        n=_prompts(tuning, harvests),
        interval="no interval: rates of all its prompts together",
        records=records,
        draw=_draw_frontier,
    )


def _draw_frontier(records: Sequence[Record], canvas: Canvas) -> None:
    canvas.set_size_inches(7.4, 4.4)
    axes = canvas.subplots()
    for place, rule in enumerate(name for name in distinct(records, "rule") if name != ORACLE):
        part = where(records, rule=rule)
        x, y = ([record[column] for record in part] for column in (DISCARD, VERIFICATION))
        axes.plot(x, y, markersize=3, label=rule, **style(place))
    for record in where(records, rule=ORACLE):
        axes.plot(record[DISCARD], record[VERIFICATION], "k*", markersize=14, label=ORACLE)
    axes.set_xscale("symlog", linthresh=1)
    axes.set_xticks(TICKS, [f"{tick:g}" for tick in TICKS])
    axes.set_xlim(-0.03, 1.1 * max(record[DISCARD] for record in records) + 0.1)
    axes.set_xlabel(DISCARD)
    axes.set_ylabel(VERIFICATION)
    axes.grid(alpha=0.3)
    canvas.legend(loc="outside upper center", ncols=4, fontsize=8)


def tuned(tuning: Json, harvests: Sequence[Harvest] = ()) -> Figure:
    """Return the best threshold of every rule for every cost table of one file."""
    return Figure(
        name=f"tuned-{_name(tuning)}",
        title=f"Best threshold of every rule, {_distributions(tuning)}",
        source="SpecDec++, table 1",
        kind="modelled",
        n=_prompts(tuning, harvests),
        records=[
            {
                **{"costs": tuning["cost"] if costs == "chosen" else costs, "rule": rule},
                "threshold": choice["threshold"],
                **estimated(SPEED, [choice["speedup"], *choice["interval"]]),
                "regret, %": 100 * choice["regret"],
                **{DISCARD: choice["discard_rate"], VERIFICATION: choice["verification_rate"]},
                **{"oracle, modelled": result["oracle_speedup"], "advice": result["advice"]},
            }
            for costs, result in tuning["results"].items()
            for rule, choice in result["rules"].items()
        ],
        draw=_draw_tuned,
        how_to_read=(
            f"Chosen on the {tuning['chosen_on']} split, judged on the {tuning['judged_on']} split."
        ),
    )


def _draw_tuned(records: Sequence[Record], canvas: Canvas) -> None:
    """Draw the costs tuned for, which stand first."""
    costs = records[0]["costs"]
    part = where(records, costs=costs)
    axes = panels(canvas, [f"costs: {costs}"], size=(6.4, 1.4 + 0.35 * len(part)))[0]
    dots(axes, part, SPEED, "rule", "costs")
    axes.axvline(1, color="black", lw=0.8)
    axes.axvline(part[0]["oracle, modelled"], color="grey", ls="--", lw=0.8, label="oracle")
    legend(canvas, axes)


def _name(tuning: Json) -> str:
    return f"{tuning['pair']['name']}-T{tuning['warp']['temperature']:g}-{tuning['cost']}"


def _distributions(tuning: Json) -> str:
    return at_temperatures(*(tuning[key]["temperature"] for key in ("warp", "draft_warp")))


def _prompts(tuning: Json, harvests: Sequence[Harvest]) -> str:
    """Return the split that a tuning was judged on, with its size if its harvest is among
    `harvests`."""
    folder, split = str(tuning["data"]["folder"]), tuning["judged_on"]
    counts = [harvest.splits[split] for harvest in harvests if str(harvest.folder) == folder]
    prompts = f"{plural(counts[0], 'prompt')}, " if counts else ""
    return f"{prompts}{split} split of {folder.rstrip('/').split('/')[-1]}"


def _each(
    build: Callable[[Json, Sequence[Harvest]], Figure], artifacts: Artifacts
) -> list[Builder]:
    needs = "needs thresholds: python scripts/tune.py"
    return each(artifacts.thresholds, lambda one: build(one, artifacts.harvests), needs)


FIGURES = (
    Entry(
        "Best threshold of every rule",
        "Regret: time over that of the oracle, which knows what will be accepted. A rule whose"
        " interval holds 1 shows no gain over plain decoding.",
        lambda artifacts: _each(tuned, artifacts),
    ),
    Entry(
        "Frontiers of discarded tokens and target calls",
        "Left and low is better (beyond 1 the axis is logarithmic); prices decide which point of a"
        " curve is fastest. The oracle knows what will be accepted and discards nothing; a sampled"
        " target has no such point.",
        lambda artifacts: _each(frontier, artifacts),
    ),
)
