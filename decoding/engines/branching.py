"""The draft's side of SpecBranch (2506.01979): pending tokens, and the branches after them.

Every decision depends on verified tokens, on distributions before anything is drawn from them, or
on a drawn token that is kept. The paper's own version redraws tokens after looking at them, which
is biased for a sampled target."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from decoding.draft import Draft, RoundContext
from decoding.draft_tree import DraftStep, DraftTree
from decoding.interfaces import (
    LM,
    BranchingStructure,
    CandidateVerifier,
    Classes,
    ConfidenceRule,
    StopRule,
)
from decoding.sampling import Sampler, Warp, top_tokens
from decoding.stopping.base import refuse_older
from decoding.stopping.policy import ALL, NONE, SOME
from decoding.structures.chain import draw_chain
from decoding.trace import Stopwatch
from runtime.errors import UserError


@dataclass(frozen=True)
class Always:
    """The same class for every context: SpecBranch without its predictor."""

    outcome: int
    confidence: ConfidenceRule
    target_layers: Sequence[int] = ()
    trained_gamma: int | None = None
    trained_age: int = 0

    def classify(self, context: RoundContext) -> int:
        return self.outcome


def classes_of(stop: "StopRule | Classes", gamma: int, a_priori: bool) -> Classes:
    """Return `stop` as `Classes`. Raises UserError if it does not fit. gamma: length of a draft,
    for which a predictor of classes must be trained; a_priori: classes of branches are predicted
    one round before they begin, for which it may be trained."""
    if not isinstance(stop, Classes):
        raise UserError(
            f"stop, engine: {type(stop).__name__} does not say how far to draft from verified"
            " tokens. Use stop=hrad, confidence, confidence_before or never with this engine"
        )
    if not isinstance(stop.confidence, ConfidenceRule):
        raise UserError(
            f"stop.confidence, engine: {type(stop.confidence).__name__} cannot say how much of a"
            " branch to keep. Use stop/confidence or stop/confidence_before there"
        )
    refuse_older(stop.trained_age, int(a_priori))
    trained = stop.trained_gamma
    if trained not in (None, gamma):
        raise UserError(
            f"structure.gamma_max, stop.checkpoint: the classes are those of drafts of {trained}"
            f" tokens, and gamma_max is {gamma}. Set structure.gamma_max={trained}, in an"
            " experiment method.<its name>.structure.gamma_max"
        )
    return stop


def tokens_after_candidate(gamma: int, predicted: bool, a_priori: bool) -> int:
    """Return the most tokens of a branch after its candidate. predicted: classes are those of a
    predictor.

    A predictor is asked when the candidate of the accepted branch is committed, about the next
    `gamma` tokens, as it was trained: so gamma tokens are drawn after the candidate. Otherwise
    gamma counts the draft's steps, including the candidate."""
    return gamma if predicted and not a_priori else gamma - 1


@dataclass(frozen=True)
class Pending:
    """Tokens drawn and kept, not verified yet: rows 1 .. length of `tree`. The branch point follows
    them.

    q: the distribution of each row was drawn from, [V] each
    unsure: row length + 1 exists too: a token on which the confidence rule stopped after it was
        drawn, hence candidate 1 of the branch point, to be tested as part of the chain
    ended: the last pending token ends the output, so nothing branches off
    outcome: the class that decided the length, None if none was asked; continued: the tokens were
    kept from a branch
    steps: tokens drawn in the draft stage, the unsure one included
    """

    tree: DraftTree
    length: int
    q: list[Tensor]
    unsure: bool
    ended: bool
    outcome: int | None
    continued: bool
    steps: int

    @property
    def tokens(self) -> list[int]:
        return self.tree.token[: self.length]

    @property
    def stage(self) -> Literal["draft", "branch", "pre_verify"]:
        """Return the stage in which they were drawn."""
        return "branch" if self.continued else "pre_verify" if self.outcome is None else "draft"

    def chain(self) -> Draft:
        """Return the chain to verify: the pending tokens, and the unsure one as an open leaf."""
        tree, count = self.tree, len(self.q)
        q, open_leaves = [*self.q, tree.zero_q()], int(self.unsure)
        parents = list(range(count))
        return Draft(parents, tree.token[:count], q, open_leaves, tree.drawn[:count])


@dataclass(frozen=True)
class Branches:
    """The branches of a round. paths: rows of each candidate and its continuation, that of the
    unsure token first; distribution: [V], from which the other candidates were drawn."""

    paths: list[list[int]]
    distribution: Tensor

    @property
    def depth(self) -> int:
        """Count the sequential draft steps: branches side by side count once."""
        return max(map(len, self.paths), default=0)


class Drafter:
    """Owns the draft model for one request.

    structure: its `gamma_max` is the most tokens of a draft stage; its `candidates` the most
    branches"""

    def __init__(
        self,
        lm: LM,
        warp: Warp,
        rule: CandidateVerifier,
        confidence: ConfidenceRule,
        structure: BranchingStructure,
        sampler: Sampler,
    ) -> None:
        self.lm, self.warp, self.rule, self.sampler = lm, warp, rule, sampler
        self.gamma, self.k_max = structure.gamma_max, structure.candidates
        self.confidence = confidence
        self.cut = confidence.before_drawing()
        self.watch = Stopwatch()

    def start(self, context: RoundContext, outcome: int | None) -> Pending:
        """Run the draft stage. Class 0 or None draws nothing, 1 draws until the confidence rule
        stops, 2 draws `gamma` tokens."""
        tree = DraftTree(self.lm, context, self.warp, self.watch, sampler=self.sampler)
        step, stop = DraftStep(tree), self.confidence if outcome == SOME else None
        limit = 0 if outcome in (NONE, None) else min(self.gamma, context.max_depth)
        self.confidence.begin_round(context)
        ended = draw_chain(step, limit, stop)
        unsure = step.count < limit and not ended and stop is not None and stop.keeps_unsure
        length, q = step.count - unsure, [tree.q(row) for row in range(step.count)]
        ended = ends(tree, length, context)
        return Pending(tree, length, q, unsure, ended, outcome, False, step.count)

    def branch(
        self, pending: Pending, context: RoundContext, outcome: int, continuation: int
    ) -> Branches:
        """Run the branch stage: draw candidates for the position after the pending tokens, and
        continue them together by at most `continuation` tokens, one forward per depth. Class 0
        continues none, 1 each until no token is likely, 2 all to the end."""
        tree, tip = pending.tree, pending.length
        if not tree.may_grow(tip):
            return Branches([], torch.zeros(0))
        rows, distribution = self._candidates(tree, tip, pending.unsure)
        paths = [[row] for row in rows]
        growing = [] if outcome == NONE else paths
        self.cut.begin_round(context)
        for _ in range(continuation):
            growing = [path for path in growing if tree.may_grow(path[-1])]
            tree.run(path[-1] for path in growing)
            if outcome == SOME:
                growing = [
                    path for path in growing if not DraftStep(tree, path[-1]).stopped_by(self.cut)
                ]
            for path in growing:
                path += _drawn(tree.draw(path[-1]))
        return Branches(paths, distribution)

    def keep(
        self, pending: Pending, path: Sequence[int], context: RoundContext, outcome: int
    ) -> Pending:
        """Return the pending tokens after branch `path` was accepted and its candidate committed:
        class 0 keeps nothing of its continuation, 1 the tokens before the first position where no
        token is likely, 2 all."""
        kept = list(path[1:]) if outcome == ALL else []
        if outcome == SOME:
            self.cut.begin_round(context)
            kept = self._until_unlikely(pending.tree, path)
        accepted = [*range(1, pending.length + 1), path[0]]
        tree = pending.tree.reroot(accepted, kept, context)
        q, ended = [tree.q(row) for row in range(len(kept))], ends(tree, len(kept), context)
        return Pending(tree, len(kept), q, False, ended, outcome, True, 0)

    def roll_back(self, pending: Pending, accepted: int, committed: int) -> None:
        """Drop everything after `accepted` pending tokens."""
        pending.tree.wind_back(range(1, accepted + 1), committed - 1)

    def _until_unlikely(self, tree: DraftTree, path: Sequence[int]) -> list[int]:
        kept = list[int]()
        for above, row in pairwise(path):
            if DraftStep(tree, above).stopped_by(self.cut):
                break
            kept.append(row)
        return kept

    def _candidates(self, tree: DraftTree, tip: int, unsure: bool) -> tuple[list[int], Tensor]:
        """Return the rows of the candidates after `tip`, and the distribution from which the branch
        rule's sibling sampler drew them. An unsure token comes first; the others are then drawn
        from the distribution without it.

        Point masses are the most probable tokens of the unwarped q, since a greedy distribution has
        only one."""
        unwarped_q = self.rule.siblings is top_tokens
        distribution = tree.unwarped_q(tip) if unwarped_q else tree.q(tip)
        rows = list[int]()
        if unsure:
            rows, distribution = [tip + 1], distribution.clone()
            distribution[tree.token[tip]] = 0  # all zeros if nothing is left
            mass = distribution.sum(dtype=torch.float64).item()
            distribution = distribution.div_(mass) if mass > 0 else distribution
        tree.set_q(tip, distribution)
        if not bool(distribution.any()):
            return rows, distribution
        rows = rows or _drawn(tree.draw(tip, self.rule.siblings))
        width = self.k_max  # a rule for pairs takes two
        if self.rule.max_siblings is None:
            width = max(1, int(self.k_max * (1 - tree.drawn_unwarped(rows[0]))))
        while len(rows) < width and (row := tree.draw(tip, self.rule.siblings)) is not None:
            rows.append(row)
        return rows, distribution


def ends(tree: DraftTree, length: int, context: RoundContext) -> bool:
    """Return whether the last of the first `length` tokens ends the output."""
    return length > 0 and tree.token[length - 1] in context.eos_ids


def _drawn(row: int | None) -> list[int]:
    assert row is not None, "a distribution has at least one token"
    return [row]
