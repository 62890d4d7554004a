"""What a draft is worth along given responses, and the speed-up that its acceptance and the forwards' costs allow."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from decoding.lm import Pair
from decoding.sampling import Warp
from decoding.timeline import Devices

TINY = 1e-30


@dataclass(frozen=True)
class Match:
    """A draft against its target along a response of T tokens, both having read all before, [T] each.

    overlap: sum_v min(p, q) at temperature 1; greedy: whether p and q have the same most probable token; chance: that
    the response's token is the draft's, given that the response has it: min(1, q / p) of the warped laws (Leviathan et
    al. 2023: a drawn token is kept with min(1, p / q), so it is drawn and kept with min(p, q))
    """

    overlap: Tensor
    greedy: Tensor
    chance: Tensor


@torch.inference_mode()
def match(pair: Pair, prompt: Tensor, response: Sequence[int], warp: Warp, draft_warp: Warp) -> Match:
    """One forward of each model over prompt [P] and response [T]; their caches are left to be reset. A draft that reads
    its target's states has them at every position here, as the first token of a draft has; later ones accept less."""
    tokens = torch.tensor(response)
    text = torch.cat([prompt, tokens])[:-1]
    rows = range(len(prompt) - 1, len(text))
    logits = []
    for lm in (pair.target, pair.draft):
        lm.reset()
        logits.append(lm.forward(text, logits=rows).logits)
    p, q = (of.softmax(-1) for of in logits)
    said_p, said_q = (
        law.probs(of).gather(-1, tokens[:, None])[:, 0] for law, of in zip((warp, draft_warp), logits, strict=True)
    )
    return Match(
        torch.minimum(p, q).sum(-1),
        p.argmax(-1) == q.argmax(-1),
        (said_q / said_p.clamp_min(TINY)).clamp_max(1),
    )


def expected_rounds(chance: Sequence[float], gamma: int) -> float:
    """Rounds in which drafts of `gamma` tokens, verified token by token, make the response, expected over all coins.

    chance: [T], of each token that it is the draft's (`Match`). A round ends with the first token that is not, or with
    the one after the draft.
    """
    count, rounds = len(chance), 0.0
    begins = [1.0] + [0.0] * (count + gamma)  # probability that a round begins at a token
    for first in range(count):
        rounds += begins[first]
        reached = begins[first]
        for place in range(first, min(first + gamma, count)):
            begins[place + 1] += reached * (1 - chance[place])
            reached *= chance[place]
        begins[first + gamma + 1] += reached
    return rounds


@dataclass(frozen=True)
class Roofline:
    """Modelled: nothing but forwards costs time, and every draft has `gamma` tokens. speedup: over one target forward
    per token."""

    gamma: int
    tokens_per_round: float
    speedup: float


def roofline(chances: Sequence[Tensor], devices: Devices, longest: int) -> Roofline:
    """The best draft length from 1 to `longest`. chances: [T] of each response."""
    tokens, values = sum(map(len, chances)), [chance.tolist() for chance in chances]
    found = []
    for gamma in range(1, longest + 1):
        rounds = sum(expected_rounds(chance, gamma) for chance in values)
        seconds = rounds * (gamma * devices.draft(1) + devices.target(gamma + 1))
        found.append(Roofline(gamma, tokens / rounds, tokens * devices.target(1) / seconds))
    return max(found, key=lambda one: one.speedup)
