"""Several i.i.d. drafts from one prefix, consumed in order (HSD, 2601.05724, Algorithm 3)."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Annotated, Literal

import torch
from torch import Tensor

from decoding.draft import Draft, Verdict
from decoding.sampling import Sampler, SiblingSampler, iid
from decoding.verification import ChainVerifier, DraftPath, Rows, VerdictDistribution, verdict_at
from decoding.verifiers.block import BlockVerifier
from decoding.verifiers.token import TokenVerifier


@dataclass(frozen=True)
class _State:
    """The state after some of the drafts.

    row, tokens: the end of the accepted path
    left: [V], the residual of the target distribution there (p itself after a draft accepted to
    its end)"""

    row: int
    tokens: list[int]
    left: Tensor


class ParallelVerifier:
    """The next draft that begins with the accepted tokens goes on from there, against the residual
    distribution of the last.

    rule: "token" or "block" for each draft. Its joint ratio restarts at 1 (the released code
    carries it over, which is biased, and accepts full drafts by the uncapped ratio, which is biased
    too). A draft that has missed the accepted tokens once never returns."""

    lossless = True
    siblings: SiblingSampler = staticmethod(iid)
    shapes = ("chain", "paths")
    max_siblings = None

    def __init__(
        self, rule: Annotated[Literal["token", "block"], "how each draft is verified"]
    ) -> None:
        self.rule: ChainVerifier = TokenVerifier() if rule == "token" else BlockVerifier()

    def distribution(self, draft: Draft, p: Tensor) -> VerdictDistribution:
        """Return the residual in float64. After a draft stops, its next token has no mass in the
        residual, so no later draft goes that way: a row is reached by one history of the drafts,
        and what rounding adds to it is left out of the residual."""
        draft, p = replace(draft, q=[row.double() for row in draft.q]), p.double()
        histories = [(1.0, _State(0, [], p[0]))]
        for rows in paths(draft):
            histories = [
                (w * share, state)
                for w, before in histories
                for share, state in self._after(draft, p, rows, before)
            ]
        end_prob, left = torch.zeros(len(draft) + 1, dtype=torch.float64), dict[int, Tensor]()
        for weight, state in sorted(histories, key=itemgetter(0)):
            end_prob[state.row] += weight
            left[state.row] = state.left
        return VerdictDistribution(end_prob, lambda row: left.get(row, p[row]))

    def verify(self, draft: Draft, p: Rows, sampler: Sampler) -> Verdict:
        """`distribution`, walked lazily: touches the vocabulary where the rule for one draft
        does."""
        state = _State(0, [], p[0])
        for rows in paths(draft):
            path = _remaining(draft, p, rows, state)
            if path is not None:
                state = _advance(path, state, *self.rule.walk(path, sampler))
        return verdict_at(draft, state.row, state.left, sampler)

    def _after(
        self, draft: Draft, p: Tensor, rows: list[int], before: _State
    ) -> Iterator[tuple[float, _State]]:
        """Yield each state that one more draft can lead to, and its probability."""
        path = _remaining(draft, p, rows, before)
        if path is None:
            yield 1.0, before
            return
        distribution = self.rule.on_path(path)
        for accepted, share in enumerate(distribution.end_prob.tolist()):
            residual = distribution.residual(accepted)
            if share > 0 and residual is not None:
                yield share, _advance(path, before, accepted, residual)


def paths(draft: Draft) -> list[list[int]]:
    """Return the rows of each draft, without the root they share."""
    children = draft.children()
    assert not draft.open and all(len(rows) < 2 for rows in children[1:]), (
        "drafts may share the root only"
    )
    drafts = [[first] for first in children[0]]
    for rows in drafts:
        while children[rows[-1]]:
            rows += children[rows[-1]]
    return drafts


def _remaining(draft: Draft, p: Rows, rows: list[int], state: _State) -> DraftPath | None:
    """Return the part of a draft that is still to be verified; None if it does not continue the
    accepted tokens."""
    count = len(state.tokens)
    tokens = [draft.token[row - 1] for row in rows[:count]]
    if tokens != state.tokens:
        return None
    return DraftPath(draft, p, [0, *rows][count:], state.left)


def _advance(path: DraftPath, state: _State, accepted: int, residual: Tensor | None) -> _State:
    assert residual is not None, "parallel drafts have no open leaves"
    if not accepted:
        return replace(state, left=residual)
    rows = path.rows[1 : accepted + 1]
    tokens = [*state.tokens, *(path.draft.token[row - 1] for row in rows)]
    return _State(rows[-1], tokens, residual)
