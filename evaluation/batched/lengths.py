"""The best fixed draft length for every number of requests decoded together."""

from collections.abc import Sequence
from dataclasses import dataclass

from decoding.batch_cost import BatchCost, share
from evaluation.replay.tuning import Candidate, best, interval, speedup, spread


@dataclass(frozen=True)
class BatchChoice:
    """length: to draft, 0: nothing, for no length pays on the prompts it was chosen on (the whole
    95 % interval of its speed-up there must be above 1); best: the fastest length there all the
    same; the rest is of `length`, on prompts it was not chosen on, with 95 % intervals over them:
    tokens_per_second: of all requests together; speedup: over no draft; best_speedup: of `best`"""

    requests: int
    length: int
    best: int
    tokens_per_second: float
    tokens_interval: tuple[float, float]
    plain_tokens_per_second: float
    speedup: float
    interval: tuple[float, float]
    best_speedup: float
    best_interval: tuple[float, float]


def best_lengths(
    chosen_on: Sequence[Candidate],
    judged_on: Sequence[Candidate],
    cost: BatchCost,
    sizes: Sequence[int],
    gamma: int,
) -> list[BatchChoice]:
    """A choice for each of `sizes`. chosen_on, judged_on: fixed lengths, counted on different
    prompts. Every request pays its share of a step in which all of them draft as much."""
    return [_choice(chosen_on, judged_on, cost, size, gamma) for size in sizes]


def _choice(
    chosen_on: Sequence[Candidate],
    judged_on: Sequence[Candidate],
    cost: BatchCost,
    requests: int,
    gamma: int,
) -> BatchChoice:
    table = share(cost, requests, gamma)
    pick = best(chosen_on, table)
    low = spread(pick, table)[0]
    pays = (speedup(pick, table) if low != low else low) > 1  # NaN of a single prompt
    judged = next(one for one in judged_on if one.threshold == pick.threshold)
    counts, plain = judged.counts, 1 / table.autoregressive
    spent = table.price(counts)
    found, ends = speedup(judged, table), spread(judged, table)
    rate = float(counts["emitted"].sum() / spent.sum())
    return BatchChoice(
        requests,
        int(pick.threshold) if pays else 0,
        int(pick.threshold),
        rate if pays else plain,
        interval(counts["emitted"], spent) if pays else (plain, plain),
        plain,
        found if pays else 1.0,
        ends if pays else (1.0, 1.0),
        found,
        ends,
    )
