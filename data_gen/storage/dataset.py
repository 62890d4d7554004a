"""A finished harvest: its manifest, its records by split, its responses, and its verification."""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor
from tqdm import tqdm

from data_gen.storage import chunks
from data_gen.storage.chunks import MANIFEST, PLAN, Manifest, PairNames, WarpSettings
from data_gen.storage.shards import (
    DRAWN,
    FEATURES,
    INTEGERS,
    PROMPT,
    SCHEMAS,
    SIBLINGS,
    SPLITS,
    batches,
    shard_name,
)
from predictors.features.draft_statistics import HISTORY
from predictors.features.layers import RecordedLayers
from runtime.errors import TooFewRows, UserError
from runtime.job import command_of
from runtime.json_files import digest, read_json

HUB = "hub:"  # before a dataset repository, in place of a folder
RECORDS, CARD = [PLAN, "*.parquet", "chunk-*.json"], "README.md"  # of a repository
WRITTEN = (
    "command",
    "versions",
    "responses_from",
    "shards",
    "bytes",
    "chat_template",
)  # how and as what its records were written


class PairWarps(NamedTuple):
    """The warps of both models, from logits to the distributions that are sampled."""

    target: WarpSettings
    draft: WarpSettings


@dataclass(frozen=True)
class HarvestedPrompt:
    """A prompt and the target's response, as token ids."""

    prompt_id: str
    dataset: str
    split: str
    prompt_tokens: list[int]
    response_tokens: list[int]


@dataclass(frozen=True)
class Harvest:
    """A finished harvest in a folder. `open` reads and checks its manifest once; records are read
    from the mapped shards when they are asked for.

    Splits are "train", "calibration" and "test", or "all" of them."""

    folder: Path
    manifest: Manifest

    @classmethod
    def open(cls, folder: str | Path, key: str = "data") -> "Harvest":
        """Open the harvest in a folder, or in a dataset repository ("hub:owner/name"). Raises
        UserError if there is none, with the command that makes it.

        key: config key named in errors.
        """
        given = folder
        folder = fetched(str(folder), key) if str(folder).startswith(HUB) else Path(folder)
        path = folder / MANIFEST
        remedy = f"Run: {command_of('gen_data', f'out={folder}')}"
        if str(given).startswith(HUB):
            remedy = "Name a dataset that gen_data.py push=owner/name has sent"
        if not path.exists():
            half = (folder / PLAN).exists()
            state = "is only half harvested" if half else "is no harvested dataset"
            raise UserError(f"{key}: {folder} {state}. {remedy}")
        again = f"{remedy} (and its settings): it writes the file again"
        return cls(folder, read_json(path, Manifest, key, again))

    @property
    def name(self) -> str:
        """The name of the folder, or of the dataset repository."""
        if self.folder.parent.name == "snapshots":  # in the cache of huggingface_hub
            return self.folder.parents[1].name.removeprefix("datasets--")
        return self.folder.name

    # From the manifest

    @property
    def pair(self) -> PairNames:
        return self.manifest.pair

    @property
    def warps(self) -> PairWarps:
        return PairWarps(self.manifest.warp, self.manifest.draft_warp)

    @property
    def greedy(self) -> bool:
        """Return whether neither model was sampled."""
        return self.warps.target.temperature == 0 == self.warps.draft.temperature

    @property
    def inputs(self) -> RecordedLayers:
        """The layers whose hidden states were recorded."""
        return RecordedLayers(**self.manifest.inputs.model_dump())

    @property
    def gamma(self) -> int:
        """Draft tokens of a round."""
        return self.manifest.gamma

    @property
    def max_new_tokens(self) -> int:
        return self.manifest.max_new_tokens

    @property
    def splits(self) -> dict[str, int]:
        """Prompts of each split."""
        return self.manifest.splits

    @property
    def features_stored(self) -> bool:
        return self.manifest.features_stored

    @property
    def context(self) -> dict[str, Any]:
        """The pair and warps, as JSON, for which everything made of this harvest is valid."""
        return {name: self.manifest.written[name] for name in ("pair", "warp", "draft_warp")}

    @cached_property
    def identity(self) -> str:
        """Digest of the harvest's records and settings; not of the command, the versions of
        packages or the bytes of its files, which change when the same records are written
        again."""
        aside = WRITTEN if self.manifest.content is not None else ()
        facts = self.manifest.written
        return digest({name: value for name, value in facts.items() if name not in aside})

    @property
    def origin(self) -> dict[str, Any]:
        """Return what is recorded of the harvest in what is made of it: its identity, and how its
        prompts were split."""
        names, written = ("split_by", "shares"), self.manifest.written
        return {"identity": self.identity} | {key: written[key] for key in names if key in written}

    @property
    def artifact(self) -> tuple[str, str, Path]:
        """Name, kind and file that stand for the harvest in tracked runs."""
        return f"harvest-{self.name}", "harvest", self.folder / MANIFEST

    # Records

    def rounds(self, split: str, columns: Collection[str] | None = None) -> dict[str, Tensor]:
        """Return the rounds of a split, as `records`."""
        return self.records("rounds", split, columns)

    def mixed(self, split: str, columns: Collection[str] | None = None) -> dict[str, Tensor]:
        """Return the records of mixed sequences of a split, as `records`."""
        return self.records("mixed", split, columns)

    def records(
        self, kind: str, split: str, columns: Collection[str] | None = None
    ) -> dict[str, Tensor]:
        """Return all samples of one kind ("mixed" or "rounds") and split.

        One tensor per column of ``SCHEMAS[kind]`` (or per name in `columns`) with the sample first:
        integers int64, floats float32, [N], or [N, gamma] in `rounds` where every token of a round
        has a value, [N, gamma, k] of its siblings; `history` [N, 3]; hidden states bfloat16 [N, L *
        H] or [N, gamma, L * H]; and `group` int64 [N], the number of the prompt a sample came from
        (to check or make splits by prompt). Hidden states are left out if the harvest stored none.
        Raises UserError naming the shard when one is missing or damaged, when the split is empty,
        or for an unknown kind, split or column."""
        found = [part for _, part in self.parts(kind, split, columns) if part is not None]
        try:
            return joined(found)
        except RuntimeError as error:  # states of several widths
            raise self._damaged(error) from error

    def parts(
        self, kind: str, split: str, columns: Collection[str] | None = None
    ) -> Iterator[tuple[int, dict[str, Tensor] | None]]:
        """Yield `records` a few prompts at a time: how many prompts, and their samples; None where
        they have none. Raises UserError as `records`."""
        refuse_unknown("kind", [kind], ("mixed", "rounds"))
        recorded = [name for name in SCHEMAS[kind].names if name not in PROMPT]
        refuse_unknown("column", columns or (), recorded)
        wanted = [name for name in recorded if columns is None or name in columns]
        names = [name for name in wanted if self.features_stored or name not in FEATURES]
        counted = "anchor" if kind == "rounds" else "position"  # one value per sample
        before = found = 0
        for table in self.batches(kind, split, [counted, *names]):
            counts = _lengths(table[counted])
            try:
                part = {
                    name: _shaped(table[name], name, kind, counts, self.gamma) for name in names
                }
            except ValueError as error:
                raise self._damaged(error) from error
            part["group"] = torch.from_numpy(
                np.repeat(np.arange(before, before + len(table)), counts)
            )
            before += len(table)
            found += int(counts.sum())
            yield len(table), part if counts.sum() else None
        if not found:
            raise TooFewRows(
                f"data: {self.folder} has no {kind} records in split {split}. Harvest more prompts"
            )

    def _damaged(self, error: Exception) -> UserError:
        return UserError(
            f"data: {self.folder} is damaged ({error}). Harvest again with another out=..."
        )

    def prompts(self, split: str) -> Iterator[HarvestedPrompt]:
        """Yield the prompts of a split, in the order of the groups of `records`."""
        names = [*PROMPT, "prompt_tokens", "response_tokens"]
        for table in self.batches("responses", split, names):
            yield from (HarvestedPrompt(**row) for row in table.to_pylist())

    def by_prompt(
        self, kind: str, split: str, columns: Collection[str]
    ) -> Iterator[dict[str, Tensor]]:
        """Yield some columns of one kind, prompt by prompt, in the order of `records`: int64 or
        float32, as stored."""
        for table in self.batches(kind, split, columns):
            types = {name: table.schema.field(name).type for name in columns}
            dtypes = {n: torch.int64 if t == INTEGERS else torch.float32 for n, t in types.items()}
            for row in table.to_pylist():
                yield {name: torch.tensor(row[name], dtype=dtypes[name]) for name in columns}

    def batches(self, kind: str, split: str, columns: Collection[str]) -> Iterator[pa.Table]:
        """Yield some columns of one kind and split, a few prompts at a time."""
        refuse_unknown("kind", [kind], SCHEMAS)
        refuse_unknown("split", [split], (*SPLITS, "all"))
        refuse_unknown("column", columns, SCHEMAS[kind].names)
        for shard in self.manifest.shards:
            if shard.kind == kind:
                for table in batches(self.folder, shard, ["split", *columns]):
                    if split != "all":
                        table = table.filter(pc.equal(table["split"], split))
                    if len(table):
                        yield table

    @cached_property
    def embeddings(self) -> tuple[Tensor, Tensor]:
        """Return the ids [U], ascending, of all tokens that occur in the records, and the target's
        input embeddings of them [U, E], bfloat16. The harvest must have stored them."""
        vectors: dict[int, Tensor] = {}
        for table in self.batches("responses", "all", ["embedded", "embedding"]):
            ids, bits = (
                table[name].combine_chunks().flatten().to_numpy(zero_copy_only=False)
                for name in ("embedded", "embedding")
            )
            rows = torch.from_numpy(bits.copy()).view(torch.bfloat16).view(len(ids), -1)
            vectors |= dict(zip(ids.tolist(), rows, strict=True))
        ids = sorted(vectors)
        return torch.tensor(ids), torch.stack([vectors[token] for token in ids])


def fetched(name: str, key: str) -> Path:
    """Return the folder of a dataset repository, fetched into the cache of huggingface_hub unless
    it is there. Raises UserError naming the config key if it cannot be had."""
    from huggingface_hub import snapshot_download

    from predictors.hub import REFUSALS, refuse_no_repository, said_by

    repository = name.removeprefix(HUB)
    refuse_no_repository(repository, key)
    try:
        return Path(
            snapshot_download(
                repository, repo_type="dataset", allow_patterns=[*RECORDS, MANIFEST, CARD]
            )
        )
    except REFUSALS as error:
        raise UserError(
            f"{key}: no dataset {repository} could be fetched ({said_by(error)}). Check its name"
            " and `hf auth login`"
        ) from error


def refuse_unknown(what: str, names: Collection[str], known: Collection[str]) -> None:
    """Raise UserError for an unknown kind, split or column of records."""
    for name in names:
        if name not in known:
            raise UserError(f"data: {what} {name!r} is unknown. Use one of {', '.join(known)}")


def joined(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return the samples of some parts together."""
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _shaped(lists: pa.ChunkedArray, name: str, kind: str, counts: np.ndarray, gamma: int) -> Tensor:
    """Return a column with the sample first. counts: [rows], samples of each row. Raises ValueError
    if a row does not have as many values as its samples need."""
    each_token = kind == "rounds" and (name in DRAWN or name in SIBLINGS)
    samples, shape = int(counts.sum()), [gamma] if each_token else []
    flat = np.concatenate([chunk.flatten().to_numpy() for chunk in lists.chunks])
    values = torch.from_numpy(flat if flat.dtype in (np.int16, np.float32) else flat.astype("i8"))
    if name == "history":
        shape.append(HISTORY)
    if name in SIBLINGS:
        shape.append(SIBLINGS[name])
    if name in FEATURES:
        values = values.view(torch.bfloat16)
        shape.append(len(values) // max(1, samples * math.prod(shape)))
    per_sample = math.prod(shape)
    if (per_sample == 0 and samples) or not np.array_equal(_lengths(lists), counts * per_sample):
        raise ValueError(
            f"column {name} has not {per_sample or 'any'} values for each of the {kind} records"
        )
    return values.view(samples, *shape)


def _lengths(lists: pa.ChunkedArray) -> np.ndarray:
    """Return the number of values in each row of a column of lists."""
    return np.concatenate([chunk.value_lengths().to_numpy() for chunk in lists.chunks])


# Whole or damaged ---------------------------------------------------------------------------------


def verify(folder: Path) -> list[str]:
    """Return one line for each file that is missing, damaged, out of date, of another version or
    does not belong; none for an intact dataset. Reads every byte.

    Raises UserError if `folder` holds no harvest at all."""
    if not any((folder / name).exists() for name in (PLAN, MANIFEST)) and not any(
        folder.glob("chunk-*")
    ):
        raise UserError(f"out: {folder} is no harvested dataset. Give the folder of one: out=...")
    bad, settings_files = list[str](), list[dict[str, Any] | None]()
    for name, form in ((PLAN, chunks.Plan), (MANIFEST, chunks.Manifest)):
        try:
            settings_files.append(read_json(folder / name, form, "out", "").written)
        except UserError as error:
            settings_files.append(None)
            bad.append(str(error).removeprefix("out: ").rstrip(". "))
    plan, manifest = settings_files
    settings = plan or manifest
    present = chunks.files_of_chunks(folder)
    marked = [int(name[6:-5]) for name in present if name.startswith("chunk-")]
    count = chunks.chunk_count(settings) if settings else max(marked, default=-1) + 1
    identity = chunks.plan_id(plan) if plan else None
    for index in tqdm(range(count), desc="verify", unit=" chunks", leave=False, mininterval=1):
        problems = chunks.faults(folder, index, identity)
        bad += [f"{folder / name} {problem}" for name, problem in problems]
    if settings:
        own = {shard_name(kind, index) for kind in SCHEMAS for index in range(count)}
        own |= {chunks.marker_name(index) for index in range(count)}
        strange = [name for name in present if name not in own]
        bad += [f"{folder / name} belongs to no chunk. Delete it" for name in strange]
    if plan and manifest and not bad:
        expected = {**plan, **chunks.inventory(folder, plan)}
        if any(manifest.get(key) != value for key, value in expected.items()):
            path = folder / MANIFEST
            bad.append(f"{path} is out of date: it does not describe the shards beside it")
    if manifest and "url" in (manifest.get("responses_from") or {}):  # asked of a server
        from data_gen.responses import log  # loads code that runs models, needed only here

        bad += log.faults(folder, [] if bad else _harvested(folder, bad))
    return bad


def _harvested(folder: Path, bad: list[str]) -> list[str]:
    """Return the ids of the prompts whose responses were harvested. A shard that cannot be read is
    added to `bad`."""
    try:
        return [prompt.prompt_id for prompt in Harvest.open(folder).prompts("all")]
    except UserError as error:
        bad.append(str(error).removeprefix("data: ").removeprefix("shard ").rstrip(". "))
        return []
