"""Whether given responses have the distribution that their harvest states.

Of a token drawn from p the mean of -log p is the entropy H(p). So the sum of -log p - H(p) over a
response, which is a martingale, has mean 0 whatever ends the response; drawn colder, by fewer
candidates or with penalties it has not. The mean is per token, its interval over prompts: the
tokens of a response depend on each other. (Means of responses would not do: a response that a
surprising end token cuts short would count as much as a long one.)"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

# Responses that a warning takes: with fewer, sums that a few rare tokens make are far from normal.
ENOUGH = 50
# Half widths of the 95 % interval from 0 at which to warn: 1 of 20 honest harvests lies outside of
# the interval itself, 1 of 300 so far outside if sums are normal (5 of 400 simulated sets of 50).
FAR = 1.5
# Shares of tokens with p = 0 that rounding explains: of a sampled target, of a greedy one.
IMPOSSIBLE = 0.02, 0.05
CAUSES = (
    "a temperature, top_k, top_p, min_p or repetition_penalty that the server takes from its"
    " generation_config, another chat template or system prompt, other weights, or text that is"
    " tokenised otherwise than it was sampled (ask for token ids)"
)


def given_row(excess: Tensor) -> list[float]:
    """Return tokens, sum of -log p - H(p) in nats over those with p > 0, and tokens with p = 0 (at
    most 1: the target draws that token itself) of a given response. excess: [T]."""
    possible = torch.isfinite(excess)
    total = float(excess[possible].double().sum())
    return [int(possible.sum()), round(total, 6), int((~possible).sum())]


def surprisal(rows: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Return what `given_row` says of all responses together: `prompts`, `tokens`, `impossible`
    tokens (p = 0), `mean` excess in nats per token, and its 95 % interval `low` to `high`; None
    where there is too little to tell."""
    tokens, sums, impossible = np.array(rows, dtype=float).reshape(-1, 3).T
    found: dict[str, Any] = {
        **{"prompts": len(rows), "tokens": int(tokens.sum()), "impossible": int(impossible.sum())},
        **dict.fromkeys(("mean", "low", "high")),
    }
    if len(rows) > 1 and found["tokens"]:
        mean = sums.sum() / tokens.sum()  # a ratio of means: its error is that of sums - mean * T
        error = (sums - mean * tokens).std(ddof=1) / math.sqrt(len(rows)) / tokens.mean()
        edges = {"mean": mean, "low": mean - 1.96 * error, "high": mean + 1.96 * error}
        found |= {name: round(float(value), 6) for name, value in edges.items()}
    return found


def lines(found: dict[str, Any], greedy: bool) -> dict[str, str]:
    """Return rows of a summary, by their heads. greedy: the target has one token at each place."""
    all_tokens, zero = found["tokens"] + found["impossible"], found["impossible"]
    if greedy:
        share = found["tokens"] / max(1, all_tokens)
        return {"given = argmax": f"{share:.2%} of {all_tokens:,} tokens looked at"}
    rows = {"-log p(token) - H(p)": "no interval: it takes tokens of two prompts or more"}
    if found["mean"] is not None:
        rows["-log p(token) - H(p)"] = (
            f"{found['mean']:+.3f} nats a token ({found['low']:+.3f} to {found['high']:+.3f}, 95 %"
            f" over {found['prompts']:,} prompts; 0: drawn as warp says)"
        )
    if zero:
        rows["  tokens with p = 0"] = (
            f"{zero:,} of {all_tokens:,}, left out; their responses end there"
        )
    return rows


def warning(found: dict[str, Any], greedy: bool) -> str | None:
    """Return a line where the responses are not what the harvest states, with the usual causes."""
    if found["prompts"] < ENOUGH:
        return None
    impossible = found["impossible"] / max(1, found["tokens"] + found["impossible"])
    reasons = []
    if not greedy and found["mean"] is not None:
        half = (found["high"] - found["low"]) / 2
        if abs(found["mean"]) > FAR * half:
            reasons.append(f"-log p - H(p) is {found['mean']:+.3f} nats a token, not 0")
    if impossible > IMPOSSIBLE[greedy]:
        what = "differ from the target's argmax" if greedy else "have p = 0 under warp"
        reasons.append(f"{impossible:.1%} of their tokens {what}")
    if not reasons:
        return None
    return (
        f"warning: the given responses are not drawn as warp says: {'; '.join(reasons)}. Usual"
        f" causes: {CAUSES}"
    )
