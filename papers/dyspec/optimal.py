"""DySpec's greedy construction against the best one, by brute force on small trees."""

from collections.abc import Callable, Iterator
from functools import cache

from decoding.models.table_lm import random_table
from reports.figure import Entry, Figure, Record

VOCAB, NODES, TABLES = 3, (2, 3, 4), 20
CONCENTRATIONS = {"peaky": 0.3, "flat": 2.0}
Path = tuple[int, ...]
Tree = frozenset[Path]
Draft = Callable[[Path], list[float]]
"""Path -> distribution of the next token."""
Worth = Callable[[float, float], float]
"""(value of a draw, probability with which its token was drawn) -> what the draw adds."""
WORTHS: dict[str, Worth] = {
    "draws that are reached": lambda value, drawn: value,
    "accepted tokens": lambda value, drawn: value * drawn,
}
"""Expectations where a token is accepted with the probability it was drawn with (hypothesis 1)."""


def expected(draft: Draft, nodes: int, worth: Worth, greedy: bool) -> float:
    """Return the expected worth of a tree of `nodes` draws. greedy: the draw of the largest value
    is made, as in `DySpecHeap`; otherwise the one that is best in the end, whatever is drawn."""

    def draws(tree: Tree) -> Iterator[tuple[float, Path, dict[int, float]]]:
        """Yield the value of the next draw below each node, and the distribution it is from."""
        for path in [(), *tree]:
            left = {y: q for y, q in enumerate(draft(path)) if (*path, y) not in tree}
            if (mass := sum(left.values())) > 0:
                reach = 1.0
                for depth, token in enumerate(path):
                    reach *= draft(path[:depth])[token]
                yield reach * mass, path, {y: q / mass for y, q in left.items()}

    @cache
    def from_here(tree: Tree) -> float:
        if len(tree) == nodes:
            return 0.0
        offers = sorted(draws(tree), key=lambda offer: -offer[0])
        return max(
            sum(
                share * (worth(value, share) + from_here(tree | {(*path, y)}))
                for y, share in shares.items()
            )
            for value, path, shares in offers[: 1 if greedy else None]
        )

    return from_here(frozenset())


def table_draft(seed: int, concentration: float) -> Draft:
    """Return a draft with a random distribution after every path."""
    table = random_table(VOCAB, seed, concentration)
    return cache(lambda path: table(path).tolist())


def greedy_against_best() -> Figure:
    """Return what greedy trees are worth, as a share of the best ones of as many draws."""
    records = list[Record]()
    for law, concentration in CONCENTRATIONS.items():
        drafts = [table_draft(seed, concentration) for seed in range(TABLES)]
        for nodes in NODES:
            record: Record = {"draft": law, "nodes": nodes}
            for name, worth in WORTHS.items():
                pairs = [
                    [expected(draft, nodes, worth, greedy) for greedy in (True, False)]
                    for draft in drafts
                ]
                shares = [greedy / best for greedy, best in pairs]
                record |= {f"{name}, best": sum(best for _, best in pairs) / len(pairs)}
                record |= {f"{name}, greedy / best": sum(shares) / len(shares)}
                record |= {f"{name}, least": min(shares)}
            records.append(record)
    return Figure(
        name="greedy-against-best",
        title="The greedy tree against the best",
        source="DySpec, theorem D.1",
        kind="exact",
        n=f"{TABLES} random drafts of {VOCAB} tokens of each law",
        interval="no interval: every tree is enumerated, with everything that can be drawn",
        records=records,
    )


FIGURES = (
    Entry(
        "The greedy tree against the best",
        "Best: of all ways to choose the next draw by what was drawn, found by brute force. The"
        " greedy tree has the most draws that are reached. Accepted tokens are another sum: a draw"
        " counts for more where the draft is surer of its token, which DySpec's value leaves out."
        " Least: of the worst draft.",
        lambda artifacts: [greedy_against_best],
    ),
)
