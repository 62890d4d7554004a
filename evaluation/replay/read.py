"""From a harvest to the table that replay reads, with what the rules' predictors say at each of its
rounds."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from omegaconf import DictConfig
from torch import Tensor

from data_gen.samples import read_columns
from data_gen.storage.dataset import read_manifest, read_responses
from data_gen.storage.shards import SPLITS
from decoding.stopping.rollout_table import RolloutTable, build
from predictors.base import Records
from runtime.errors import UserError

COLUMNS = ("anchor", "drafted", "accepted", "token", "q_drawn", "q_max", "q_entropy", "accept_prob")
DRAWN, LARGEST = "rrsw_accept", "top_accept"  # siblings of a sampled draft and of a greedy one


class Asks(Protocol):
    """A stop rule or a structure whose predictor, if it has one, says something of every round."""

    columns: Sequence[str]

    def predictions(self, records: Records, manifest: Mapping[str, Any]) -> dict[str, Tensor]: ...


def read_table(
    folder: str | Path, split: str, asked: Iterable[Asks] = (), pair: DictConfig | None = None
) -> RolloutTable:
    """The rounds of one split, or of "all", with what `asked` say of them. pair: config of the
    harvested pair, only needed where the harvest stored no features.

    Raises UserError where the harvest has no round at some position."""
    manifest, all_asked = read_manifest(folder), list(asked)
    if split not in ("all", *SPLITS):
        raise UserError(f"split: expected all, {', '.join(SPLITS)}, got {split!r}. Use one of them")
    if manifest["anchors"]["stride"] != 1:
        raise UserError(
            f"data: expected a round at every position, got one every"
            f" {manifest['anchors']['stride']} in {folder}. Harvest them: python"
            " scripts/gen_data.py anchors.stride=1 out=<another folder>"
        )
    siblings = DRAWN if manifest["draft_warp"]["temperature"] else LARGEST
    read = (name for one in all_asked for name in one.columns)
    columns = dict.fromkeys([*COLUMNS, siblings, *read])
    records = read_columns(folder, "rounds", split, list(columns), pair)
    values = {**recorded(records), "siblings": records[siblings][..., -2:]}
    predicted: dict[str, Tensor] = {}
    for one in all_asked:
        predicted |= one.predictions(records, manifest)
    greedy = manifest["warp"]["temperature"] == 0 == manifest["draft_warp"]["temperature"]
    rows = by_prompt(folder, split, values, predicted, records["group"], manifest["max_new_tokens"])
    return build(list(rows), greedy)


def recorded(records: Records) -> dict[str, Tensor]:
    """The columns of `RolloutTable` that the harvest holds, a row per round."""
    return {
        "tokens": records["token"],
        "drawn": records["drafted"],
        "accepted": records["accepted"],
        "accept": records["accept_prob"],
        "max_q": records["q_max"],
        "entropy": records["q_entropy"],
        "confidence": records["q_drawn"],
    }


def by_prompt(
    folder: str | Path,
    split: str,
    values: Mapping[str, Tensor],
    predicted: Mapping[str, Tensor],
    group: Tensor,
    max_new: int,
) -> Iterator[dict[str, Any]]:
    """One mapping per prompt, as `build` takes them."""
    responses = read_responses(folder, split)
    sizes = group.bincount(minlength=len(responses)).tolist()
    if sizes != [len(response["response_tokens"]) for response in responses]:
        raise UserError(
            f"data: {folder} is damaged (rounds and responses differ in length). Harvest again:"
            " out=..."
        )
    parts, said = (
        {name: column.split(sizes) for name, column in columns.items()}
        for columns in (values, predicted)
    )
    for number, response in enumerate(responses):
        yield {
            "prompt_id": response["prompt_id"],
            "length": sizes[number],
            "max_new": max_new,
            **{name: chunks[number] for name, chunks in parts.items()},
            "predicted": {name: chunks[number] for name, chunks in said.items()},
        }
