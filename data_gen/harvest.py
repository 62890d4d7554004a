"""Harvest of a pair and prompts: the target answers, both models are run along the answers, labels
are written as shards.

The prompts, shortest first, are cut into chunks of one generation batch; a chunk is three shards
(`data_gen.storage.chunks`) and the unit of resuming and of sharing work
(`data_gen.storage.sharing`). The records depend on the plan only: a harvest that was interrupted,
or made by several processes, equals any other, up to rounding where memory limits how many
responses are labelled together (`data_gen.room`)."""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data_gen.answers import Answer, read_answers, teacher_forced_answers, uniforms
from data_gen.columns import may_merge
from data_gen.records import Row, label
from data_gen.requests import SPLIT_BY, Request
from data_gen.room import Room, joined, room_of
from data_gen.settings import HarvestSettings
from data_gen.storage import shards
from data_gen.storage.chunks import DATES, Marker, plan_id, save_chunk
from data_gen.storage.sharing import ALONE, Worker, open_chunks
from decoding.models.loading import ModelPair, pair_identity
from decoding.models.machine import dtypes


@dataclass(frozen=True)
class Progress:
    """Callbacks with numbers. sampled(tokens): response tokens drawn; finished(prompts, tokens):
    prompts finished, and tokens drawn for them in this run (0 for those of an earlier run)."""

    sampled: Callable[[int], object] = lambda tokens: None
    finished: Callable[[int, int], object] = lambda prompts, tokens: None

    def earlier(self, marker: Marker) -> None:
        """Count a chunk that was made by an earlier run."""
        self.finished(marker.prompts, 0)

    def elsewhere(self, marker: Marker) -> None:
        """Count a chunk that was made by another process of this run."""
        self.sampled(marker.tokens)
        self.finished(marker.prompts, marker.tokens)


def harvest(
    pair: ModelPair,
    requests: Sequence[Request],
    settings: HarvestSettings,
    out: Path,
    progress: Progress,
    worker: Worker = ALONE,
) -> None:
    """Write every chunk of the dataset in `out` that is not there yet, together with other
    processes that do the same.

    Raises UserError when `out` holds a dataset made with other settings, or when a model returns
    NaN."""
    whole = plan(pair, requests, settings)
    batches = split_into_chunks(requests, settings.batch_size)
    with outputs_on(pair, pair.target.device):
        room = room_of(pair, requests, settings)
        for index in open_chunks(out, whole, worker, progress.earlier, progress.elsewhere):
            rows = label_chunk(pair, batches[index], settings, progress, room)
            save_chunk(out, plan_id(whole), index, rows)


@contextmanager
def outputs_on(pair: ModelPair, device: torch.device) -> Iterator[None]:
    """Let both models leave their outputs on one device, and the draft give logits of the tokens
    that it may propose only (`data_gen.columns`)."""
    before = pair.target.output_device, pair.draft.output_device
    pair.target.output_device = pair.draft.output_device = device
    pair.draft.merges = may_merge(pair.draft)
    try:
        yield
    finally:
        pair.target.output_device, pair.draft.output_device = before
        pair.draft.merges = False


def plan(pair: ModelPair, requests: Sequence[Request], settings: HarvestSettings) -> dict[str, Any]:
    """Return everything the shards depend on. Two harvests with equal plans may share a folder."""
    prompts = [(r.prompt_id, r.dataset, r.split, r.tokens.tolist()) for r in requests]
    given = [(r.prompt_id, r.response.tolist()) for r in requests if r.response is not None]
    dates = sorted({request.date for request in requests if request.date})
    return {
        "pair": pair_identity(pair),
        "dtypes": dtypes(pair),
        "prompts": {"count": len(requests), "sha256": _sha256(prompts)},
        "responses": _sha256(given) if given else "generated",
        **({DATES: dates} if dates else {}),
        **settings_of([request.split for request in requests], settings),
    }


def settings_of(splits: Sequence[str], settings: HarvestSettings) -> dict[str, Any]:
    """Return the part of a plan that is known before a model is loaded. splits: of every prompt."""
    counts = {split: splits.count(split) for split in shards.SPLITS}
    head = {"schema_version": shards.SCHEMA_VERSION, "splits": counts, "split_by": SPLIT_BY}
    return head | settings.to_dict()


def _sha256(rows: Sequence[tuple[Any, ...]]) -> str:
    """Return the digest of rows that differ in their first entry, in any order."""
    return hashlib.sha256(json.dumps(sorted(rows)).encode()).hexdigest()[:16]


def split_into_chunks(requests: Sequence[Request], size: int) -> list[list[Request]]:
    """Return batches of similar length, so that little of a batch is padding."""
    ordered = sorted(requests, key=lambda request: (len(request.tokens), request.prompt_id))
    return [ordered[start : start + size] for start in range(0, len(ordered), size)]


def label_chunk(
    pair: ModelPair,
    chunk: Sequence[Request],
    settings: HarvestSettings,
    progress: Progress,
    room: Room | None = None,
) -> dict[str, list[Row]]:
    """Answer and label the prompts of one chunk. Returns its records by kind, one per prompt."""
    room = room or room_of(pair, chunk, settings)
    records: dict[int, dict[str, Row]] = {}
    answers = answers_of(pair, chunk, settings, progress.sampled)
    for group in joined(pair, answers, settings, room):
        requests = [chunk[answer.index] for answer in group]
        rows = label(pair, requests, group, settings, room)
        for answer, row in zip(group, rows, strict=True):
            records[answer.index] = row
            progress.finished(1, len(answer.distributions.response))
    return {kind: [records[index][kind] for index in sorted(records)] for kind in shards.SCHEMAS}


def answers_of(
    pair: ModelPair,
    chunk: Sequence[Request],
    settings: HarvestSettings,
    advance: Callable[[int], object],
) -> Iterator[Answer]:
    """Answer the prompts of a chunk, or read the responses that came with them."""
    prompts, uniform = [request.tokens for request in chunk], draws(chunk, settings)
    given = [request.response for request in chunk if request.response is not None]
    if not given:
        yield from read_answers(pair, prompts, uniform, settings, advance)
        return
    for answer in teacher_forced_answers(pair, prompts, given, uniform, settings):
        advance(len(answer.distributions.response))
        yield answer


def draws(chunk: Sequence[Request], settings: HarvestSettings) -> Tensor:
    """Return the draws of responses, and of candidates and their siblings, [4, B, max_new]."""
    seed, size = settings.seed, settings.max_new_tokens
    purposes = ("response", "candidates", "second", "third")
    streams = [uniforms(seed, r.prompt_id, purpose, size) for purpose in purposes for r in chunk]
    return torch.stack(streams).view(len(purposes), len(chunk), size)
