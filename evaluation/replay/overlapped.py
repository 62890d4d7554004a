"""What an overlapped engine would have counted, read off recorded rollouts: no model runs.

A round begins with `start` tokens of the response committed, and everything it puts to the test is
the rollout recorded there: the pending tokens are its first ones, the candidates of the branch
point what the draft thought behind them. An accepted branch goes on with the rollout recorded
behind its candidate, which the next round begins with.

Greedy target: exact. Each rollout is used once at most, so that of a sampled draft the recorded
tokens are as fair a draw as the engine's own; of a greedy draft they are the engine's. One thing is
not recorded, how a branch that is not accepted goes on (but for the rollout's own, as far as it
goes): it is taken to meet no end token. Sampled target: as in `evaluation.replay.simulate`, text and jumps are treated as
independent; candidates beside an unsure token are tested as if it had not been there."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from decoding.stopping.policy import ALL, NONE, SOME
from decoding.stopping.rollout_table import RolloutTable
from decoding.trace import STAGES, RoundTrace, StageTrace, Trace
from predictors.base import Records

CANDIDATES = 3
"""Of a branch point, as many as a harvest records."""
COLUMNS = ("top_token", "top_accept", "rrsw_token", "rrsw_accept")


class BranchRecords:
    """Asks a harvest for what it says of candidates (`evaluation.replay.read.Asks`)."""

    columns: Sequence[str] = COLUMNS

    def predictions(self, records: Records, manifest: Mapping[str, Any]) -> dict[str, Tensor]:
        return {name: records[name] for name in COLUMNS}


@dataclass(frozen=True)
class Overlapped:
    """The settings of an overlapped engine that its counts depend on.

    gamma, candidates: of its structure, candidates 3 at most
    threshold: of its confidence rule
    outcomes: the `RolloutTable.predicted` that holds the class of every round; None: `always`
    keeps_unsure: the confidence rule keeps the token it stops at (`Confidence`), else it stops
        before (`ConfidenceBefore`)
    drawn: candidates are drawn without replacement (RRSw), else the most probable tokens (point
        masses)
    """

    gamma: int
    candidates: int = 1
    threshold: float = 0.0
    outcomes: str | None = None
    always: int = ALL
    pre_verify: bool = False
    keeps_unsure: bool = True
    drawn: bool = False

    @property
    def continuation(self) -> int:
        """Most tokens after a candidate (`decoding.engines.branching.tokens_after_candidate`)."""
        return self.gamma - (self.outcomes is None)


def pearl(gamma: int) -> Overlapped:
    return Overlapped(gamma, pre_verify=True, drawn=True)


@dataclass(frozen=True)
class Pending:
    """As `decoding.engines.branching.Pending`. tip_known: the draft has run on the last of them;
    alone: forwards of the draft stage."""

    length: int
    outcome: int | None
    continued: bool = False
    unsure: bool = False
    tip_known: bool = False
    ended: bool = False
    steps: int = 0
    alone: int = 0

    @property
    def stage(self) -> Any:
        return "branch" if self.continued else "pre_verify" if self.outcome is None else "draft"


@dataclass(frozen=True)
class Found:
    """What a round comes to: pending tokens accepted, the number of the accepted branch, tokens
    committed, draft steps of the branches, and what is pending next."""

    accepted: int
    branch: int | None
    tokens: int
    depth: int
    following: Pending | None = None


class Walker:
    """One response under one setting. coins: uniform numbers, [T, G] for the tokens of the rollouts
    and [T, 3] for candidates; any where the target is greedy."""

    def __init__(
        self,
        table: RolloutTable,
        index: int,
        settings: Overlapped,
        coins: tuple[NDArray[np.float64], NDArray[np.float64]],
    ) -> None:
        assert settings.gamma < table.gamma, "rollouts are no longer than the drafts to walk"
        assert settings.candidates <= CANDIDATES, "harvests record three candidates"
        self.settings, self.gamma = settings, table.gamma
        self.length, self.max_new = int(table.length[index]), int(table.max_new[index])
        self.tokens, self.drawn = table.tokens[index], table.drawn[index]
        self.confidence, self.max_q = table.confidence[index], table.max_q[index]
        self.top_token, self.top_accept, self.rrsw_token, self.rrsw_accept = (
            table.of_predictor(name)[index] for name in COLUMNS
        )
        self.coins = coins[1]
        right = coins[0] < table.accept[index]
        self.right = np.logical_and.accumulate(right, axis=-1).sum(-1)
        outcomes = settings.outcomes
        self.outcome = None if outcomes is None else table.of_predictor(outcomes)[index]

    def rounds(self) -> list[RoundTrace]:
        """Of the whole response."""
        start, pending, found = 0, None, list[RoundTrace]()
        while start < self.length:
            pending = pending or self._draft_stage(start)
            width = self._width(start, pending)
            outcome = self._verdict(start, pending, width)
            found.append(_trace(self.tokens[start], pending, width, outcome))
            start, pending = start + outcome.tokens, outcome.following
        return found

    def _class(self, start: int) -> int:
        return self.settings.always if self.outcome is None else int(self.outcome[start])

    def _until_unlikely(self, start: int, limit: int) -> int:
        """Tokens of the rollout before the first position where none is likely, `limit` at most."""
        unlikely = np.flatnonzero(self.max_q[start, :limit] < self.settings.threshold)
        return int(unlikely[0]) if len(unlikely) else limit

    def _draft_stage(self, start: int) -> Pending:
        outcome = None if self.settings.pre_verify else self._class(start)
        limit = min(self.settings.gamma, self.max_new - 1 - start, int(self.drawn[start]))
        if outcome in (NONE, None):
            return Pending(0, outcome)
        count = self._count(start, limit) if outcome == SOME else limit
        stopped = count < limit
        unsure = stopped and self.settings.keeps_unsure
        ended = 0 < count == self.drawn[start]
        looked = stopped and not self.settings.keeps_unsure
        return Pending(
            count - unsure, outcome, False, unsure, stopped, ended, count, count + looked
        )

    def _count(self, start: int, limit: int) -> int:
        """Tokens that the confidence rule draws; the one it stops at is kept or not drawn."""
        if not self.settings.keeps_unsure:
            return self._until_unlikely(start, limit)
        unsure = np.flatnonzero(self.confidence[start, : max(0, limit - 1)] < self.settings.threshold)
        return int(unsure[0]) + 1 if len(unsure) else limit

    def _width(self, start: int, pending: Pending) -> int:
        """Branches behind the pending tokens."""
        if pending.ended or pending.length >= self.max_new - start - 1:
            return 0
        own = pending.unsure or self.settings.drawn
        sure = (self.confidence if own else self.max_q)[start, pending.length]
        there = CANDIDATES
        if self.settings.drawn:  # a greedy draft has but one
            there = 1 + int((self.rrsw_token[start, pending.length] >= 0).sum())
        return min(there, max(1, int(self.settings.candidates * (1 - sure))))

    def _verdict(self, start: int, pending: Pending, width: int) -> Found:
        length, right = pending.length, int(self.right[start])
        if right < length:
            return self._found(start, right, None, self._depth(start, pending, width))
        if not width:
            return self._found(start, length, None, 0, bonus=not pending.ended)
        branch = self._accepted_branch(start, pending, width)
        if branch is None:
            return self._found(start, length, None, self._depth(start, pending, width))
        return self._goes_on(start, pending, width, branch)

    def _found(
        self, start: int, accepted: int, branch: int | None, depth: int, bonus: bool = True
    ) -> Found:
        return Found(accepted, branch, min(accepted + bonus, self.length - start), depth)

    def _most(self, start: int, pending: Pending) -> int:
        """Tokens after a candidate that meets no end token."""
        return min(self.settings.continuation, self.max_new - start - 2 - pending.length)

    def _depth(self, start: int, pending: Pending, width: int) -> int:
        """Draft steps of branches none of which is accepted."""
        most = self._most(start, pending)
        if not width:
            return 0
        own = pending.unsure or self.settings.drawn or self._own_is_top(start, pending.length)
        ends = self.drawn[start] - pending.length - 1
        known = width == 1 and own and self.drawn[start] < self.gamma and ends >= 0
        return 1 + (min(most, int(ends)) if known else most)

    def _own_is_top(self, start: int, depth: int) -> bool:
        return bool(self.top_token[start, depth, 0] == self.tokens[start, depth])

    def _accepted_branch(self, start: int, pending: Pending, width: int) -> int | None:
        """Candidate by candidate; the rollout's own is accepted where the rollout is."""
        depth = pending.length
        own = pending.unsure or self.settings.drawn
        if own and self.right[start] > depth:
            return 0
        chances = self.rrsw_accept if self.settings.drawn else self.top_accept
        beside = chances[start, depth]
        if pending.unsure and not self.settings.drawn:
            beside = beside[self.top_token[start, depth] != self.tokens[start, depth]]
        taken = np.flatnonzero(self.coins[start, : len(beside)] < beside)
        place = int(taken[0]) + own if len(taken) else width
        return place if place < width else None

    def _goes_on(self, start: int, pending: Pending, width: int, branch: int) -> Found:
        """Behind an accepted candidate: what is drawn there, and how much of it is kept."""
        tokens, most = pending.length + 1, self._most(start, pending)
        tip = start + tokens
        drawn = kept = 0
        following = None
        if tip < self.length:
            drawn = min(most, int(self.drawn[tip]))
            outcome = self._class(tip)
            kept = {NONE: 0, ALL: drawn}.get(outcome, -1)
            kept = self._until_unlikely(tip, drawn) if kept < 0 else kept
            ended = 0 < kept == self.drawn[tip]
            following = Pending(kept, outcome, True, False, kept < drawn, bool(ended))
        depth = 1 + (most if width > 1 else drawn)
        committed = min(tokens, self.length - start)
        return Found(pending.length, branch, committed, depth, following)


def _trace(rollout: Any, pending: Pending, width: int, found: Found) -> RoundTrace:
    """As `decoding.engines.overlapped` writes it; of branches and of the tokens committed only the
    number is known."""
    length, branched = pending.length, found.branch is not None
    kept = found.following.length if found.following else 0
    steps = pending.steps + found.depth - pending.unsure
    stages = StageTrace(
        stage=pending.stage,
        outcome=pending.outcome,
        pending=length,
        draft_steps=steps,
        alone=pending.alone,
        branches=[[0] * found.depth] * width,
        rollback=0 if branched else length - found.accepted + found.depth,
        waste=found.depth - 1 - kept if branched else 0,
        spans=[],
    )
    beside = found.depth - 1 + (not pending.tip_known) if width else 0
    return RoundTrace(
        draft_tokens=[*rollout[:length].tolist(), *[0] * width],
        draft_parents=[*range(length), *[length] * width],
        draft_q=[],
        row=found.accepted if found.branch is None else length + 1 + found.branch,
        accepted=found.accepted + branched,
        tokens=[0] * found.tokens,
        predicted=[] if pending.outcome is None else [float(pending.outcome)],
        draft_forwards=pending.alone + beside,
        seconds=dict.fromkeys(STAGES, 0.0),
        overlap=stages,
    )


def traces(table: RolloutTable, settings: Overlapped, seeds: Iterable[int] = (0,)) -> list[Trace]:
    """Of every response, once per seed of the coins; one seed says all where the target is
    greedy."""
    shape, found = table.accept.shape, list[Trace]()
    for seed in seeds:
        rng = np.random.default_rng(seed)
        coins, others = rng.random(shape), rng.random((*shape[:2], CANDIDATES))
        for index, prompt in enumerate(table.prompt_ids):
            rounds = Walker(table, index, settings, (coins[index], others[index])).rounds()
            tokens = [0] * sum(len(round_.tokens) for round_ in rounds)
            found.append(Trace(0, tokens, rounds, 0.0, 0.0, prompt_id=prompt, seed=seed))
    return found
