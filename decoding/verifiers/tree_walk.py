"""Verification of a tree, one node after another: a rule for the candidates of one position is a
rule for the tree."""

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Collection, Generator, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from decoding.draft import Draft, Shape, Verdict
from decoding.interfaces import CandidateVerifier
from decoding.picking import refuse_unless_finite
from decoding.sampling import Sampler, SiblingSampler
from decoding.together import brought, sent
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
    """Walks down from the root: at each node one child is accepted, or none and the path ends.

    A path that reaches a leaf continues with a token from p there; at an open leaf, where the
    target has not run, with none."""

    lossless = True
    siblings: SiblingSampler
    shapes: Collection[Shape] = ("chain", "branch_point", "paths", "tree")
    max_siblings: int | None = None
    reads_q = True

    @abstractmethod
    def trials(self, p: Tensor, q: Tensor, tokens: Tokens) -> Trials:
        """Return the trials of one position. p, q: [V], target and draft distribution there;
        tokens: the candidates in draw order."""

    def distribution(self, draft: Draft, p: Tensor) -> VerdictDistribution:
        """Return the distribution of the verdict, always in float64."""
        children, tokens = draft.children(), draft.token

        def outcome(row: int) -> tuple[list[tuple[Any, Any, Any]], Tensor]:
            candidates = [tokens[child - 1] for child in children[row]]
            return _exhausted(self.trials(p[row].double(), draft.q[row].double(), candidates))

        end_prob = torch.zeros(len(draft) + 1, dtype=torch.float64)
        end_prob[0] = 1
        for row in range(draft.closed + 1):
            for child, a, b in outcome(row)[0]:
                accept = min(1.0, a / b) if b > 0 else 0.0
                end_prob[children[row][child]] += end_prob[row] * accept
                end_prob[row] *= 1 - accept
        return VerdictDistribution(
            end_prob, lambda row: outcome(row)[1] if row <= draft.closed else None
        )

    def verify(self, draft: Draft, p: Rows, sampler: Sampler) -> Verdict:
        """Walk `distribution` lazily: read only the distributions of rows on the accepted path; on
        a device, where each read is a wait, all at once."""
        children, tokens, row = draft.children(), draft.token, 0
        sent = dict[int, Trials]()
        if p.device.type != "cpu":
            inner = [row for row in range(draft.closed + 1) if children[row]]
            below = {row: [tokens[child - 1] for child in children[row]] for row in inner}
            q = draft.q if self.reads_q else p
            for row, (trials, known) in _sent(self, p, q, below).items():
                sent[row] = trials
                if isinstance(p, WarpedRows):
                    for token, p_token in zip(below[row], known, strict=True):
                        p.note(row, token, p_token)
            row = 0
        while row <= draft.closed:
            candidates = [tokens[child - 1] for child in children[row]]
            trials = sent[row] if row in sent else self.trials(p[row], draft.q[row], candidates)
            accepted, residual = run_trials(trials, sampler)
            if residual is not None:
                return verdict_at(draft, row, residual, sampler)
            row = children[row][accepted]
        return verdict_at(draft, row, None, sampler)


def trials_of(rule: CandidateVerifier, p: Tensor, q: Tensor, tokens: list[int]) -> Trials:
    """Return `rule.trials`; a GPU sends all their numbers at once."""
    if p.device.type == "cpu":
        return rule.trials(p, q, tokens)
    return _sent(rule, p[None], q[None], {0: tokens})[0][0]


def _sent(
    rule: CandidateVerifier, p: Rows, q: Any, below: Mapping[int, list[int]]
) -> dict[int, tuple[Trials, Sequence[float]]]:
    """Return the trials of rows on a device and p of their candidates, sent to the host in one
    copy. Raises UserError if a number is not finite.

    below: candidates of each row. The m rows with the same number k of candidates are computed
    together: numbers [3 t + k, m] of t trials (candidate, a and b) and p of k candidates."""
    groups = defaultdict[int, list[int]](list)
    for row, candidates in below.items():
        groups[len(candidates)].append(row)
    order = [row for rows in groups.values() for row in rows]
    flat = torch.tensor([token for row in order for token in below[row]], dtype=torch.long)
    parts = sent(flat, p.device).split([count * len(rows) for count, rows in groups.items()])
    tables, residuals = list[Tensor](), list[Tensor]()
    for (count, rows), part in zip(groups.items(), parts, strict=True):
        tokens, here = part.view(-1, count), torch.stack([p[row] for row in rows])
        there = here if q is p else torch.stack([q[row] for row in rows])
        trials, residual = _exhausted(rule.trials(here, there, tokens.unbind(1)))
        ones = here.new_ones(len(rows), dtype=torch.float64)
        numbers = torch.stack([ones * number for trial in trials for number in trial])
        tables.append(torch.cat([numbers, here.gather(1, tokens).T]).T)
        residuals += residual.unbind()
    if not tables:
        return {}
    values = brought(torch.cat([table.flatten() for table in tables]))
    refuse_unless_finite(sum(values))
    lines = iter(values)
    by_row = dict[int, tuple[Trials, Sequence[float]]]()
    widths = [table.shape[1] for table in tables for _ in table]
    for row, width, residual in zip(order, widths, residuals, strict=True):
        line, count = list(islice(lines, width)), len(below[row])
        by_row[row] = _known(line[:-count], residual), line[-count:]
    return by_row


def _known(numbers: Sequence[float], residual: Tensor) -> Trials:
    """Yield trials from numbers on the host: candidate, a and b of each."""
    for candidate, a, b in zip(numbers[::3], numbers[1::3], numbers[2::3], strict=True):
        if candidate >= 0:
            yield int(candidate), a, b
    return residual


def at(values: Tensor, token: Any) -> Any:
    """Return the value at `token` of [V]; for [m, V] one of each row, [m] float64."""
    if values.dim() == 1:
        return values[token].item()
    return values.gather(1, token[:, None]).squeeze(1).double()


def mass_of(values: Tensor) -> Any:
    """Return the sum of [V]; for [m, V] one of each row, [m] float64."""
    total = values.sum(-1, dtype=torch.float64)
    return total.item() if values.dim() == 1 else total


def take_out(values: Tensor, token: Any) -> None:
    """Set the values at `token` (as in `at`) to 0, in place."""
    if values.dim() == 1:
        values[token] = 0
    else:
        values.scatter_(1, token[:, None], 0.0)


def certain(drawn: Any) -> bool:
    """Return whether `drawn` is above 0; taken to be so if it is a tensor, unread by the host."""
    return isinstance(drawn, Tensor) or drawn > 0


def run_trials(trials: Trials, sampler: Sampler) -> tuple[int, Tensor | None]:
    """Return the accepted candidate, or the residual when there is none."""
    try:
        while True:
            candidate, a, b = next(trials)
            if sampler.accept(a, b):
                return candidate, None
    except StopIteration as end:
        return -1, end.value


def _exhausted(trials: Trials) -> tuple[list[tuple[Any, Any, Any]], Tensor]:
    """Return all trials, and the residual."""
    every = []
    try:
        while True:
            every.append(next(trials))
    except StopIteration as end:
        return every, end.value


def normalised(mass: Tensor, otherwise: Tensor) -> Tensor:
    """Return norm(mass) [V], in place, or of many rows; `otherwise` where no mass is left, which is
    never drawn from."""
    if mass.dim() > 1 or mass.device.type != "cpu":
        sums = mass.sum(-1, keepdim=True, dtype=torch.float64)
        return torch.where(sums > 0, mass.div_(sums), otherwise)
    total = mass.sum(dtype=torch.float64).item()
    return mass.div_(total) if total > 0 else otherwise
