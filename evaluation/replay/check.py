"""Replay = decode on your pair: decode the prompts of a greedy harvest and compare the counts, one
by one.

Where counts differ, the first round that does is shown with what decided it: forwards of other
shapes round differently, so two tokens, or a rule's value and its threshold, that lie within
rounding of each other may change places."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import Any

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from tqdm import tqdm

from data_gen.storage.dataset import Harvest, HarvestedPrompt
from decoding.cost import Counts
from decoding.engines.request import prefill
from decoding.interfaces import LM
from decoding.models.loading import ModelPair, load_pair, pair_identity
from decoding.models.machine import dtypes, in_words
from decoding.sampling import Sampler, Warp
from decoding.settings import Pair
from decoding.stopping.base import TunableRule
from decoding.stopping.policy import Policy
from decoding.stopping.rollout_table import RolloutTable
from decoding.trace import RoundTrace, Trace
from evaluation.replay.candidates import engine, refuse_other_pair
from evaluation.replay.read import read_table
from evaluation.replay.simulate import COUNTS, Replayer, Step, counts_of
from evaluation.table import sums
from runtime.errors import UserError

# Gaps that rounding may close: of two logits; of a rule's value; of one predicted from harvested
# features (bfloat16).
LOGITS, VALUES, PREDICTIONS = 1e-3, 1e-4, 5e-3
Verdicts = dict[str, list[dict[str, Any]]]


def check_replay(cfg: DictConfig, harvest: Harvest, stops: Mapping[str, TunableRule]) -> Verdicts:
    """By rule and value of its setting, one verdict per prompt: `equal`, the counts `replayed` and
    `decoded`, and the `reason` where they differ."""
    if not harvest.greedy:
        raise UserError(
            f"data: expected a greedy harvest, got {cfg.data}, of which a decode is another draw."
            " Give a greedy one"
        )
    pair = load_pair(Pair.of(cfg.pair))
    refuse_other_pair(pair_identity(pair), harvest.context["pair"], f"pair: {cfg.pair.name}")
    refuse_other_dtypes(dtypes(pair), harvest.manifest.dtypes)
    prompts = list(islice(harvest.prompts("all"), cfg.check_prompts))
    table = read_table(harvest, "all", stops.values(), Pair.of(cfg.pair))
    rules = [(name, value) for name, stop in stops.items() for value in values(cfg, stop, table)]
    found: Verdicts = {}
    with tqdm(total=len(rules) * len(prompts), desc="decode", unit="prompt") as bar:
        for name, value in rules:
            replay = Replay.of(table, stops[name], value)
            stop, rows = with_value(cfg.rules[name], stops[name].setting, value), []
            for index, prompt in enumerate(prompts):
                rows.append(compared(pair, stop, prompt, harvest, replay, index))
                bar.update()
            found[f"{name} {value:.3g}"] = rows
    return found


def refuse_other_dtypes(here: Mapping[str, str], harvested: Mapping[str, str] | None) -> None:
    """Counts can only be equal where the models round alike. harvested: None of a harvest that did
    not record them."""
    if harvested is not None and here != harvested:
        raise UserError(
            f"pair.dtype: expected {in_words(harvested)} as harvested, got {in_words(here)}. Give"
            " the former, or harvest anew with pair.dtype=float32, in which few decisions rest on"
            " rounding"
        )


def values(cfg: DictConfig, stop: TunableRule, table: RolloutTable) -> list[float]:
    """`cfg.check_values` of the rule's grid, evenly spaced, its ends left out where they can be."""
    grid, count = list(stop.grid(cfg.points, table.gamma)), cfg.check_values + 1
    places = [part * (len(grid) - 1) // count for part in range(1, count)]
    return [grid[place] for place in dict.fromkeys(places)]


def with_value(rule: DictConfig, setting: str, value: float) -> TunableRule:
    """The rule with this value of its setting."""
    settings = OmegaConf.create(OmegaConf.to_container(rule, resolve=True))
    OmegaConf.update(settings, setting, value)
    stop: TunableRule = instantiate(settings)
    return stop


def decode(pair: ModelPair, stop: TunableRule, prompt: HarvestedPrompt, harvest: Harvest) -> Trace:
    greedy = engine(pair, stop, harvest.gamma, Warp(0.0), Warp(0.0))
    return greedy.decode(prompt.prompt_tokens, harvest.max_new_tokens, Sampler.seeded(0))


# Comparing ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Replay:
    """What replay says of one rule, on all prompts. rounding: how far apart its value and its
    threshold may be for a near tie."""

    table: RolloutTable
    policy: Policy
    counts: Counts
    steps: Sequence[Step]
    rounding: float

    @classmethod
    def of(cls, table: RolloutTable, stop: TunableRule, value: float) -> "Replay":
        policy = stop.policy(table)
        counts, steps = Replayer(table, table.gamma).walk(policy, value)
        return cls(table, policy, counts, steps, PREDICTIONS if stop.columns else VALUES)


def compared(
    pair: ModelPair,
    stop: TunableRule,
    prompt: HarvestedPrompt,
    harvest: Harvest,
    replay: Replay,
    index: int,
) -> dict[str, Any]:
    """Return the verdict of a prompt, which is row `index` of the table."""
    trace = decode(pair, stop, prompt, harvest)
    replayed, decoded = counts_of(replay.counts, index), counted(trace)
    found = {
        "prompt": prompt.prompt_id,
        "equal": replayed == decoded,
        "replayed": replayed,
        "decoded": decoded,
    }
    if not found["equal"]:
        tokens = torch.tensor(prompt.prompt_tokens)
        found["reason"] = reason(pair, replay, index, tokens, trace)
    return found


def counted(trace: Trace) -> dict[str, float]:
    """Return what `counts_of` says, of a real decode."""
    columns = sums(trace)
    return {name: float(columns[name]) for name in COUNTS}


def reason(
    pair: ModelPair, replay: Replay, index: int, prompt: torch.Tensor, trace: Trace
) -> dict[str, Any]:
    """The first round that differs, and how close the decision was. Counts that differ though no
    round does have no excuse."""
    starts = [0, *accumulate(len(round_.tokens) for round_ in trace.rounds)]
    decoded = [
        (start, len(r.draft_tokens), r.accepted)
        for start, r in zip(starts, trace.rounds, strict=False)
    ]
    replayed = [step.of(index) for step in replay.steps if step.live[index]]
    pairs = enumerate(zip(replayed, decoded, strict=False))
    number = next((i for i, (ours, theirs) in pairs if ours != theirs), None)
    if number is None:
        return tie(min(len(replayed), len(decoded)), "rounds that agree", math.nan, 0.0)
    start = replayed[number][0]
    text = torch.cat([prompt, torch.tensor(trace.tokens[:start], dtype=torch.long)])
    return tie(number, *_decision(pair, replay, index, number, trace.rounds[number], text))


def _decision(
    pair: ModelPair, replay: Replay, index: int, number: int, round_: RoundTrace, text: torch.Tensor
) -> tuple[str, float, float]:
    """What decided round `number` after `text`: between two tokens of the draft, between the rule's
    value and its threshold, or between two tokens of the target; how far apart they are, and how
    far they may be for a near tie."""
    start, drafted, accepted = replay.steps[number].of(index)
    recorded = replay.table.tokens[index, start].tolist()
    for depth, (token, other) in enumerate(zip(round_.draft_tokens, recorded, strict=False)):
        if token != other:
            logits = draft_logits(pair, text, round_.draft_tokens[:depth])
            return "draft's tokens", abs(float(logits[token] - logits[other])), LOGITS
    if len(round_.draft_tokens) != drafted:
        depth, reach = min(len(round_.draft_tokens), drafted), replay.policy.reach
        value = reach[min(index, len(reach) - 1), min(start, reach.shape[1] - 1), depth]
        gap = float(value) - replay.policy.sign * replay.steps[number].threshold[index]
        return "value and threshold", abs(gap), replay.rounding
    position = min(round_.accepted, accepted)
    before = torch.cat([text, torch.tensor(round_.tokens[:position], dtype=torch.long)])
    first, second = last_logits(pair.target, before).topk(2).values
    return "target's tokens", float(first - second), LOGITS


def tie(number: int, between: str, gap: float, rounding: float) -> dict[str, Any]:
    """gap: NaN where there is nothing to compare."""
    near = bool(gap < rounding)
    return {"round": number, "between": between, "gap": float(gap), "near_tie": near}


@torch.inference_mode()
def draft_logits(pair: ModelPair, committed: torch.Tensor, drafted: Sequence[int]) -> torch.Tensor:
    """[V] of the draft after `committed` [n] and `drafted`, of which the target, whose states it
    may read, has seen all committed tokens but the last."""
    pair.target.reset()
    prefill(pair.target, committed)
    logits = last_logits(pair.draft, committed)
    for token in drafted:
        logits = pair.draft.forward(torch.tensor([token])).logits[-1]
    return logits


@torch.inference_mode()
def last_logits(lm: LM, text: torch.Tensor) -> torch.Tensor:
    """[V] after `text` [n]."""
    lm.reset()
    return lm.forward(text, logits="last").logits[-1]


# Reporting ----------------------------------------------------------------------------------------


def excused(found: Verdicts) -> bool:
    """Whether every difference is a near tie."""
    rows = [row for rows in found.values() for row in rows]
    return all(row["equal"] or row["reason"]["near_tie"] for row in rows)


def in_lines(found: Verdicts) -> str:
    lines = [
        f"{name}: {sum(row['equal'] for row in rows)} of {len(rows)} prompts equal"
        for name, rows in found.items()
    ]
    for name, rows in found.items():
        for row in rows:
            if not row["equal"]:
                why = row["reason"]
                excuse = "near tie" if why["near_tie"] else "NO NEAR TIE"
                where = f"round {why['round']}, gap {why['gap']:.2g} between {why['between']}"
                lines.append(f"  {name}, {row['prompt']}: {where}: {excuse}")
    return "\n".join(lines)
