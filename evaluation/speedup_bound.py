"""How a draft matches its target along the responses of plain decoding, and the speed-up that its
acceptance and the costs of forwards allow."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from decoding.interfaces import Pair
from decoding.sampling import Warp
from decoding.trace import Trace
from evaluation.table import by_dataset, timed
from evaluation.timeline import COST_ROWS, Devices, measured_devices

TINY = 1e-30
TOGETHER = 128  # places of a response from which drafts are followed by one forward


@dataclass(frozen=True)
class Match:
    """A draft against its target along a response of T tokens, both having read all before.

    overlap: [T], sum_v min(p, q) at temperature 1; greedy: [T], whether p and q have the same most
    probable token; both of a draft's first token. chance: [D, T], that the response's token is the
    draft's, given that the response has it and the d tokens before it were drafted in the same
    round: min(1, q / p) of the warped distributions (Leviathan et al. 2023: a drawn token is kept
    with min(1, p / q), so it is drawn and kept with min(p, q)). D is 1 where d makes no difference;
    zeros where the response has no d tokens before"""

    overlap: Tensor
    greedy: Tensor
    chance: Tensor


@torch.inference_mode()
def match(
    pair: Pair,
    prompt: Tensor,
    response: Sequence[int],
    warp: Warp,
    draft_warp: Warp,
    longest: int = 1,
) -> Match:
    """One forward of each model over prompt [P] and response [T]; their caches are left to be
    reset. Of a draft that reads its target's states, and its own from the second token of a draft
    on, also `drafted_logits`, for drafts of up to `longest` tokens."""
    tokens = torch.tensor(response)
    text = torch.cat([prompt, tokens])[:-1]
    rows = range(len(prompt) - 1, len(text))
    logits = []
    for lm in (pair.target, pair.draft):
        lm.reset()
        logits.append(lm.forward(text, logits=rows).logits)
    p, q = (of.softmax(-1) for of in logits)
    said_p, first = (
        distribution.probs(of).gather(-1, tokens[:, None])[:, 0]
        for distribution, of in zip((warp, draft_warp), logits, strict=True)
    )
    depths = min(longest, len(tokens)) if pair.draft.reads_target else 1
    said_q = first.new_zeros(depths, len(tokens))
    said_q[0] = first
    if depths > 1:
        _say_later(said_q, pair.draft, len(prompt), tokens, draft_warp)
    return Match(
        torch.minimum(p, q).sum(-1),
        p.argmax(-1) == q.argmax(-1),
        (said_q / said_p.clamp_min(TINY)).clamp_max(1),
    )


def _say_later(
    said_q: Tensor, draft: Any, prompt_tokens: int, tokens: Tensor, draft_warp: Warp
) -> None:
    """Write rows 1 and on of `said_q` [D, T]: the draft's probability of each of `tokens` [T] when
    it has drafted the d before it itself."""
    depths = len(said_q) - 1
    for start in range(0, len(tokens), TOGETHER):
        some = torch.arange(start, min(start + TOGETHER, len(tokens)))
        logits = drafted_logits(draft, prompt_tokens, tokens, some, depths)
        for depth, of in enumerate(logits, 1):
            place = some[some + depth < len(tokens)] + depth
            probs = draft_warp.probs(of[: len(place)].to(said_q.dtype))
            said_q[depth, place] = probs.gather(-1, tokens[place, None])[:, 0]


def drafted_logits(
    draft: Any, start: int, tokens: Tensor, anchors: Tensor, depths: int
) -> Iterator[Tensor]:
    """[A, V] of the draft when it has drafted 1, 2, ..., `depths` of a response's `tokens` [T]
    itself, from each of `anchors` [A] on: its logits for the token after them. start: tokens of the
    prompt; it has prompt and response but its last token cached, and has them again at the end.
    Where the response ends earlier they mean nothing."""
    base, own = draft.length, torch.eye(len(anchors), dtype=torch.bool)
    rows = start - 1 + anchors
    prefix = torch.arange(base) <= rows[:, None]
    for depth in range(1, depths + 1):
        drafted = tokens[(anchors + depth - 1).clamp_max(len(tokens) - 1)]
        places = (rows + depth).clamp_max(base - 1)
        yield draft.forward_masked(drafted, places, torch.cat([prefix, *[own] * depth], 1)).logits
    draft.crop(base)


def expected_rounds(chance: Sequence[Sequence[float]], gamma: int) -> float:
    """Rounds in which drafts of `gamma` tokens, verified token by token, make the response,
    expected over all coins.

    chance: [D, T], of each token that it is the draft's (`Match`); of more than D tokens drafted,
    the last row. A round ends with the first token that is not, or with the one after the draft.
    """
    count, rounds = len(chance[0]), 0.0
    begins = [1.0] + [0.0] * (count + gamma)  # probability that a round begins at a token
    for first in range(count):
        rounds += begins[first]
        reached = begins[first]
        for place in range(first, min(first + gamma, count)):
            kept = chance[min(place - first, len(chance) - 1)][place]
            begins[place + 1] += reached * (1 - kept)
            reached *= kept
        begins[first + gamma + 1] += reached
    return rounds


@dataclass(frozen=True)
class SpeedupBound:
    """Modelled: nothing but forwards costs time, and every draft has `gamma` tokens. speedup: over
    one target forward per token."""

    gamma: int
    tokens_per_round: float
    speedup: float


def speedup_bound(chances: Sequence[Tensor], devices: Devices, longest: int) -> SpeedupBound:
    """The best draft length from 1 to `longest`. chances: [D, T] of each response (`Match`)."""
    tokens, values = (
        sum(chance.shape[1] for chance in chances),
        [chance.tolist() for chance in chances],
    )
    found = []
    for gamma in range(1, longest + 1):
        rounds = sum(expected_rounds(chance, gamma) for chance in values)
        seconds = rounds * (gamma * devices.draft(1) + devices.target(gamma + 1))
        found.append(SpeedupBound(gamma, tokens / rounds, tokens * devices.target(1) / seconds))
    return max(found, key=lambda one: one.speedup)


# Along plain decoding -----------------------------------------------------------------------------


def draft_along(
    pair: Any,
    prompts: Sequence[Tensor],
    plain: Sequence[Trace],
    warp: Warp,
    draft_warp: Warp,
    longest: int,
) -> dict[str, Any]:
    """Return measured seconds of forwards, and by dataset how the draft matches the target along
    the responses of plain decoding, with the best draft length up to `longest`.

    prompts [n] and plain: the same requests."""
    texts = [
        [*prompt.tolist(), *trace.tokens] for prompt, trace in zip(prompts, plain, strict=True)
    ]
    devices = measured_devices(pair, sorted(texts, key=len)[len(texts) // 2], longest + 1)
    matches = [
        match(pair, prompt, trace.tokens, warp, draft_warp, longest)
        for prompt, trace in zip(prompts, plain, strict=True)
    ]
    rows = timed({"": plain})
    found = {
        name: _summary([matches[number] for number in part.index], devices, longest)
        for name, part in by_dataset(rows).items()
    }
    counts = [count for count in COST_ROWS if count <= longest + 1]
    costs = {
        "draft": devices.draft(1),
        "target": {str(count): devices.target(count) for count in counts},
    }
    return {"seconds": costs, "match": found}


def _summary(matches: Sequence[Match], devices: Devices, longest: int) -> dict[str, Any]:
    """Return what one dataset's responses say."""
    depths = max(len(one.chance) for one in matches)
    return {
        "positions": sum(len(one.overlap) for one in matches),
        "overlap": _mean([one.overlap for one in matches]),
        "greedy": _mean([one.greedy for one in matches]),
        "accepted": _mean([one.chance[0] for one in matches]),
        "accepted_after": [
            _mean([one.chance[depth, depth:] for one in matches if depth < len(one.chance)])
            for depth in range(1, depths)
        ],
        "speedup_bound": asdict(speedup_bound([one.chance for one in matches], devices, longest)),
    }


def _mean(values: Sequence[Tensor]) -> float:
    """Return the mean over all positions of all responses."""
    return float(torch.cat(list(values)).double().mean())
