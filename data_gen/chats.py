"""Self-made chats on disk: safetensors shards that a distillation run reads while more are being written."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from predictors.errors import UserError


@dataclass(frozen=True)
class Chat:
    """One conversation.

    tokens: [n] int32, prompt and response; start: index of the first response token;
    hidden: [n - start, H] bfloat16, row i is the target's last hidden state (after the final norm) that predicts
    tokens[start + i].
    """

    tokens: Tensor
    start: int
    hidden: Tensor


def save_chats(path: Path, chats: Sequence[Chat]) -> None:
    """Write one shard; it appears under its name only when complete."""
    partial = path.with_suffix(".partial")
    tensors = {
        "tokens": torch.cat([chat.tokens for chat in chats]),
        "lengths": torch.tensor([len(chat.tokens) for chat in chats]),
        "starts": torch.tensor([chat.start for chat in chats]),
        "hidden": torch.cat([chat.hidden for chat in chats]),
    }
    save_file(tensors, partial)
    partial.rename(path)


def load_chats(path: Path) -> list[Chat]:
    """Read one shard. Raises UserError naming it when it is damaged."""
    try:
        shard = load_file(path)
        lengths, starts = shard["lengths"].tolist(), shard["starts"].tolist()
        tokens = shard["tokens"].split(lengths)
        hidden = shard["hidden"].split([length - start for length, start in zip(lengths, starts, strict=True)])
    except (SafetensorError, KeyError, RuntimeError, ValueError) as error:
        raise UserError(f"chats: {path} is damaged ({error}). Delete it and run again") from error
    return [Chat(*fields) for fields in zip(tokens, starts, hidden, strict=True)]


class ChatPool:
    """All chats of a folder, in memory; `refresh` picks up shards written since. The first `held_out` never train:
    shards are read in the order they were written, so that these stay the same, whoever writes more."""

    def __init__(self, folder: Path, held_out: int) -> None:
        self.folder, self.held_out = folder, held_out
        self.read: set[Path] = set()
        self.chats: list[Chat] = []
        self.refresh()

    def refresh(self) -> None:
        for path in sorted(self.folder.glob("*.safetensors"), key=lambda path: (path.stat().st_mtime_ns, path.name)):
            if path not in self.read:
                self.read.add(path)
                self.chats.extend(load_chats(path))

    @property
    def training(self) -> list[Chat]:
        return self.chats[self.held_out :]

    @property
    def validation(self) -> list[Chat]:
        return self.chats[: self.held_out]

    def response_tokens(self) -> int:
        """Response tokens to train on."""
        return sum(len(chat.hidden) for chat in self.training)


def batches(chats: Sequence[Chat], tokens: int, rng: random.Random) -> Iterator[list[Chat]]:
    """One pass over `chats` in random order, cut into batches of at most `tokens` padded tokens of similar length."""
    order = rng.sample(range(len(chats)), len(chats))
    cut: list[list[Chat]] = []
    for window in range(0, len(order), 512):
        cut.extend(_cut([chats[i] for i in order[window : window + 512]], tokens))
    rng.shuffle(cut)
    yield from cut


def _cut(chats: list[Chat], tokens: int) -> list[list[Chat]]:
    result: list[list[Chat]] = [[]]
    for chat in sorted(chats, key=lambda chat: len(chat.tokens)):
        if result[-1] and len(chat.tokens) * (len(result[-1]) + 1) > tokens:
            result.append([])
        result[-1].append(chat)
    return result
