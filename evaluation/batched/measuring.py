"""What forwards of many requests cost on this machine: batch_cost=measure."""

from collections.abc import Sequence
from statistics import median

import torch

from decoding.batch_cost import BatchTable
from decoding.models.cached_lm import CachedLM
from decoding.models.forward import Rows, additive_mask, causal
from decoding.models.kv_cache import BufferCache
from decoding.models.layers.clock import Clock
from decoding.models.layers.recurrent import refuse_recurrent
from decoding.models.loading import ModelPair
from runtime.errors import UserError


@torch.inference_mode()
def measured(
    pair: ModelPair, requests: Sequence[int], rows: Sequence[int], context: int, repeats: int
) -> BatchTable:
    """Medians of batched forwards of the two models, alone: drawing and verification are left out.
    All requests have `context` tokens. Sizes take turns, so that drift of the machine hits all of
    them alike; the first turn warms up."""
    for side, lm in (("target", pair.target), ("draft", pair.draft)):
        remedy = "Give a GPU's costs, such as batch_cost=h100_llama"
        refuse_recurrent(f"batch_cost, pair.{side}", lm, f"a batch of texts. {remedy}")
    room = min(pair.target.max_length, pair.draft.max_length) - max(rows)
    if context > room:
        raise UserError(
            f"batch_cost.context: expected at most {room}, the rest of the models' context, got"
            f" {context}. Lower it"
        )
    target = timed(pair.target, requests, rows, context, repeats)
    draft = timed(pair.draft, requests, [1], context, repeats)
    drafting = [line[0] for line in draft]
    return BatchTable("measured", list(requests), list(rows), target, drafting)


def timed(
    lm: CachedLM, requests: Sequence[int], rows: Sequence[int], context: int, repeats: int
) -> list[list[float]]:
    """Seconds by requests, then rows of each."""
    caches = {size: _cache(lm, size, context) for size in requests}
    cells = [(size, count) for size in requests for count in rows]
    found: dict[tuple[int, int], list[float]] = {cell: [] for cell in cells}
    for repeat in range(repeats + 1):
        for size, count in cells:
            seconds = _forward(lm, caches[size], size, count, context)
            if repeat > 0:
                found[size, count].append(seconds)
    return [[median(found[size, count]) for count in rows] for size in requests]


def _cache(lm: CachedLM, requests: int, context: int) -> BufferCache:
    """Of as many times the same text, of tokens drawn at random."""
    one, cache = BufferCache(), BufferCache()
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(lm.vocab_size, (1, context), generator=generator).to(lm.device)
    lm.compute(_rows(lm, tokens, 0), one, (), "none")
    for index, layer in enumerate(one.layers):
        states = (part[:, :, : layer.length] for part in (layer.keys, layer.values))
        keys, values = (part.expand(requests, -1, -1, -1) for part in states)
        cache.update(keys, values, index)
    return cache


def _forward(lm: CachedLM, cache: BufferCache, requests: int, count: int, context: int) -> float:
    tokens = torch.zeros(requests, count, dtype=torch.long, device=lm.device)
    rows, clock = _rows(lm, tokens, context), Clock(lm.device)
    with clock:
        lm.compute(rows, cache, (), "all")
    cache.set_length(context)
    return clock.seconds


def _rows(lm: CachedLM, tokens: torch.Tensor, start: int) -> Rows:
    """Chains of tokens [B, n] after `start` cached ones."""
    size, count = tokens.shape
    positions = torch.arange(start, start + count, device=lm.device)[None]
    mask = None
    if start and count > 1:
        mask = additive_mask(causal(count, lm.device), start, lm.model.dtype, lm.device)
    added = None
    if lm.reads_target:  # what it adds takes no time by its values
        width = lm.model.config.get_text_config().hidden_size
        added = torch.zeros(size, count, width, dtype=lm.model.dtype, device=lm.device)
    return Rows(tokens, positions, mask, added)
