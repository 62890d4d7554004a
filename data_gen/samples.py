"""Samples that predictors are trained and scored on, made from a harvest's records."""

from collections.abc import Callable, Collection, Iterator
from itertools import islice

import torch
from torch import Tensor

from data_gen.storage.dataset import Harvest, joined
from data_gen.storage.shards import FEATURES
from decoding.settings import Pair
from predictors.base import Predictor, Records
from predictors.inputs import Inputs, recorded, refuse_unreadable
from runtime.compatibility import incompatible
from runtime.errors import TooFewRows, UserError

VERDICTS = ("known", "drafted", "accept_prob", "q_drawn")


def read_samples(
    harvest: Harvest, predictor: Predictor, split: str, pair: Pair | None = None
) -> Records:
    """Return the samples of one split ("train", "calibration", "test" or "all").

    pair: settings of the pair that was harvested; only needed if the harvest stored no hidden
    states, to run it again. Raises UserError as `Harvest.records`, and if harvested rounds are
    shorter than the predictor needs."""
    return joined(list(sample_parts(harvest, predictor, split, pair)))


def sample_parts(
    harvest: Harvest,
    predictor: Predictor,
    split: str,
    pair: Pair | None = None,
    prompts: Tensor | None = None,
) -> Iterator[Records]:
    """Yield `read_samples` a few prompts at a time. prompts: [n] bool by `group`, those that are
    read; None: all."""
    refuse_short_rounds(harvest, predictor)
    asked, found = (predictor.kind, split, predictor.columns, pair, prompts), False
    for part in input_parts(harvest, predictor, *asked):
        try:
            samples = predictor.samples(part)
        except TooFewRows as error:
            few = error
            continue
        found = True
        yield samples
    if not found:
        raise few


def refuse_short_rounds(harvest: Harvest, predictor: Predictor) -> None:
    """Raise UserError if harvested rounds are shorter than `predictor` needs."""
    if predictor.gamma is not None and predictor.gamma > harvest.gamma:
        raise UserError(
            f"predictor.gamma: {predictor.gamma} is more than the {harvest.gamma} tokens per round"
            f" of {harvest.folder}. Lower it, or harvest longer rounds: python scripts/gen_data.py"
            f" gamma={predictor.gamma}"
        )


def round_parts(
    harvest: Harvest,
    predictor: Predictor,
    split: str,
    pair: Pair | None = None,
    prompts: Tensor | None = None,
) -> Iterator[Records]:
    """Yield the rounds of one split with `inputs` [N, gamma, D], for prefix survival, a few prompts
    at a time. prompts: as in `sample_parts`."""
    return input_parts(harvest, predictor, "rounds", split, VERDICTS, pair, prompts)


def of_prompts(records: Records, prompts: Tensor) -> Records:
    """Return the rows of some prompts. prompts: [n] bool, by `group`."""
    kept = prompts[records["group"]]
    return {name: values[kept] for name, values in records.items()}


def first_prompts(harvest: Harvest, count: int) -> Tensor:
    """Return which prompts of the training split, [prompts] bool, are the first `count` in a fixed
    order: a smaller count gives a subset. Raises UserError if there are fewer."""
    known = harvest.splits["train"]
    if count > known:
        raise UserError(
            f"prompts: expected at most the {known} prompts of the training split, got"
            f" {count}. Write e.g. prompts=null"
        )
    order = torch.randperm(known, generator=torch.Generator().manual_seed(0))
    return torch.zeros(known, dtype=torch.bool).index_fill_(0, order[:count], True)


def reached(samples: Records) -> Records:
    """Return the samples that predictions are scored on: if rows are weighted by the probability
    that a decode reaches them, those reached by the harvest's accept draws, else all."""
    if "reached" not in samples:
        return samples
    return {name: values[samples["reached"]] for name, values in samples.items()}


def unseen_prompts(harvest: Harvest, trained_on: Harvest, predictor: Predictor) -> Tensor:
    """Return [prompts] bool: which prompts of a harvest are not in the harvest `trained_on`,
    whatever the split.

    Raises UserError if none is new, if the harvests differ in more than their prompts, or if rounds
    are too short."""
    refuse_other_distributions(harvest, trained_on)
    refuse_short_rounds(harvest, predictor)
    new, data, home = unseen(harvest, trained_on), harvest.folder, trained_on.folder
    if not new.any():
        raise UserError(
            f"drift: {data} holds no prompts besides those of {home}. Harvest others: "
            "python scripts/gen_data.py dataset=... out=..."
        )
    print(f"drift: {int(new.sum())} of {len(new)} prompts of {data} are not in {home}")
    return new


def unseen(harvest: Harvest, home: Harvest) -> Tensor:
    """Return which prompts are not in `home`, whatever the split, [prompts] bool."""
    held = set(prompt_texts(home))
    return torch.tensor([prompt not in held for prompt in prompt_texts(harvest)])


def prompt_texts(harvest: Harvest, split: str = "all") -> Iterator[tuple[int, ...]]:
    """Yield the tokens of every prompt, in the order of the groups of `read_samples`. Ids need not
    be unique across data sets."""
    for row in harvest.by_prompt("responses", split, ["prompt_tokens"]):
        yield tuple(row["prompt_tokens"].tolist())


def refuse_other_distributions(
    harvest: Harvest, like: Harvest, key: str = "drift", name: str = "the data to train on"
) -> None:
    """Raise UserError naming `key` if a harvest differs from `like`, called `name`, in more than
    its prompts."""
    same = {**like.context, "inputs": like.inputs.to_dict()}
    if unlike := incompatible(harvest.manifest.written, same):
        setting, made, here = unlike[0]
        raise UserError(
            f"{key}: {harvest.folder} was made with {setting}={made}, {name} with {here}. Harvest"
            " it with the same pair, distributions and inputs: python scripts/gen_data.py"
        )


def inputs_of(harvest: Harvest, predictor: Predictor) -> Inputs:
    """Return the inputs of `predictor` with every layer of the harvest spelled out. Raises
    UserError if the harvest does not hold them."""
    return predictor.reads.among(harvest.inputs)


def read_inputs(
    harvest: Harvest,
    predictor: Predictor,
    kind: str,
    split: str,
    columns: Collection[str],
    pair: Pair | None = None,
) -> Records:
    """Return the columns `columns` of one kind of record, `group`, and `inputs`, the matrix that
    `predictor` reads (`predictors.inputs.recorded`)."""
    return joined(list(input_parts(harvest, predictor, kind, split, columns, pair)))


def input_parts(
    harvest: Harvest,
    predictor: Predictor,
    kind: str,
    split: str,
    columns: Collection[str],
    pair: Pair | None = None,
    prompts: Tensor | None = None,
) -> Iterator[Records]:
    """Yield `read_inputs` a few prompts at a time. prompts: as in `sample_parts`."""
    inputs, when = inputs_of(harvest, predictor), predictor.when
    refuse_unreadable(inputs, when, kind, predictor.name)
    found = False
    for part in _column_parts(harvest, kind, split, {*columns, *inputs.columns(when)}, pair):
        records = part if prompts is None else of_prompts(part, prompts)
        if len(records["group"]):
            found = True
            kept = {name: records[name] for name in (*columns, "group")}
            yield kept | {"inputs": recorded(inputs, harvest.inputs, records, when)}
    if not found:
        raise TooFewRows(f"data: none of these prompts of {harvest.folder} has {kind} records")


def read_columns(
    harvest: Harvest, kind: str, split: str, columns: Collection[str], pair: Pair | None = None
) -> Records:
    """Return `Harvest.records`, with hidden states recomputed if none are stored, and with the
    columns of `WORKED_OUT`."""
    return joined(list(_column_parts(harvest, kind, split, columns, pair)))


def _column_parts(
    harvest: Harvest, kind: str, split: str, columns: Collection[str], pair: Pair | None
) -> Iterator[dict[str, Tensor]]:
    made = {name for name in columns if name in WORKED_OUT}
    ids = {WORKED_OUT[name][0] for name in made}
    wanted = {name for name in columns if name in FEATURES or name in EMBEDDINGS}
    again: Iterator[Records] = iter(())
    if wanted and not harvest.features_stored:
        if pair is None:
            raise UserError(
                f"pair: {harvest.folder} stores no hidden states. Give the pair that was harvested"
            )
        from data_gen.recompute import recompute  # imports the models

        again = recompute(harvest, kind, split, wanted, pair)
    for prompts, records in harvest.parts(kind, split, {*columns, *ids} - made):
        states = list(islice(again, prompts))
        if records is None:
            continue
        records |= joined(states) if states else {}
        for name in made - records.keys():
            source, work_out = WORKED_OUT[name]
            records[name] = work_out(harvest, records[source])
        yield records


def _depth(harvest: Harvest, tokens: Tensor) -> Tensor:
    return torch.arange(1, tokens.shape[-1] + 1).expand_as(tokens)


def _embedding(harvest: Harvest, tokens: Tensor) -> Tensor:
    """Return [..., E] of token ids [...]."""
    ids, vectors = harvest.embeddings
    row = torch.searchsorted(ids, tokens).clamp(max=len(ids) - 1)
    if not torch.equal(ids[row], tokens):
        raise UserError(
            f"data: {harvest.folder} lacks embeddings of tokens that it names. Harvest again"
            " with another out=..."
        )
    return vectors[row]


EMBEDDINGS = ("embedding", "committed_embedding")
WORKED_OUT: dict[str, tuple[str, Callable[[Harvest, Tensor], Tensor]]] = {
    "depth": ("token", _depth),
    "embedding": ("token", _embedding),
    "committed_embedding": ("committed", _embedding),
}
"""Columns that are not recorded as such: what they are made of, and how."""
