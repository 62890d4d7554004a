"""Features that a harvest did not store (`features=recompute`), computed again from its token
ids."""

from collections.abc import Collection, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from data_gen.rollouts import TOGETHER, candidate_states, forward_along
from data_gen.storage.dataset import read_manifest, read_prompts
from decoding.models.cached_lm import CachedLM
from decoding.models.loading import ModelPair, load_pair, pair_identity
from predictors.inputs import FeatureSpec, extract
from runtime.errors import UserError

Row = Mapping[str, Tensor]


def recompute(
    folder: str | Path, kind: str, split: str, columns: Collection[str], pair_cfg: DictConfig
) -> Row:
    """Those feature columns of `read_records(folder, kind, split)` that are in `columns`, equal up
    to rounding.

    pair_cfg: the pair that was harvested. Raises UserError where it is another one.
    """
    manifest = read_manifest(folder)
    pair = _loaded(OmegaConf.to_yaml(pair_cfg, resolve=True))
    refuse_other_pair(pair, manifest)
    specs = {name: FeatureSpec.from_dict(spec) for name, spec in manifest["features"].items()}
    answers = read_prompts(folder, "responses", split, ["prompt_tokens", "response_tokens"])
    if kind == "specdecpp":
        rows = read_prompts(folder, kind, split, ["position", "token_ids"])
        parts = [
            mixed_features(pair, answer, row, specs["specdecpp"])
            for answer, row in zip(answers, rows, strict=True)
        ]
        return {"features": torch.cat(parts)}
    rows = read_prompts(folder, kind, split, ["anchor", "draft_tokens"])
    found: dict[str, list[Tensor]] = {
        name: [] for name in ("features", "rollout_features") if name in columns
    }
    for answer, row in zip(answers, rows, strict=True):
        if "features" in found:
            found["features"].append(anchor_features(pair.target, answer, row, specs["hrad"]))
        if "rollout_features" in found:
            found["rollout_features"].append(
                rollout_features(pair, answer, row, specs["specdecpp"])
            )
    return {name: torch.cat(parts) for name, parts in found.items()}


@lru_cache(maxsize=1)
def _loaded(pair: str) -> ModelPair:
    """The pair of a config, kept for the next split."""
    return load_pair(DictConfig(OmegaConf.create(pair)))


def refuse_other_pair(pair: ModelPair, manifest: Mapping[str, Any]) -> None:
    ours, harvested = pair_identity(pair), manifest["pair"]
    for side in ("target", "draft"):
        if ours[side] != harvested[side]:
            raise UserError(
                f"pair.{side}: it is not the one of the harvest, {harvested['name']}, whose"
                " features are to be recomputed. Give the pair that was harvested"
            )


def mixed_features(pair: ModelPair, answer: Row, row: Row, spec: FeatureSpec) -> Tensor:
    """[n, D] bfloat16 of the draft at the kept candidates of a mixed sequence
    (`harvest.candidates`)."""
    start, mixed = len(answer["prompt_tokens"]), answer["response_tokens"].clone()
    mixed[row["position"]] = row["token_ids"]
    run_draft(pair, answer)
    hidden = candidate_states(pair.draft, start, mixed, row["position"], spec.layers)
    return extract(hidden, spec).bfloat16()


def anchor_features(target: CachedLM, answer: Row, row: Row, spec: FeatureSpec) -> Tensor:
    """[A, D] bfloat16 of the target at the last verified position before each anchor."""
    tokens = torch.cat([answer["prompt_tokens"], answer["response_tokens"]])
    last = row["anchor"] + len(answer["prompt_tokens"]) - 1  # committed, not run on yet
    embedding = (
        torch.stack([target.embed(token) for token in tokens[last].tolist()])
        if spec.embedding
        else None
    )
    target.reset()
    wanted = (last - 1).tolist()
    hidden = target.forward(tokens, hidden=spec.layers, hidden_rows=wanted, logits="none").hidden
    assert hidden is not None
    return extract(hidden, spec, embedding).bfloat16()


def rollout_features(pair: ModelPair, answer: Row, row: Row, spec: FeatureSpec) -> Tensor:
    """[A, gamma, D] bfloat16 of the draft at every token of the rounds."""
    run_draft(pair, answer)
    draft, count = pair.draft, len(row["anchor"])
    base, last = draft.length, row["anchor"] + len(answer["prompt_tokens"]) - 1
    tokens = row["draft_tokens"].view(count, -1)
    at_once = (
        1 if draft.reads_target else tokens.shape[1]
    )  # one that reads its own state needs that first
    parts = []
    for some in torch.arange(count).split(max(1, TOGETHER * 4 // tokens.shape[1])):
        read = []
        for drafted in tokens[some].split(at_once, 1):
            hidden = forward_along(
                draft, last[some], drafted, base, hidden=spec.layers, logits="none"
            ).hidden
            assert hidden is not None
            read.append(extract(hidden, spec).bfloat16())
        draft.crop(base)
        parts.append(torch.cat(read).view(tokens.shape[1], len(some), -1).transpose(0, 1))
    return torch.cat(parts)


def run_draft(pair: ModelPair, answer: Row) -> None:
    """Let the draft's cache hold prompt and response, as it reads them when they are verified."""
    tokens = torch.cat([answer["prompt_tokens"], answer["response_tokens"]])
    if pair.draft.reads_target:
        run(pair.target, tokens)
    run(pair.draft, tokens)


def run(lm: CachedLM, tokens: Tensor) -> None:
    """Let the cache hold exactly these tokens."""
    lm.reset()
    lm.forward(tokens, logits="none")
