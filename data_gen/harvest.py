"""Pair x prompts -> records: the target answers, both models are run along the answers, labels are
written as shards.

The prompts, shortest first, are cut into chunks of one generation batch; a chunk is three shards
(`data_gen.storage.chunks`) and the unit of resuming and of sharing work
(`data_gen.storage.sharing`). What is written depends on the plan only: a harvest that was
interrupted, or made by several processes, equals any other."""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data_gen import labels
from data_gen.requests import Request
from data_gen.responses.generate import Answer, ResponseSettings, read_answers, uniforms
from data_gen.responses.teacher_forcing import teacher_forced_answers
from data_gen.rollouts import (
    Drawn,
    Rollouts,
    candidate_states,
    roll,
    roll_greedy,
    rollout_acceptance,
)
from data_gen.storage import shards
from data_gen.storage.chunks import plan_id, save_chunk
from data_gen.storage.sharing import ALONE, Worker, open_chunks
from decoding.models.cached_lm import CachedLM
from decoding.models.loading import ModelPair, pair_identity
from decoding.models.machine import dtypes
from decoding.sampling import Warp
from predictors.inputs import FeatureSpec, extract
from runtime.errors import UserError, checked_count, checked_seed, checked_switch

Row = dict[str, Any]
"""One prompt's columns of one kind of record."""


@dataclass(frozen=True)
class HarvestSettings:
    """What decides the content of the records, apart from pair and prompts.

    gamma: draft tokens per rollout; mixing: share r of response tokens in SpecDec++'s mixed
    sequences; stride: response positions between rollouts; batch_size: prompts answered together,
    and per shard; features_stored: false leaves hidden states out, to be recomputed for training
    (`data_gen.recompute`)."""

    gamma: int
    seed: int
    max_new_tokens: int
    batch_size: int
    mixing: float
    stride: int
    warp: Warp
    draft_warp: Warp
    specdecpp: FeatureSpec
    hrad: FeatureSpec
    features_stored: bool = True

    def __post_init__(self) -> None:
        for key in ("gamma", "batch_size", "max_new_tokens"):
            checked_count(key, getattr(self, key))
        checked_count("anchors.stride", self.stride)
        checked_seed(self.seed)
        if not 0 <= self.mixing < 1:
            raise UserError(f"mixing: {self.mixing} is not in [0, 1). SpecDec++ uses 0.15")
        checked_switch("features.stored", self.features_stored)
        if self.specdecpp.side != "draft" or self.specdecpp.embedding:
            raise UserError(
                "features.specdecpp: must read the draft, without embedding. Use draft_last"
            )
        if self.hrad.side != "target":
            raise UserError("features.hrad: must read the target. Use target_last4")

    def reading(self, pair: ModelPair) -> ResponseSettings:
        return ResponseSettings(
            self.max_new_tokens, pair.eos_ids, self.warp, self.draft_warp, self.stride, self.hrad
        )

    def to_dict(self) -> dict[str, Any]:
        """As the plan and the manifest record it."""
        return {
            "gamma": self.gamma,
            "seed": self.seed,
            "max_new_tokens": self.max_new_tokens,
            "batch_size": self.batch_size,
            "mixing": self.mixing,
            "anchors": {"stride": self.stride},
            "warp": self.warp.to_dict(),
            "draft_warp": self.draft_warp.to_dict(),
            "features": {"specdecpp": self.specdecpp.to_dict(), "hrad": self.hrad.to_dict()},
            "features_stored": self.features_stored,
        }

    def packed(self, features: Tensor) -> np.ndarray:
        """Features [..., D] as they are stored, if they are."""
        return shards.pack_features(features if self.features_stored else features.new_empty(0))


@dataclass(frozen=True)
class Progress:
    """Callbacks. sampled(tokens): so many response tokens were drawn; finished(prompts, tokens): so
    many prompts are done, with that many tokens drawn for them in this run (0 for what an earlier
    run has done)."""

    sampled: Callable[[int], object] = lambda tokens: None
    finished: Callable[[int, int], object] = lambda prompts, tokens: None

    def earlier(self, marker: dict[str, Any]) -> None:
        """A chunk was made by an earlier run."""
        self.finished(marker["prompts"], 0)

    def elsewhere(self, marker: dict[str, Any]) -> None:
        """A chunk was made by another process of this run."""
        self.sampled(marker["tokens"])
        self.finished(marker["prompts"], marker["tokens"])


def harvest(
    pair: ModelPair,
    requests: Sequence[Request],
    recipe: HarvestSettings,
    out: Path,
    progress: Progress,
    worker: Worker = ALONE,
) -> None:
    """Write every chunk of the dataset in `out` that is not there yet, together with other
    processes that do the same.

    Raises UserError when `out` holds a dataset made with other settings, or when a model returns
    NaN."""
    settings, batches = plan(pair, requests, recipe), split_into_chunks(requests, recipe.batch_size)
    pair.target.output_device = pair.draft.output_device = pair.target.device
    for index in open_chunks(out, settings, worker, progress.earlier, progress.elsewhere):
        rows = label_chunk(pair, batches[index], recipe, progress)
        save_chunk(out, plan_id(settings), index, rows)


def plan(pair: ModelPair, requests: Sequence[Request], recipe: HarvestSettings) -> dict[str, Any]:
    """Everything the shards depend on. Two harvests with equal plans may share a folder."""
    prompts = [(r.prompt_id, r.dataset, r.split, r.tokens.tolist()) for r in requests]
    given = [(r.prompt_id, r.response.tolist()) for r in requests if r.response is not None]
    return {
        "pair": pair_identity(pair),
        "dtypes": dtypes(pair),
        "prompts": {"count": len(requests), "sha256": _sha256(prompts)},
        "responses": _sha256(given) if given else "generated",
        **settings_of([request.split for request in requests], recipe),
    }


def settings_of(splits: Sequence[str], recipe: HarvestSettings) -> dict[str, Any]:
    """What of a plan is known before a model is loaded. splits: of every prompt."""
    counts = {split: splits.count(split) for split in shards.SPLITS}
    return {"schema_version": shards.SCHEMA_VERSION, "splits": counts, **recipe.to_dict()}


def _sha256(rows: Sequence[tuple[Any, ...]]) -> str:
    """Of rows that differ in their first entry, in any order."""
    return hashlib.sha256(json.dumps(sorted(rows)).encode()).hexdigest()[:16]


def feature_dims(pair: ModelPair, recipe: HarvestSettings) -> dict[str, int]:
    """Length D of the feature vectors that each predictor reads."""
    sizes = {
        side: getattr(pair, side).model.config.get_text_config().hidden_size
        for side in ("draft", "target")
    }
    embedding = pair.target.model.get_input_embeddings().weight.shape[1]
    specs = {"specdecpp": recipe.specdecpp, "hrad": recipe.hrad}
    return {name: spec.dim(sizes[spec.side], embedding) for name, spec in specs.items()}


def split_into_chunks(requests: Sequence[Request], size: int) -> list[list[Request]]:
    """Batches of similar length, so that little of a batch is padding."""
    ordered = sorted(requests, key=lambda request: (len(request.tokens), request.prompt_id))
    return [ordered[start : start + size] for start in range(0, len(ordered), size)]


def label_chunk(
    pair: ModelPair, chunk: Sequence[Request], recipe: HarvestSettings, progress: Progress
) -> dict[str, list[Row]]:
    """Answer and label the prompts of one chunk. Returns its records by kind, one per prompt."""
    records: dict[int, dict[str, Row]] = {}
    for answer in answers_of(pair, chunk, recipe, progress.sampled):
        records[answer.index] = label(pair, chunk[answer.index], answer, recipe)
        progress.finished(1, len(answer.distributions.response))
    return {kind: [records[row][kind] for row in sorted(records)] for kind in shards.SCHEMAS}


def answers_of(
    pair: ModelPair,
    chunk: Sequence[Request],
    recipe: HarvestSettings,
    advance: Callable[[int], object],
) -> Iterator[Answer]:
    """Answer the prompts of a chunk, or follow the responses that came with them."""
    prompts, reading = [request.tokens for request in chunk], recipe.reading(pair)
    given = [request.response for request in chunk if request.response is not None]
    if not given:
        yield from read_answers(
            pair.target, pair.draft, prompts, draws(chunk, recipe), reading, advance
        )
        return
    for answer in teacher_forced_answers(
        pair.target, pair.draft, prompts, given, draws(chunk, recipe), reading
    ):
        advance(len(answer.distributions.response))
        yield answer


def draws(chunk: Sequence[Request], recipe: HarvestSettings) -> Tensor:
    """[2, B, max_new]: the draws of responses and candidates."""
    purposes = ("response", "candidates")
    size = recipe.max_new_tokens
    return torch.stack(
        [
            torch.stack([uniforms(recipe.seed, r.prompt_id, purpose, size) for r in chunk])
            for purpose in purposes
        ]
    )


@torch.inference_mode()
def label(
    pair: ModelPair, request: Request, answer: Answer, recipe: HarvestSettings
) -> dict[str, Row]:
    """All records of one prompt, by kind (`data_gen.storage.shards.SCHEMAS`). The models hold the
    prompt and its answer."""
    head = {"prompt_id": request.prompt_id, "dataset": request.dataset, "split": request.split}
    response = answer.distributions.response.cpu()
    return {
        "responses": {**head, "prompt_tokens": request.tokens, "response_tokens": response},
        "rounds": {**head, **rounds(pair, request, answer, recipe)},
        "specdecpp": {
            **head,
            **candidates(pair, request, answer, recipe),
        },  # last: it rewrites the draft's cache
    }


def candidates(pair: ModelPair, request: Request, answer: Answer, recipe: HarvestSettings) -> Row:
    """SpecDec++ records (2405.19715, section 3.2): the draft reads a mix of response and
    candidates.

    Z_t is the response token with probability r = `mixing`, else the candidate Y_t; the record of t
    is kept where Z_t = Y_t. Its label belongs to the unmixed context, as in the paper; so do the
    features of a draft that reads its target's states (`candidate_states`)."""
    distributions, length = answer.distributions, len(answer.distributions.response)
    kept = uniforms(recipe.seed, request.prompt_id, "mixing", length) >= recipe.mixing
    mixed, position = (
        torch.where(kept, distributions.candidate.cpu(), distributions.response.cpu()),
        torch.arange(length)[kept],
    )
    layers = recipe.specdecpp.layers
    hidden = candidate_states(pair.draft, len(request.tokens), mixed, position, layers)
    return {
        "position": position,
        "token_ids": mixed[kept],
        "soft_label": distributions.accept.cpu()[kept],
        "overlap": distributions.overlap.cpu()[kept],
        "q_token": distributions.q.cpu()[kept],
        "draft_max_q": distributions.max_q.cpu()[kept],
        "draft_entropy": distributions.entropy.cpu()[kept],
        "features": recipe.packed(extract(hidden, recipe.specdecpp).cpu()),
    }


def rounds(pair: ModelPair, request: Request, answer: Answer, recipe: HarvestSettings) -> Row:
    """The round of gamma draft tokens that would follow each anchor of the response, never cut
    short."""
    distributions, response = answer.distributions, answer.distributions.response.cpu()
    anchors = torch.arange(0, len(response), recipe.stride)
    shape = (len(anchors), recipe.gamma)
    rolled = rollouts(pair.draft, request, answer, anchors, recipe)
    tokens = rolled.drawn.token.cpu()
    known = torch.full_like(anchors, recipe.gamma)
    drafted = labels.drafted_length(tokens, pair.eos_ids)
    verdicts = uniforms(recipe.seed, request.prompt_id, "verdicts", *shape)
    if recipe.warp.temperature == 0:
        accept = labels.greedy_acceptance(tokens, response, anchors)
        if int(response[-1]) not in pair.eos_ids:
            known = labels.known_depth(anchors, len(response), recipe.gamma)
    else:
        first = distributions.accept[anchors]
        accept = rollout_acceptance(
            pair.target, rolled, first, drafted, verdicts, recipe.warp
        ).cpu()
    return {
        "anchor": anchors,
        "known": known,
        "drafted": drafted,
        "accepted": labels.accepted_length(accept, verdicts, drafted),
        "draft_tokens": tokens,
        "draft_q": rolled.drawn.q,
        "draft_max_q": rolled.drawn.max_q,
        "draft_entropy": rolled.drawn.entropy,
        "accept_prob": accept,
        "features": recipe.packed(answer.features[: len(anchors)]),
        "rollout_features": recipe.packed(rolled.features),
    }


def rollouts(
    draft: CachedLM, request: Request, answer: Answer, anchors: Tensor, recipe: HarvestSettings
) -> Rollouts:
    """gamma draft tokens from each anchor, the first of which are the candidates of the answer."""
    distributions, response = answer.distributions, answer.distributions.response.cpu()
    first = Drawn(
        distributions.candidate[anchors],
        distributions.q[anchors],
        distributions.max_q[anchors],
        distributions.entropy[anchors],
    )
    shared = not draft.reads_target  # else a context drafted and the same one verified are two
    if shared and recipe.stride == 1 and recipe.draft_warp.temperature == 0:
        return roll_greedy(draft, response, first, recipe.gamma, recipe.specdecpp)
    uniform = uniforms(recipe.seed, request.prompt_id, "rollouts", len(anchors), recipe.gamma)[
        :, 1:
    ]
    last = anchors + len(request.tokens) - 1  # cache row of the last committed token
    return roll(draft, last, first, uniform, recipe.draft_warp, recipe.specdecpp)
