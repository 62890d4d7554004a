"""Statistics of a draft that predictors read: its confidence in a token, its recent acceptance."""

from collections.abc import Sequence
from math import log

import torch
from torch import Tensor

Q_STATS = ("q_drawn", "q_max", "q_margin", "q_entropy")
PATH = 3
"""Columns of `path_rows`."""
TINY = torch.finfo(torch.float32).tiny
HISTORY, RECENT, LONGER = 3, 4, 16
"""Columns of `history`; verdicts that its two shares look back on."""


def q_stats(unwarped: Tensor, token: Tensor) -> dict[str, Tensor]:
    """Return `Q_STATS` [...] of tokens [...] drawn where the draft's distribution, at temperature 1
    and unfiltered, is `unwarped` [..., V]: the token's probability, the highest one, its margin to
    the second, the entropy in nats."""
    top = unwarped.topk(2, dim=-1).values
    return {
        "q_drawn": unwarped.gather(-1, token[..., None]).squeeze(-1),
        "q_max": top[..., 0],
        "q_margin": top[..., 0] - top[..., 1],
        "q_entropy": entropy(unwarped),
    }


def q_stats_of(unwarped: Tensor, token: int) -> list[float]:
    """Return `q_stats` of one token and its distribution [V]: on a CPU in a fifth of the time."""
    if unwarped.device.type != "cpu":
        row: list[float] = q_stats_row(unwarped, ids_of(token, unwarped)).tolist()
        return row
    values = unwarped.numpy()
    peak = int(values.argmax())
    highest, second = values[peak], values[:peak].max(initial=0)
    second = max(second, values[peak + 1 :].max(initial=0))
    return [*map(float, (values[token], highest, highest - second)), entropy(unwarped).item()]


def q_stats_row(unwarped: Tensor, token: Tensor) -> Tensor:
    """Return `q_stats` of `token` [1] and `unwarped` [V], [4], on their device."""
    return torch.stack(list(q_stats(unwarped, token[0]).values()))


def ids_of(token: int, like: Tensor) -> Tensor:
    """Return `token` as [1] int64 on the device of `like`, without waiting for a copy."""
    return torch.full((1,), token, device=like.device)


def entropy(probs: Tensor) -> Tensor:
    """Return the natural-log entropy of distributions [..., V], [...]."""
    # four times as fast on a CPU as torch.special.entr; numbers below TINY are subnormal, and their
    # logarithm takes ten times as long
    return -(probs.clamp_min(TINY).log_().mul_(probs)).sum(-1)


def path_rows(q_drawn: Tensor) -> Tensor:
    """Return for each of the n tokens of a path, with draft probabilities `q_drawn` [..., n]: the
    log of the product so far, the lowest so far, and the probability of the token before (1 for the
    first token), [..., n, 3]."""
    before = torch.cat([torch.ones_like(q_drawn[..., :1]), q_drawn[..., :-1]], dim=-1)
    product = q_drawn.clamp_min(1e-30).log().cumsum(-1)
    return torch.stack([product, q_drawn.cummin(-1).values, before], dim=-1)


def path_row(q_drawn: Sequence[float]) -> list[float]:
    """Return the last of `path_rows`."""
    product = sum(log(max(q, 1e-30)) for q in q_drawn)
    return [product, min(q_drawn), q_drawn[-2] if len(q_drawn) > 1 else 1.0]


def history_row(verdicts: Sequence[bool]) -> Tensor:
    """Return the recent acceptance of a request's draft tokens, as input of its next round, [3]
    float32.

    verdicts: for each committed position where a draft token was verified, oldest first, whether
    that token was accepted. Columns: the share accepted of the last `RECENT` and of the last
    `LONGER` verdicts (half a verdict added to both sides), and the number of verdicts as a share of
    `LONGER`.

    Decoding: a round that verified n tokens and accepted a of them adds a verdicts "accepted" and,
    if a < n, one "rejected"; a tree counts as its accepted path. Harvest: each position before the
    round has one verdict, on the draft's first token there, by the harvest's accept draws. Two
    things differ. Decoding has no verdict for positions where no draft token was verified (a bonus
    token, a round without a draft); a harvest has one for every position. And if the target or the
    draft is sampled, the harvest's token was drawn independently of the response: its verdict has
    the right probability, but does not belong to the committed token. If both are greedy, token and
    verdict are the same."""
    return torch.tensor(history_numbers(verdicts), dtype=torch.float32)


def history_numbers(verdicts: Sequence[bool]) -> list[float]:
    """Return `history_row` as plain numbers."""
    looks = (verdicts[-RECENT:], verdicts[-LONGER:])
    shares = [(sum(last) + 0.5) / (len(last) + 1) for last in looks]
    return [*shares, min(len(verdicts), LONGER) / LONGER]


def history_rows(verdicts: Tensor) -> Tensor:
    """Return `history_row` before each of T positions, [T, 3]. verdicts: [T] bool."""
    values = verdicts.tolist()
    return torch.stack([history_row(values[:position]) for position in range(len(values))])
