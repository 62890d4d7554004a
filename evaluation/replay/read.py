"""From a harvest to the table that replay reads, with what the rules' predictors say at each of its
rounds."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from data_gen.samples import read_columns
from data_gen.storage.dataset import Harvest
from data_gen.storage.shards import SPLITS
from decoding.settings import Pair
from decoding.stopping.rollout_table import RolloutTable, build
from predictors.base import Records
from predictors.features.layers import RecordedLayers
from runtime.errors import UserError

COLUMNS = ("anchor", "drafted", "accepted", "token", "q_drawn", "q_max", "q_entropy", "accept_prob")
DRAWN, LARGEST = "rrsw_accept", "top_accept"  # siblings of a sampled draft and of a greedy one


class Asks(Protocol):
    """A stop rule or a structure whose predictor, if it has one, says something of every round."""

    columns: Sequence[str]

    def predictions(self, records: Records, layers: RecordedLayers) -> dict[str, Tensor]: ...


def read_table(
    harvest: Harvest, split: str, asked: Iterable[Asks] = (), pair: Pair | None = None
) -> RolloutTable:
    """The rounds of one split, or of "all", with what `asked` say of them. pair: settings of
    the harvested pair, only needed where the harvest stored no features.

    Raises UserError where the harvest has no round at some position."""
    all_asked, stride = list(asked), harvest.manifest.anchors.stride
    if split not in ("all", *SPLITS):
        raise UserError(f"split: expected all, {', '.join(SPLITS)}, got {split!r}. Use one of them")
    if stride != 1:
        raise UserError(
            f"data: expected a round at every position, got one every {stride} in"
            f" {harvest.folder}. Harvest them: python scripts/gen_data.py"
            " anchors.stride=1 out=<another folder>"
        )
    siblings = DRAWN if harvest.warps.draft.temperature else LARGEST
    read = (name for each in all_asked for name in each.columns)
    columns = dict.fromkeys([*COLUMNS, siblings, *read])
    records = read_columns(harvest, "rounds", split, list(columns), pair)
    values = {**recorded(records), "siblings": records[siblings][..., -2:]}
    predicted: dict[str, Tensor] = {}
    for each in all_asked:
        predicted |= each.predictions(records, harvest.inputs)
    rows = by_prompt(harvest, split, values, predicted, records["group"])
    return build(list(rows), harvest.greedy)


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
    harvest: Harvest,
    split: str,
    values: Mapping[str, Tensor],
    predicted: Mapping[str, Tensor],
    group: Tensor,
) -> Iterator[dict[str, Any]]:
    """One mapping per prompt, as `build` takes them."""
    prompts = list(harvest.prompts(split))
    sizes = group.bincount(minlength=len(prompts)).tolist()
    if sizes != [len(prompt.response_tokens) for prompt in prompts]:
        raise UserError(
            f"data: {harvest.folder} is damaged (rounds and responses differ in length). Harvest"
            " again: out=..."
        )
    parts, predictions = (
        {name: column.split(sizes) for name, column in columns.items()}
        for columns in (values, predicted)
    )
    for number, prompt in enumerate(prompts):
        yield {
            "prompt_id": prompt.prompt_id,
            "length": sizes[number],
            "max_new": harvest.max_new_tokens,
            **{name: chunks[number] for name, chunks in parts.items()},
            "predicted": {name: chunks[number] for name, chunks in predictions.items()},
        }
