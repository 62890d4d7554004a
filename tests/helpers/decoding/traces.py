"""Rounds and traces made by hand."""

from collections.abc import Sequence
from typing import Literal

from decoding.trace import STAGES, RoundTrace, Span, StageTrace

SECONDS = dict.fromkeys(STAGES, 0.01)
SPANS = [Span("target", "verify", 1.0, 2.0, 1)]


def plain(token: int) -> RoundTrace:
    return RoundTrace([], [], [], 0, 0, [token], [], 0, SECONDS)


def chain(drafted: Sequence[int], accepted: int, last: int) -> RoundTrace:
    """`last` follows the accepted tokens."""
    count = len(drafted)
    draft = list(drafted), list(range(count)), [0.5] * count
    committed = [*drafted[:accepted], last]
    return RoundTrace(*draft, accepted, accepted, committed, [], count, SECONDS)


def tree(parents: Sequence[int], row: int, accepted: int) -> RoundTrace:
    """Token n + 10 is in row n; 9 follows."""
    tokens, path, above = [place + 10 for place, _ in enumerate(parents, 1)], list[int](), row
    while above:
        path.insert(0, above + 10)
        above = parents[above - 1]
    return RoundTrace(
        tokens, list(parents), [0.5] * len(parents), row, accepted, [*path, 9], [], 2, SECONDS
    )


def overlapped(
    pending: Sequence[int],
    branches: Sequence[Sequence[int]],
    row: int,
    tokens: Sequence[int],
    outcome: int | None,
    stage: Literal["draft", "branch", "pre_verify"] = "draft",
    spans: Sequence[Span] = SPANS,
) -> RoundTrace:
    count, candidates = len(pending), [branch[0] for branch in branches]
    stages = StageTrace(
        stage, outcome, count, 0, 0, [list(branch) for branch in branches], 0, 0, list(spans)
    )
    return RoundTrace(
        draft_tokens=[*pending, *candidates],
        draft_parents=[*range(count), *[count] * len(candidates)],
        draft_q=[0.5] * (count + len(candidates)),
        row=row,
        accepted=min(row, count + 1),
        tokens=list(tokens),
        predicted=[] if outcome is None else [float(outcome)],
        draft_forwards=1,
        seconds=SECONDS,
        overlap=stages,
    )
