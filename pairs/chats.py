"""Chats written by a target, on disk: safetensors shards that a distillation run reads while more
are being written."""

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save
from torch import Tensor

from decoding.models.draft_vocabulary import FILE as VOCABULARY
from runtime.errors import UserError

LAYERS = "feature_layers"


@dataclass(frozen=True)
class Chat:
    """One conversation.

    tokens: [n] int32, prompt and response; start: index of the first response token;
    states: [n - 1, L + 1, H] bfloat16, row i holds hidden states of the target after tokens[i]:
    those of the L layers that were asked for, then the last one (after the final norm), which
    predicts tokens[i + 1]."""

    tokens: Tensor
    start: int
    states: Tensor

    @property
    def hidden(self) -> Tensor:
        """Return [n - start, H]: row i is the last hidden state that predicts tokens[start + i]."""
        return self.states[self.start - 1 :, -1]


def save_chats(path: Path, chats: Sequence[Chat], layers: Sequence[int] = ()) -> None:
    """Write one shard; it appears under its name only when complete. layers: those whose hidden
    states are stored besides the last one."""
    partial = path.with_suffix(".partial")
    tensors = {
        "tokens": torch.cat([chat.tokens for chat in chats]),
        "lengths": torch.tensor([len(chat.tokens) for chat in chats]),
        "starts": torch.tensor([chat.start for chat in chats]),
        "states": torch.cat([chat.states for chat in chats]),
    }
    partial.write_bytes(save(tensors, {LAYERS: json.dumps([*layers])}))
    partial.rename(path)


def shards(folder: Path) -> list[Path]:
    """Return the files of a folder of chats, in the order they were written."""
    paths = [path for path in folder.glob("*.safetensors") if path.name != VOCABULARY]
    return sorted(paths, key=lambda path: (path.stat().st_mtime_ns, path.name))


def layers_of(path: Path) -> tuple[int, ...]:
    """Return the layers whose hidden states a shard stores besides the last one."""
    try:
        with safe_open(path, "pt") as file:
            facts = file.metadata() or {}
        return tuple(json.loads(facts[LAYERS]))
    except KeyError as error:
        raise UserError(
            f"chats: {path} is of an earlier version. Delete it and run again"
        ) from error
    except (SafetensorError, OSError, TypeError, ValueError) as error:
        raise UserError(f"chats: {path} is damaged ({error}). Delete it and run again") from error


def load_chats(path: Path) -> list[Chat]:
    """Read one shard. Raises UserError naming it when it is damaged."""
    try:
        shard = load_file(path)
        lengths, starts = shard["lengths"].tolist(), shard["starts"].tolist()
        tokens = shard["tokens"].split(lengths)
        states = shard["states"].split([length - 1 for length in lengths])
    except (SafetensorError, KeyError, RuntimeError, ValueError) as error:
        raise UserError(f"chats: {path} is damaged ({error}). Delete it and run again") from error
    return [Chat(*fields) for fields in zip(tokens, starts, states, strict=True)]


class ChatPool:
    """All chats of a folder, in memory; `refresh` reads shards written since. The first `held_out`
    chats are never trained on: shards are read in the order they were written, so that these stay
    the same."""

    def __init__(self, folder: Path, held_out: int) -> None:
        self.folder, self.held_out = folder, held_out
        self.read: set[Path] = set()
        self.chats: list[Chat] = []
        self.layers: tuple[int, ...] = ()  # layers stored besides the last one
        self.refresh()

    def refresh(self) -> None:
        for path in shards(self.folder):
            if path not in self.read:
                layers = layers_of(path)
                if self.read and layers != self.layers:
                    raise UserError(
                        f"chats: {path} keeps hidden states of layers {[*layers]}, the others of"
                        f" {[*self.layers]}. Write them to a folder of their own"
                    )
                self.layers = layers
                self.read.add(path)
                self.chats.extend(load_chats(path))

    @property
    def training(self) -> list[Chat]:
        return self.chats[self.held_out :]

    @property
    def validation(self) -> list[Chat]:
        return self.chats[: self.held_out]

    def response_tokens(self) -> int:
        """Number of response tokens to train on."""
        return sum(len(chat.hidden) for chat in self.training)


def batches(chats: Sequence[Chat], tokens: int, rng: random.Random) -> Iterator[list[Chat]]:
    """Yield batches of chats of similar length, of at most `tokens` padded tokens, in one pass over
    `chats` in random order."""
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
