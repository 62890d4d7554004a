"""The match of a draft with its target along the responses of plain decoding, and the speed-up that
its acceptance and the costs of forwards allow."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from decoding.interfaces import Pair
from decoding.processors import scored
from decoding.sampling import Warp
from decoding.trace import Trace
from evaluation.table import by_dataset, timed
from evaluation.timeline import COST_ROWS, Devices, measured_devices

TINY = 1e-30
TOGETHER = 128  # positions of a response from which drafts are followed by one forward


@dataclass(frozen=True)
class Match:
    """A draft against its target along a response of T tokens, given the text before each.

    overlap: [T], sum_v min(p, q) at temperature 1; greedy: [T], whether p and q have the same most
    probable token; both for a draft's first token. chance: [D, T], the probability that the
    response's token came from the draft, given the response and that the d tokens before it were
    drafted in the same round: min(1, q / p) of the warped distributions (Leviathan et al. 2023: a
    drawn token is kept with min(1, p / q), so it is drawn and kept with min(p, q)). D is 1 if d
    makes no difference; zeros where the response has no d tokens before"""

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
    """Return the match by one forward of each model over prompt [P] and response [T]; the caller
    resets their caches. A draft that reads its target's states, and its own from the second token
    of a draft on, also runs `drafted_logits`, for drafts of up to `longest` tokens."""
    tokens = torch.tensor(response)
    text = torch.cat([prompt, tokens])[:-1]
    rows = range(len(prompt) - 1, len(text))
    logits = []
    for lm in (pair.target, pair.draft):
        lm.reset()
        logits.append(lm.forward(text, logits=rows).logits)
    p, q = (each.softmax(-1) for each in logits)
    ends = getattr(pair, "eos_ids", ())

    def warped(one: Warp, logits: Tensor, drawn: Tensor) -> Tensor:
        """Return the probabilities [n] of the tokens `drawn` [n] of the response."""
        size = len(prompt)
        scores = scored(one, logits, lambda row: (text[: size + drawn[row]], size), ends)
        probs = one.rest.probs(scores)
        return probs.gather(-1, tokens[drawn, None])[:, 0]

    every = torch.arange(len(tokens))
    p_response, q_first = (
        warped(one, each, every) for one, each in zip((warp, draft_warp), logits, strict=True)
    )
    depths = min(longest, len(tokens)) if pair.draft.reads_target else 1
    q_response = q_first.new_zeros(depths, len(tokens))
    q_response[0] = q_first
    for first in range(0, len(tokens) if depths > 1 else 0, TOGETHER):
        anchors = torch.arange(first, min(first + TOGETHER, len(tokens)))
        drafted = drafted_logits(pair.draft, len(prompt), tokens, anchors, depths - 1)
        for depth, each in enumerate(drafted, 1):
            drawn = anchors[anchors + depth < len(tokens)] + depth
            logits_drawn = each[: len(drawn)].to(q_first.dtype)
            q_response[depth, drawn] = warped(draft_warp, logits_drawn, drawn)
    return Match(
        torch.minimum(p, q).sum(-1),
        p.argmax(-1) == q.argmax(-1),
        (q_response / p_response.clamp_min(TINY)).clamp_max(1),
    )


def drafted_logits(
    draft: Any, start: int, tokens: Tensor, anchors: Tensor, depths: int
) -> Iterator[Tensor]:
    """Yield the draft's logits [A, V] of the next token after it has drafted 1, 2, ..., `depths` of
    a response's `tokens` [T] itself, from each of `anchors` [A] on; undefined where the response
    ends earlier. start: tokens of the prompt. Its cache must hold prompt and response without the
    last token, and does so again at the end."""
    base, own = draft.length, torch.eye(len(anchors), dtype=torch.bool)
    rows = start - 1 + anchors
    prefix = torch.arange(base) <= rows[:, None]
    for depth in range(1, depths + 1):
        drafted = tokens[(anchors + depth - 1).clamp_max(len(tokens) - 1)]
        places = (rows + depth).clamp_max(base - 1)
        yield draft.forward_masked(drafted, places, torch.cat([prefix, *[own] * depth], 1)).logits
    draft.crop(base)


def expected_rounds(chance: Sequence[Sequence[float]], gamma: int) -> float:
    """Return the expected number of rounds that produce the response with drafts of `gamma` tokens,
    verified token by token.

    chance: [D, T], the probability that each token came from the draft (`Match`); the last row also
    holds for longer drafts. A round ends with the first token that did not, or with the one after
    the draft.
    """
    count, rounds = len(chance[0]), 0.0
    begins = [1.0] + [0.0] * (count + gamma)  # probability that a round begins at a token
    for first in range(count):
        rounds += begins[first]
        reached = begins[first]
        for token in range(first, min(first + gamma, count)):
            kept = chance[min(token - first, len(chance) - 1)][token]
            begins[token + 1] += reached * (1 - kept)
            reached *= kept
        begins[first + gamma + 1] += reached
    return rounds


@dataclass(frozen=True)
class SpeedupBound:
    """A modelled bound: only forwards cost time, and every draft has `gamma` tokens. speedup: over
    one target forward per token."""

    gamma: int
    tokens_per_round: float
    speedup: float


def speedup_bound(chances: Sequence[Tensor], devices: Devices, longest: int) -> SpeedupBound:
    """Return the best draft length from 1 to `longest`. chances: [D, T] of each response."""
    tokens, values = sum(each.shape[1] for each in chances), [each.tolist() for each in chances]
    bounds = []
    for gamma in range(1, longest + 1):
        rounds = sum(expected_rounds(chance, gamma) for chance in values)
        seconds = rounds * (gamma * devices.draft(1) + devices.target(gamma + 1))
        bounds.append(SpeedupBound(gamma, tokens / rounds, tokens * devices.target(1) / seconds))
    return max(bounds, key=lambda bound: bound.speedup)


# Along plain decoding -----------------------------------------------------------------------------


def draft_along(
    pair: Any,
    prompts: Sequence[Tensor],
    plain: Sequence[Trace],
    warp: Warp,
    draft_warp: Warp,
    longest: int,
) -> dict[str, Any]:
    """Return measured seconds of forwards, and by dataset the draft's match with the target along
    the responses of plain decoding, with the best draft length up to `longest`.

    prompts [n] and plain: the same requests."""
    requests = list(zip(prompts, plain, strict=True))
    texts = sorted(([*prompt.tolist(), *trace.tokens] for prompt, trace in requests), key=len)
    devices = measured_devices(pair, texts[len(texts) // 2], longest + 1)
    matches = [
        match(pair, prompt, trace.tokens, warp, draft_warp, longest) for prompt, trace in requests
    ]
    summaries = {
        name: _summary([matches[number] for number in part.index], devices, longest)
        for name, part in by_dataset(timed({"": plain})).items()
    }
    rows = [count for count in COST_ROWS if count <= longest + 1]
    target = {str(count): devices.target(count) for count in rows}
    return {"seconds": {"draft": devices.draft(1), "target": target}, "match": summaries}


def _summary(matches: Sequence[Match], devices: Devices, longest: int) -> dict[str, Any]:
    """Return means over all positions of one dataset's responses, and its bound."""

    def mean(values: Iterable[Tensor]) -> float:
        return float(torch.cat(list(values)).double().mean())

    chances = [match.chance for match in matches]
    return {
        "positions": sum(len(match.overlap) for match in matches),
        "overlap": mean(match.overlap for match in matches),
        "greedy": mean(match.greedy for match in matches),
        "accepted": mean(chance[0] for chance in chances),
        "accepted_after": [
            mean(chance[depth, depth:] for chance in chances if depth < len(chance))
            for depth in range(1, max(map(len, chances)))
        ],
        "speedup_bound": asdict(speedup_bound(chances, devices, longest)),
    }
