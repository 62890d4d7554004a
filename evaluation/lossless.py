"""Evidence that a decode is lossless: token-for-token equality when greedy, fixed invariants
always."""

import math
from collections.abc import Collection, Mapping, Sequence
from itertools import zip_longest
from typing import NamedTuple

import torch

from decoding.interfaces import LM
from decoding.models.loading import ModelPair
from decoding.processors import scored_after
from decoding.sampling import Warp
from decoding.trace import Trace
from evaluation.table import BASELINE
from runtime.text import plural, printable

GREEDY = Warp(0.0)
TOLERANCE = 1e-3  # largest top-two logit gap that float32 rounding may flip
STEPS = 2  # of narrower dtypes, in steps between neighbouring numbers: each logit may be one off


class Difference(NamedTuple):
    """The first place where a greedy output leaves the baseline's.

    gap: logit of the baseline's token minus logit of this method's, from one uncached target pass
    over the common prefix. Forwards of different lengths round differently, so a near tie may fall
    either way. limit: a near tie is below it; 0 where rows are equal to the bit."""

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
    dtype: torch.dtype | None = torch.float32,
    warp: Warp = GREEDY,
    eos_ids: Collection[int] = (),
) -> list[Difference]:
    """Return one entry per request whose tokens are not the baseline's. prompts: ids [n] of each
    request; dtype: of the target's logits; None: nothing is rounded otherwise, there are no near
    ties; warp: whose processors change them; eos_ids: that they may read."""
    differences = []
    for prompt, trace, plain in zip(prompts, traces, baseline, strict=True):
        if trace.tokens == plain.tokens:
            continue
        pairs = enumerate(zip_longest(trace.tokens, plain.tokens))
        position, (token, expected) = next((i, pair) for i, pair in pairs if pair[0] != pair[1])
        gap, limit = math.inf, TOLERANCE
        if token is not None and expected is not None:  # else one output is longer: a bug
            target.reset()
            prefix = torch.cat([prompt, torch.tensor(trace.tokens[:position], dtype=torch.long)])
            logits = target.forward(prefix, logits="last").logits[-1]
            logits = scored_after(prefix, len(prompt), warp, logits, eos_ids)
            first, second = logits[expected].item(), logits[token].item()
            gap = first - second
            limit = 0.0 if dtype is None else near_tie(max(first, second), dtype)
        differences.append(Difference(trace.prompt_id, position, expected, token, gap, limit))
    return differences


def near_tie(logit: float, dtype: torch.dtype) -> float:
    """Return the gap between two logits of about `logit` in `dtype` that rounding can no longer
    explain."""
    step = torch.finfo(dtype).eps * 2.0 ** math.floor(math.log2(max(abs(logit), 1.0)))
    return max(TOLERANCE, math.nextafter(STEPS * step, math.inf))


def broken_invariants(trace: Trace, max_new_tokens: int, eos_ids: frozenset[int]) -> list[str]:
    """Return violations of invariants that hold for every correct decode, whatever the
    distribution; empty for a sound trace."""
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


# In words -----------------------------------------------------------------------------------------


def evidence(
    pair: ModelPair,
    prompts: Sequence[torch.Tensor],
    traces: Mapping[str, Sequence[Trace]],
    lossy: Sequence[str],
    recorded: Collection[str],
    max_new_tokens: int,
    warp: Warp,
) -> list[str]:
    """Return lines with the evidence that decoding was lossless. Greedy: equality with plain
    decoding, and how near a tie each difference is. Sampled: the fixed invariants.

    prompts [n] of the requests, which every repeat decodes in this order; lossy: methods whose
    verifier changes the distribution; recorded: methods whose traces say what was drafted."""
    every = [trace for name in traces if name in recorded for trace in traces[name]]
    eos_ids = frozenset(pair.eos_ids)
    broken = {fact for trace in every for fact in broken_invariants(trace, max_new_tokens, eos_ids)}
    sound = (
        "sound: each is what its rounds accepted and one token of the target's a round, and ends at"
        " EOS or the limit"
    )
    state = f"FAULTY: {'; '.join(sorted(broken))}" if broken else sound
    lines = [f"bookkeeping of {plural(len(every), 'response')} is {state}"]
    if warp.temperature > 0:
        lines += [
            f"sampled: NOT lossless: the verifiers of {', '.join(lossy)} change the target's"
            " distribution, as the tests show by enumeration"
            if lossy
            else "sampled outputs are lossless by construction: the tests enumerate the output of"
            " these engines and verifiers and find exactly the target's distribution; a run of"
            " samples cannot show that"
        ]
        foreign = ", ".join(name for name in traces if name not in recorded)
        return (
            [*lines, f"not enumerated, as it is no code of ours: {foreign}"] if foreign else lines
        )
    plain, dtype = traces[BASELINE], pair.target.model.dtype
    exact = pair.target.exact
    asked = list(prompts) * (len(plain) // len(prompts))
    differences = {
        name: greedy_differences(
            *(pair.target, asked, decoded, plain),
            *(None if exact and name in recorded else dtype, warp, eos_ids),
        )
        for name, decoded in traces.items()
        if name != BASELINE
    }
    return [*lines, *difference_lines(differences, len(plain))]


def difference_lines(
    differences: Mapping[str, Sequence[Difference]], outputs: int, against: str = "plain decoding"
) -> list[str]:
    """Return which methods equal another token for token, and how near a tie every difference
    is."""
    lines = []
    for name, each in differences.items():
        wrong = sum(not difference.excused for difference in each)
        state = "equal up to near ties" if each else "equal"
        state = f"NOT LOSSLESS on {wrong}" if wrong else state
        equal = f"{outputs - len(each)} of {outputs} outputs equal {against}"
        lines.append(f"{name}: {equal} ({state})")
        lines += [
            f"  {printable(d.prompt_id)}, token {d.position}: {d.token} instead of"
            f" {d.baseline_token}, logit gap {d.gap:.1e}"
            f" ({'near tie' if d.excused else 'too large'}, limit {d.limit:.0e})"
            for d in each
        ]
    return lines
