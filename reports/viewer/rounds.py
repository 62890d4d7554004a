"""A trace as the viewer shows it: the fate of every token, round by round, and the times at which
each model was running."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, NamedTuple

from hydra.utils import get_class

from decoding.trace import RoundTrace, Stage, Trace

Fate = Literal["accepted", "rejected", "rolled back", "branch", "retained", "wasted"]
"""Of a draft token.

rejected: refused where the accepted path ended; rolled back: drawn after a token that was refused,
and never judged;
branch: another candidate where one was accepted, or what was drawn after it (it may have been
refused before that one);
retained: drawn after an accepted branch's first token, and pending in the next round; wasted: drawn
there and dropped. """
Origin = Literal["accepted", "residual", "bonus", "plain"]
"""Of a committed token: an accepted draft token, the one drawn after a rejection, the one drawn
after a draft that was accepted to its end, or one without a draft."""
MARKS: dict[Fate | Origin, str] = {
    "accepted": "✓",
    "rejected": "✗",
    "rolled back": "↩",
    "branch": "↳",
    "retained": "»",
    "wasted": "–",
    "residual": "◆",
    "bonus": "+",
    "plain": "·",
}
MEANINGS: dict[Fate | Origin, str] = {
    "accepted": "a draft token, committed",
    "rejected": "refused by the verifier, where the accepted path ended",
    "rolled back": "drafted after a refused token, never judged",
    "branch": "another candidate than the accepted one, or what followed it",
    "retained": "drafted after the accepted candidate, and pending in the next round",
    "wasted": "drafted after the accepted candidate, and dropped",
    "residual": "drawn from what the rejection left of the target's distribution",
    "bonus": "drawn from the target's distribution after a draft accepted to its end",
    "plain": "drawn from the target's distribution, nothing was drafted",
}
CLASSES = ("none", "some", "all")
ORDER: tuple[Stage, ...] = ("draft", "sample", "stop", "target", "verify", "other")
Lane = Literal["draft", "target", "rest"]
LANES: tuple[Lane, ...] = ("draft", "target", "rest")
MODELS: tuple[Lane, ...] = ("draft", "target")


class Rule(NamedTuple):
    """The meaning of a stop rule's values. says: that of the n-th value for the n-th draft token,
    "" if unknown; picks_class: the first value is the class of the round, and tokens have none."""

    says: str = ""
    picks_class: bool = False


UNKNOWN = Rule()


class Drafted(NamedTuple):
    """A draft token. parent: row of its parent, 0 for the last committed token; line: on which it
    is shown, a first child on that of its parent; q, p, predicted: None if the trace has none."""

    token: int
    parent: int
    depth: int
    line: int
    fate: Fate
    q: float | None = None
    p: float | None = None
    predicted: float | None = None


class Committed(NamedTuple):
    token: int
    origin: Origin


class Bar(NamedTuple):
    """A job of a model, or of the thread between them ("rest"), in seconds since the request began.
    rows: of the forward, None if unknown."""

    lane: Lane
    job: str
    start: float
    end: float
    rows: int | None


@dataclass(frozen=True)
class Round:
    """A round as it is shown. drafted: the round's draft tokens, then those with which its branches
    continued; outcome: the class that decided how far to draft; stage: the first stage of an
    overlapped round; unused: the stop rule's values beyond the last draft token."""

    drafted: list[Drafted]
    committed: list[Committed]
    outcome: int | None
    stage: str | None
    unused: list[float]
    bars: list[Bar]
    start: float
    end: float

    def uses(self, lane: Lane) -> bool:
        return any(bar.lane == lane for bar in self.bars)

    def idle(self, lane: Lane) -> float:
        """Return the seconds in which a lane has no job."""
        return (
            self.end
            - self.start
            - sum(bar.end - bar.start for bar in self.bars if bar.lane == lane)
        )


def rounds(trace: Trace, rule: Rule = UNKNOWN) -> list[Round]:
    """Return the rounds of a trace as they are shown. rule: that of its method (`rule_of`)."""
    limits, following = _limits(trace), [*trace.rounds, None][1:]
    return [
        _round(round_, after, rule, start, end)
        for round_, after, (start, end) in zip(trace.rounds, following, limits, strict=True)
    ]


def summary(shown: Round, number: int, count: int) -> str:
    """Return round `number` of `count` in a line."""

    def counts(kinds: Iterable[Fate | Origin]) -> str:
        numbers = Counter(kinds)
        return ", ".join(f"{numbers[kind]} {kind}" for kind in MARKS if kind in numbers)

    drafted = counts(node.fate for node in shown.drafted)
    committed = counts(token.origin for token in shown.committed)
    parts = [f"class {CLASSES[shown.outcome]}"] if shown.outcome is not None else []
    parts += [f"{len(shown.drafted)} drafted: {drafted}" if drafted else "nothing drafted"]
    parts += [f"the stop rule ended it at {shown.unused[-1]:.3g}"] if shown.unused else []
    parts += [f"{len(shown.committed)} committed: {committed}"]
    parts += [f"{1000 * (shown.end - shown.start):.1f} ms"]
    parts += [
        f"{lane} idle {1000 * shown.idle(lane):.1f} ms" for lane in MODELS if shown.uses(lane)
    ]
    return f"Round {number} of {count}: {'; '.join(parts)}"


def rule_of(settings: Mapping[str, Any]) -> Rule:
    """Return the meaning of the values from the rule's class. settings: those a method was decoded
    with."""
    stop = settings.get("stop") or {}
    try:
        kind: Any = get_class(stop["_target_"])
    except (KeyError, ImportError, ValueError):  # no rule, or one that is not installed here
        return UNKNOWN
    return Rule(getattr(kind, "value_says", ""), getattr(kind, "picks_class", False))


def _round(
    round_: RoundTrace, after: RoundTrace | None, rule: Rule, start: float, end: float
) -> Round:
    drafted, classes = _drafted(round_, after), round_.overlap is not None or rule.picks_class
    values = [] if classes else round_.predicted
    return Round(
        drafted=[
            node._replace(predicted=value)
            for node, value in zip(drafted, _padded(values, len(drafted)), strict=True)
        ],
        committed=[Committed(token, _origin(round_, i)) for i, token in enumerate(round_.tokens)],
        outcome=int(round_.predicted[0]) if classes and round_.predicted else None,
        stage=round_.overlap.stage if round_.overlap else None,
        unused=list(values[len(drafted) :]),
        bars=_bars(round_, start),
        start=start,
        end=end,
    )


# Tokens -------------------------------------------------------------------------------------------


def _drafted(round_: RoundTrace, after: RoundTrace | None) -> list[Drafted]:
    """Return the draft's tokens, then those of the branches beyond their first."""
    tokens, parents, fates = list(round_.draft_tokens), list(round_.draft_parents), _fates(round_)
    if round_.overlap:
        stages = after.overlap if after else None  # the next round may continue with these
        retained = stages.pending if stages and stages.stage == "branch" else 0
        for row, branch in enumerate(round_.overlap.branches, round_.overlap.pending + 1):
            grown = _grown(fates[row - 1], len(branch) - 1, retained)
            parents += [row, *range(len(tokens) + 1, len(tokens) + len(grown))][: len(grown)]
            tokens += branch[1:]
            fates += grown
    count, (depths, lines) = len(tokens), _places(parents)
    q, p = _padded(round_.draft_q, count), _padded(round_.draft_p, count)
    nodes = zip(tokens, parents, depths, lines, fates, q, p, strict=True)
    return [Drafted(*node) for node in nodes]


def _fates(round_: RoundTrace) -> list[Fate]:
    path, row = set[int](), round_.row
    while row > 0:
        path.add(row)
        row = round_.draft_parents[row - 1]
    fates = list[Fate]()
    for row, parent in enumerate(round_.draft_parents, 1):
        above = fates[parent - 1] if parent else "accepted"
        if row in path:
            fates.append("accepted")
        elif parent == round_.row:
            fates.append("rejected")
        else:
            fates.append("branch" if above in ("accepted", "branch") else "rolled back")
    return fates


def _grown(candidate: Fate, count: int, retained: int) -> list[Fate]:
    """Return the fates of the `count` tokens drawn after a branch's first token."""
    if candidate == "accepted":
        return ["retained" if place < retained else "wasted" for place in range(count)]
    return ["branch" if candidate == "branch" else "rolled back" for _ in range(count)]


def _places(parents: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return depth and line of each node."""
    depths, lines, seen, last = [0], [0], set[int](), 0
    for parent in parents:
        depths.append(depths[parent] + 1)
        last += parent in seen
        lines.append(last if parent in seen else lines[parent])
        seen.add(parent)
    return depths[1:], lines[1:]


def _origin(round_: RoundTrace, place: int) -> Origin:
    if place < round_.accepted:
        return "accepted"
    if round_.rejected:
        return "residual"
    return "bonus" if round_.draft_tokens else "plain"


def _padded(values: Sequence[Any], count: int) -> list[Any]:
    return [*values, *[None] * count][:count]


# Time ---------------------------------------------------------------------------------------------


def _limits(trace: Trace) -> list[tuple[float, float]]:
    """Return start and end of each round. If the models have spans, a round ends where the next
    one's first span starts; otherwise the rounds' seconds are laid end to end."""
    if trace.rounds and all(round_.overlap for round_ in trace.rounds):
        starts = [
            min(span.start for span in r.overlap.spans) for r in trace.rounds[1:] if r.overlap
        ]
        return list(pairwise([trace.prefill_seconds, *starts, trace.seconds]))
    ends = [trace.prefill_seconds]
    for round_ in trace.rounds:
        ends.append(ends[-1] + sum(round_.seconds.values()))
    return list(pairwise(ends))


def _bars(round_: RoundTrace, start: float) -> list[Bar]:
    """Return the jobs of models that ran side by side, else the round's stages end to end: the
    trace has the sum of each, not its parts."""
    if round_.overlap:
        spans = round_.overlap.spans
        return [Bar(span.worker, span.job, span.start, span.end, span.tokens) for span in spans]
    bars = list[Bar]()
    for stage in ORDER:
        end = start + round_.seconds[stage]
        lane: Lane = "draft" if stage == "draft" else "target" if stage == "target" else "rest"
        if end > start:
            bars.append(Bar(lane, stage, start, end, None))
        start = end
    return bars
