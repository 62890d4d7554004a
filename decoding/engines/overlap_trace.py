"""What a round of an overlapped engine leaves in its trace."""

from collections.abc import Sequence
from dataclasses import dataclass

from decoding.engines.branching import Branches, Pending
from decoding.trace import STAGES, Span, Stage, StageTrace


@dataclass(frozen=True)
class Outcome:
    """accepted: pending tokens accepted; branch: the accepted one; token: drawn where neither goes
    on; ended: the response ends before any of them that is not here."""

    accepted: int
    branch: int | None
    token: int | None
    ended: bool = False

    def kept(self, tokens: int) -> "Outcome":
        """The same with the first `tokens` committed tokens alone."""
        emitted = self.accepted + ((self.branch, self.token) != (None, None))
        return self if tokens == emitted else Outcome(tokens, None, None, ended=True)


def drafted(pending: Pending, branches: Branches) -> tuple[list[int], list[int], list[float]]:
    """Tokens, parents and q of what was put to the test: the pending tokens, then the first token
    of each branch."""
    tree, chain, first = pending.tree, pending.tokens, int(pending.unsure)
    candidates = [tree.token[rows[0] - 1] for rows in branches.paths]
    parents = [*range(len(chain)), *[len(chain)] * len(candidates)]
    drawn = [*range(1, len(pending.q) + 1), *(rows[0] for rows in branches.paths[first:])]
    q = [tree.drawn[row - 1] for row in drawn]
    return [*chain, *candidates], parents, q


def stage_trace(
    pending: Pending,
    branches: Branches,
    outcome: Outcome,
    following: Pending | None,
    alone: int,
    spans: list[Span],
) -> StageTrace:
    """following: what is pending next, None after a rejection; alone: draft forwards while the
    target waited; spans: of both workers."""
    tree, waste = pending.tree, 0
    rollback = pending.length - outcome.accepted + branches.depth
    if outcome.branch is not None:
        kept = following.length if following else 0
        rollback, waste = 0, branches.depth - 1 - kept
    elif outcome.ended:
        rollback, waste = 0, rollback
    return StageTrace(
        stage=pending.stage,
        outcome=pending.outcome,
        pending=pending.length,
        draft_steps=pending.steps + branches.depth - pending.unsure,
        alone=alone,
        branches=[[tree.token[row - 1] for row in path] for path in branches.paths],
        rollback=rollback,
        waste=waste,
        spans=spans,
    )


def stage_seconds(
    ours: dict[Stage, float], drafts: dict[Stage, float], spans: Sequence[Span]
) -> dict[Stage, float]:
    """Return the seconds of the engine's own stages, the draft's and the target's; `other` is what
    is left while they run in turn."""
    drafts["target"] = sum(span.end - span.start for span in spans if span.worker == "target")
    drafts["other"] = 0.0
    ours["other"] = max(0.0, ours["other"] - sum(drafts.values()))
    return {stage: ours[stage] + drafts[stage] for stage in STAGES}
