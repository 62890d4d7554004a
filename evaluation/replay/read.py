"""From a harvest to the table that replay reads, with what the predictors say at each of its
rounds."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from omegaconf import DictConfig
from torch import Tensor

from data_gen.samples import records_with_features
from data_gen.storage.dataset import read_manifest, read_responses
from data_gen.storage.shards import SPLITS
from decoding.draft_tree import StopRule
from decoding.sampling import Warp
from decoding.stopping.hrad import HRADStop
from decoding.stopping.specdecpp import SpecDecPPStop
from evaluation.replay.table import RolloutTable, build
from predictors.base import Records
from predictors.inputs import FeatureSpec, narrowed
from runtime.errors import UserError

Asking = TypeVar("Asking", SpecDecPPStop, HRADStop)
CHUNK = 65536  # feature vectors a head is run on at once
COLUMNS = (
    "anchor",
    "drafted",
    "accepted",
    "draft_tokens",
    "draft_q",
    "draft_max_q",
    "draft_entropy",
    "accept_prob",
)


def read_table(
    folder: str | Path, split: str, stops: Iterable[StopRule] = (), pair: DictConfig | None = None
) -> RolloutTable:
    """The rounds of one split, or of "all". stops: rules whose predictors are to be asked, rules of
    one kind the same; pair: config of the harvested pair, only needed where the harvest stored no
    features.

    Raises UserError where the harvest has no round at some position, or two rules of one kind ask
    different predictors."""
    manifest = read_manifest(folder)
    if split not in ("all", *SPLITS):
        raise UserError(f"split: {split!r} is unknown. Use all, {', '.join(SPLITS)}")
    if manifest["anchors"]["stride"] != 1:
        raise UserError(
            f"data: {folder} has a round every {manifest['anchors']['stride']} positions, replay"
            " needs one at each. Harvest them: python scripts/gen_data.py anchors.stride=1"
            " out=<another folder>"
        )
    rules = list(stops)
    head, classifier = one_of(rules, SpecDecPPStop), one_of(rules, HRADStop)
    features = {"rollout_features": head, "features": classifier}
    columns = [*COLUMNS, *(name for name, rule in features.items() if rule)]
    records = records_with_features(folder, "rounds", split, columns, pair)
    specs = {name: FeatureSpec.from_dict(spec) for name, spec in manifest["features"].items()}
    values = recorded(records, Warp.from_dict(manifest["draft_warp"])) | predicted(
        records, specs, head, classifier
    )
    greedy = manifest["warp"]["temperature"] == 0 == manifest["draft_warp"]["temperature"]
    return build(
        list(by_prompt(folder, split, values, records["group"], manifest["max_new_tokens"])), greedy
    )


def one_of(rules: Iterable[StopRule], kind: type[Asking]) -> Asking | None:
    """The rule of a kind that stands for all of them: what they predict is one column of the
    table."""
    found = [rule for rule in rules if isinstance(rule, kind)]
    if any(_asks(rule) != _asks(found[0]) for rule in found):
        raise UserError(
            f"rules: two {kind.__name__} differ in checkpoint or balance, a replay takes one."
            " Replay them in turn, e.g. methods=[specdecpp]"
        )
    return found[0] if found else None


def _asks(rule: SpecDecPPStop | HRADStop) -> Any:
    """What its predictions depend on."""
    predictor = rule.predictor
    weights = {
        name: tensor.numpy().tobytes() for name, tensor in predictor.head.state_dict().items()
    }
    return (
        predictor.features,
        predictor.calibration.to_dict(),
        weights,
        getattr(rule, "balance", None),
    )


def recorded(records: Records, draft_warp: Warp) -> dict[str, Tensor]:
    """The columns of `RolloutTable` that the harvest holds, a row per round. What the unwarped
    draft says of a token is known where it is the most probable one, and where there is no warp."""
    of_drawn = (
        "draft_max_q"
        if draft_warp.temperature == 0
        else "draft_q"
        if draft_warp == Warp()
        else None
    )
    return {
        "tokens": records["draft_tokens"],
        "drawn": records["drafted"],
        "accepted": records["accepted"],
        "accept": records["accept_prob"],
        "max_q": records["draft_max_q"],
        "entropy": records["draft_entropy"],
        **({"confidence": records[of_drawn]} if of_drawn else {}),
    }


def predicted(
    records: Records,
    harvested: Mapping[str, FeatureSpec],
    head: SpecDecPPStop | None,
    classifier: HRADStop | None,
) -> dict[str, Tensor]:
    """The columns that the rules' predictors give. harvested: predictor -> what the features of
    `records` are; a predictor may read some of the layers."""
    found = {}
    if head:
        f = in_chunks(
            head.predictor.predict_proba, records["rollout_features"], harvested["specdecpp"], head
        )
        found["survival"] = head.predictor.calibration.survival(f)
    if classifier:
        found["outcome"] = in_chunks(
            classifier.decide, records["features"], harvested["hrad"], classifier
        )
    return found


def in_chunks(
    ask: Callable[[Tensor], Tensor],
    features: Tensor,
    harvested: FeatureSpec,
    rule: SpecDecPPStop | HRADStop,
) -> Tensor:
    """What `rule` says, asked for float32 rows [n, D'] of the layers it reads, of `harvested`
    bfloat16 [..., D]."""
    wanted = rule.predictor.features
    found = torch.cat(
        [
            ask(narrowed(part, harvested, wanted).float())
            for part in features.flatten(0, -2).split(CHUNK)
        ]
    )
    return found.view(features.shape[:-1])


def by_prompt(
    folder: str | Path, split: str, values: dict[str, Tensor], group: Tensor, max_new: int
) -> Iterator[dict[str, Any]]:
    """One mapping per prompt, as `evaluation.replay.table.build` takes them."""
    responses = read_responses(folder, split)
    sizes = group.bincount(minlength=len(responses)).tolist()
    if sizes != [len(response["response_tokens"]) for response in responses]:
        raise UserError(
            f"data: {folder} is damaged (rounds and responses differ in length). Harvest again:"
            " out=..."
        )
    parts = {name: column.split(sizes) for name, column in values.items()}
    for number, response in enumerate(responses):
        facts = {"prompt_id": response["prompt_id"], "length": sizes[number], "max_new": max_new}
        yield facts | {name: chunks[number] for name, chunks in parts.items()}
