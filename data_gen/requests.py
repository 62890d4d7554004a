"""From prompts to requests: tokens that fit the models, and a split for every prompt."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from torch import Tensor

from data_gen.prompts import Prompt
from data_gen.prompts.prompt import select
from data_gen.prompts.render import prompt_ids
from data_gen.storage.shards import SPLITS
from decoding.models.loading import ModelPair
from runtime.errors import UserError
from runtime.files import file_hash

AnyRequest = TypeVar("AnyRequest")


@dataclass(frozen=True)
class Request:
    """A prompt ready for the models, to be harvested or decoded. tokens: [P] int64, at least 2 of
    them for a harvest; split: "train", "calibration" or "test", or "all" where no split was asked
    for; response: [T >= 1] int64, what the target has answered elsewhere (`data_gen.responses`), or
    None."""

    prompt_id: str
    dataset: str
    tokens: Tensor
    split: str
    response: Tensor | None = None


def make_requests(
    prompts: Sequence[Prompt], pair: ModelPair, new_tokens: int, calibration: float, test: float
) -> list[Request]:
    """Tokenise and split. new_tokens: room to leave after each prompt; calibration, test: shares of
    the prompts.

    Raises UserError for prompts that do not fit either model's context, or of a single token.
    """
    room = min(pair.target.max_length, pair.draft.max_length) - new_tokens
    if room < 2:
        raise UserError(
            f"max_new_tokens: with gamma, {new_tokens} tokens fill pair.max_length. Lower it"
        )
    splits = assign_splits([prompt.id for prompt in prompts], calibration, test)
    requests = []
    for prompt in prompts:
        tokens = prompt_ids(prompt, pair.tokenizer, room)
        if len(tokens) < 2:
            raise UserError(
                f"dataset: the prompt {prompt.id} is a single token. Remove it or make it longer"
            )
        requests.append(Request(prompt.id, prompt.dataset, tokens, splits[prompt.id]))
    return requests


def requests_of_split(
    prompts: Sequence[Prompt],
    pair: ModelPair,
    new_tokens: int,
    split: str,
    shares: Mapping[str, float],
    limit: int | None,
) -> list[Request]:
    """`limit` prompts of a split ("all": of the whole set), evenly spaced, ready to be decoded.
    shares: of the prompts, "calibration" and "test".

    Raises UserError for an unknown split, and as `assign_splits`.
    """
    if split not in ("all", *SPLITS):
        raise UserError(f"split: {split!r} is unknown. Use all, {', '.join(SPLITS)}")
    if split != "all":
        names = [prompt.id for prompt in prompts]
        splits = assign_splits(names, shares["calibration"], shares["test"])
        prompts = [prompt for prompt in prompts if splits[prompt.id] == split]
    room = min(pair.target.max_length, pair.draft.max_length) - new_tokens
    return [
        Request(prompt.id, prompt.dataset, prompt_ids(prompt, pair.tokenizer, room), split)
        for prompt in select(prompts, limit)
    ]


def refuse_other_shares(data: Mapping[str, str], shares: Mapping[str, float], where: str) -> None:
    """Raise UserError where a harvest was split by other shares than these: what it kept for tests,
    and what it trained on, are not what they are here.

    data: `folder` of the harvest and `sha256` of its manifest. One that is gone, or was made anew
    since, is not asked.
    where: what was made of it.
    """
    path = Path(data["folder"]) / "manifest.json"
    if not path.is_file() or file_hash(path) != data.get("sha256"):
        return
    for name, theirs in json.loads(path.read_text(encoding="utf-8")).get("shares", {}).items():
        if shares[name] != theirs:
            raise UserError(
                f"splits.{name}: {shares[name]} here, {theirs} in {data['folder']}, on which"
                f" {where}: what is kept for tests differs. Set splits.{name}={theirs}, or, where"
                " it has seen none of the prompts, split=all"
            )


def spread(requests: Sequence[AnyRequest], count: int) -> list[AnyRequest]:
    """`count` of them (or all), evenly spaced."""
    count = min(count, len(requests))
    return [requests[index * len(requests) // count] for index in range(count)]


def assign_splits(prompt_ids: Sequence[str], calibration: float, test: float) -> dict[str, str]:
    """Split by a hash of the prompt id, so that a prompt stays where it is when the set around it
    changes.

    Only in sets so small that a split would be empty are the nearest prompts moved over. Raises
    UserError for fewer than three prompts or impossible shares."""
    if calibration <= 0 or test <= 0 or calibration + test >= 1:
        raise UserError(
            f"splits: calibration={calibration} and test={test} must be positive and leave room for"
            " train"
        )
    if len(prompt_ids) < len(SPLITS):
        raise UserError(
            f"dataset: {len(prompt_ids)} prompts cannot be split three ways. Give at least 3"
        )
    place = {name: _unit_hash(name) for name in prompt_ids}
    ranked = sorted(prompt_ids, key=lambda name: (place[name], name))
    last = len(ranked) - 1
    train = min(max(1, sum(place[name] < 1 - calibration - test for name in ranked)), last - 1)
    known = min(max(train + 1, sum(place[name] < 1 - test for name in ranked)), last)
    sizes = (train, known - train, len(ranked) - known)
    names = [split for split, size in zip(SPLITS, sizes, strict=True) for _ in range(size)]
    return dict(zip(ranked, names, strict=True))


def _unit_hash(text: str) -> float:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big") / 2**48
