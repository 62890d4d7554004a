"""Endless chats of a target model with itself: training text for a distilled draft.

Every slot of one batch starts from the chat template's user header, samples a user turn, is fed the
assistant header, and samples `responses` answers to it (the cache is rolled back to the end of the
prompt in between). A finished slot starts again at once, so each forward advances all slots by one
token and no row is ever padding. The target's last hidden states (after the final norm) are stored
with the tokens: the head gives p from them, so training needs no further target forward."""

import os
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from tqdm import tqdm
from transformers import LlamaForCausalLM, PreTrainedTokenizerBase
from transformers.cache_utils import Cache

from data_gen.prompts.prompt import Prompt, read_rows, text_of
from data_gen.prompts.render import rendered
from decoding.models.ends import end_ids
from decoding.models.kv_cache import ATTENTION
from decoding.models.options import first_line
from pairs.chats import Chat, layers_of, save_chats, shards
from runtime.errors import UserError
from runtime.files import alive, refuse_foreign


class SlotCache(Cache):
    """Preallocated keys and values with one write position per batch row (`at`: [B] int64)."""

    def __init__(self, slots: int, capacity: int) -> None:
        super().__init__(layers=[])
        self.slots, self.capacity = slots, capacity
        self.at = torch.zeros(slots, dtype=torch.long)
        self.width = 1
        self.buffers: list[tuple[Tensor, Tensor]] = []

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write one token per slot ([B, kv_heads, 1, D]) and return views of the first `width`
        rows."""
        if layer_idx == len(self.buffers):
            shape = (self.slots, key_states.shape[1], self.capacity, key_states.shape[-1])
            self.buffers.append((key_states.new_zeros(shape), key_states.new_zeros(shape)))
        keys, values = self.buffers[layer_idx]
        rows = torch.arange(self.slots, device=keys.device)
        keys[rows, :, self.at] = key_states[:, :, 0]
        values[rows, :, self.at] = value_states[:, :, 0]
        return keys[:, :, : self.width], values[:, :, : self.width]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.width - 1

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        return self.capacity

    def get_mask_sizes(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        return self.width, 0


@dataclass
class Slot:
    """State of one batch row: the tokens written, those to be fed next, and the turn being
    sampled."""

    tokens: list[int] = field(default_factory=list)
    forced: list[int] = field(default_factory=list)
    states: list[Tensor] = field(default_factory=list)
    start: int = 0
    answers: int = 0


def chat_headers(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """Return token ids before the user's text, and those between its end-of-turn token and the
    assistant's text. Raises UserError if the chat template gives no such ids."""
    mark = "\u0001"
    if not tokenizer.chat_template:
        raise UserError(
            "pair.target: expected a target with a chat template, got one without, which can write"
            " no chats. Use one that was trained on chats"
        )
    try:
        text, _ = rendered(Prompt("chats", "", "", mark), tokenizer)
    except UserError as error:
        cause = error.__cause__
        fault = str(error).partition(": ")[2].partition(". ")[0]
        reason = first_line(cause) if isinstance(cause, Exception) else fault
        raise UserError(
            f"pair.target: its chat template does not work ({reason}). Use another target"
        ) from error
    before, shown, after = text.partition(mark)
    end = tokenizer.eos_token
    if not (shown and end and after.startswith(end)) or mark in after:
        raise UserError(
            f"pair.target: its chat template does not close a user turn with {end!r}. Use another"
            " target"
        )
    parts = [
        tokenizer(part, add_special_tokens=False)["input_ids"]
        for part in (before, after[len(end) :])
    ]
    return parts[0], parts[1]


class SelfChat:
    """An iterator over `Chat`s. Any end token of the target ends a sampled turn; the tokenizer's
    eos is written after a user's turn.

    config: ``chats`` of conf/distill_draft.yaml. A user turn is the next of `prompts` (token ids)
    while there are any, then the target's completion of one of `openings` (token ids, drawn
    uniformly)."""

    def __init__(
        self,
        model: LlamaForCausalLM,
        tokenizer: PreTrainedTokenizerBase,
        config: Any,
        seed: int,
        prompts: Iterable[list[int]] = (),
        openings: Sequence[Sequence[int]] = ((),),
    ) -> None:
        self.model, self.config = model, config
        self.prompts, self.openings = iter(prompts), openings
        self.rng = random.Random(seed)
        self.user_header, self.assistant_header = chat_headers(tokenizer)
        self.eos, self.ends = int(tokenizer.eos_token_id), end_ids(model, tokenizer)
        self.generator = torch.Generator(model.device).manual_seed(seed)
        longest = len(self.user_header) + config.prompt_tokens + 1 + len(self.assistant_header)
        self.cache = SlotCache(config.slots, longest + config.response_tokens + 1)
        self.slots = [self._fresh() for _ in range(config.slots)]

    def _fresh(self) -> Slot:
        given = next(self.prompts, None)
        if given is None:
            opening = self.rng.choice(self.openings)[: self.config.prompt_tokens - 1]
            return Slot(forced=[*self.user_header, *opening])
        prompt = [*self.user_header, *given[: self.config.prompt_tokens]]
        prompt += [self.eos, *self.assistant_header]
        return Slot(forced=prompt, start=len(prompt))

    def __iter__(self) -> Iterator[Chat]:
        self.model.set_attn_implementation(ATTENTION)
        feed = [slot.forced.pop(0) for slot in self.slots]
        while True:
            states, drawn = self._step(feed)
            for row, slot in enumerate(self.slots):
                slot.tokens.append(feed[row])
                slot.states.append(states[row])
                finished = self._advance(row, slot, drawn[row])
                if finished is not None:
                    yield finished
                feed[row] = self.slots[row].forced.pop(0)

    @torch.inference_mode()
    def _step(self, feed: list[int]) -> tuple[Tensor, list[int]]:
        """Forward one token per slot and sample the next. Return states [B, L + 1, H] and drawn
        ids [B]."""
        device = self.model.device
        lengths = torch.tensor([len(slot.tokens) for slot in self.slots], device=device)
        self.cache.at, self.cache.width = lengths, int(lengths.max()) + 1
        seen = torch.arange(self.cache.width, device=device)[None] <= lengths[:, None]
        mask = torch.zeros(seen.shape, dtype=self.model.dtype, device=device).masked_fill_(
            ~seen, float("-inf")
        )
        out = self.model.model(
            input_ids=torch.tensor(feed, device=device)[:, None],
            position_ids=lengths[:, None],
            attention_mask=mask[:, None, None],
            past_key_values=self.cache,
            use_cache=True,
            output_hidden_states=bool(self.config.feature_layers),
        )
        hidden = out.last_hidden_state[:, 0]
        logits = self.model.lm_head(hidden).float().div_(self._temperatures()[:, None])
        cdf = logits.softmax(-1).cumsum(-1)
        level = torch.rand(len(feed), 1, generator=self.generator, device=device) * cdf[:, -1:]
        drawn = torch.searchsorted(cdf, level, right=True)[:, 0].clamp_(max=cdf.shape[-1] - 1)
        kept = [out.hidden_states[layer][:, 0] for layer in self.config.feature_layers]
        return torch.stack([*kept, hidden], 1).to(torch.bfloat16).cpu(), drawn.tolist()

    def _temperatures(self) -> Tensor:
        """Return the temperature of each slot's current turn, [B]; user turns have start 0."""
        cycle, prompt = self.config.temperatures, self.config.prompt_temperature
        values = [cycle[slot.answers % len(cycle)] if slot.start else prompt for slot in self.slots]
        return torch.tensor(values, device=self.model.device)

    def _advance(self, row: int, slot: Slot, drawn: int) -> Chat | None:
        """Queue the slot's next token. If this step finished a chat, return it; the slot is then
        rolled back to the prompt for another answer, or starts a new conversation."""
        if slot.forced:
            return None
        slot.forced, ended = [drawn], drawn in self.ends
        if slot.start == 0:
            sampled = len(slot.tokens) - len(self.user_header)
            if ended or sampled >= self.config.prompt_tokens:
                slot.start = len(slot.tokens) + 1 + len(self.assistant_header)
                slot.forced = [self.eos, *self.assistant_header]
            return None
        if not ended and len(slot.tokens) + 1 - slot.start < self.config.response_tokens:
            return None
        tokens = torch.tensor([*slot.tokens, drawn], dtype=torch.int32)
        chat = Chat(tokens, slot.start, torch.stack(slot.states))
        slot.answers += 1
        if slot.answers < self.config.responses:
            slot.forced = [slot.tokens[slot.start - 1]]
            del slot.tokens[slot.start - 1 :], slot.states[slot.start - 1 :]
        else:
            self.slots[row] = self._fresh()
        return chat


# On disk ------------------------------------------------------------------------------------------


class ChatWriter:
    """Writes the endless chats of this process to `folder`. It keeps one stream for the whole run:
    a new one would drop unfinished chats, long ones above all, and begin again with the first of
    ``chats.prompts``."""

    def __init__(
        self, settings: Any, seed: int, target: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase
    ) -> None:
        """settings: ``chats`` of conf/distill_draft.yaml."""
        folder = Path(settings.folder)
        refuse_foreign(folder, "chats-*", key="chats.folder")
        folder.mkdir(parents=True, exist_ok=True)
        for left in folder.glob(f"chats-{seed:03d}-*.partial"):  # left by a killed process
            pid = left.stem.rpartition("-")[2]
            if pid.isdecimal() and not alive(int(pid)):
                left.unlink(missing_ok=True)
        self.settings, self.folder, self.seed = settings, folder, seed
        again = seed * 1_000_003 + len(shards(folder))  # never the same chats after a restart
        prompts = read_texts(settings, "prompts", tokenizer)
        openings = read_texts(settings, "openings", tokenizer)
        self.stream = iter(SelfChat(target, tokenizer, settings, again, prompts, openings or [[]]))

    def write(self, tokens: int) -> None:
        """Write shards until the folder holds `tokens` response tokens (of all processes that write
        there). Raises UserError if its chats store other hidden states."""
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
                shard, count = list[Chat](), 0
                while count < self.settings.shard_tokens:
                    shard.append(next(self.stream))
                    count += len(shard[-1].hidden)
                    bar.update(len(shard[-1].hidden))
                name = f"chats-{self.seed:03d}-{number:05d}-{os.getpid()}.safetensors"
                save_chats(self.folder / name, shard, layers)
                number += 1
                have = written_tokens(self.folder)


def written_tokens(folder: Path) -> int:
    """Count the response tokens in all shards. Hidden states are not read."""
    total = 0
    for path in shards(folder):
        with safe_open(path, "pt") as file:
            total += int((file.get_tensor("lengths") - file.get_tensor("starts")).sum())
    return total


def first_round(settings: Any) -> int:
    """Return the number of response tokens needed before training can begin: the held-out chats and
    one shard more."""
    least = 2 * settings.shard_tokens + settings.held_out * settings.response_tokens
    return int(min(settings.tokens, least))


def read_texts(settings: Any, key: str, tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Return the token ids of the ``prompt`` field of each row of the JSONL file ``chats.<key>``;
    [] if it is null."""
    file, name = getattr(settings, key), f"chats.{key}"
    if file is None:
        return []
    texts = [text_of(row, "prompt", name, where) for where, _, row in read_rows(file, name)]
    return [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
