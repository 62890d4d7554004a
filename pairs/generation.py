"""Writing chats of a target with itself into a folder, shard by shard, until there are enough."""

import os
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

from omegaconf import DictConfig
from safetensors import safe_open
from tqdm import tqdm
from transformers import LlamaForCausalLM, PreTrainedTokenizerBase

from data_gen.prompts.prompt import read_rows, text_of
from pairs.chats import Chat, layers_of, save_chats, shards
from pairs.self_chat import SelfChat, SelfChatConfig
from runtime.errors import UserError
from runtime.files import alive, refuse_foreign


class ChatWriter:
    """The endless chats of this process, written to `folder`. One stream for the whole run: a new
    one would drop the chats that are not finished, long ones above all, and begin again with the
    first of ``chats.prompts``."""

    def __init__(
        self,
        settings: DictConfig,
        folder: Path,
        seed: int,
        target: LlamaForCausalLM,
        tokenizer: PreTrainedTokenizerBase,
    ) -> None:
        """settings: ``chats`` of conf/distill_draft.yaml."""
        refuse_foreign(folder, "chats-*", key="chats.folder")
        folder.mkdir(parents=True, exist_ok=True)
        clear_partial(folder, seed)
        self.settings, self.folder, self.seed = settings, folder, seed
        chosen = {f.name: settings[f.name] for f in fields(SelfChatConfig)}
        chosen |= {key: tuple(chosen[key]) for key in ("temperatures", "feature_layers")}
        again = seed * 1_000_003 + len(shards(folder))  # never the same chats after a restart
        prompts = read_texts(settings, "prompts", tokenizer)
        openings = read_texts(settings, "openings", tokenizer)
        config = SelfChatConfig(**chosen)
        self.stream = iter(SelfChat(target, tokenizer, config, again, prompts, openings or [[]]))

    def write(self, tokens: int) -> None:
        """Write shards until the folder holds `tokens` response tokens (of every process that
        writes there). Raises UserError where its chats keep other hidden states."""
        layers = tuple(self.settings.feature_layers)
        for path in shards(self.folder):
            if (known := layers_of(path)) != layers:
                raise UserError(
                    f"chats.feature_layers: expected {[*known]}, as of the chats in {self.folder},"
                    f" got {[*layers]}. Choose another chats.folder=..."
                )
        have, number = written_tokens(self.folder), len(shards(self.folder))
        if have >= tokens:
            return
        with tqdm(total=tokens, initial=have, unit="tok", desc="chats", smoothing=0.1) as bar:
            while have < tokens:
                shard = next_shard(self.stream, self.settings.shard_tokens, bar)
                name = f"chats-{self.seed:03d}-{number:05d}-{os.getpid()}.safetensors"
                save_chats(self.folder / name, shard, layers)
                number += 1
                have = written_tokens(self.folder)


def clear_partial(folder: Path, seed: int) -> None:
    """Remove what a process with this seed was writing when it was killed."""
    for left in folder.glob(f"chats-{seed:03d}-*.partial"):
        pid = left.stem.rpartition("-")[2]
        if pid.isdecimal() and not alive(int(pid)):
            left.unlink(missing_ok=True)


def next_shard(stream: Iterator[Chat], tokens: int, bar: tqdm) -> list[Chat]:
    """Chats with at least `tokens` response tokens."""
    shard: list[Chat] = []
    count = 0
    while count < tokens:
        shard.append(next(stream))
        count += len(shard[-1].hidden)
        bar.update(len(shard[-1].hidden))
    return shard


def written_tokens(folder: Path) -> int:
    """Response tokens in all shards. Hidden states are not read."""
    total = 0
    for path in shards(folder):
        with safe_open(path, "pt") as file:
            total += int((file.get_tensor("lengths") - file.get_tensor("starts")).sum())
    return total


def first_round(settings: DictConfig) -> int:
    """Response tokens needed before training can begin: the held-out chats and one shard more."""
    least = 2 * settings.shard_tokens + settings.held_out * settings.response_tokens
    return int(min(settings.tokens, least))


def read_texts(
    settings: DictConfig, key: str, tokenizer: PreTrainedTokenizerBase
) -> list[list[int]]:
    """Token ids of the ``prompt`` field of each row of the JSONL file ``chats.<key>``; none where
    it is null."""
    if settings[key] is None:
        return []
    name = f"chats.{key}"
    texts = [
        text_of(row, "prompt", name, where) for where, _, row in read_rows(settings[key], name)
    ]
    return [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
