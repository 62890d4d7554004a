"""Verification of a tree, one node after another: a rule for the candidates of one position is a
rule for the tree."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Generator, Sequence

import torch
from torch import Tensor

from decoding.draft import Draft, Shape, Verdict
from decoding.sampling import Sampler, SiblingSampler
from decoding.verification import Rows, VerdictDistribution, verdict_at

Trials = Generator[tuple[int, float, float], None, Tensor]
"""One position put to the test. Yields (which candidate, a, b): it is accepted with probability
min(1, a / b), given that all trials before it failed. Returns the residual distribution [V], for
when all failed. What a trial needs is computed when it is asked for."""


class TreeVerifier(ABC):
    """Walk down from the root: at each node one child is accepted, or none and the path ends there.

    A path that reaches a leaf continues with p there; an open leaf, where the target has not run,
    with nothing."""

    lossless = True
    siblings: SiblingSampler
    shapes: Collection[Shape] = ("chain", "branch_point", "paths", "tree")
    max_siblings: int | None = None

    @abstractmethod
    def trials(self, p: Tensor, q: Tensor, tokens: Sequence[int]) -> Trials:
        """The rule at one position. p, q: [V], target and draft distribution there; tokens: the
        candidates in draw order."""

    def distribution(self, draft: Draft, p: Tensor) -> VerdictDistribution:
        """Float64 whatever the distributions are."""
        children, tokens = draft.children(), draft.token

        def outcome(row: int) -> tuple[list[tuple[int, float]], Tensor]:
            candidates = [tokens[child - 1] for child in children[row]]
            return _exhaust(self.trials(p[row].double(), draft.q[row].double(), candidates))

        end_prob = torch.zeros(len(draft) + 1, dtype=torch.float64)
        end_prob[0] = 1
        for row in range(draft.closed + 1):
            for child, accept in outcome(row)[0]:
                end_prob[children[row][child]] += end_prob[row] * accept
                end_prob[row] *= 1 - accept
        return VerdictDistribution(
            end_prob, lambda row: outcome(row)[1] if row <= draft.closed else None
        )

    def verify(self, draft: Draft, p: Rows, sampler: Sampler) -> Verdict:
        """`distribution`, walked lazily: touches only the distributions of rows on the accepted
        path."""
        children, tokens, row = draft.children(), draft.token, 0
        while row <= draft.closed:
            candidates = [tokens[child - 1] for child in children[row]]
            accepted, residual = run_trials(self.trials(p[row], draft.q[row], candidates), sampler)
            if residual is not None:
                return verdict_at(draft, row, residual, sampler)
            row = children[row][accepted]
        return verdict_at(draft, row, None, sampler)


def run_trials(trials: Trials, sampler: Sampler) -> tuple[int, Tensor | None]:
    """The accepted candidate, or the residual when there is none."""
    try:
        while True:
            candidate, a, b = next(trials)
            if sampler.accept(a, b):
                return candidate, None
    except StopIteration as end:
        return -1, end.value


def _exhaust(trials: Trials) -> tuple[list[tuple[int, float]], Tensor]:
    """(candidate, probability of its acceptance) of every trial in order, and the residual."""
    found: list[tuple[int, float]] = []
    try:
        while True:
            candidate, a, b = next(trials)
            found.append((candidate, min(1.0, a / b) if b > 0 else 0.0))
    except StopIteration as end:
        return found, end.value


def normalised(mass: Tensor, otherwise: Tensor) -> Tensor:
    """norm(mass) [V], in place. No mass left means it is never drawn from: `otherwise` stands
    in."""
    total = mass.sum(dtype=torch.float64).item()
    return mass.div_(total) if total > 0 else otherwise
