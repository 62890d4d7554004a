"""Endless chats a target model holds with itself: training text for a distilled draft.

Every slot of one batch starts from the chat template's user header, samples a user turn, is fed the
assistant header, and samples `responses` answers to it (the cache is wound back to the end of the
prompt in between). A finished slot starts afresh at once, so each forward advances all slots by one
token and no row is ever padding. Along with the tokens come the target's last hidden states (after
the final norm), from which the head gives p: training needs no further target forward."""

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedTokenizerBase
from transformers.cache_utils import Cache

from data_gen.prompts import Prompt
from data_gen.prompts.render import rendered
from decoding.models.ends import end_ids
from decoding.models.kv_cache import ATTENTION
from decoding.models.options import first_line
from pairs.chats import Chat
from runtime.errors import UserError


class SlotCache(Cache):
    """Preallocated keys and values with one write position per batch row (`at`: [B] int64)."""

    def __init__(self, slots: int, capacity: int) -> None:
        super().__init__(layers=[])
        self.slots, self.capacity = slots, capacity
        self.at = torch.zeros(slots, dtype=torch.long)
        self.width = 1
        self.buffers: list[tuple[Tensor, Tensor]] = []

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        layer_idx: int,
        *args: object,
        **kwargs: object,
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

    def get_mask_sizes(self, *args: object, **kwargs: object) -> tuple[int, int]:
        return self.width, 0


@dataclass
class Slot:
    """State of one batch row: what has been written, what must be fed next, and the turn being
    sampled."""

    tokens: list[int] = field(default_factory=list)
    forced: list[int] = field(default_factory=list)
    states: list[Tensor] = field(default_factory=list)
    start: int = 0
    answers: int = 0


@dataclass(frozen=True)
class SelfChatConfig:
    """slots: batch rows; prompt_tokens, response_tokens: most sampled per turn; responses: answers
    per prompt; prompt_temperature: sampling temperature of prompts; temperatures: of answer 0, 1,
    ... (cycled); feature_layers: hidden states that are kept besides the last one (0: the
    embeddings, i: after layer i)."""

    slots: int = 128
    prompt_tokens: int = 64
    response_tokens: int = 192
    responses: int = 2
    prompt_temperature: float = 1.0
    temperatures: tuple[float, ...] = (1.0, 0.6)
    feature_layers: tuple[int, ...] = ()


def chat_headers(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """Token ids before the user's text, and those between its end-of-turn token and the assistant's
    text. Raises UserError where the chat template gives no such ids."""
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
    before, found, after = text.partition(mark)
    end = tokenizer.eos_token
    if not (found and end and after.startswith(end)) or mark in after:
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
    """Iterator over `Chat`s; any end of the target ends a turn that is sampled, the tokenizer's eos
    is written after a user's.

    A user turn is the next of `prompts` (token ids) for as long as they last, then the target's own
    completion of one of `openings` (token ids, drawn uniformly)."""

    def __init__(
        self,
        model: LlamaForCausalLM,
        tokenizer: PreTrainedTokenizerBase,
        config: SelfChatConfig,
        seed: int,
        prompts: Iterable[list[int]] = (),
        openings: Sequence[Sequence[int]] = ((),),
    ) -> None:
        self.model, self.config, self.prompts, self.openings = (
            model,
            config,
            iter(prompts),
            openings,
        )
        self.rng = random.Random(seed)
        self.user_header, self.assistant_header = chat_headers(tokenizer)
        self.eos, self.ends = int(tokenizer.eos_token_id), end_ids(model, tokenizer)
        self.generator = torch.Generator(model.device).manual_seed(seed)
        longest = (
            len(self.user_header)
            + config.prompt_tokens
            + 1
            + len(self.assistant_header)
            + config.response_tokens
        )
        self.cache = SlotCache(config.slots, longest + 1)
        self.slots = [self._fresh() for _ in range(config.slots)]

    def _fresh(self) -> Slot:
        given = next(self.prompts, None)
        if given is None:
            opening = self.rng.choice(self.openings)[: self.config.prompt_tokens - 1]
            return Slot(forced=[*self.user_header, *opening])
        prompt = [
            *self.user_header,
            *given[: self.config.prompt_tokens],
            self.eos,
            *self.assistant_header,
        ]
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
        """Forward one token per slot and sample the next. Returns states [B, L + 1, H] and drawn
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
        """[B]: of the turn each slot is in; user turns have start 0."""
        cycle, prompt = self.config.temperatures, self.config.prompt_temperature
        values = [cycle[slot.answers % len(cycle)] if slot.start else prompt for slot in self.slots]
        return torch.tensor(values, device=self.model.device)

    def _advance(self, row: int, slot: Slot, drawn: int) -> Chat | None:
        """Queue the slot's next token; return a finished chat, if this step finished one."""
        if slot.forced:
            return None
        if slot.start == 0:
            slot.forced = self._user_turn(slot, drawn)
            return None
        slot.forced = [drawn]
        length = len(slot.tokens) + 1 - slot.start
        if drawn not in self.ends and length < self.config.response_tokens:
            return None
        return self._finish(row, slot, drawn)

    def _user_turn(self, slot: Slot, drawn: int) -> list[int]:
        sampled = len(slot.tokens) - len(self.user_header)
        if drawn not in self.ends and sampled < self.config.prompt_tokens:
            return [drawn]
        slot.start = len(slot.tokens) + 1 + len(self.assistant_header)
        return [self.eos, *self.assistant_header]

    def _finish(self, row: int, slot: Slot, drawn: int) -> Chat:
        """Emit the answer; wind back to the prompt for another one, or start a new conversation."""
        tokens = torch.tensor([*slot.tokens, drawn], dtype=torch.int32)
        chat = Chat(tokens, slot.start, torch.stack(slot.states))
        slot.answers += 1
        if slot.answers < self.config.responses:
            last = slot.tokens[slot.start - 1]
            kept = slice(slot.start - 1)
            slot.tokens, slot.states, slot.forced = slot.tokens[kept], slot.states[kept], [last]
        else:
            self.slots[row] = self._fresh()
        return chat
