"""Replay of stop rules on recorded rollouts: the counts of decoding, without running a model.

Greedy target and draft: exact. The rollout from position t is the draft of a decode there. So
starting at t = 0, drafting the length of the rule, accepting min(a(t), length) and continuing after
the token that follows gives the rounds of the decode (except for near ties of logits).

Sampled target: in expectation, over the paths a decode may take. v(t) is the probability that a
round starts at t: v(0) = 1 and v(t + n + 1) += v(t) P(n | length), with the distribution of
token-wise verification. The committed text has the distribution of the recorded response, whatever
the rule. It is an approximation that text and jump are treated as independent given t: in a decode
the accepted tokens *are* the text, so after a long jump the text was easy to draft."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from decoding.cost import Counts
from decoding.stopping.policy import Lengths, Policy, lengths, stop_at
from decoding.stopping.rollout_table import RolloutTable
from decoding.structures.comb import Comb

Array = NDArray[np.float64]
Ints = NDArray[np.int64]
WALKS = 8  # paths drawn per response for an adaptive rule with a sampled target


class Step(NamedTuple):
    """One round of every response, [B] each: the position it starts at, draft tokens, those
    accepted, the threshold in force, and whether the response still continues (otherwise the rest
    is undefined)."""

    start: Ints
    drafted: Ints
    accepted: Ints
    threshold: Array
    live: NDArray[np.bool_]

    def of(self, prompt: int) -> tuple[int, int, int]:
        """Return start, drafted and accepted of one response."""
        return int(self.start[prompt]), int(self.drafted[prompt]), int(self.accepted[prompt])


COUNTS = ("emitted", "rounds", "drafted", "accepted", "draft_forwards", "questions")
"""What replay counts of each response: columns of the table of measurements, [B] each, whole
numbers where replay is exact, besides `calls_by_drafted` [B, G + 1], for combs up to all the nodes
there may be."""


def counts_of(counts: Counts, prompt: int) -> dict[str, float]:
    """Return one response's numbers by column."""
    return {name: float(counts[name][prompt]) for name in COUNTS}


class Replayer:
    """A table prepared for many policies: values that do not depend on them are computed once.

    gamma_max: the structure's, at most the recorded number of tokens.
    """

    def __init__(self, table: RolloutTable, gamma_max: int) -> None:
        assert gamma_max <= table.gamma, "rollouts are shorter than the drafts to replay"
        self.table, self.gamma_max = table, gamma_max
        self.limit = table.limit(gamma_max)
        batch, positions, gamma = table.tokens.shape
        # P(the first n tokens are accepted), then P(exactly n, another one is rejected)
        self._survival = np.ones((batch, positions, gamma + 1))
        np.cumprod(table.accept, axis=-1, out=self._survival[..., 1:])
        self._ends = self._survival[..., :-1] - self._survival[..., 1:]
        self._mean = np.zeros_like(self._survival)  # expected accepted of n drafted
        np.cumsum(self._survival[..., 1:], axis=-1, out=self._mean[..., 1:])
        self._inside = np.arange(positions) < table.length[:, None]

    def replay(self, policy: Policy, threshold: float) -> dict[str, Array]:
        """Return the counts of decoding every prompt with this rule; for an adaptive rule and a
        sampled target, means over walks."""
        if policy.adaptive:
            seeds = range(1 if self.table.greedy else WALKS)
            walks = [self.walk(policy, threshold, seed)[0] for seed in seeds]
            means = {name: np.mean([counts[name] for counts in walks], 0) for name in walks[0]}
            return means | {"rounds": means["calls_by_drafted"].sum(1)}
        draft = lengths(policy, threshold, self.limit)
        visits = self._carried(self._jumps(draft.drafted))
        accepted = np.take_along_axis(self._mean, draft.drafted[..., None], -1)[..., 0]
        return self._weighed(draft, visits, accepted, self._survival.shape[-1])

    def combs(self, comb: Comb) -> dict[str, Array]:
        """Return the counts of decoding every prompt with drafts that have leaves beside their
        path. A leaf is tested if the path is rejected there; an accepted leaf is followed by a
        bonus token. One number is computed for every token of the path."""
        accept = self.table.siblings
        assert accept is not None, "the table has no siblings"
        none = np.cumprod(1 - accept, axis=-1)  # P(none of the first ones is accepted)
        none = np.concatenate([np.ones_like(none[..., :1]), none], -1)
        beside = 1 - np.take_along_axis(none, comb.leaves[..., None], -1)[..., 0]
        jump = self._jumps(comb.path)
        rescued = jump[..., :-1] * beside
        jump[..., :-1] -= rescued
        jump[..., 1:] += rescued
        draft = Lengths(comb.nodes, comb.path, comb.path)
        width = self._survival.shape[-1] + accept[0, 0].size
        return self._weighed(draft, self._carried(jump), jump @ np.arange(jump.shape[-1]), width)

    def _weighed(
        self, draft: Lengths, visits: Array, accepted: Array, width: int
    ) -> dict[str, Array]:
        """Return counts weighted by visits. accepted: [B, T], expected for the draft from each
        position; width: that of `calls_by_drafted`."""
        batch = len(visits)
        cells = (np.arange(batch)[:, None] * width + draft.drafted).ravel()
        by_length: Array = (
            np.bincount(cells, visits.ravel(), batch * width).reshape(batch, width).astype(float)
        )
        taken = {
            "draft_forwards": draft.forwards,
            "drafted": draft.drafted,
            "questions": draft.calls,
        }
        sums = {name: (visits * values).sum(1) for name, values in taken.items()}
        sums["accepted"] = (visits * accepted).sum(1)
        return self._counts(sums, by_length)

    def _counts(self, sums: Counts, calls_by_drafted: Array) -> dict[str, Array]:
        return {
            "emitted": self.table.length.astype(float),
            "rounds": calls_by_drafted.sum(1),
            **sums,
            "calls_by_drafted": calls_by_drafted,
        }

    def _jumps(self, drafted: Ints) -> Array:
        """Return P(n accepted) of the path from each position, [B, T, G + 1]."""
        batch, positions = drafted.shape
        gamma = self._ends.shape[-1]
        jump = np.zeros((batch, positions, gamma + 1))
        np.multiply(self._ends, np.arange(gamma) < drafted[..., None], out=jump[..., :-1])
        last = np.take_along_axis(self._survival, drafted[..., None], -1)
        np.put_along_axis(jump, drafted[..., None], last, -1)
        return jump

    def _carried(self, jump: Array) -> Array:
        """Return v, the probability that a round starts at each position, [B, T]."""
        batch, positions, width = jump.shape
        visits = np.zeros((batch, positions + width))
        visits[:, 0] = 1
        for start in range(positions):
            visits[:, start + 1 : start + width + 1] += visits[:, start, None] * jump[:, start]
        return visits[:, :positions] * self._inside

    def walk(
        self, policy: Policy, threshold: float, seed: int = 0, first: int = 0
    ) -> tuple[dict[str, Array], list[Step]]:
        """Walk one path per response; return its counts, and the rounds of all responses together.
        seed: of random verdicts; first: position of the first round (1: the prompt's forward gives
        the first token)."""
        accepted = self.table.accepted if self.table.greedy else self._verdicts(seed)
        batch, rows = len(accepted), np.arange(len(accepted))
        live, steps = self.table.length > first, list[Step]()
        start = np.where(live, first, 0)
        level = np.full(batch, float(threshold))
        state = policy.adaptive.first_state(level) if policy.adaptive else (level,)
        names = ("draft_forwards", "drafted", "questions", "accepted")
        sums = {name: np.zeros(batch) for name in names}
        by_length = np.zeros((batch, self._survival.shape[-1]))
        reach = np.broadcast_to(policy.reach, self.table.accept.shape)
        limit = np.minimum(self.limit, policy.most)
        while live.any():
            willing = (reach[rows, start] >= policy.sign * state[0][:, None]).sum(-1)
            draft = stop_at(policy, willing, limit[rows, start])
            right = np.minimum(accepted[rows, start], draft.drafted)
            counts = (draft.forwards, draft.drafted, draft.calls, right)
            for name, values in zip(names, counts, strict=True):
                sums[name] += live * values
            by_length[rows, draft.drafted] += live
            steps.append(Step(start, draft.drafted, right, state[0], live))
            if policy.adaptive:
                state = policy.adaptive.next_state(state, draft.drafted, right)
            following = start + right + 1
            live = live & (following < self.table.length)
            start = np.where(live, following, 0)
        return self._counts(sums, by_length), steps

    def _verdicts(self, seed: int) -> Ints:
        """Return the accepted tokens of each rollout for one draw of random verdicts, [B, T]."""
        uniform = np.random.default_rng(seed).random(self.table.accept.shape)
        return np.logical_and.accumulate(uniform < self.table.accept, axis=-1).sum(-1)
