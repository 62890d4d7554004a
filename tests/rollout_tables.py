"""Rollout tables made the slow way: every model on every prefix, one token at a time, nothing cached."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from decoding.engines.autoregressive import AutoregressiveEngine
from decoding.models import ModelPair
from decoding.rollouts import RolloutTable, build
from decoding.sampling import Sampler, Warp
from decoding.stopping.acceptance import AcceptanceStop
from decoding.stopping.hrad import HRADStop
from predictors.features import extract


def slow_table(
    pair: ModelPair,
    prompts: Sequence[Tensor],
    max_new: int,
    gamma: int,
    warp: Warp,
    draft_warp: Warp,
    head: AcceptanceStop,
    classes: HRADStop,
    seed: int = 0,
) -> RolloutTable:
    """One response and a rollout from each of its positions per prompt; head, classes: whose predictors are asked."""
    rows = []
    for number, prompt in enumerate(prompts):
        sampler = Sampler.seeded(1000 * seed + number)
        engine = AutoregressiveEngine(pair, warp, frozenset(pair.eos_ids))
        response = engine.decode(prompt, max_new, sampler).tokens
        text = torch.cat([prompt, torch.tensor(response)])
        prefixes = [text[: len(prompt) + position] for position in range(len(response))]
        rounds = [_round(pair, prefix, gamma, warp, draft_warp, sampler, head, classes) for prefix in prefixes]
        facts = {"prompt_id": str(number), "length": len(response), "max_new": max_new}
        rows.append(facts | {name: [found[name] for found in rounds] for name in rounds[0]})
    return build(rows, warp.temperature == 0 == draft_warp.temperature)


@torch.inference_mode()
def _round(
    pair: ModelPair,
    prefix: Tensor,
    gamma: int,
    warp: Warp,
    draft_warp: Warp,
    sampler: Sampler,
    head: AcceptanceStop,
    classes: HRADStop,
) -> dict[str, Any]:
    """Of the rollout after `prefix`, the columns of `RolloutTable`."""
    found: dict[str, Any] = {name: [] for name in ("tokens", "accept", "confidence", "max_q", "entropy", "acceptance")}
    text = prefix
    for _ in range(gamma):
        logits = pair.draft.model(text[None]).logits[0, -1]
        p = warp.probs(pair.target.model(text[None]).logits[0, -1])
        belief, q = Warp().probs(logits), draft_warp.probs(logits)
        token = sampler.draw(q)
        text = torch.cat([text, torch.tensor([token])])
        hidden = torch.stack(pair.draft.model(text[None], output_hidden_states=True).hidden_states)[:, 0, -1:]
        found["tokens"].append(token)
        found["accept"].append(min(1.0, float(p[token] / q[token])))
        found["confidence"].append(float(belief[token]))
        found["max_q"].append(float(belief.max()))
        found["entropy"].append(float(torch.special.entr(belief).sum()))
        found["acceptance"].append(head.predictor.predict_proba(extract(hidden, head.predictor.features)).item())
    ends = [place for place, token in enumerate(found["tokens"], 1) if token in pair.eos_ids]
    found["drawn"] = min([*ends, gamma])
    coins = [sampler.accept(accept, 1.0) for accept in found["accept"][: found["drawn"]]]
    found["accepted"] = [*coins, False].index(False)
    verified = pair.target.model(prefix[None], output_hidden_states=True)
    hidden = torch.stack(verified.hidden_states)[:, 0, -2:-1]
    embedding = pair.target.embed(int(prefix[-1]))[None]
    features = extract(hidden, classes.predictor.features, embedding)
    found["outcome"] = int(classes.predictor.predict_proba(features)[0].argmax())
    return found
