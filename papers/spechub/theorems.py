"""What SpecHub's theorems say of two candidates, counted; and the acceptance of up to ten."""

from collections.abc import Iterator, Sequence
from itertools import islice, product
from math import sqrt

import numpy as np
import torch
from matplotlib.figure import Figure as Canvas
from scipy.optimize import linprog
from torch import Tensor

from papers.spechub.toy import (
    RULES,
    SEED,
    distinct_pair,
    hub_pair,
    independent,
    single,
    softmaxes,
    transport_optimum,
)
from reports import drawing
from reports.figure import Entry, Figure, Record

VOCABS, DRAWS, CLOSE = (3, 4, 6), 50, 1e-9
DRAFTS, ORDERS = 10, 500
MARGINAL = "accepted, probability"


# Two candidates -----------------------------------------------------------------------------------


def full_optimum(p: Tensor, pairs: Tensor) -> float:
    """Return the optimum of `transport_optimum` from the whole transport: pi(i, j, y) for every y,
    whose marginals are `pairs` [V, V] and p [V], at cost 1 where y is neither i nor j."""
    size = len(p)
    every = list(product(range(size), repeat=3))
    marginals = np.zeros((size**2 + size, len(every)))
    for column, (i, j, y) in enumerate(every):
        marginals[[i * size + j, size**2 + y], column] = 1
    cost = [float(y not in (i, j)) for i, j, y in every]
    wanted = np.concatenate([pairs.flatten().numpy(), p.numpy()])
    # the last row follows from the others, up to rounding, which a solver may not forgive
    found = linprog(cost, A_eq=marginals[:-1], b_eq=wanted[:-1], method="highs")
    return float(1 - found.fun)


def random_pairs(size: int, alike: float) -> list[tuple[Tensor, Tensor]]:
    """Return pairs (p, q) [V]: p peaky, q with the share `alike` of p, the rest as p was drawn."""
    rows = np.random.default_rng(SEED).dirichlet([0.5] * size, size=(DRAWS, 2))
    p, other = torch.from_numpy(rows).unbind(1)
    return list(zip(p, alike * p + (1 - alike) * other, strict=True))


def counted_theorems() -> Figure:
    """Return how far apart what is said to be equal is, and in how many pairs (p, q) SpecHub is
    ahead where that is promised, and where it is not."""
    return Figure(
        name="spechub-theorems",
        title="SpecHub's theorems, counted",
        source="SpecHub, the LP of section 3, and its theorems over RRS and over OTM",
        kind="exact",
        n=f"{DRAWS} pairs (p, q) a row (seed {SEED})",
        interval="no interval: solved, and enumerated",
        records=[
            {"tokens": size, "shared by p and q": alike, **_counted(random_pairs(size, alike))}
            for size, alike in product(VOCABS, (0.0, 0.5))
        ],
    )


def _counted(pairs: Sequence[tuple[Tensor, Tensor]]) -> Record:
    apart, short, ahead = 0.0, 0.0, dict[str, list[bool]]()
    for p, q in pairs:
        best = {law: transport_optimum(p, law(q)) for law in (independent, distinct_pair, hub_pair)}
        apart = max(apart, *(abs(full_optimum(p, law(q)) - found) for law, found in best.items()))
        hub, top = RULES["SpecHub"](p, q), float(q.max())
        short = max(short, abs(best[hub_pair] - hub))
        for over, other, promised in (
            ("RRS", RULES["RRS"](p, q), top / (1 - top) >= 1 - single(p, q)),
            ("OTM, i.i.d. pairs", best[independent], top >= 0.5),
        ):
            where = "where promised" if promised else "elsewhere"
            ahead.setdefault(f"over {over}, {where}", []).append(hub >= other - CLOSE)
    columns = [
        f"over {name}, {where}"
        for name in ("RRS", "OTM, i.i.d. pairs")
        for where in ("where promised", "elsewhere")
    ]
    return {
        "whole transport less the LP, at most": apart,
        "LP of hub pairs less SpecHub, at most": short,
        **{name: f"{sum(ahead.get(name, ()))} of {len(ahead.get(name, ()))}" for name in columns},
    }


# Ten drafts ---------------------------------------------------------------------------------------


def with_replacement(p: Tensor, q: Tensor) -> Iterator[float]:
    """Yield the probability that the first, second, ... i.i.d. candidate is the accepted one."""
    left = 1.0
    while True:
        accept = single(p, q)
        yield left * accept
        left *= 1 - accept
        p = (p - q).clamp_min(0)
        p = p / p.sum() if p.sum() > 0 else p


def without(p: Tensor, q: Tensor, generator: torch.Generator) -> Iterator[Tensor]:
    """Yield the same [ORDERS] of candidates without replacement, each given those drawn before it;
    their mean is the probability."""
    p, q, left = (x.expand(ORDERS, -1) for x in (p, q, torch.ones(1, dtype=p.dtype)))
    while True:
        accept = torch.minimum(p, q).sum(1, keepdim=True)
        yield (left * accept)[:, 0]
        left = left * (1 - accept)
        over = (q - p).clamp_min(0)  # the distribution of a rejected candidate
        sure = over.sum(1, keepdim=True) <= 0
        drawn = torch.multinomial(torch.where(sure, q, over), 1, generator=generator)
        p = torch.where(sure, p, (p - q).clamp_min(0))
        p, q = p / p.sum(1, keepdim=True), q.scatter(1, drawn, 0.0)
        q = q / q.sum(1, keepdim=True)


def many_drafts() -> Figure:
    """Return the marginal acceptance of each of ten candidates, on toy distributions."""
    records, errors = list[Record](), list[float]()
    for temperature in (0.25, 0.5):
        pairs = softmaxes("normal", temperature, 0.7)
        generator = torch.Generator().manual_seed(SEED)
        found: dict[str, Tensor] = {
            "RRS": torch.tensor([[*islice(with_replacement(*pair), DRAFTS)] for pair in pairs]),
            "RRSw": torch.stack(
                [torch.stack([*islice(without(*pair, generator), DRAFTS)]) for pair in pairs]
            ),
        }
        errors.append(float(found["RRSw"].std(2).max()) / sqrt(ORDERS * len(pairs)))
        records += [
            {"T": temperature, "rule": rule, "candidate": number, MARGINAL: float(value)}
            for rule, values in found.items()
            for number, value in enumerate(values.reshape(len(pairs), DRAFTS, -1).mean((0, 2)), 1)
        ]
    return Figure(
        name="many-drafts",
        title="Acceptance of up to ten candidates",
        source="SpecHub, figure 9 (toy distributions)",
        kind="exact",
        n=f"8 pairs (p, q) of 50 tokens a temperature; RRSw {ORDERS} orders of candidates of each",
        interval=f"RRS exact; RRSw's standard error is {max(errors):.1e} at most",
        records=records,
        draw=_draw,
    )


def _draw(records: Sequence[Record], canvas: Canvas) -> None:
    for axes, part in drawing.panels_by(canvas, records, "T", 2, (3.4, 3.0)):
        drawing.lines(axes, part, "candidate", MARGINAL, "rule")
        axes.set_xlabel("candidate, in the order of tests")
        axes.set_yscale("log")


FIGURES = (
    Entry(
        "SpecHub's theorems, counted",
        "The first two columns are 0 up to rounding where the small linear programme is the whole"
        " transport, and SpecHub its solution. Promised: over RRS where q(a) / (1 - q(a)) is at"
        " least 1 - the acceptance of one candidate, over OTM of i.i.d. pairs where q(a) is at"
        " least 1/2, a the draft's most probable token.",
        lambda artifacts: [counted_theorems],
    ),
    Entry(
        "Acceptance of up to ten candidates",
        "The probability that a candidate is the accepted one, those before it rejected, of all"
        " positions. With replacement a candidate may be one that was rejected.",
        lambda artifacts: [many_drafts],
    ),
)
