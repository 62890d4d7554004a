"""Verification of a tree, one node after another: a rule for the candidates of one position is a
rule for the tree."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Generator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from decoding.draft import Draft, Shape, Verdict
from decoding.interfaces import CandidateVerifier
from decoding.picking import refuse_unless_finite
from decoding.sampling import Sampler, SiblingSampler
from decoding.verification import Rows, VerdictDistribution, WarpedRows, verdict_at

Trials = Generator[tuple[Any, Any, Any], None, Tensor]
"""One position put to the test. Yields (which candidate, a, b): it is accepted with probability
min(1, a / b), given that all trials before it failed. Returns the residual distribution [V], for
when all failed. What a trial needs is computed when it is asked for.

Or m positions with as many candidates each, on a GPU, where nobody looks at a number before all are
there: p, q and the residual are [m, V] then, tokens, a and b [m]."""
Tokens = Sequence[int] | Sequence[Tensor]
"""Candidates in draw order: of one position, or [m] each."""


class TreeVerifier(ABC):
    """Walk down from the root: at each node one child is accepted, or none and the path ends there.

    A path that reaches a leaf continues with p there; an open leaf, where the target has not run,
    with nothing."""

    lossless = True
    siblings: SiblingSampler
    shapes: Collection[Shape] = ("chain", "branch_point", "paths", "tree")
    max_siblings: int | None = None
    reads_q = True

    @abstractmethod
    def trials(self, p: Tensor, q: Tensor, tokens: Tokens) -> Trials:
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
        there = p.device.type != "cpu"
        known = self._all_trials(draft, p, children) if there else {}
        while row <= draft.closed:
            candidates = [tokens[child - 1] for child in children[row]]
            trials = known[row] if row in known else self.trials(p[row], draft.q[row], candidates)
            accepted, residual = run_trials(trials, sampler)
            if residual is not None:
                return verdict_at(draft, row, residual, sampler)
            row = children[row][accepted]
        return verdict_at(draft, row, None, sampler)

    def _all_trials(
        self, draft: Draft, p: Rows, children: Sequence[Sequence[int]]
    ) -> dict[int, Trials]:
        """Return the numbers of each row with children that the target was run on, in one copy."""
        by_count = dict[int, list[int]]()
        for row in range(draft.closed + 1):
            by_count.setdefault(len(children[row]), []).append(row)
        by_count.pop(0, None)
        below = [
            [[draft.token[child - 1] for child in children[row]] for row in rows]
            for rows in by_count.values()
        ]
        groups = list[Group]()
        for rows, tokens in zip(by_count.values(), placed(below, p.device), strict=True):
            here = torch.stack([p[row] for row in rows])
            q = torch.stack([draft.q[row] for row in rows]) if self.reads_q else here
            groups.append(Group.of(self, here, q, rows, tokens))
        return found_in(groups, draft, p) if groups else {}


@dataclass(frozen=True)
class Group:
    """Positions of a tree with as many candidates each, put to the test on a GPU.

    rows: [m] of the draft; candidates: k of each; numbers: [3 t + k, m] float64, of t trials which
    candidate, a and b, then p of the k candidates; residual: [m, V]"""

    rows: list[int]
    candidates: int
    numbers: Tensor
    residual: Tensor

    @classmethod
    def of(
        cls, rule: CandidateVerifier, p: Tensor, q: Tensor, rows: list[int], tokens: Tensor
    ) -> "Group":
        """p, q: [m, V]; tokens: [m, k], candidates in draw order."""
        trials, residual = _exhausted(rule.trials(p, q, tokens.unbind(1)))
        one = p.new_ones(len(rows), dtype=torch.float64)
        numbers = [one * part for trial in trials for part in trial]
        of_tokens = p.gather(1, tokens).T
        return cls(rows, tokens.shape[1], torch.cat([torch.stack(numbers), of_tokens]), residual)


def placed(tokens: Sequence[list[list[int]]], device: torch.device) -> list[Tensor]:
    """[m, k] of each group of candidates, in one copy."""
    flat = torch.tensor([token for group in tokens for row in group for token in row]).to(device)
    parts = flat.split([len(group) * len(group[0]) for group in tokens])
    return [part.view(len(group), -1) for part, group in zip(parts, tokens, strict=True)]


def found_in(
    groups: Sequence[Group], draft: Draft | None = None, p: Rows | None = None
) -> dict[int, Trials]:
    """The trials of each row, whose numbers come to the host in one copy; p of the candidates is
    noted there. Raises UserError where one of them is none."""
    sent = torch.cat([group.numbers.flatten() for group in groups]).tolist()
    refuse_unless_finite(sum(sent))
    found, first = dict[int, Trials](), 0
    children = draft.children() if draft else []
    for group in groups:
        last, count = first + group.numbers.numel(), len(group.rows)
        for place, row in enumerate(group.rows):
            column = sent[first + place : last : count]
            found[row] = _known(column[: -group.candidates], group.residual[place])
            if draft and isinstance(p, WarpedRows):
                for child, known in zip(children[row], column[-group.candidates :], strict=True):
                    p.note(row, draft.token[child - 1], known)
        first = last
    return found


def trials_of(rule: CandidateVerifier, p: Tensor, q: Tensor, tokens: list[int]) -> Trials:
    """`rule.trials`, of which a GPU sends all numbers at once."""
    if p.device.type == "cpu":
        return rule.trials(p, q, tokens)
    (there,) = placed([[tokens]], p.device)
    return found_in([Group.of(rule, p[None], q[None], [0], there)])[0]


def _known(numbers: Sequence[float], residual: Tensor) -> Trials:
    """Trials whose numbers are there: candidate, a and b of each."""
    for candidate, a, b in zip(numbers[::3], numbers[1::3], numbers[2::3], strict=True):
        if candidate >= 0:
            yield int(candidate), a, b
    return residual


def at(values: Tensor, token: Any) -> Any:
    """A number of [V]; of [m, V] one of each row, [m] float64."""
    if values.dim() == 1:
        return values[token].item()
    return values.gather(1, token[:, None]).squeeze(1).double()


def mass_of(values: Tensor) -> Any:
    """The sum of [V]; of [m, V] one of each row, [m] float64."""
    total = values.sum(-1, dtype=torch.float64)
    return total.item() if values.dim() == 1 else total


def take_out(values: Tensor, token: Any) -> None:
    """Set to 0, in place, as `at` finds them."""
    if values.dim() == 1:
        values[token] = 0
    else:
        values.scatter_(1, token[:, None], 0.0)


def certain(drawn: Any) -> bool:
    """Above 0, as far as it is known here."""
    return isinstance(drawn, Tensor) or drawn > 0


def run_trials(trials: Trials, sampler: Sampler) -> tuple[int, Tensor | None]:
    """The accepted candidate, or the residual when there is none."""
    try:
        while True:
            candidate, a, b = next(trials)
            if sampler.accept(a, b):
                return candidate, None
    except StopIteration as end:
        return -1, end.value


def _exhausted(trials: Trials) -> tuple[list[tuple[Any, Any, Any]], Tensor]:
    """All trials, and the residual."""
    found = []
    try:
        while True:
            found.append(next(trials))
    except StopIteration as end:
        return found, end.value


def _exhaust(trials: Trials) -> tuple[list[tuple[int, float]], Tensor]:
    """(candidate, probability of its acceptance) of every trial in order, and the residual."""
    found, residual = _exhausted(trials)
    return [(child, min(1.0, a / b) if b > 0 else 0.0) for child, a, b in found], residual


def normalised(mass: Tensor, otherwise: Tensor) -> Tensor:
    """norm(mass) [V], in place, or of many rows. No mass left means it is never drawn from:
    `otherwise` stands in."""
    if mass.dim() > 1 or mass.device.type != "cpu":
        sums = mass.sum(-1, keepdim=True, dtype=torch.float64)
        return torch.where(sums > 0, mass.div_(sums), otherwise)
    total = mass.sum(dtype=torch.float64).item()
    return mass.div_(total) if total > 0 else otherwise
