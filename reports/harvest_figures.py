"""Which figures harvests, checkpoints, costs and tunings give, in the order of a report.

A harvest is read when the first figure needs it, and once for all figures that need the same of it.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

from reports.artifacts import Checkpoint, Evidence, Harvest, Json
from reports.figure import Figure, Missing
from reports.figure_data import (
    activations,
    aged,
    by_pair,
    draft_tokens,
    models,
    of_pair,
    predicted,
    rounds,
    trained_on,
)
from reports.figures.calibration import NEEDS, diagrams, drift
from reports.figures.confidence import QUANTITIES, Quantity, acceptance_by_probability, by_verdict
from reports.figures.energy import energy
from reports.figures.frontiers import frontier, tuned
from reports.figures.heads import confusions, feature_age, sweep, tsne
from reports.figures.theory import COSTS, forward_times, latency

Builder = Callable[[], Figure]
Entry = tuple[str, str, Sequence[Builder]]
"""Section, what is lacking where no builder succeeds, builders."""

DRAFT, PRICES, HEADS = (
    "What the draft knows",
    "Time, counts and thresholds",
    "What the predictors know",
)
HARVEST = "needs a harvest: python scripts/gen_data.py"
CLASSIFIER = "needs an H-RAD checkpoint: python train.py predictor=hrad"
TUNED = "needs thresholds: python scripts/tune.py"
DECODED = "needs an evaluation: python scripts/evaluate.py"


def entries(evidence: Evidence) -> list[Entry]:
    """Of everything but decodes, and the energy of these."""
    return [*_draft(evidence), *_prices(evidence), *_heads(evidence)]


def _draft(evidence: Evidence) -> list[Entry]:
    reads = [cache(partial(draft_tokens, harvests)) for harvests in by_pair(evidence.harvests)]

    def entry(title: str, build: Callable[..., Figure], *rest: Quantity) -> Entry:
        return (
            DRAFT,
            title,
            [partial(_of, read, build, *rest) for read in reads] or [_lacking(HARVEST)],
        )

    return [
        *(entry(quantity.title, by_verdict, quantity) for quantity in QUANTITIES),
        entry("Acceptance against draft probability", acceptance_by_probability),
    ]


def _prices(evidence: Evidence) -> list[Entry]:
    harvests, evaluations = evidence.harvests, evidence.evaluations
    latencies = [builder for cost in evidence.costs for builder in _latencies(cost, evidence)]
    return [
        (
            PRICES,
            "Time per token by draft length",
            latencies or [_lacking(f"needs measured costs: {COSTS}")],
        ),
        (PRICES, "Forward times by regression", [partial(forward_times, evidence.costs)]),
        (
            PRICES,
            "Frontiers of discarded tokens and target calls",
            _each(frontier, evidence.thresholds, harvests),
        ),
        (PRICES, "Best threshold of every rule", _each(tuned, evidence.thresholds, harvests)),
        (
            PRICES,
            "Energy per token",
            [partial(energy, one) for one in evaluations] or [_lacking(DECODED)],
        ),
    ]


def _latencies(cost: Json, evidence: Evidence) -> list[Builder]:
    """One for each temperature of the harvests of its pair."""
    harvests = of_pair(cost["pair"], evidence.harvests)
    decoded = [
        one
        for one in evidence.evaluations
        if models(one.results["run"]["pair"]) == models(cost["pair"])
    ]
    read = cache(partial(rounds, harvests))
    temperatures = sorted(
        {float(harvest.manifest["warp"]["temperature"]) for harvest in harvests}, reverse=True
    )

    def build(temperature: float) -> Figure:
        return latency(read()[temperature], cost, decoded)

    return [partial(build, temperature) for temperature in temperatures] or [
        partial(latency, [], cost)
    ]


def _each(
    build: Callable[[Json, Sequence[Harvest]], Figure],
    thresholds: Sequence[Json],
    harvests: Sequence[Harvest],
) -> list[Builder]:
    return [partial(build, found, harvests) for found in thresholds] or [_lacking(TUNED)]


def _heads(evidence: Evidence) -> list[Entry]:
    chosen = one_of_each(evidence.checkpoints)
    reads = [cache(partial(predicted, checkpoint, evidence.harvests)) for checkpoint in chosen]
    hrad = [checkpoint for checkpoint in chosen if checkpoint.config["predictor"] == "hrad"]

    def matrix(kind: tuple[str, float]) -> Figure:
        rows = [
            read()
            for read, checkpoint in zip(reads, chosen, strict=True)
            if _kind(checkpoint) == kind
        ]
        return drift([one for row in rows for one in row])

    def points(checkpoint: Checkpoint) -> Figure:
        home = trained_on(checkpoint, evidence.harvests)
        if home is None:
            raise Missing(NEEDS)
        return tsne(activations(home, checkpoint.config["gamma"]))

    def ages(checkpoint: Checkpoint) -> Figure:
        return feature_age(aged(checkpoint, evidence.harvests))

    def of_hrad(build: Callable[[Checkpoint], Figure]) -> list[Builder]:
        return [partial(build, checkpoint) for checkpoint in hrad] or [_lacking(CLASSIFIER)]

    reliabilities = [partial(_of, read, diagrams) for read in reads]
    matrices = [partial(matrix, kind) for kind in dict.fromkeys(map(_kind, chosen))]
    sweeps = [partial(sweep, group) for group in _by_data(evidence.checkpoints)]
    return [
        (HEADS, "Reliability before and after calibration", reliabilities or [_lacking(NEEDS)]),
        (HEADS, "Drift across datasets", matrices or [_lacking(NEEDS)]),
        (HEADS, "SpecDec++ heads by depth and weight", sweeps),
        (HEADS, "Activations of H-RAD", of_hrad(points)),
        (HEADS, "Confusion of H-RAD", of_hrad(confusions)),
        (HEADS, "Prediction against the age of features", of_hrad(ages)),
    ]


def one_of_each(checkpoints: Sequence[Checkpoint]) -> list[Checkpoint]:
    """Of those with the same recipe and training harvest the first, so that of a sweep not every
    head is shown."""
    found: dict[tuple[str, str, str], Checkpoint] = {}
    for checkpoint in checkpoints:
        config = checkpoint.config
        found.setdefault(
            (config["predictor"], config["settings"].get("recipe", ""), _data(checkpoint)),
            checkpoint,
        )
    return list(found.values())


def _by_data(checkpoints: Sequence[Checkpoint]) -> list[list[Checkpoint]]:
    """SpecDec++ heads by the harvest they were trained on; one empty group where there are none."""
    found: dict[str, list[Checkpoint]] = {}
    for checkpoint in checkpoints:
        if checkpoint.config["predictor"] == "specdecpp":
            found.setdefault(_data(checkpoint), []).append(checkpoint)
    return list(found.values()) or [[]]


def _data(checkpoint: Checkpoint) -> str:
    return str(checkpoint.config["provenance"]["data"]["sha256"])


def _kind(checkpoint: Checkpoint) -> tuple[str, float]:
    return checkpoint.config["predictor"], float(checkpoint.config["warp"]["temperature"])


def _of(read: Callable[[], Sequence[Any]], build: Callable[..., Figure], *rest: Any) -> Figure:
    return build(read(), *rest)


def _lacking(needs: str) -> Builder:
    def build() -> Figure:
        raise Missing(needs)

    return build
