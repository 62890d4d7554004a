"""Evidence that a decode is lossless: token-for-token equality when greedy, fixed invariants
always."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from decoding.interfaces import LM
from decoding.trace import Trace

TOLERANCE = 1e-3  # largest top-two logit gap that float32 rounding may flip
STEPS = 2  # of narrower dtypes, in steps between neighbouring numbers: each logit may be one off


@dataclass(frozen=True)
class Difference:
    """The first place where a greedy output leaves the baseline's.

    gap: logit of the baseline's token minus logit of this method's, from one uncached target pass
    over the common prefix. Forwards of different lengths round differently, so a near tie may fall
    either way. limit: a near tie is below it."""

    prompt_id: str
    position: int
    baseline_token: int | None
    token: int | None
    gap: float
    limit: float = TOLERANCE

    @property
    def excused(self) -> bool:
        return abs(self.gap) < self.limit


def greedy_differences(
    target: LM,
    prompts: Sequence[torch.Tensor],
    traces: Sequence[Trace],
    baseline: Sequence[Trace],
    dtype: torch.dtype = torch.float32,
) -> list[Difference]:
    """One entry per request whose tokens are not the baseline's. prompts: ids [n] of each request;
    dtype: of the target's logits."""
    found = []
    for prompt, ours, theirs in zip(prompts, traces, baseline, strict=True):
        if ours.tokens != theirs.tokens:
            found.append(_first_difference(target, prompt, ours, theirs, dtype))
    return found


def _first_difference(
    target: LM, prompt: torch.Tensor, ours: Trace, theirs: Trace, dtype: torch.dtype
) -> Difference:
    position = next(
        (i for i, (a, b) in enumerate(zip(ours.tokens, theirs.tokens, strict=False)) if a != b),
        min(len(ours.tokens), len(theirs.tokens)),
    )
    token, expected = (dict(enumerate(trace.tokens)).get(position) for trace in (ours, theirs))
    if token is None or expected is None:
        return Difference(
            ours.prompt_id, position, expected, token, float("inf")
        )  # one simply goes on: a bug
    target.reset()
    prefix = torch.cat([prompt, torch.tensor(ours.tokens[:position], dtype=torch.long)])
    logits = target.forward(prefix, logits="last").logits[-1]
    first, second = logits[expected].item(), logits[token].item()
    return Difference(
        ours.prompt_id,
        position,
        expected,
        token,
        first - second,
        near_tie(max(first, second), dtype),
    )


def near_tie(logit: float, dtype: torch.dtype) -> float:
    """The gap from which on two logits of about `logit` in `dtype` are not the same up to
    rounding."""
    step = torch.finfo(dtype).eps * 2.0 ** math.floor(math.log2(max(abs(logit), 1.0)))
    return max(TOLERANCE, math.nextafter(STEPS * step, math.inf))


def broken_invariants(trace: Trace, max_new_tokens: int, eos_ids: frozenset[int]) -> list[str]:
    """What no correct decode does, whatever the distribution; empty for a sound trace."""
    facts = {
        "the output is not the concatenation of its rounds": (
            trace.tokens != [token for round_ in trace.rounds for token in round_.tokens]
        ),
        "longer than max_new_tokens": len(trace.tokens) > max_new_tokens,
        "goes on after EOS": any(token in eos_ids for token in trace.tokens[:-1]),
        "a round commits nothing": any(not r.tokens for r in trace.rounds),
        "a round commits other tokens than it accepted": any(
            len(r.accepted_path) != r.accepted or r.tokens[: r.accepted] != r.accepted_path
            for r in trace.rounds
        ),
        "more accepted than drafted": any(r.accepted > len(r.draft_tokens) for r in trace.rounds),
        "more than one token follows the accepted ones": any(
            len(r.tokens) > r.accepted + 1 for r in trace.rounds
        ),
        "a drawn token had no probability": any(q <= 0 for r in trace.rounds for q in r.draft_q),
    }
    return [fact for fact, broken in facts.items() if broken]
