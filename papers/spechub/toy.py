"""Acceptance of one of two candidates by every rule on small distributions, computed exactly."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from statistics import mean

import numpy as np
import torch
from matplotlib.figure import Figure as Canvas
from scipy.optimize import linprog
from scipy.sparse import coo_matrix
from torch import Tensor

from decoding.draft import Draft
from decoding.verifiers.spechub import SpecHubVerifier
from decoding.verifiers.tree_walk import TreeVerifier
from reports.drawing import COLOURS, MARKERS
from reports.figure import Entry, Figure, Record

SETTINGS = [(temperature, alike) for temperature in (0.1, 0.25, 0.5) for alike in (0.7, 0.5)]
LAWS = {"normal": (torch.randn, 50), "uniform": (torch.rand, 16)}  # of logits: draws, tokens
PAIRS, SEED = 8, 0


@dataclass(frozen=True)
class Distributions:
    """Pairs (p, q), [V] float64 each, over which a row of the table is the mean."""

    name: str
    pairs: Sequence[tuple[Tensor, Tensor]]


# Acceptance ---------------------------------------------------------------------------------------


def transport_optimum(p: Tensor, pairs: Tensor) -> float:
    """Return the largest acceptance of any lossless rule for two candidates with joint distribution
    `pairs` [V, V], by linear programming.

    Optimal transport with membership cost (SpecTr, 2310.15141): pi(i, j, y) is the mass of the pair
    (i, j) answered with y, y = i or j. Maximise the total with sum_y pi(i, j, y) <= pairs[i, j] and
    sum_ij pi(i, j, y) <= p[y]; what is left of p makes the residual distribution."""
    drawn = [(i, j) for i, j in product(range(len(p)), repeat=2) if pairs[i, j] > 0]
    columns = [(n, len(drawn) + y) for n, pair in enumerate(drawn) for y in sorted(set(pair))]
    limits = np.array([*(pairs[i, j].item() for i, j in drawn), *p.tolist()])
    rows = np.array(columns).T.ravel()
    pairs_of = np.tile(np.arange(len(columns)), 2)
    uses = coo_matrix((np.ones(len(rows)), (rows, pairs_of)), shape=(len(limits), len(columns)))
    return float(
        -linprog(-np.ones(len(columns)), A_ub=uses.tocsr(), b_ub=limits, method="highs").fun
    )


def single(p: Tensor, q: Tensor) -> float:
    """Return the acceptance of one candidate."""
    return float(torch.minimum(p, q).sum())


def of_siblings(pair_distribution: Callable[[Tensor], Tensor], p: Tensor, q: Tensor) -> float:
    """Return the acceptance of RRS with independent pairs, or of RRSw with distinct ones: the first
    candidate is tested against p, the second against the residual."""
    left = (p - q).clamp_min(0)
    again = pair_distribution(q) / q[:, None]  # distribution of the second candidate by the first
    taken = torch.minimum(left / left.sum(), again).sum(1)
    return single(p, q) + float((q - p).clamp_min(0) @ taken)


def of_rule(
    verifier: TreeVerifier, pair_distribution: Callable[[Tensor], Tensor], p: Tensor, q: Tensor
) -> float:
    """Return the acceptance of a rule with the candidates it is exact for, over every pair."""
    drawn = pair_distribution(q)
    acceptance = 0.0
    for first, second in drawn.nonzero().tolist():
        draft = Draft([0, 0], [first, second], [q, 0 * q, 0 * q])
        end_prob = verifier.distribution(draft, p.expand(3, -1)).end_prob
        acceptance += float(drawn[first, second]) * (1 - float(end_prob[0]))
    return acceptance


def independent(q: Tensor) -> Tensor:
    """Return [V, V], the distribution of two i.i.d. candidates."""
    return torch.outer(q, q)


def distinct_pair(q: Tensor) -> Tensor:
    """Return [V, V], the distribution of two candidates drawn without replacement."""
    pairs = torch.outer(q / (1 - q), q)
    return pairs.fill_diagonal_(0)


def hub_pair(q: Tensor) -> Tensor:
    """Return [V, V], the distribution of SpecHub's pair: a token and the hub, or the reverse."""
    pairs, hub = torch.zeros(len(q), len(q), dtype=q.dtype), int(q.argmax())
    pairs[:, hub] = q
    pairs[hub] = q[hub] * q / (1 - q[hub])
    pairs[hub, hub] = 0
    return pairs


RULES: Mapping[str, Callable[[Tensor, Tensor], float]] = {
    "one candidate": single,
    "RRS": partial(of_siblings, independent),
    "RRSw": partial(of_siblings, distinct_pair),
    "SpecHub": partial(of_rule, SpecHubVerifier(), hub_pair),
    "OTM, i.i.d. pairs": lambda p, q: transport_optimum(p, independent(q)),
    "OTM, distinct pairs": lambda p, q: transport_optimum(p, distinct_pair(q)),
}


# Distributions ------------------------------------------------------------------------------------


def toy_distributions() -> list[Distributions]:
    """Return two pairs of distributions of three tokens, then softmaxes of logits by law."""
    small = [([0.5, 0.3, 0.2], [0.6, 0.3, 0.1]), ([0.2, 0.5, 0.3], [0.5, 0.3, 0.2])]
    fixed = [(p, q, torch.tensor([p, q], dtype=torch.float64)) for p, q in small]
    return [
        *(Distributions(f"p = {p}, q = {q}", [(rows[0], rows[1])]) for p, q, rows in fixed),
        *(
            Distributions(f"{law}, T = {t}, λ = {alike}", softmaxes(law, t, alike))
            for law in LAWS
            for t, alike in SETTINGS
        ),
    ]


def softmaxes(law: str, temperature: float, alike: float) -> list[tuple[Tensor, Tensor]]:
    """Return pairs (p, q) from logits of a law of `LAWS`, N(0, 1) or uniform in [0, 1], the same
    for every setting. The draft's logits are a mixture of the target's (`alike`) and independent
    ones: a low temperature makes both peaky, `alike` sets how well they agree."""
    draw, size = LAWS[law]
    generator = torch.Generator().manual_seed(SEED)
    u, other = (draw(PAIRS, size, dtype=torch.float64, generator=generator) for _ in range(2))
    p, q = (torch.softmax(z / temperature, -1) for z in (u, alike * u + (1 - alike) * other))
    return list(zip(p, q, strict=True))


# Figure -------------------------------------------------------------------------------------------


def toy_acceptance(distributions: Sequence[Distributions] | None = None) -> Figure:
    """Return the mean acceptance of every rule on every set of distributions; by default those of
    `toy_distributions`."""
    distributions = toy_distributions() if distributions is None else distributions
    return Figure(
        name="toy-acceptance",
        title="Acceptance of two candidates on toy distributions",
        source="SpecHub, table 4 (draws of our own)",
        kind="exact",
        n=(
            f"{sum(len(one.pairs) for one in distributions)} pairs of distributions;"
            f" {' and '.join(f'{size} tokens of {law}' for law, (_, size) in LAWS.items())} logits"
            f" (seed {SEED})"
        ),
        interval=(
            "no interval: nothing is sampled, each pair of candidates and each verdict is"
            " enumerated"
        ),
        records=[
            {
                **{"distributions": one.name, "pairs (p, q)": len(one.pairs)},
                **{
                    of(name): mean(rule(*pair) for pair in one.pairs)
                    for name, rule in RULES.items()
                },
            }
            for one in distributions
        ],
        draw=_draw,
    )


def of(rule: str) -> str:
    return f"{rule}, probability of acceptance"


def _draw(records: Sequence[Record], canvas: Canvas) -> None:
    names = [record["distributions"] for record in records]
    canvas.set_size_inches(8, 0.4 * len(names) + 1.4)
    axes = canvas.subplots()
    for place, rule in enumerate(RULES):
        axes.plot(
            [record[of(rule)] for record in records],
            range(len(names)),
            linestyle="",
            markersize=8,
            label=rule,
            color=COLOURS[place],
            marker=MARKERS[place],
            markerfacecolor="none",
        )
    axes.set_yticks(range(len(names)), [name.replace(", q", "\nq") for name in names], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.02)
    axes.grid(axis="y", alpha=0.3)
    axes.set_xlabel("probability that one of the candidates is accepted")
    canvas.legend(loc="outside upper center", ncols=len(RULES), fontsize=8)


FIGURES = (
    Entry(
        "Acceptance of two candidates on toy distributions",
        "OTM is the most any lossless rule can accept with such pairs, by linear programming."
        " SpecHub draws pairs of its own, so that it may be above the OTM of either or below it."
        " The paper's text says uniform logits; the numbers that it prints are those of normal ones"
        " with 50 tokens, to .015 on average, and .2 away from uniform ones.",
        lambda artifacts: [toy_acceptance],
    ),
)
