"""What an overlapped engine would have counted, read off recorded rollouts: no model runs.

A round begins with `start` tokens of the response committed, and everything it puts to the test is
the rollout recorded there: the pending tokens are its first ones, the candidates of the branch
point what the draft thought behind them. An accepted branch goes on with the rollout recorded
behind its candidate, which the next round begins with.

Greedy target: exact. Each rollout is used once at most, so that of a sampled draft the recorded
tokens are as fair a draw as the engine's own; of a greedy draft they are the engine's. One thing is
not recorded, how a branch that is not accepted goes on (but for the rollout's own, as far as it
goes): it is taken to meet no end token, and with `a_priori` to stop no later than those known.

Sampled target: as in `evaluation.replay.simulate`, text and jumps are treated as independent;
candidates beside an unsure token are tested as if it had not been there."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from decoding.engines.branching import classes_of, tokens_after_candidate
from decoding.engines.fit import check_overlap_fit
from decoding.engines.overlapped import OverlappedEngine
from decoding.engines.serial import SerialEngine
from decoding.sampling import top_tokens
from decoding.stopping.policy import ALL, NONE, SOME
from decoding.stopping.rollout_table import RolloutTable
from decoding.trace import STAGES, RoundTrace, StageTrace, Trace
from evaluation.replay.candidates import REPLAYED, target
from predictors.base import Records
from predictors.features.layers import RecordedLayers
from runtime.errors import UserError

CANDIDATES = 3
"""Of a branch point, as many as a harvest records."""
COLUMNS = ("top_token", "top_accept", "rrsw_token", "rrsw_accept")


class BranchRecords:
    """Asks a harvest for what it says of candidates (`evaluation.replay.read.Asks`)."""

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
        """Most tokens of a branch after its candidate; its draft steps are one more."""
        return tokens_after_candidate(self.gamma, self.outcomes is not None, self.a_priori)


def settings_of(parts: Mapping[str, Any]) -> Overlapped:
    """parts: of an overlapped engine, by its arguments. Raises UserError for what does not go
    together."""
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


def is_serial(engine: Any, parts: Mapping[str, Any], key: str) -> bool:
    """Return whether drafts and target calls take turns. Raises UserError for what is neither
    replayed in turn nor side by side."""
    if engine is OverlappedEngine:
        return False
    if engine is not SerialEngine:
        raise UserError(
            f"{key}.engine: expected serial, overlapped or pearl, got"
            f" {getattr(engine, '__name__', engine)}. Name another method"
        )
    for part in ("structure", "verifier"):
        if target(type(parts[part])) != REPLAYED[part]:
            raise UserError(
                f"{part}: expected {REPLAYED[part]} in {key}, got {type(parts[part]).__name__}."
                " Leave it as it is"
            )
    return True


def refuse_short(table: RolloutTable, gamma: int) -> None:
    """Raises UserError where rollouts are no longer than drafts."""
    if gamma >= table.gamma:
        raise UserError(
            f"gamma: expected less than the {table.gamma} tokens of the harvest's rounds, got"
            f" {gamma}. Lower it, or harvest longer rounds: python scripts/gen_data.py gamma=..."
        )


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


class Branch(NamedTuple):
    """A branch behind its candidate. looked: the draft has run on its last token, too."""

    tokens: int
    looked: bool


@dataclass(frozen=True)
class Found:
    """What a round comes to: pending tokens accepted, the number of the accepted branch, tokens
    committed, draft steps and forwards of the branches behind the tip, and what is pending next."""

    accepted: int
    branch: int | None
    tokens: int
    depth: int
    forwards: int
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

    def _class_ahead(self, start: int) -> int:
        """How far branches go."""
        return self._class(start) if self.settings.a_priori else ALL

    def _until_unlikely(self, start: int, limit: int, first: int = 0) -> int:
        """Tokens of the rollout, from its token `first` on, before the first position where none is
        likely, `limit` at most."""
        sure = self.max_q[start, first : first + limit]
        unlikely = np.flatnonzero(sure < self.settings.threshold)
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
        unsure = np.flatnonzero(
            self.confidence[start, : max(0, limit - 1)] < self.settings.threshold
        )
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
        branch = None
        if width and right >= length:
            branch = self._accepted_branch(start, pending, width)
        if branch is not None:
            return self._goes_on(start, pending, width, branch)
        accepted, bonus = min(right, length), not (pending.ended and right >= length)
        tokens = min(accepted + bonus, self.length - start)
        return Found(accepted, None, tokens, *self._spent(start, pending, width, None))

    def _grown(self, start: int, first: int, limit: int, outcome: int) -> Branch:
        """A branch that goes on with the rollout from `start`, its token `first`, by `limit` tokens
        at most."""
        if outcome != SOME:
            return Branch(limit if outcome == ALL else 0, False)
        count = self._until_unlikely(start, limit, first)
        return Branch(count, count < limit)

    def _spent(
        self, start: int, pending: Pending, width: int, accepted: Branch | None
    ) -> tuple[int, int]:
        """Draft steps and forwards of the branches, those of the tip left out. accepted: how the
        accepted one goes on."""
        if not width:
            return 0, 0
        known = [accepted] if accepted else []
        outcome, most = self._class_ahead(start), self._most(start, pending)
        if not known or (width > 1 and outcome == SOME):
            known.append(self._own(start, pending, most, outcome))
        if width > 1 and outcome == ALL:
            known.append(Branch(most, False))
        forwards = max(one.tokens + one.looked for one in known)
        return 1 + max(one.tokens for one in known), forwards

    def _own(self, start: int, pending: Pending, most: int, outcome: int) -> Branch:
        """The branch whose candidate the rollout holds, as far as it does."""
        depth = pending.length
        own = pending.unsure or self.settings.drawn
        own |= self.top_token[start, depth, 0] == self.tokens[start, depth]
        ends = int(self.drawn[start]) - depth - 1
        known = own and self.drawn[start] < self.gamma and ends >= 0
        return self._grown(start, depth + 1, min(most, ends) if known else most, outcome)

    def _most(self, start: int, pending: Pending) -> int:
        """Tokens after a candidate that meets no end token."""
        return min(self.settings.continuation, self.max_new - start - 2 - pending.length)

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
        tip, grown, following = start + pending.length + 1, Branch(0, False), None
        if tip < self.length:
            ahead, limit = self._class_ahead(start), self._most(start, pending)
            grown = self._grown(tip, 0, min(limit, int(self.drawn[tip])), ahead)
            outcome = ahead if self.settings.a_priori else self._class(tip)
            kept = self._grown(tip, 0, grown.tokens, outcome).tokens
            ended = 0 < kept == self.drawn[tip]
            known = kept < grown.tokens or grown.looked
            following = Pending(kept, outcome, True, False, known, bool(ended))
        committed = min(pending.length + 1, self.length - start)
        spent = self._spent(start, pending, width, grown)
        return Found(pending.length, branch, committed, *spent, following)


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
    beside = found.forwards + (not pending.tip_known) if width else 0
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
