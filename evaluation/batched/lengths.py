"""The best fixed draft length for every number of requests decoded together (tune.py batch=...)."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import pandas as pd
import torch
from hydra.utils import instantiate
from omegaconf import DictConfig

from data_gen.storage.dataset import Harvest
from decoding.batch_cost import BatchCost, BatchTable, share, write_batch_cost
from decoding.models.cached_lm import CachedLM
from decoding.models.forward import Rows, additive_mask, causal
from decoding.models.kv_cache import BufferCache
from decoding.models.layers.clock import Clock
from decoding.models.layers.recurrent import refuse_recurrent
from decoding.models.loading import ModelPair, load_pair, pair_identity
from decoding.models.machine import setup_facts
from decoding.settings import Pair
from evaluation.replay.candidates import candidates_of, replayer
from evaluation.replay.tuning import (
    Candidate,
    best,
    candidate_rows,
    interval,
    span,
    speedup,
    spread,
)
from evaluation.table import markdown, price
from runtime.errors import UserError
from runtime.files import refuse_foreign_file
from runtime.job import command_line


def best_length(
    chosen_on: Sequence[Candidate],
    judged_on: Sequence[Candidate],
    cost: BatchCost,
    requests: int,
    gamma: int,
) -> dict[str, Any]:
    """Return the fixed length to draft for so many requests, and what it brings. Every request pays
    its share of a step in which all of them draft as much.

    chosen_on, judged_on: fixed lengths, counted on different prompts. length: 0 where none pays on
    the prompts it was chosen on (the whole 95 % interval of its speed-up there must be above 1);
    best: the fastest length there all the same; the rest is on prompts it was not chosen on, with
    95 % intervals over them: tokens_per_second of all requests together, speedup over no draft,
    best_speedup of `best`."""
    table = share(cost, requests, gamma)
    pick = best(chosen_on, table)
    low = spread(pick, table)[0]
    pays = (speedup(pick, table) if low != low else low) > 1  # NaN of a single prompt
    judged = next(one for one in judged_on if one.threshold == pick.threshold)
    tokens, spent = judged.counts["emitted"], table.price(judged.counts)
    plain, speed, ends = 1 / table.autoregressive, speedup(judged, table), spread(judged, table)
    return {
        "requests": requests,
        "length": int(pick.threshold) if pays else 0,
        "best": int(pick.threshold),
        "tokens_per_second": float(tokens.sum() / spent.sum()) if pays else plain,
        "tokens_interval": interval(tokens, spent) if pays else (plain, plain),
        "plain_tokens_per_second": plain,
        "speedup": speed if pays else 1.0,
        "interval": ends if pays else (1.0, 1.0),
        "best_speedup": speed,
        "best_interval": ends,
    }


def measurements(
    fixed: Mapping[str, Sequence[Candidate]],
    cost: BatchCost,
    sizes: Sequence[int],
    gamma: int,
    scheduled: Mapping[str, pd.DataFrame],
) -> pd.DataFrame:
    """Return the rows of every length on the prompts of each split, for every number of requests,
    and those of the scheduler by what they are judged on."""
    parts = [rows.assign(split=where) for where, rows in scheduled.items()]
    for split, each in fixed.items():
        rows = candidate_rows(each, split)
        parts += [price(rows, share(cost, size, gamma)).assign(requests=size) for size in sizes]
    return pd.concat(parts, ignore_index=True)


def page(choices: Sequence[Mapping[str, Any]]) -> str:
    """Return a table, a row per number of requests; intervals are of 95 % over prompts."""
    rows = [
        [
            str(one["requests"]),
            str(one["length"]) if one["length"] else "do not speculate",
            f"{one['tokens_per_second']:.1f} ({span(one['tokens_interval'])})",
            f"{one['plain_tokens_per_second']:.1f}",
            f"{one['speedup']:.3f} ({span(one['interval'])})",
            f"{one['best']}: {one['best_speedup']:.3f} ({span(one['best_interval'])})",
        ]
        for one in choices
    ]
    header = ["requests", "draft", "tokens/s", "without a draft", "speed-up", "of the best length"]
    return markdown(header, rows)


def answer(choices: Sequence[Mapping[str, Any]]) -> str:
    """Return what to draft, in a sentence."""
    parts = [
        f"{one['length']} tokens for {one['requests']} request(s)"
        f" ({one['speedup']:.2f} times plain decoding, {span(one['interval'])})"
        for one in choices
        if one["length"]
    ]
    none = [str(one["requests"]) for one in choices if not one["length"]]
    rest = f" Use plain decoding for {', '.join(none)} request(s)." if none else ""
    return ((f"Draft {', '.join(parts)}." if parts else "") + rest).strip()


def priced(cfg: DictConfig, gamma: int) -> BatchCost:
    """The costs of the config, measured here where it says so. Raises UserError for fewer rows than
    drafts of `gamma` tokens have."""
    if "_target_" in cfg.batch_cost:
        cost: BatchCost = instantiate(cfg.batch_cost)
        return cost
    asked, file = cfg.batch_cost, Path(cfg.batch_cost.file)
    if (most := max(asked.rows)) <= gamma:
        raise UserError(
            f"batch_cost.rows: expected rows up to {gamma + 1}, one more than the tokens of the"
            f" longest draft, got {most} at most. Add them, or lower gamma_max"
        )
    refuse_foreign_file(file, "tune", "batch_cost.file")
    pair = load_pair(Pair.of(cfg.pair))
    found = measured(pair, cfg.batch, asked.rows, asked.context, asked.repeats)
    facts = {
        "seconds": asdict(found),
        "context": asked.context,
        "pair": pair_identity(pair),
        "measured_on": setup_facts(pair),
        "command": command_line(),
    }
    write_batch_cost(file, facts)
    return found


def fixed(cfg: DictConfig, gamma: int, harvest: Harvest, split: str) -> list[Candidate]:
    found = replayer(cfg, gamma, harvest, split, [])
    return candidates_of(cfg, {"fixed": instantiate(cfg.rules.fixed)}, found)


# Costs of forwards of many requests, measured -----------------------------------------------------


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
