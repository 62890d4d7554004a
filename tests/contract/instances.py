"""Random (p, q) instances in the families of the specification, and what a verification rule makes
of them."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product

import torch
from torch import Tensor

from decoding.draft import Draft
from decoding.verification import VerdictDistribution
from tests.contract.enumeration import Distribution, autoregressive_distribution, dirichlet

Prefix = tuple[int, ...]
Rule = Callable[[Draft, Tensor], VerdictDistribution]
Proposals = list[tuple[float, Draft, Tensor]]
"""Every draft with its probability and the target distributions it is verified against."""
FAMILIES = ("dirichlet", "peaky", "aligned", "sparse", "equal", "greedy")


@dataclass(frozen=True)
class Instance:
    """p and q after every prefix, [V] float64 each."""

    vocab: int
    gamma: int
    p: Callable[[Prefix], Tensor]
    q: Callable[[Prefix], Tensor]


def instance(family: str, vocab: int, gamma: int, seed: int) -> Instance:
    generator = torch.Generator().manual_seed(seed)

    @cache
    def distributions(prefix: Prefix) -> tuple[Tensor, Tensor]:
        return _pair(family, vocab, generator)

    p, q = (lambda prefix, side=side: distributions(prefix)[side] for side in (0, 1))
    return Instance(vocab, gamma, p, q)


def _pair(family: str, vocab: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    concentration = 0.3 if family == "peaky" else 1.0
    p, q = (dirichlet(vocab, generator, concentration) for _ in range(2))
    if family == "aligned":
        return p, 0.7 * p + 0.3 * q
    if family == "sparse":
        return _with_zeros(p, generator), _with_zeros(q, generator)
    if family == "equal":
        return p, p
    if family == "greedy":
        return torch.eye(vocab, dtype=torch.float64)[p.argmax()], q
    return p, q


def _with_zeros(distribution: Tensor, generator: torch.Generator) -> Tensor:
    kept = torch.rand(len(distribution), generator=generator) < 0.6
    kept[torch.randint(len(distribution), (1,), generator=generator)] = True
    return distribution * kept / (distribution * kept).sum()


def chain(tokens: Sequence[int], q: Sequence[Tensor]) -> Draft:
    """One path. q: [V] of each token, and of the last row."""
    return Draft(list(range(len(tokens))), list(tokens), q)


def drafts(
    case: Instance,
    stop: Callable[[Prefix], bool] = lambda drawn: False,
    kept: Callable[[Prefix], int] = len,
) -> Proposals:
    """Every draft with its probability and p [g + 1, V].

    Drafting ends after `gamma` tokens or where `stop(drawn)`; of the drawn tokens the first
    `kept(drawn)` are sent (all of them, unless a test wants to be biased)."""
    found: Proposals = []
    open_prefixes: list[tuple[float, Prefix]] = [(1.0, ())]
    while open_prefixes:
        probability, drawn = open_prefixes.pop()
        if len(drawn) == case.gamma or stop(drawn):
            sent = drawn[: kept(drawn)]
            q = [case.q(sent[:t]) for t in range(len(sent))]
            p = torch.stack([case.p(sent[:t]) for t in range(len(sent) + 1)])
            found.append((probability, chain(sent, [*q, torch.zeros_like(p[0])]), p))
        else:
            distribution = case.q(drawn).tolist()
            open_prefixes += [
                (probability * distribution[x], (*drawn, x))
                for x in range(case.vocab)
                if distribution[x] > 0
            ]
    return found


def output_distribution(
    case: Instance, rule: Rule, proposals: Proposals | None = None
) -> Distribution:
    """Distribution of the first gamma + 1 tokens: one round under `rule`, the rest from the
    target."""
    emitted: Distribution = defaultdict(float)
    for probability, draft, p in proposals or drafts(case):
        verdict = rule(draft, p)
        for row, end in enumerate(verdict.end_prob.tolist()):
            if end > 0:
                path, residual = tuple(draft.path(row)), verdict.residual(row)
                if residual is None:
                    emitted[path] += probability * end
                for token, follows in enumerate([] if residual is None else residual.tolist()):
                    emitted[(*path, token)] += probability * end * follows
    distribution: Distribution = defaultdict(float)
    for prefix, probability in emitted.items():
        for rest in product(range(case.vocab), repeat=case.gamma + 1 - len(prefix)):
            total = probability
            for count, token in enumerate(rest):
                total *= case.p((*prefix, *rest[:count]))[token].item()
            distribution[(*prefix, *rest)] += total
    return dict(distribution)


def expected_accepted(case: Instance, rule: Rule, proposals: Proposals | None = None) -> float:
    """E[tau], the mean number of accepted draft tokens."""
    total = 0.0
    for probability, draft, p in proposals or drafts(case):
        lengths = torch.tensor([len(draft.rows_to(row)) for row in range(len(draft) + 1)])
        total += probability * float(rule(draft, p).end_prob @ lengths.double())
    return total


def assert_same(found: VerdictDistribution, literal: VerdictDistribution) -> None:
    """Where the path ends, and what follows wherever it may."""
    torch.testing.assert_close(found.end_prob, literal.end_prob, atol=1e-9, rtol=0)
    for row in (found.end_prob > 1e-9).nonzero()[:, 0].tolist():
        residuals = found.residual(row), literal.residual(row)
        torch.testing.assert_close(*residuals, atol=1e-9, rtol=0)


def exact(case: Instance) -> Distribution:
    """What a lossless rule must give."""
    return autoregressive_distribution(case.p, case.vocab, case.gamma + 1)
