"""Rollout tables made the slow way: every model on every prefix, one token at a time, nothing
cached."""

from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from data_gen.harvest import Progress, harvest, plan
from data_gen.requests import Request
from data_gen.run import finish
from data_gen.storage.dataset import Harvest
from decoding.engines.autoregressive import AutoregressiveEngine
from decoding.interfaces import LM, Pair
from decoding.models.loading import ModelPair
from decoding.sampling import Sampler, Warp
from decoding.stopping.hrad import HRADStop
from decoding.stopping.rollout_table import RolloutTable, build
from decoding.stopping.specdecpp import SpecDecPPStop
from decoding.stopping.value import ValueStop
from evaluation.replay.read import Asks, read_table
from predictors.features.draft_statistics import Q_STATS, path_rows, q_stats
from predictors.features.layers import RecordedLayers, side_by_side
from predictors.inputs import matrix
from predictors.outcomes import Chances
from tests.helpers.data.datasets import GREEDY, SETTINGS


def sampled_table(
    accept: NDArray[np.float64], confidence: Any = 1.0, siblings: Any = None
) -> RolloutTable:
    """Responses of T tokens of a sampled target, all tokens of a rollout drawn, `accept` [B, T, G]
    of them. confidence: as many, or one for all."""
    prompts, length, gamma = accept.shape
    ends, drawn = np.full(prompts, length), np.full((prompts, length), gamma)
    ones, names = np.ones(accept.shape), [str(number) for number in range(prompts)]
    return RolloutTable(
        *(names, ends, ends, False, ones.astype(int), drawn, drawn),
        *(accept, ones * confidence, 0 * ones, ones * confidence),
        siblings=siblings,
    )


def harvested_table(
    pair: ModelPair,
    prompts: Sequence[Tensor],
    asked: Sequence[Asks],
    draft_warp: Warp = GREEDY.draft_warp,
    **changes: Any,
) -> RolloutTable:
    """A harvest of a greedy target with a round at every position, as replay reads it; the id of a
    prompt is its number."""
    layers = RecordedLayers([-1], [-1])
    given = {"draft_warp": draft_warp, "seed": 0, "batch_size": 64, "layers": layers} | changes
    recipe = replace(GREEDY, **given)
    requests = [Request(f"{n:03}", "toy", prompt, "train") for n, prompt in enumerate(prompts)]
    folder = Path(mkdtemp())
    harvest(pair, requests, recipe, folder, Progress())
    finish(plan(pair, requests, recipe), 0, folder, *SETTINGS.values())
    return read_table(Harvest.open(folder), "train", asked)


def slow_table(
    pair: Pair,
    prompts: Sequence[Tensor],
    max_new: int,
    gamma: int,
    warp: Warp,
    draft_warp: Warp,
    eos_ids: Collection[int],
    head: SpecDecPPStop,
    classes: HRADStop,
    worth: ValueStop,
) -> RolloutTable:
    """One response and a rollout from each of its positions per prompt; head, classes, worth:
    whose predictors are asked."""

    def one_round(prefix: Tensor, sampler: Sampler) -> dict[str, Any]:
        """Of the rollout after `prefix`, the columns of `RolloutTable`."""
        names = ("tokens", "accept", "siblings", "confidence", "max_q", "entropy")
        found: dict[str, Any] = {name: [] for name in names}
        text, scores, stats = prefix, list[float](), list[Tensor]()
        for _ in range(gamma):
            p, (logits, _) = warp.probs(_run(pair.target, text)[0]), _run(pair.draft, text)
            unwarped_q, q = Warp().probs(logits), draft_warp.probs(logits)
            token = sampler.draw(q).token
            text = torch.cat([text, torch.tensor([token])])
            hidden = _run(pair.draft, text, head.draft_layers)[1][:, -1:]
            features = matrix(head.predictor.inputs, {"draft_hidden": side_by_side(hidden)})
            scores.append(head.predictor.predict_proba(features.float()).item())
            stats.append(torch.stack(list(q_stats(unwarped_q, torch.tensor(token)).values())))
            greedy = draft_warp.temperature == 0
            others = top_ones(p, unwarped_q) if greedy else drawn(p, q, token, sampler)
            reached = all(found["accept"])
            found["tokens"].append(token)
            found["siblings"].append(others if reached else [0.0, 0.0])
            found["accept"].append(min(1.0, float(p[token] / q[token])) if reached else 0.0)
            found["confidence"].append(float(unwarped_q[token]))
            found["max_q"].append(float(unwarped_q.max()))
            found["entropy"].append(float(torch.special.entr(unwarped_q).sum()))
        ends = [place for place, token in enumerate(found["tokens"], 1) if token in eos_ids]
        found["drawn"] = min([*ends, gamma])
        coins = [sampler.accept(accept, 1.0) for accept in found["accept"][: found["drawn"]]]
        found["accepted"] = [*coins, False].index(False)
        hidden = _run(pair.target, prefix[:-1], classes.target_layers)[1][:, -1:]
        embedding = pair.target.embed(int(prefix[-1]))[None]
        facts = {"target_hidden": side_by_side(hidden), "embedding": embedding}
        features = matrix(classes.predictor.inputs, facts).float()
        decided = classes.decide(classes.predictor.predict_proba(features))
        found["predicted"] = {
            head.survival: head.predictor.calibration.survival(torch.tensor(scores)).tolist(),
            classes.outcomes: int(decided),
            worth.survival: _values(worth, torch.stack(stats)),
        }
        return found

    rows = []
    for number, prompt in enumerate(prompts):
        sampler = Sampler.seeded(number)
        engine = AutoregressiveEngine(pair, warp, frozenset(eos_ids))
        response = engine.decode(prompt, max_new, sampler).tokens
        text = torch.cat([prompt, torch.tensor(response)])
        with torch.inference_mode():
            starts = range(len(prompt), len(text))
            rounds = [one_round(text[:start], sampler) for start in starts]
        facts = {"prompt_id": str(number), "length": len(response), "max_new": max_new}
        said = [found.pop("predicted") for found in rounds]
        predicted = {name: [found[name] for found in said] for name in said[0]}
        columns = {name: [found[name] for found in rounds] for name in rounds[0]}
        rows.append(facts | columns | {"predicted": predicted})
    return build(rows, warp.temperature == 0 == draft_warp.temperature)


def drawn(p: Tensor, q: Tensor, token: int, sampler: Sampler) -> list[float]:
    """Acceptance of the second and third candidate drawn from q without the ones before, each if
    those were rejected (RRSw)."""
    found, left, pool = list[float](), p.double(), q.double()
    for _ in range(2):
        left = (left - pool).clamp(min=0)
        pool = pool.clone()
        pool[token] = 0
        if not (left.any() and pool.any()):
            return [*found, 0.0, 0.0][:2]
        left, pool = left / left.sum(), pool / pool.sum()
        token = sampler.draw(pool).token
        found.append(min(1.0, float(left[token] / pool[token])))
    return found


def top_ones(p: Tensor, q: Tensor) -> list[float]:
    """Acceptance of q's second and third most probable token as point masses, each if those before
    were rejected."""
    first, second, third = (float(p[token]) for token in q.topk(3).indices)
    left = 1 - first
    return [
        second / left if left > 0 else 0.0,
        third / (left - second) if left - second > 0 else 0.0,
    ]


def _values(worth: ValueStop, stats: Tensor) -> list[float]:
    """stats: [gamma, 4], of the drawn tokens."""
    path, values = torch.ones(0), list[float]()
    reach = 1.0
    for depth, row in enumerate(stats, 1):
        path = torch.cat([path, row[:1]])
        facts = dict(zip(Q_STATS, row, strict=True))
        facts |= {"depth": torch.tensor(depth), "q_path": path_rows(path)[-1]}
        features = matrix(worth.predictor.inputs, facts)[None]
        said = Chances.of(worth.predictor.predict_proba(features))
        reach *= float(said.first)
        values.append(reach * float(said.following))
    return values


def _run(lm: LM, text: Tensor, layers: Sequence[int] = (-1,)) -> tuple[Tensor, Tensor]:
    """Logits [V] after `text` and hidden states [len(layers), n, H], from an empty cache."""
    lm.reset()
    output = lm.forward(text, hidden=layers)
    assert output.hidden is not None
    return output.logits[-1], output.hidden
