"""Harvest of a pair and prompts: the target answers, both models are run along the answers, labels
are written as shards.

The prompts, shortest first, are cut into chunks of one generation batch; a chunk is three shards
(`data_gen.storage.chunks`) and the unit of resuming and of sharing work (`runtime.workers`). The
records depend on the plan only: a harvest that was interrupted, or made by several processes,
equals any other, up to rounding where memory limits how many responses are labelled together
(`data_gen.room`)."""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data_gen.answers import Answer, read_answers, teacher_forced_answers, uniforms
from data_gen.columns import may_merge
from data_gen.prompts import Prompt
from data_gen.records import Row, label
from data_gen.requests import SPLIT_BY, Request, following, make_requests
from data_gen.responses.external import ExternalResponse, with_responses
from data_gen.room import Room, joined, room_of
from data_gen.settings import HarvestSettings
from data_gen.storage import shards
from data_gen.storage.chunks import DATES, Chunk, Marker, chunk_of, empty_chunk, plan_id
from data_gen.storage.claim import unmade
from decoding.models.loading import ModelPair, load_pair, pair_identity
from decoding.models.machine import dtypes
from decoding.processors import Processed
from decoding.sampling import Warp
from decoding.settings import Pair
from runtime.errors import UserError
from runtime.workers import LOCAL, Team


@dataclass(frozen=True)
class Progress:
    """Callbacks with numbers. sampled(tokens): response tokens drawn; finished(prompts, tokens):
    prompts finished, and tokens drawn for them in this run (0 for those of an earlier run)."""

    sampled: Callable[[int], object] = lambda tokens: None
    finished: Callable[[int, int], object] = lambda prompts, tokens: None

    def earlier(self, marker: Marker) -> None:
        """Count a chunk that was made by an earlier run."""
        self.finished(marker.prompts, 0)

    def elsewhere(self, chunk: Chunk) -> None:
        """Count a chunk that another process has made."""
        self.sampled(chunk.marker["tokens"])
        self.finished(chunk.marker["prompts"], chunk.marker["tokens"])


NO_PROGRESS = Progress()
PLAIN = Warp()


class Maker:
    """What a process of a harvest holds: both models, and the prompts of all chunks."""

    def __init__(
        self, pair: ModelPair, requests: Sequence[Request], settings: HarvestSettings
    ) -> None:
        self.pair, self.requests, self.settings = pair, requests, settings

    @cached_property
    def plan(self) -> dict[str, Any]:
        return plan(self.pair, self.requests, self.settings)

    @cached_property
    def batches(self) -> list[list[Request]]:
        return split_into_chunks(self.requests, self.settings.batch_size)

    @cached_property
    def room(self) -> Room:
        return room_of(self.pair, self.requests, self.settings)

    def facts(self, _: None) -> tuple[dict[str, Any], int]:
        """Return the plan, and the number of tokens of external responses."""
        given = (request.response for request in self.requests)
        return self.plan, sum(len(response) for response in given if response is not None)

    def first_difference(self, _: None, made: Mapping[str, list[int]]) -> str:
        """Return where the prompts first read otherwise than those of a harvest, whose ids `made`
        holds by name; "" where none does, as when there are more or fewer of them."""
        for request in self.requests:
            new: list[int] = request.tokens.tolist()
            old = made.get(request.prompt_id, new)
            if old != new:
                at = [a != b for a, b in zip_longest(old, new)].index(True)
                there, here = (self.pair.tokenizer.decode(ids[at : at + 8]) for ids in (old, new))
                return f" ({request.prompt_id} goes on with {there!r} at token {at}, here {here!r})"
        return ""

    def chunk(self, index: int, progress: Progress = NO_PROGRESS) -> Chunk:
        """Make a chunk. Raises UserError when a model returns NaN."""
        with outputs_on(self.pair, self.pair.target.device, self.settings.draft_warp):
            rows = label_chunk(self.pair, self.batches[index], self.settings, progress, self.room)
        return chunk_of(plan_id(self.plan), index, rows)


def maker_of(
    files: Pair,
    prompts: Sequence[Prompt],
    given: Mapping[str, ExternalResponse] | None,
    settings: HarvestSettings,
    shares: tuple[float, float],
) -> Maker:
    """Load a pair for prompts and their external responses, if any. shares: of the splits
    "calibration" and "test". Raises UserError."""
    pair = load_pair(files)
    pair.draft.refuse_missing(settings.layers.draft_layers)
    pair.target.refuse_missing(settings.layers.target_layers)
    requests = make_requests(prompts, pair, settings.max_new_tokens + settings.gamma, *shares)
    return Maker(pair, with_responses(requests, given, pair, settings.max_new_tokens), settings)


def make_chunks(team: Team, whole: dict[str, Any], out: Path, progress: Progress) -> None:
    """Write every chunk of the dataset in `out` that is not there yet. whole: its `plan`; progress:
    told of chunks that earlier runs and other processes have made.

    Raises UserError when `out` holds a dataset made with other settings."""
    make = Maker.chunk if team.remote else partial(Maker.chunk, progress=progress)

    def told(prompts: dict[str, list[int]]) -> str:
        find = partial(Maker.first_difference, made=prompts)
        return "".join(where or "" for _, where in team.map(find, [None]))

    for index, made in team.map(make, unmade(out, whole, progress.earlier, told)):
        chunk = made or empty_chunk(plan_id(whole), index)
        if chunk.marker["plan"] != plan_id(whole):
            raise UserError(
                "workers: expected the same models, files and packages on every node, got another"
                f" plan of chunk {index}. Install the same everywhere"
            )
        chunk.save(out)
        if team.remote:
            progress.elsewhere(chunk)


def harvest(
    pair: ModelPair,
    requests: Sequence[Request],
    settings: HarvestSettings,
    out: Path,
    progress: Progress,
) -> None:
    """Write, in this process, every chunk of the dataset in `out` that is not there yet.

    Raises UserError when `out` holds a dataset made with other settings, or when a model returns
    NaN."""
    maker = Maker(pair, requests, settings)
    with LOCAL.team(lambda: maker) as team:
        make_chunks(team, maker.plan, out, progress)


@contextmanager
def outputs_on(pair: ModelPair, device: torch.device, draft_warp: Warp = PLAIN) -> Iterator[None]:
    """Let both models leave their outputs on one device, and the draft give logits of the tokens
    that it may propose only (`data_gen.columns`), unless processors of its warp read all."""
    before = pair.target.output_device, pair.draft.output_device
    pair.target.output_device = pair.draft.output_device = device
    pair.draft.merges = may_merge(pair.draft) and not isinstance(draft_warp, Processed)
    try:
        yield
    finally:
        pair.target.output_device, pair.draft.output_device = before
        pair.draft.merges = False


def plan(pair: ModelPair, requests: Sequence[Request], settings: HarvestSettings) -> dict[str, Any]:
    """Return everything the shards depend on. Two harvests with equal plans may share a folder."""
    template = _sha256([(pair.tokenizer.chat_template,)])
    prompts = [
        (r.prompt_id, r.dataset, r.split, r.tokens.tolist(), *rendered_later(r, template))
        for r in requests
    ]
    given = [(r.prompt_id, r.response.tolist()) for r in requests if r.response is not None]
    dates = sorted({r.prompt.date for r in requests if r.prompt and r.prompt.date})
    splits = [request.split for request in requests for _ in request.ids]
    counts = {"count": len(splits)}
    counts |= {"conversations": len(requests)} if len(splits) > len(requests) else {}
    return {
        "pair": pair_identity(pair),
        "dtypes": dtypes(pair),
        "prompts": {**counts, "sha256": _sha256(prompts)},
        "responses": _sha256(given) if given else "generated",
        **({DATES: dates} if dates else {}),
        **settings_of(splits, settings),
    }


def rendered_later(request: Request, template: str) -> list[Any]:
    """Return what decides how the later turns of a conversation are rendered."""
    prompt = request.prompt
    if prompt is None or not prompt.then:
        return []
    return [prompt.then, prompt.tools, dict(prompt.template), template]


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
    """Answer and label the prompts of one chunk. Returns its records by kind, one per prompt, the
    later turns of conversations behind all first ones."""
    room, asked = room or room_of(pair, chunk, settings), list(chunk)
    records: dict[int, dict[str, Row]] = {}
    answers = answers_of(pair, asked, settings, progress.sampled)
    for group in joined(pair, answers, settings, room):
        requests = [asked[answer.index] for answer in group]
        rows = label(pair, requests, group, settings, room)
        for answer, row in zip(group, rows, strict=True):
            records[answer.index] = row
            progress.finished(1, len(answer.distributions.response))
    return {kind: [records[index][kind] for index in sorted(records)] for kind in shards.SCHEMAS}


def answers_of(
    pair: ModelPair,
    asked: list[Request],
    settings: HarvestSettings,
    advance: Callable[[int], object],
) -> Iterator[Answer]:
    """Answer the prompts of a chunk, or read the responses that came with them. asked: grows by the
    next turns of conversations, which are asked when all have been answered."""
    start = 0
    room = min(pair.target.max_length, pair.draft.max_length)
    room -= settings.max_new_tokens + settings.gamma
    while wave := asked[start:]:
        prompts, uniform = [request.tokens for request in wave], draws(wave, settings)
        given = [request.response for request in wave if request.response is not None]
        later = dict[int, Request]()
        if not given:
            answers = read_answers(pair, prompts, uniform, settings, advance)
        else:
            answers = teacher_forced_answers(pair, prompts, given, uniform, settings)
        for answer in answers:
            if given:
                advance(len(answer.distributions.response))
            if after := following(wave[answer.index], answer.distributions.response, pair, room):
                later[answer.index] = after
            yield replace(answer, index=start + answer.index)
        start = len(asked)
        asked += [request for _, request in sorted(later.items())]


def draws(chunk: Sequence[Request], settings: HarvestSettings) -> Tensor:
    """Return the draws of responses, and of candidates and their siblings, [4, B, max_new]."""
    seed, size = settings.seed, settings.max_new_tokens
    purposes = ("response", "candidates", "second", "third")
    streams = [uniforms(seed, r.prompt_id, purpose, size) for purpose in purposes for r in chunk]
    return torch.stack(streams).view(len(purposes), len(chunk), size)
