"""From a harvest to the table that replay reads, with what the predictors say at each of its rounds."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data_gen.shards import FEATURES, SPLITS, read_manifest, read_records, read_responses
from decoding.growth import StopRule
from decoding.rollouts import RolloutTable, build
from decoding.sampling import Warp
from decoding.stopping.acceptance import AcceptanceStop
from decoding.stopping.hrad import HRADStop
from predictors.base import Predictor
from predictors.errors import UserError

CHUNK = 65536  # feature vectors a head is run on at once
COLUMNS = ("anchor", "drafted", "accepted", "draft_tokens", "draft_q", "draft_max_q", "draft_entropy", "accept_prob")


def read_rollouts(folder: str | Path, split: str, stops: Iterable[StopRule] = ()) -> RolloutTable:
    """The rounds of one split, or of "all". stops: rules whose predictors are to be asked, one of each kind at most.

    Raises UserError where the harvest has no round at some position, or no features and a predictor asks for them.
    """
    manifest = read_manifest(folder)
    if manifest["anchors"]["stride"] != 1:
        raise UserError(
            f"data: {folder} has a round every {manifest['anchors']['stride']} positions, replay needs one at each. "
            "Harvest them: python scripts/gen_data.py anchors.stride=1 out=<another folder>"
        )
    stops = list(stops)
    head = next((stop for stop in stops if isinstance(stop, AcceptanceStop)), None)
    classifier = next((stop for stop in stops if isinstance(stop, HRADStop)), None)
    if (head or classifier) and not manifest["features_stored"]:
        raise UserError(f"data: {folder} stores no features, which the predictors read. Harvest with features stored")
    wanted = {"rollout_features": head, "features": classifier}
    columns = [*COLUMNS, *(name for name in FEATURES if wanted[name])]
    rows = [row for part in parts(split) for row in _rows(folder, part, columns, manifest, head, classifier)]
    greedy = manifest["warp"]["temperature"] == 0 == manifest["draft_warp"]["temperature"]
    return build(rows, greedy)


def parts(split: str) -> Sequence[str]:
    """The splits that "all" stands for, or the one named."""
    if split not in ("all", *SPLITS):
        raise UserError(f"split: {split!r} is unknown. Use all, {', '.join(SPLITS)}")
    return SPLITS if split == "all" else [split]


def _rows(
    folder: str | Path,
    split: str,
    columns: Sequence[str],
    manifest: dict[str, Any],
    head: AcceptanceStop | None,
    classifier: HRADStop | None,
) -> Iterator[dict[str, Any]]:
    """One mapping per prompt, as `decoding.rollouts.build` takes them."""
    records = read_records(folder, "rounds", split, columns)
    values = {
        "tokens": records["draft_tokens"],
        "drawn": records["drafted"],
        "accepted": records["accepted"],
        "accept": records["accept_prob"],
        "max_q": records["draft_max_q"],
        "entropy": records["draft_entropy"],
        **_confidence(records, Warp.from_dict(manifest["draft_warp"])),
    }
    if head:
        values["survival"] = predict(head.predictor, records["rollout_features"]).double().cumprod(-1)
    if classifier:
        values["outcome"] = predict(classifier.predictor, records["features"]).argmax(-1)
    sizes = records["group"].bincount().tolist()
    split_up = {name: column.split(sizes) for name, column in values.items()}
    for number, response in enumerate(read_responses(folder, split)):
        facts = {"prompt_id": response["prompt_id"], "length": sizes[number], "max_new": manifest["max_new_tokens"]}
        assert sizes[number] == len(response["response_tokens"]), "a round at every position"
        yield facts | {name: chunks[number] for name, chunks in split_up.items()}


def _confidence(records: dict[str, Tensor], draft_warp: Warp) -> dict[str, Tensor]:
    """What the unwarped draft says of its tokens: the best one's where it is greedy; unknown for other warps."""
    if draft_warp.temperature == 0:
        return {"confidence": records["draft_max_q"]}
    return {"confidence": records["draft_q"]} if draft_warp == Warp() else {}


def predict(predictor: Predictor, features: Tensor) -> Tensor:
    """Probabilities of bfloat16 features [..., D], as `predict_proba` shapes them: [...] or [..., C]."""
    rows = features.flatten(0, -2)
    found = torch.cat([predictor.predict_proba(part.float()) for part in rows.split(CHUNK)])
    return found.view(*features.shape[:-1], *found.shape[1:])
