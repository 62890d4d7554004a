"""Test that replay equals decoding on a pair: decode the prompts of a greedy harvest and compare
the counts one by one.

Where counts differ, the first different round is shown with the decision behind it: forwards of
other shapes round differently, so two tokens, or a rule's value and its threshold, that lie within
rounding of each other may change order."""

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import Any

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from tqdm import tqdm

from data_gen.storage.dataset import Harvest, HarvestedPrompt
from decoding.engines.request import prefill
from decoding.interfaces import LM
from decoding.models.loading import ModelPair, load_pair, pair_identity
from decoding.models.machine import dtypes, in_words
from decoding.processors import scored_after
from decoding.sampling import Sampler, Warp
from decoding.settings import Pair
from decoding.stopping.base import TunableRule
from decoding.stopping.policy import Policy
from decoding.stopping.rollout_table import RolloutTable
from decoding.trace import RoundTrace, Trace
from evaluation.replay.read import (
    engine,
    open_harvests,
    read_table,
    refuse_other_pair,
    tunable_rules,
)
from evaluation.replay.simulate import COUNTS, Replayer, Step, counts_of
from evaluation.replay.tune import out_file
from evaluation.table import sums
from runtime.errors import UserError
from runtime.files import write_json
from runtime.job import command_line

# Largest gaps that rounding may explain: of two logits; of a rule's value; of one predicted from
# harvested features (bfloat16).
LOGITS, VALUES, PREDICTIONS = 1e-3, 1e-4, 5e-3
Verdicts = dict[str, list[dict[str, Any]]]


def check(cfg: DictConfig) -> None:
    """Write the comparison, and exit with 1 if rounding does not explain a difference."""
    out = out_file(cfg, "replay-check")
    harvest, _ = open_harvests(cfg)
    verdicts = check_replay(cfg, harvest, tunable_rules(cfg, harvest))
    write_json(out, {"command": command_line(), "rules": verdicts})
    print(f"\n{in_lines(verdicts)}\n\nsaved {out}")
    differ = [row for rows in verdicts.values() for row in rows if not row["equal"]]
    sys.exit(not all(row["reason"]["near_tie"] for row in differ))


def check_replay(cfg: DictConfig, harvest: Harvest, stops: Mapping[str, TunableRule]) -> Verdicts:
    """Return by rule and value of its setting one verdict per prompt: `equal`, the counts
    `replayed` and `decoded`, and the `reason` if they differ."""
    if not harvest.greedy:
        raise UserError(
            f"data: expected a greedy harvest, got {cfg.data}, of which a decode is another draw."
            " Give a greedy one"
        )
    pair = load_pair(Pair.of(cfg.pair))
    refuse_other_pair(pair_identity(pair), harvest.context["pair"], f"pair: {cfg.pair.name}")
    harvested, here = harvest.manifest.dtypes, dtypes(pair)
    if harvested not in (None, here):  # None: not recorded
        raise UserError(
            f"pair.dtype: expected {in_words(harvested)} as harvested, got {in_words(here)}. Give"
            " the former, or harvest anew with pair.dtype=float32, in which few decisions rest on"
            " rounding"
        )
    prompts = list(islice(harvest.prompts("all"), cfg.check_prompts))
    gamma, most = cfg.gamma_max or harvest.gamma, cfg.max_new_tokens or harvest.max_new_tokens
    warps = instantiate(cfg.warp), instantiate(cfg.draft_warp)
    table = read_table(harvest, "all", stops.values(), Pair.of(cfg.pair)).shortened(most)
    rules = [(name, value) for name, stop in stops.items() for value in values(cfg, stop, gamma)]
    verdicts: Verdicts = {}
    with tqdm(total=len(rules) * len(prompts), desc="decode", unit="prompt") as bar:
        for name, value in rules:
            rule, rows = stops[name], list[dict[str, Any]]()
            policy = rule.policy(table)
            counts, steps = Replayer(table, gamma).walk(policy, value)
            rounding = PREDICTIONS if rule.columns else VALUES
            replay = Replay(table, policy, steps, rounding, warps)
            settings = OmegaConf.create(OmegaConf.to_container(cfg.rules[name], resolve=True))
            OmegaConf.update(settings, rule.setting, value)
            decoder = engine(pair, instantiate(settings), gamma, *warps)
            for index, prompt in enumerate(prompts):
                sampler = Sampler.seeded(0)
                trace = decoder.decode(prompt.prompt_tokens, most, sampler)
                replayed, decoded = counts_of(counts, index), counted(trace)
                row = {"prompt": prompt.prompt_id, "equal": replayed == decoded}
                row |= {"replayed": replayed, "decoded": decoded}
                if replayed != decoded:
                    row["reason"] = reason(pair, replay, index, prompt, trace)
                rows.append(row)
                bar.update()
            verdicts[f"{name} {value:.12g}"] = rows
    return verdicts


def values(cfg: DictConfig, stop: TunableRule, gamma: int) -> list[float]:
    """Return `cfg.check_values` values of the rule's grid, evenly spaced, without its ends if
    possible."""
    grid, count = list(stop.grid(cfg.points, gamma)), cfg.check_values + 1
    numbers = dict.fromkeys(part * (len(grid) - 1) // count for part in range(1, count))
    return [grid[number] for number in numbers]


def counted(trace: Trace) -> dict[str, float]:
    """Return the numbers of `counts_of` for a real decode."""
    columns = sums(trace)
    return {name: float(columns[name]) for name in COUNTS}


# Where they differ --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Replay:
    """The replay of one rule on all prompts. rounding: largest gap between its value and its
    threshold that counts as a near tie; warps: of target and draft."""

    table: RolloutTable
    policy: Policy
    steps: Sequence[Step]
    rounding: float
    warps: tuple[Warp, Warp]


def reason(
    pair: ModelPair, replay: Replay, index: int, prompt: HarvestedPrompt, trace: Trace
) -> dict[str, Any]:
    """Return the first round of prompt `index` that differs, and how close the decision was. A
    round with the same counts differs if its text leaves the harvested one. Different counts with
    equal rounds are not explained by rounding."""
    starts = accumulate((len(round_.tokens) for round_ in trace.rounds), initial=0)
    decoded = [
        (start, len(round_.draft_tokens), round_.accepted)
        for start, round_ in zip(starts, trace.rounds, strict=False)
    ]
    replayed = [step.of(index) for step in replay.steps if step.live[index]]
    pairs = list(zip(replayed, decoded, strict=False))
    texts = enumerate(zip(prompt.response_tokens, trace.tokens, strict=False))
    parted = next((place for place, (one, other) in texts if one != other), len(trace.tokens))
    ends = accumulate(len(round_.tokens) for round_ in trace.rounds)
    differs = (
        n
        for n, ((one, other), end) in enumerate(zip(pairs, ends, strict=False))
        if one != other or parted < end
    )
    number = next(differs, len(pairs))
    between, gap, rounding = "rounds that agree", math.nan, 0.0
    if number < len(pairs):
        start, round_ = replayed[number][0], trace.rounds[number]
        parts = parted < start + len(round_.tokens)
        before = prompt.prompt_tokens + trace.tokens[: parted if parts else start]
        text, start = torch.tensor(before, dtype=torch.long), len(prompt.prompt_tokens)
        between, gap, rounding = (
            target_decision(pair, replay, text, start)
            if parts
            else decision(pair, replay, index, number, round_, text, start)
        )
    return {"round": number, "between": between, "gap": gap, "near_tie": gap < rounding}


def decision(
    pair: ModelPair,
    replay: Replay,
    index: int,
    number: int,
    round_: RoundTrace,
    text: torch.Tensor,
    prompt: int,
) -> tuple[str, float, float]:
    """Return the decision of round `number` after `text`, which begins with `prompt` tokens of
    prompt, in words (between two tokens of the draft, between the rule's value and its threshold,
    or between two tokens of the target), its gap, and the largest gap of a near tie."""
    step = replay.steps[number]
    start, drafted, accepted = step.of(index)
    recorded = replay.table.tokens[index, start].tolist()
    for depth, (token, other) in enumerate(zip(round_.draft_tokens, recorded, strict=False)):
        if token != other:
            before = torch.cat([text, torch.tensor(round_.draft_tokens[:depth], dtype=torch.long)])
            logits = draft_logits(pair, text, round_.draft_tokens[:depth])
            logits = scored_after(before, prompt, replay.warps[1], logits, pair.eos_ids)
            return "draft's tokens", abs(float(logits[token] - logits[other])), LOGITS
    if len(round_.draft_tokens) != drafted:
        depth, reach = min(len(round_.draft_tokens), drafted), replay.policy.reach
        value = reach[min(index, len(reach) - 1), min(start, reach.shape[1] - 1), depth]
        gap = float(value) - replay.policy.sign * step.threshold[index]
        return "value and threshold", abs(float(gap)), replay.rounding
    position = min(round_.accepted, accepted)
    before = torch.cat([text, torch.tensor(round_.tokens[:position], dtype=torch.long)])
    return target_decision(pair, replay, before, prompt)


def target_decision(
    pair: ModelPair, replay: Replay, text: torch.Tensor, prompt: int
) -> tuple[str, float, float]:
    """Return `decision` between the two likeliest tokens of the target after `text`."""
    logits = last_logits(pair.target, text)
    logits = scored_after(text, prompt, replay.warps[0], logits, pair.eos_ids)
    first, second = logits.topk(2).values
    return "target's tokens", float(first - second), LOGITS


@torch.inference_mode()
def draft_logits(pair: ModelPair, committed: torch.Tensor, drafted: Sequence[int]) -> torch.Tensor:
    """Return the draft's logits [V] after `committed` [n] and `drafted`; the target, whose states
    it may read, is run on all committed tokens but the last."""
    pair.target.reset()
    prefill(pair.target, committed)
    logits = last_logits(pair.draft, committed)
    for token in drafted:
        logits = pair.draft.forward(torch.tensor([token])).logits[-1]
    return logits


@torch.inference_mode()
def last_logits(lm: LM, text: torch.Tensor) -> torch.Tensor:
    """Return the logits [V] after `text` [n]."""
    lm.reset()
    return lm.forward(text, logits="last").logits[-1]


# In words -----------------------------------------------------------------------------------------


def in_lines(verdicts: Verdicts) -> str:
    """Return two lines on whether replay equals decoding, then a line for every rule, and for every
    prompt that differs."""
    lines, differences, ties, decodes = list[str](), list[str](), 0, 0
    for name, rows in verdicts.items():
        decodes += len(rows)
        lines.append(f"{name}: {sum(row['equal'] for row in rows)} of {len(rows)} prompts equal")
        for row in (row for row in rows if not row["equal"]):
            why = row["reason"]
            ties += why["near_tie"]
            excuse = "near tie" if why["near_tie"] else "NO NEAR TIE"
            where = f"round {why['round']}, gap {why['gap']:.2g} between {why['between']}"
            differences.append(f"  {name}, {row['prompt']}: {where}: {excuse}")
    differ = len(differences)
    answer = [
        f"Replay counts what {decodes - differ} of {decodes} decodes count.",
        f"Of the {differ} that differ, {ties} rest on a near tie: rounding decides.",
    ]
    return "\n".join([*answer, "", *lines, *differences])
