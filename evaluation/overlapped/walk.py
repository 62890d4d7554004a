"""Replay of overlapped engines on recorded rollouts: their counts, without running a model.

A round begins with `start` tokens of the response committed, and verifies tokens of the rollout
recorded there: the pending tokens are its first ones, and the candidates of the branch point come
from the draft's distribution after them. An accepted branch continues with the rollout recorded
after its candidate, with which the next round begins.

Greedy target: exact. Each rollout is used at most once, so a sampled draft's recorded tokens have
the distribution of the engine's own draws; a greedy draft's are the engine's. Only the continuation
of branches that are not accepted is not recorded (except for the rollout's own, as far as it goes):
they are taken to meet no end token, and with `a_priori` to stop no later than the known ones.

Sampled target: as in `evaluation.replay.simulate`, text and jumps are treated as independent;
candidates beside an unsure token are tested as if it were not there."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from decoding.engines.branching import classes_of, tokens_after_candidate
from decoding.engines.fit import check_overlap_fit
from decoding.sampling import top_tokens
from decoding.stopping.policy import ALL, NONE, SOME
from decoding.stopping.rollout_table import RolloutTable
from decoding.trace import STAGES, RoundTrace, StageTrace, Trace
from predictors.base import Records
from predictors.features.layers import RecordedLayers
from runtime.errors import UserError

CANDIDATES = 3
"""Of a branch point, as many as a harvest records."""
COLUMNS = ("top_token", "top_accept", "rrsw_token", "rrsw_accept")


class BranchRecords:
    """The columns of a harvest about candidates (`evaluation.replay.read.Asks`)."""

    columns: Sequence[str] = COLUMNS

    def predictions(self, records: Records, layers: RecordedLayers) -> dict[str, Tensor]:
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
    a_priori: bool = False
    keeps_unsure: bool = True
    drawn: bool = False

    @property
    def continuation(self) -> int:
        """Return the most tokens of a branch after its candidate; its draft steps are one more."""
        return tokens_after_candidate(self.gamma, self.outcomes is not None, self.a_priori)


def settings_of(parts: Mapping[str, Any]) -> Overlapped:
    """Return the settings of an overlapped engine with these arguments. Raises UserError for parts
    that do not go together."""
    structure, _, branch_rule = check_overlap_fit(
        parts["structure"], parts["verifier"], parts["branch_verifier"]
    )
    if structure.candidates > CANDIDATES:
        raise UserError(
            f"structure.candidates: expected at most {CANDIDATES}, as many as a harvest records,"
            f" got {structure.candidates}. Lower it"
        )
    classes: Any = classes_of(parts["stop"], structure.gamma_max, parts["a_priori"])
    outcomes = getattr(classes, "outcomes", None)
    return Overlapped(
        structure.gamma_max,
        structure.candidates,
        classes.confidence.before_drawing().threshold,
        outcomes,
        ALL if outcomes else classes.classify(None),
        parts["pre_verify"],
        parts["a_priori"],
        classes.confidence.keeps_unsure,
        branch_rule.siblings is not top_tokens,
    )


@dataclass(frozen=True)
class Pending:
    """Pending tokens, as in `decoding.engines.branching.Pending`.

    tip_known: the draft has run on the last of them; steps, alone: draft steps and forwards of the
    draft stage"""

    length: int
    outcome: int | None
    stage: Literal["draft", "branch", "pre_verify"]
    unsure: bool = False
    tip_known: bool = False
    ended: bool = False
    steps: int = 0
    alone: int = 0


class Branch(NamedTuple):
    """A branch after its candidate. looked: the draft has run on its last token, too."""

    tokens: int
    looked: bool


class Walker:
    """The replay of one response under one setting. coins: uniform numbers, [T, G] for the tokens
    of the rollouts and [T, 3] for candidates; ignored if the target is greedy."""

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
        """Return the rounds of the whole response."""
        start, pending, rounds = 0, None, list[RoundTrace]()
        while start < self.length:
            round_, pending = self._round(start, pending or self._draft_stage(start))
            rounds.append(round_)
            start += len(round_.tokens)
        return rounds

    def _class(self, start: int) -> int:
        return self.settings.always if self.outcome is None else int(self.outcome[start])

    def _class_ahead(self, start: int) -> int:
        """Return the class that decides the length of branches."""
        return self._class(start) if self.settings.a_priori else ALL

    def _until_unlikely(self, start: int, limit: int, first: int = 0) -> int:
        """Count the tokens of the rollout, from its token `first` on, before the first position
        where no token is likely, `limit` at most."""
        return first_below(self.max_q[start, first : first + limit], self.settings.threshold, limit)

    def _draft_stage(self, start: int) -> Pending:
        if self.settings.pre_verify:
            return Pending(0, None, "pre_verify")
        outcome, keeps_unsure = self._class(start), self.settings.keeps_unsure
        if outcome == NONE:
            return Pending(0, outcome, "draft")
        limit = min(self.settings.gamma, self.max_new - 1 - start, int(self.drawn[start]))
        count = limit
        if outcome == SOME and keeps_unsure:  # the token at which it stops is drawn
            sure = self.confidence[start, : max(0, limit - 1)]
            count = min(limit, 1 + first_below(sure, self.settings.threshold, limit))
        elif outcome == SOME:
            count = self._until_unlikely(start, limit)
        stopped, ended = count < limit, 0 < count == self.drawn[start]
        unsure = stopped and keeps_unsure
        alone = count + (stopped and not keeps_unsure)
        return Pending(count - unsure, outcome, "draft", unsure, stopped, ended, count, alone)

    def _round(self, start: int, pending: Pending) -> tuple[RoundTrace, Pending | None]:
        """Return the round as `decoding.engines.overlapped` records it, and the pending tokens
        after it; for branches and committed tokens only numbers are known."""
        width, right = self._width(start, pending), int(self.right[start])
        whole = right >= pending.length
        branch = self._accepted_branch(start, pending, width) if width and whole else None
        accepted, more, grown, following = min(right, pending.length), 1, None, None
        if branch is not None:
            grown, following = self._goes_on(start, pending)
        elif whole and pending.ended:
            more = 0
        depth, forwards = self._spent(start, pending, width, grown)
        rollback = waste = 0
        if branch is None:
            rollback = pending.length - accepted + depth
        else:
            waste = depth - 1 - (following.length if following else 0)
        stages = StageTrace(
            stage=pending.stage,
            outcome=pending.outcome,
            pending=pending.length,
            draft_steps=pending.steps + depth - pending.unsure,
            alone=pending.alone,
            branches=[[0] * depth] * width,
            rollback=rollback,
            waste=waste,
            spans=[],
        )
        round_ = RoundTrace(
            draft_tokens=[*self.tokens[start, : pending.length].tolist(), *[0] * width],
            draft_parents=[*range(pending.length), *[pending.length] * width],
            draft_q=[],
            row=accepted if branch is None else pending.length + 1 + branch,
            accepted=accepted + (branch is not None),
            tokens=[0] * min(accepted + more, self.length - start),
            predicted=[] if pending.outcome is None else [float(pending.outcome)],
            draft_forwards=pending.alone + (forwards + (not pending.tip_known) if width else 0),
            seconds=dict.fromkeys(STAGES, 0.0),
            overlap=stages,
        )
        return round_, following

    def _width(self, start: int, pending: Pending) -> int:
        """Count the branches after the pending tokens."""
        if pending.ended or pending.length >= self.max_new - start - 1:
            return 0
        drawn = pending.unsure or self.settings.drawn
        sure = (self.confidence if drawn else self.max_q)[start, pending.length]
        recorded = CANDIDATES
        if self.settings.drawn:  # a greedy draft has only one
            recorded = 1 + int((self.rrsw_token[start, pending.length] >= 0).sum())
        return min(recorded, max(1, int(self.settings.candidates * (1 - sure))))

    def _accepted_branch(self, start: int, pending: Pending, width: int) -> int | None:
        """Return the accepted branch, None if none is; the rollout's own is accepted if the rollout
        is."""
        depth = pending.length
        recorded = pending.unsure or self.settings.drawn
        if recorded and self.right[start] > depth:
            return 0
        beside = (self.rrsw_accept if self.settings.drawn else self.top_accept)[start, depth]
        if pending.unsure and not self.settings.drawn:
            beside = beside[self.top_token[start, depth] != self.tokens[start, depth]]
        taken = np.flatnonzero(self.coins[start, : len(beside)] < beside)
        branch = int(taken[0]) + recorded if len(taken) else width
        return branch if branch < width else None

    def _goes_on(self, start: int, pending: Pending) -> tuple[Branch, Pending | None]:
        """Return the branch drawn after an accepted candidate, and the part of it that is kept."""
        tip = start + pending.length + 1
        if tip >= self.length:
            return Branch(0, False), None
        ahead, limit = self._class_ahead(start), self._most(start, pending)
        grown = self._grown(tip, 0, min(limit, int(self.drawn[tip])), ahead)
        outcome = ahead if self.settings.a_priori else self._class(tip)
        kept = self._grown(tip, 0, grown.tokens, outcome).tokens
        tip_known, ended = kept < grown.tokens or grown.looked, 0 < kept == self.drawn[tip]
        return grown, Pending(kept, outcome, "branch", False, tip_known, bool(ended))

    def _spent(
        self, start: int, pending: Pending, width: int, accepted: Branch | None
    ) -> tuple[int, int]:
        """Return draft steps and forwards of the branches, without those of the tip. accepted: the
        accepted one."""
        if not width:
            return 0, 0
        branches = [accepted] if accepted else []
        outcome, most, depth = self._class_ahead(start), self._most(start, pending), pending.length
        if not branches or (width > 1 and outcome == SOME):
            # the branch whose candidate is in the rollout, as far as that goes
            recorded = pending.unsure or self.settings.drawn
            recorded |= self.top_token[start, depth, 0] == self.tokens[start, depth]
            left = int(self.drawn[start]) - depth - 1
            ends = recorded and self.drawn[start] < self.gamma and left >= 0
            branches.append(
                self._grown(start, depth + 1, min(most, left) if ends else most, outcome)
            )
        if width > 1 and outcome == ALL:
            branches.append(Branch(most, False))
        forwards = max(branch.tokens + branch.looked for branch in branches)
        return 1 + max(branch.tokens for branch in branches), forwards

    def _grown(self, start: int, first: int, limit: int, outcome: int) -> Branch:
        """Return a branch that continues with the rollout from `start`, from its token `first` on,
        by at most `limit` tokens."""
        if outcome != SOME:
            return Branch(limit if outcome == ALL else 0, False)
        count = self._until_unlikely(start, limit, first)
        return Branch(count, count < limit)

    def _most(self, start: int, pending: Pending) -> int:
        """Count the tokens after a candidate that meets no end token."""
        return min(self.settings.continuation, self.max_new - start - 2 - pending.length)


def first_below(values: NDArray[np.float64], threshold: float, none: int) -> int:
    """Return the index of the first of `values` below a threshold, `none` if there is none."""
    below = np.flatnonzero(values < threshold)
    return int(below[0]) if len(below) else none


def traces(table: RolloutTable, settings: Overlapped, seeds: Iterable[int] = (0,)) -> list[Trace]:
    """Return the trace of every response, once per seed of the random verdicts; one seed suffices
    if the target is greedy."""
    shape, walked = table.accept.shape, list[Trace]()
    for seed in seeds:
        rng = np.random.default_rng(seed)
        coins, others = rng.random(shape), rng.random((*shape[:2], CANDIDATES))
        for index, prompt in enumerate(table.prompt_ids):
            rounds = Walker(table, index, settings, (coins[index], others[index])).rounds()
            tokens = [0] * sum(len(round_.tokens) for round_ in rounds)
            walked.append(Trace(0, tokens, rounds, 0.0, 0.0, prompt_id=prompt, seed=seed))
    return walked
