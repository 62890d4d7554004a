"""How long a draft every stop rule makes, for all recorded rollouts at once.

A rule looks at one number before each draw and stops at the first that is below a threshold. What
it would look at does not depend on the threshold, so the lowest value seen so far is computed once,
and any threshold is a comparison. The functions here say the same as the rules in
`decoding.stopping` under the structure `Chain`."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from decoding.draft_tree import StopRule
from decoding.stopping.adaedl import AdaEDL
from decoding.stopping.confidence import DrawnConfidence, PredictableConfidence
from decoding.stopping.fixed import Fixed
from decoding.stopping.hrad import ALL, NONE, HRADStop
from decoding.stopping.specdecpp import SpecDecPPStop
from evaluation.replay.table import RolloutTable
from runtime.errors import UserError

Array = NDArray[np.float64]
Ints = NDArray[np.int64]
REMEDY = "Use fixed, confidence, confidence_before, entropy, acceptance or hrad"


@dataclass(frozen=True)
class Policy:
    """A stop rule without its threshold, on a table of [B, T] anchors.

    reach: [B, T, G] (or broadcasting to it), the lowest value the rule has seen when it is asked
        with c tokens drawn; it goes on while sign * threshold <= reach
    most: [B, T] or a number, tokens at which it stops without looking
    ahead: whether looking takes the draft forward that the next draw would run (wasted when it
    stops there)
    first: smallest c at which it computes anything
    per_round: computations at the start of a round
    adaptive: the rule itself where its threshold follows the verdicts
    """

    reach: Array
    sign: float = 1.0
    most: Ints | int = 2**31
    ahead: bool = False
    first: int = 0
    per_round: int = 0
    adaptive: AdaEDL | None = None


@dataclass(frozen=True)
class Lengths:
    """Of the draft from each anchor, [B, T] each. drafted: tokens; forwards: of the draft; calls:
    numbers the rule computed."""

    drafted: Ints
    forwards: Ints
    calls: Ints


def lengths(policy: Policy, threshold: float, limit: Ints) -> Lengths:
    """What `Chain` draws with this rule.

    limit: [B, T], tokens at which nobody asks the rule any more: gamma_max, the end of the output,
    an end token."""
    willing = (policy.reach >= policy.sign * threshold).sum(-1)
    return stop_at(policy, willing, np.minimum(limit, policy.most))


def stop_at(policy: Policy, willing: Ints, limit: Ints) -> Lengths:
    """willing: first number of tokens at which the rule says stop; limit: where it is not asked, or
    does not look."""
    drafted = np.minimum(willing, limit)
    looked = np.minimum(
        willing + 1, limit
    )  # times the rule was asked with fewer than `limit` tokens
    forwards = drafted + (policy.ahead & (willing < limit))
    return Lengths(drafted, forwards, policy.per_round + np.maximum(0, looked - policy.first))


# Rules --------------------------------------------------------------------------------------------


def policy_of(stop: StopRule, table: RolloutTable) -> Policy:
    """`stop` without its threshold. Raises UserError for a rule that cannot be replayed, or what
    the table lacks."""
    match stop:
        case Fixed():
            return fixed(table.gamma)
        case DrawnConfidence():
            return drawn_confidence(table)
        case PredictableConfidence():
            return Policy(lowest(table.max_q), ahead=True)
        case AdaEDL():
            return Policy(
                lowest(1 - np.sqrt(stop.kappa * table.entropy)), ahead=True, adaptive=stop
            )
        case SpecDecPPStop():
            return acceptance(table, stop.least, stop.most, stop.order)
        case HRADStop(confidence=DrawnConfidence() | PredictableConfidence()):
            return classes(table, stop.gamma, policy_of(stop.confidence, table))
        case HRADStop():
            raise UserError(
                f"stop.confidence: {type(stop.confidence).__name__} below hrad cannot be replayed."
                " Use confidence or confidence_before"
            )
    raise UserError(f"stop: {type(stop).__name__} cannot be replayed. {REMEDY}")


def threshold_of(stop: StopRule) -> tuple[str, float]:
    """Its setting that `lengths` compares with, as the rule's YAML calls it, and its value."""
    match stop:
        case Fixed():
            return "gamma", stop.gamma
        case DrawnConfidence() | PredictableConfidence():
            return "threshold", stop.threshold
        case AdaEDL():
            return "threshold", stop.first_threshold
        case SpecDecPPStop():
            return "threshold", stop.threshold
        case HRADStop():
            key, value = threshold_of(stop.confidence)
            return f"confidence.{key}", value
    raise UserError(f"stop: {type(stop).__name__} has no threshold. {REMEDY}")


def fixed(gamma: int) -> Policy:
    """Its threshold is the number of tokens: it stops where c + 1 exceeds it."""
    return Policy(-np.arange(1.0, gamma + 1)[None, None], sign=-1, first=2**31)


def drawn_confidence(table: RolloutTable) -> Policy:
    """Looks at the token drawn last, so never before the first one."""
    if table.confidence is None:
        raise UserError(
            "draft_warp: what the draft thought of its own tokens is on record for temperature 0,"
            " and for 1 without filters. Tune confidence_before instead"
        )
    return Policy(lowest(_after_the_first(table.confidence, 1)), first=1)


def acceptance(table: RolloutTable, least: int, most: int, order: str) -> Policy:
    """-(1 - survival) of the tokens scored so far: all of them ("paper"), or all but the last
    ("code")."""
    if table.survival is None:
        raise UserError(
            "stop.checkpoint: the table holds no acceptance predictions. Give the checkpoint to"
            " replay"
        )
    unscored = 1 if order == "code" else 0
    rejected = _after_the_first(-(1 - table.survival), 1 + unscored)
    rejected[..., :least] = np.inf
    return Policy(lowest(rejected), sign=-1, most=most, ahead=order == "paper", first=1 + unscored)


def classes(table: RolloutTable, gamma: int, confidence: Policy) -> Policy:
    """none: nothing is drawn; all: `gamma` tokens; some: what `confidence` says, `gamma` at most.
    One call a round."""
    if table.outcome is None:
        raise UserError(
            "stop.checkpoint: the table holds no classes. Give the checkpoint to replay"
        )
    reach = np.where((table.outcome == ALL)[..., None], np.inf, confidence.reach)
    most = np.where(table.outcome == NONE, 0, gamma)
    return Policy(reach, most=most, ahead=confidence.ahead, first=2**31, per_round=1)


def lowest(value: Array) -> Array:
    """Running minimum along the draft, [B, T, G]."""
    return np.minimum.accumulate(value, axis=-1)


def _after_the_first(value: NDArray[Any], tokens: int) -> Array:
    """[B, T, G]: what depth c - tokens said, seen with c tokens drawn; nothing before."""
    shifted = np.full_like(value, np.inf)
    shifted[..., tokens:] = value[..., : value.shape[-1] - tokens]
    return shifted
