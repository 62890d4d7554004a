"""What no stop rule beats: hindsight, the oracle of SpecDec++, and knowing the target but not its
coins."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from decoding.cost import CostTable
from decoding.stopping.policy import Policy
from decoding.stopping.rollout_table import RolloutTable
from evaluation.replay.simulate import Replayer

Array = NDArray[np.float64]
KNOWING = "knows p"


def knowing(table: RolloutTable) -> Policy:
    """A rule that is told, once a token is drawn, with which probability all of them and the next
    one are accepted: the most that can be known before the coins fall. The first token is always
    drawn."""
    reached = np.cumprod(table.accept, axis=-1, dtype=np.float64)
    reached[..., 0] = np.inf
    return Policy(reached)


def oracle_calls(differs: Sequence[bool]) -> tuple[int, int]:
    """Draft and target calls of SpecDec++'s oracle (2405.19715, Theorem 4.1) for one greedy
    response.

    differs: [N], where the draft's choice is not the response's token. The oracle stops drafting
    right before each of
    them: nothing is discarded, and each costs one target call. One more brings the last token,
    where that is none of them. (The theorem's |S| + 1 calls are |S| where it is. A last token that
    is an end token could be drafted, which would save no call.)"""
    target = sum(differs) + (not differs[-1])
    return len(differs) - target, target


def oracle_totals(table: RolloutTable) -> tuple[int, int]:
    """`oracle_calls`, summed over the responses of a greedy target."""
    rows = [table.accept[row, :length, 0] == 0 for row, length in enumerate(table.length)]
    draft, target = zip(*(oracle_calls(differs.tolist()) for differs in rows), strict=True)
    return sum(draft), sum(target)


def hindsight(replayer: Replayer, cost: CostTable) -> Array:
    """[B], least any choice of draft lengths costs each response when it knows what will be
    accepted.

    A draft beyond the accepted length costs more and goes no further, so only lengths up to it are
    tried, backwards from the end. Where a draft token is cheaper than a target call, whatever its
    rows, this is the oracle of Theorem 4.1 with at most gamma_max tokens a round; elsewhere it may
    draft less, down to not at all. For a sampled target the recorded verdicts are what is known.
    """
    table = replayer.table
    batch, positions, gamma = table.tokens.shape
    most = np.minimum(table.accepted, replayer.limit)
    round_cost = np.arange(gamma + 1) * cost.draft + cost.target.of(np.arange(1, gamma + 2))
    left = np.zeros((batch, positions + gamma + 2))  # cost from each position on
    for start in range(positions - 1, -1, -1):
        tried = round_cost + left[:, start + 1 : start + gamma + 2]
        tried[np.arange(gamma + 1) > most[:, start, None]] = np.inf
        left[:, start] = np.where(start < table.length, tried.min(1), 0)
    return left[:, 0]
