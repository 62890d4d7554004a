"""Check that replay = decode on your pair: decode the prompts of a greedy harvest and compare the
counts, one by one.

    python scripts/gen_data.py warp=greedy draft_warp.temperature=0 anchors.stride=1
    pair.dtype=float32 out=data/greedy python train.py predictor=specdecpp data=data/greedy
    out=checkpoints/specdecpp-greedy python train.py predictor=hrad data=data/greedy
    out=checkpoints/hrad-greedy python scripts/check_replay.py

Every rule at every setting. Where counts differ, the first round that does is shown with what
decided it: forwards of other shapes round differently, so two tokens, or a rule's value and its
threshold, that lie within rounding of each other may change places. Exits with 1 where a difference
has another reason."""

import runtime.openmp  # noqa: F401  (before torch loads)

import math
import sys
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from tqdm import tqdm

from data_gen.storage.dataset import read_manifest, read_responses
from decoding.engines.request import prefill
from decoding.engines.serial import SerialEngine
from decoding.models.lm import LM
from decoding.models.loading import ModelPair, load_pair, pair_identity
from decoding.models.machine import dtypes, in_words
from decoding.sampling import Sampler, Warp
from decoding.stopping.base import TunableRule, setting_of
from decoding.stopping.policy import Policy
from decoding.stopping.rollout_table import RolloutTable
from decoding.structures.chain import Chain
from decoding.trace import Trace
from decoding.verifiers.token import TokenVerifier
from evaluation.metrics import accepted_tokens, drafted_tokens
from evaluation.replay.candidates import check_out, refuse_foreign_checkpoint, refuse_other_pair
from evaluation.replay.read import read_table
from evaluation.replay.simulate import Counts, Replayer, Step
from runtime.cli import hydra_script
from runtime.errors import UserError, checked_count
from runtime.files import write_json

# Gaps that rounding may close: of two logits; of a rule's value; of one predicted from harvested
# features (bfloat16).
LOGITS, VALUES, PREDICTIONS = 1e-3, 1e-4, 5e-3


@hydra_script("check_replay")
def main(cfg: DictConfig) -> None:
    """Harvest and pair in, a verdict for every rule and prompt out."""
    manifest = read_manifest(cfg.data)
    if manifest["warp"]["temperature"] or manifest["draft_warp"]["temperature"]:
        raise UserError(
            f"data: {cfg.data} is not greedy, so that a decode is another draw. Give a greedy"
            " harvest"
        )
    check_out(Path(cfg.out))
    limit = None if cfg.limit is None else checked_count("limit", cfg.limit)
    stops = stop_rules(cfg, manifest)
    pair = load_pair(cfg.pair)
    refuse_other_pair(pair_identity(pair), manifest, f"pair: {cfg.pair.name}")
    refuse_other_dtypes(dtypes(pair), manifest.get("dtypes"))
    responses = read_responses(cfg.data, cfg.split)[:limit]
    table = read_table(cfg.data, cfg.split, stops.values(), cfg.pair)
    found: dict[str, list[dict[str, Any]]] = {}
    with tqdm(total=len(stops) * len(responses), desc="decode", unit="prompt") as bar:
        for (name, level), stop in stops.items():
            rows = found[f"{name} {level}"] = []
            policy, replayer = stop.policy(table), Replayer(table, manifest["gamma"])
            counts, steps = replayer.walk(policy, setting_of(stop))
            for index, response in enumerate(responses):
                trace = decode(pair, stop, response, manifest)
                rows.append(compare(counts, index, trace) | {"prompt": response["prompt_id"]})
                if not rows[-1]["equal"]:
                    prompt = torch.tensor(response["prompt_tokens"])
                    rounding = PREDICTIONS if stop.draft_layers or stop.target_layers else VALUES
                    rows[-1]["reason"] = reason(
                        pair, table, policy, steps, index, prompt, trace, rounding
                    )
                bar.update()
    write_json(Path(cfg.out), found)
    print(f"\n{report(found)}\n\nsaved {cfg.out}")
    sys.exit(
        any(
            not row["equal"] and not row["reason"]["near_tie"]
            for rows in found.values()
            for row in rows
        )
    )


def refuse_other_dtypes(here: Mapping[str, str], harvested: Mapping[str, str] | None) -> None:
    """Counts can only be equal where the models round alike. harvested: None of a harvest that did
    not record them."""
    if harvested is not None and here != harvested:
        raise UserError(
            f"pair.dtype: {in_words(here)} here, {in_words(harvested)} in the harvest. Give the one"
            " that was harvested, or harvest anew with pair.dtype=float32, in which few decisions"
            " rest on rounding"
        )


def stop_rules(
    cfg: DictConfig, manifest: Mapping[str, Any]
) -> dict[tuple[str, float], TunableRule]:
    """Every rule at every setting. Raises UserError where none is left or a checkpoint is not for
    the harvest."""
    levels = {name: cfg.settings[name] for name in cfg.rules if cfg.settings.get(name)}
    if not levels:
        raise UserError(
            "settings: no rule has a threshold to be checked at. Give some, e.g."
            " settings.fixed=[1,4]"
        )
    for name in levels:
        if "checkpoint" in cfg.rules[name]:
            folder = Path(cfg.rules[name].checkpoint)
            refuse_foreign_checkpoint(
                folder, manifest, f"rules.{name}.checkpoint", manifest["gamma"]
            )
    return {
        (name, level): stop_rule(cfg, name, level)
        for name, found in levels.items()
        for level in found
    }


def stop_rule(cfg: DictConfig, name: str, level: float) -> TunableRule:
    """The rule with this threshold."""
    setting = instantiate(cfg.rules[name]).setting
    values = OmegaConf.create(OmegaConf.to_container(cfg.rules[name], resolve=True))
    OmegaConf.update(values, setting, level)
    stop: TunableRule = instantiate(values)
    return stop


def decode(
    pair: ModelPair, stop: TunableRule, response: Mapping[str, Any], manifest: Mapping[str, Any]
) -> Trace:
    chain: Any = Chain(manifest["gamma"])
    verifier: Any = TokenVerifier()
    engine = SerialEngine(
        pair, chain, stop, verifier, Warp(0.0), Warp(0.0), frozenset(pair.eos_ids)
    )
    return engine.decode(response["prompt_tokens"], manifest["max_new_tokens"], Sampler.seeded(0))


# Comparing ----------------------------------------------------------------------------------------


def counted(trace: Trace) -> dict[str, float]:
    """What `Counts.of` says, of a real decode."""
    return {
        "forwards": sum(round_.draft_forwards for round_ in trace.rounds),
        "drafted": drafted_tokens(trace),
        "accepted": accepted_tokens(trace),
        "discarded": drafted_tokens(trace) - accepted_tokens(trace),
        "calls": sum(len(round_.predicted) for round_ in trace.rounds),
        "tokens": len(trace.tokens),
        "rounds": len(trace.rounds),
    }


def compare(counts: Counts, index: int, trace: Trace) -> dict[str, Any]:
    replayed, decoded = counts.of(index), counted(trace)
    return {"equal": replayed == decoded, "replayed": replayed, "decoded": decoded}


def reason(
    pair: ModelPair,
    table: RolloutTable,
    policy: Policy,
    steps: Sequence[Step],
    index: int,
    prompt: torch.Tensor,
    trace: Trace,
    rounding: float,
) -> dict[str, Any]:
    """The first round that differs, and how close the decision was: between two tokens of the
    draft, between the rule's value and its threshold (`rounding` apart is a near tie), or between
    two tokens of the target. Counts that differ though no round does have no excuse."""
    starts = [0, *accumulate(len(round_.tokens) for round_ in trace.rounds)]
    rounds = [
        (start, len(r.draft_tokens), r.accepted)
        for start, r in zip(starts, trace.rounds, strict=False)
    ]
    replayed = [step.of(index) for step in steps if step.live[index]]
    differing = (
        i for i, (ours, theirs) in enumerate(zip(replayed, rounds, strict=False)) if ours != theirs
    )
    number = next(differing, None)
    if number is None:
        return tie(min(len(replayed), len(rounds)), "rounds that agree", math.nan, 0.0)
    (start, drafted, accepted), round_ = replayed[number], trace.rounds[number]
    text = torch.cat([prompt, torch.tensor(trace.tokens[:start], dtype=torch.long)])
    recorded = table.tokens[index, start].tolist()
    for depth, (token, other) in enumerate(zip(round_.draft_tokens, recorded, strict=False)):
        if token != other:
            logits = draft_logits(pair, text, round_.draft_tokens[:depth])
            return tie(number, "draft's tokens", abs(float(logits[token] - logits[other])), LOGITS)
    if len(round_.draft_tokens) != drafted:
        depth = min(len(round_.draft_tokens), drafted)
        reach = policy.reach[
            min(index, len(policy.reach) - 1), min(start, policy.reach.shape[1] - 1), depth
        ]
        gap = abs(float(reach) - policy.sign * steps[number].threshold[index])
        return tie(number, "value and threshold", gap, rounding)
    position = min(round_.accepted, accepted)
    before = torch.cat([text, torch.tensor(round_.tokens[:position], dtype=torch.long)])
    first, second = last_logits(pair.target, before).topk(2).values
    return tie(number, "target's tokens", float(first - second), LOGITS)


def tie(number: int, between: str, gap: float, rounding: float) -> dict[str, Any]:
    """gap: NaN where there is nothing to compare."""
    return {
        "round": number,
        "between": between,
        "gap": float(gap),
        "near_tie": bool(gap < rounding),
    }


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


def report(found: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    lines = [
        f"{name}: {sum(row['equal'] for row in rows)} of {len(rows)} prompts equal"
        for name, rows in found.items()
    ]
    for name, rows in found.items():
        for row in rows:
            if not row["equal"]:
                why = row["reason"]
                excuse = "near tie" if why["near_tie"] else "NO NEAR TIE"
                place = f"round {why['round']}, gap {why['gap']:.2g} between {why['between']}"
                lines.append(f"  {name}, {row['prompt']}: {place}: {excuse}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
