"""The best fixed draft length for every number of requests decoded together (tune.py batch=...)."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import pandas as pd
import torch
from hydra.utils import instantiate
from omegaconf import DictConfig

from data_gen.storage.dataset import Harvest
from decoding.batch_cost import (
    BatchCost,
    BatchTable,
    MeasuredBatches,
    share,
    tabled,
    write_batch_cost,
)
from decoding.models.cached_lm import CachedLM, Clock
from decoding.models.forward import Rows, additive_mask, causal
from decoding.models.kv_cache import BufferCache
from decoding.models.loading import ModelPair, load_pair, pair_identity
from decoding.models.machine import setup_facts
from decoding.models.recurrent import refuse_recurrent
from decoding.settings import Pair
from evaluation.batched import scheduler
from evaluation.page import lower, times
from evaluation.replay import tuning
from evaluation.replay.read import open_harvests, refuse_other_pair, replayer
from evaluation.replay.tuning import Candidate, over_plain, ratio
from evaluation.table import markdown, price, with_interval
from runtime.errors import UserError
from runtime.files import refuse_foreign_file
from runtime.intervals import METHOD, Estimate
from runtime.job import command_line


def tuned(cfg: DictConfig, name: str) -> tuple[BatchTable, dict[str, Any], pd.DataFrame, str]:
    """Find the best fixed length for each number of requests decoded together. name: of the costs.

    Returns the costs of their steps, the content of the schedule's file (`sizes`: `best_length` of
    every number of requests), the measurements of every length and way, and the text to print."""
    harvest, elsewhere = open_harvests(cfg)
    gamma = cfg.gamma_max or harvest.gamma
    cost, rule = priced(cfg, harvest, gamma), {"fixed": instantiate(cfg.rules.fixed)}
    costs = tabled(cost, cfg.batch, gamma)
    lengths = {
        split: tuning.candidates_of(cfg, rule, replayer(cfg, gamma, harvest, split))
        for split in (cfg.choose, cfg.judge)
    }
    chosen_on, judged_on = lengths.values()
    sizes = [best_length(chosen_on, judged_on, cost, size, gamma) for size in cfg.batch]
    scheduled = (
        scheduler.simulated(cfg, [harvest, *elsewhere], cost, gamma) if cfg.scheduler else {}
    )
    ways = {where: scheduler.compared(rows) for where, rows in scheduled.items()}
    details = {
        **harvest.context,
        "data": {"folder": str(cfg.data), **harvest.origin},
        "chosen_on": cfg.choose,
        "judged_on": cfg.judge,
        "cost": {
            "name": name,
            "made": cost.made,
            "measured_on": cost.measured_on if isinstance(cost, MeasuredBatches) else None,
        },
        "sizes": sizes,
        "scheduler": {
            where: [
                {
                    key: each._asdict() if isinstance(each, Estimate) else each
                    for key, each in row.items()
                }
                for row in rows
            ]
            for where, rows in ways.items()
        },
    }
    about = f"Costs {name} ({cost.made}), speeds modelled, {cfg.judge} prompts ({METHOD})."
    pages = [
        f"Scheduler, judged on {where}\n\n{scheduler.page(rows)}" for where, rows in ways.items()
    ]
    text = "\n\n".join([f"{answer(sizes)}\n{about}", page(sizes), *pages])
    return costs, details, measurements(lengths, cost, cfg.batch, gamma, scheduled), text


def best_length(
    chosen_on: Sequence[Candidate],
    judged_on: Sequence[Candidate],
    cost: BatchCost,
    requests: int,
    gamma: int,
) -> dict[str, Any]:
    """Return the fixed length to draft for this number of requests, and its speed. Every request
    pays its share of a step in which all draft the same length.

    chosen_on, judged_on: fixed lengths, counted on different prompts. length: 0 if none pays on the
    prompts of `chosen_on` (the whole 95 % interval of its speed-up there must be above 1); best:
    the fastest length there in any case. The rest is on the prompts of `judged_on`, with 95 %
    intervals over them: tokens_per_second of all requests together, speedup over no draft,
    best_speedup of `best`."""
    table = share(cost, requests, gamma)
    ((pick, judged),) = tuning.picks(chosen_on, judged_on, table)
    pays = lower(over_plain(pick, table)) > 1
    speed, plain = over_plain(judged, table), 1 / table.autoregressive
    rate = ratio(judged.counts["emitted"], table.price(judged.counts))
    if not pays:
        rate = Estimate(plain, plain, plain)
    gain = speed if pays else Estimate(1.0, 1.0, 1.0)
    return {
        "requests": requests,
        "length": int(pick.threshold) if pays else 0,
        "best": int(pick.threshold),
        "tokens_per_second": rate.value,
        "tokens_interval": rate[1:],
        "plain_tokens_per_second": plain,
        "speedup": gain.value,
        "interval": gain[1:],
        "best_speedup": speed.value,
        "best_interval": speed[1:],
    }


def measurements(
    fixed: Mapping[str, Sequence[Candidate]],
    cost: BatchCost,
    sizes: Sequence[int],
    gamma: int,
    scheduled: Mapping[str, pd.DataFrame],
) -> pd.DataFrame:
    """Return the rows of every length on the prompts of each split, for every number of requests,
    and those of the scheduler, by the data they are judged on."""
    parts = [rows.assign(split=where) for where, rows in scheduled.items()]
    for split, each in fixed.items():
        rows = tuning.candidate_rows(each, split)
        parts += [price(rows, share(cost, size, gamma)).assign(requests=size) for size in sizes]
    return pd.concat(parts, ignore_index=True)


def page(sizes: Sequence[Mapping[str, Any]]) -> str:
    """Return a table, a row per number of requests; intervals are of 95 % over prompts."""

    def shown(size: Mapping[str, Any], value: str, interval: str, form: str) -> str:
        return with_interval(Estimate(size[value], *size[interval]), form)

    rows = [
        [
            str(size["requests"]),
            str(size["length"] or "do not speculate"),
            shown(size, "tokens_per_second", "tokens_interval", ".1f"),
            f"{size['plain_tokens_per_second']:.1f}",
            shown(size, "speedup", "interval", ".3f"),
            f"{size['best']}: {shown(size, 'best_speedup', 'best_interval', '.3f')}",
        ]
        for size in sizes
    ]
    header = ["requests", "draft", "tokens/s", "without a draft", "speed-up", "of the best length"]
    return markdown(header, rows)


def answer(sizes: Sequence[Mapping[str, Any]]) -> str:
    """Return what to draft, in a line."""
    parts = [
        f"{size['length']} tokens for {size['requests']} request(s)"
        f" ({times(Estimate(size['speedup'], *size['interval']))} plain decoding)"
        for size in sizes
        if size["length"]
    ]
    none = [str(size["requests"]) for size in sizes if not size["length"]]
    lines = [f"Draft {', '.join(parts)}."] if parts else []
    lines += [f"Use plain decoding for {', '.join(none)} request(s)."] if none else []
    return " ".join(lines)


# Costs of forwards of many requests, measured -----------------------------------------------------


def priced(cfg: DictConfig, harvest: Harvest, gamma: int) -> BatchCost:
    """Return the costs of the config, measured here if it says so. Raises UserError for those of
    another pair than the harvest's, and for fewer rows than drafts of `gamma` tokens have."""
    if "_target_" in cfg.batch_cost:
        if gamma > max(cfg.batch_cost.get("gammas") or [gamma]):  # before it is measured
            raise UserError(
                f"batch_cost.gammas: expected lengths up to {gamma}, the tokens of a draft, got"
                f" {list(cfg.batch_cost.gammas)}. Measure more, or lower gamma_max"
            )
        cost: BatchCost = instantiate(cfg.batch_cost)
        if isinstance(cost, MeasuredBatches) and cost.pair is not None:
            where = f"batch_cost.file: {cfg.batch_cost.file}"
            refuse_other_pair(cost.pair, harvest.context["pair"], where)
        return cost
    asked, file = cfg.batch_cost, Path(cfg.batch_cost.file)
    if (most := max(asked.rows)) <= gamma:
        raise UserError(
            f"batch_cost.rows: expected rows up to {gamma + 1}, one more than the tokens of the"
            f" longest draft, got {most} at most. Add them, or lower gamma_max"
        )
    refuse_foreign_file(file, "tune", "batch_cost.file")
    pair = load_pair(Pair.of(cfg.pair))
    identity, setup = pair_identity(pair), setup_facts(pair)
    refuse_other_pair(identity, harvest.context["pair"], f"pair: {cfg.pair.name}")
    table = measured(pair, cfg.batch, asked.rows, asked.context, asked.repeats)
    facts = {
        "seconds": asdict(table),
        "context": asked.context,
        "pair": identity,
        "measured_on": setup,
        "command": command_line(),
    }
    write_batch_cost(file, facts)
    return MeasuredBatches(**asdict(table), pair=identity, measured_on=setup)


@torch.inference_mode()
def measured(
    pair: ModelPair, requests: Sequence[int], rows: Sequence[int], context: int, repeats: int
) -> BatchTable:
    """Return medians of batched forwards of the two models, alone: drawing and verification are
    left out. All requests have `context` tokens."""
    for side, lm in (("target", pair.target), ("draft", pair.draft)):
        remedy = "Give a GPU's costs, such as batch_cost=h100_llama"
        refuse_recurrent(f"batch_cost, pair.{side}", lm, f"a batch of texts. {remedy}")
    longest = min(pair.target.max_length, pair.draft.max_length) - max(rows)
    if context > longest:
        raise UserError(
            f"batch_cost.context: expected at most {longest}, the rest of the models' context, got"
            f" {context}. Lower it"
        )
    target = timed(pair.target, requests, rows, context, repeats)
    draft = timed(pair.draft, requests, [1], context, repeats)
    drafting = [line[0] for line in draft]
    return BatchTable("measured", list(requests), list(rows), target, drafting)


def timed(
    lm: CachedLM, requests: Sequence[int], rows: Sequence[int], context: int, repeats: int
) -> list[list[float]]:
    """Return seconds by requests, then rows of each. Sizes take turns, so that drift of the machine
    affects all alike; the first turn warms up."""
    first = BufferCache()  # copies of one text, of random tokens
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(lm.vocab_size, (1, context), generator=generator).to(lm.device)
    lm.compute(chains(lm, tokens, 0), first, (), "none")
    caches = {size: BufferCache() for size in requests}
    for size, (index, layer) in product(requests, enumerate(first.layers)):
        states = (part[:, :, : layer.length] for part in (layer.keys, layer.values))
        keys, values = (part.expand(size, -1, -1, -1) for part in states)
        caches[size].update(keys, values, index)
    spent: dict[tuple[int, int], list[float]] = {each: [] for each in product(requests, rows)}
    for repeat, (size, count) in product(range(repeats + 1), spent):
        tokens = torch.zeros(size, count, dtype=torch.long, device=lm.device)
        inputs, clock = chains(lm, tokens, context), Clock(lm.device)
        with clock:
            lm.compute(inputs, caches[size], (), "all")
        caches[size].set_length(context)
        if repeat > 0:
            spent[size, count].append(clock.seconds)
    return [[median(spent[size, count]) for count in rows] for size in requests]


def chains(lm: CachedLM, tokens: torch.Tensor, start: int) -> Rows:
    """Return the rows of chains of tokens [B, n] after `start` cached ones."""
    size, count = tokens.shape
    positions = torch.arange(start, start + count, device=lm.device)[None]
    mask = None
    if start and count > 1:
        mask = additive_mask(causal(count, lm.device), start, lm.model.dtype, lm.device)
    added = None
    if lm.reads_target:  # zeros take as long as any other values
        width = lm.model.config.get_text_config().hidden_size
        added = torch.zeros(size, count, width, dtype=lm.model.dtype, device=lm.device)
    return Rows(tokens, positions, mask, added)
