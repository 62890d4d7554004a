"""Find the static tree that decodes fastest on your pair and machine: measure, solve, save."""

import platform
import shlex
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig
from torch import Tensor
from tqdm import tqdm

from data_gen.prompts import load_prompts
from data_gen.requests import Request, requests_of_split
from decoding.cost import MeasuredCost, measure_cost
from decoding.engines.autoregressive import AutoregressiveEngine
from decoding.models.loading import ModelPair, load_pair, pair_identity
from decoding.sampling import Sampler, Warp
from decoding.structures.sequoia import write_artefact
from evaluation.decode import request_seed
from evaluation.page import simulated
from evaluation.replay.tree_search import Plan, Programme, best_plans, sibling_acceptance
from runtime.errors import UserError
from runtime.files import refuse_foreign_file

MARK = "python scripts/tune.py"  # in what it writes


def tune_tree(cfg: DictConfig) -> None:
    """Pair and prompts in, a tree out."""
    refuse_foreign_file(Path(cfg.structure.tree), MARK, "structure.tree")
    pair = load_pair(cfg.pair)
    requests = load_requests(cfg, pair)
    texts, acceptance = measure_acceptance(cfg, pair, requests)
    draft_cost, target_cost = measure_costs(cfg, pair, sorted(texts, key=len)[len(texts) // 2])
    plans = best_plans(
        Programme(acceptance, most_nodes(cfg) + 1, cfg.max_depth), draft_cost, target_cost
    )
    best = choose(cfg, plans)
    save(cfg, pair, best, acceptance, draft_cost, target_cost)
    text = table(plans, best, acceptance, target_cost)
    print("", text, *simulated(cfg.pair), f"saved {cfg.structure.tree}", sep="\n\n")


def most_nodes(cfg: DictConfig) -> int:
    nodes: int = cfg.nodes or cfg.max_nodes
    return nodes


def load_requests(cfg: DictConfig, pair: ModelPair) -> list[Request]:
    """`cfg.limit` prompts of the split, evenly spaced."""
    prompts, shares = load_prompts(cfg.dataset), cfg.splits
    return requests_of_split(prompts, pair, cfg.max_new_tokens + 1, cfg.split, shares, cfg.limit)


# Measuring ----------------------------------------------------------------------------------------


def measure_acceptance(
    cfg: DictConfig, pair: ModelPair, requests: Sequence[Request]
) -> tuple[list[Tensor], list[float]]:
    """Texts (prompt and response) that the target wrote, and a_b averaged over every position of
    the responses."""
    warp, draft_warp = instantiate(cfg.warp), instantiate(cfg.draft_warp)
    engine = AutoregressiveEngine(pair, warp, frozenset(pair.eos_ids))
    texts, found = list[Tensor](), list[Tensor]()
    for request in tqdm(requests, desc="acceptance", unit="response"):
        sampler = Sampler.seeded(request_seed(cfg.seed, request, 0))
        response = engine.decode(request.tokens, cfg.max_new_tokens, sampler).tokens
        texts.append(torch.cat([request.tokens, torch.tensor(response)]))
        p, q = distributions(pair, texts[-1], len(response), warp, draft_warp)
        found.append(sibling_acceptance(p, q, cfg.max_children, sampler.generator))
    return texts, torch.cat(found).mean(0).tolist()


@torch.inference_mode()
def distributions(
    pair: ModelPair, text: Tensor, last: int, warp: Warp, draft_warp: Warp
) -> list[Tensor]:
    """p and q of the `last` tokens of `text`, [last, V] each."""
    both = []
    for lm, distribution in ((pair.target, warp), (pair.draft, draft_warp)):
        lm.reset()
        if len(text) > last + 1:
            lm.forward(text[: -last - 1], logits="none")
        both.append(distribution.probs(lm.forward(text[-last - 1 : -1]).logits))
    return both


def measure_costs(
    cfg: DictConfig, pair: ModelPair, context: Tensor
) -> tuple[MeasuredCost, MeasuredCost]:
    """Seconds per forward of draft and target, up to the rows of the largest tree."""
    most = most_nodes(cfg) + 1
    rows = sorted({1, most, *(count for count in cfg.rows if count < most)})
    with tqdm(total=2 * len(rows) * (cfg.repeats + 1), desc="seconds", unit="forward") as bar:
        draft, target = (
            measure_cost(lm, context, rows, cfg.repeats, bar.update)
            for lm in (pair.draft, pair.target)
        )
    return draft, target


# Choosing and reporting ---------------------------------------------------------------------------


def choose(cfg: DictConfig, plans: Sequence[Plan]) -> Plan:
    allowed = [plan for plan in plans if cfg.nodes in (None, plan.nodes)]
    if not allowed:
        raise UserError(
            f"nodes: no tree of {cfg.nodes} nodes has depth {cfg.max_depth} and {cfg.max_children}"
            " children at most. Raise max_depth or max_children"
        )
    return min(allowed, key=lambda plan: plan.seconds_per_token)


def table(
    plans: Sequence[Plan], best: Plan, acceptance: Sequence[float], target_cost: MeasuredCost
) -> str:
    """The best tree of a few sizes beside decoding without a draft."""
    shown = [plan for plan in plans if plan is best or plan.nodes & (plan.nodes - 1) == 0]
    alone = target_cost(1)
    lines = [
        "acceptance of the b-th child, measured: "
        + ", ".join(f"{value:.3f}" for value in acceptance),
        "",
        (
            "| nodes | depth | tokens/target call, expected | ms/token, modelled | speed-up,"
            " modelled |"
        ),
        "|---|---|---|---|---|",
        f"| 0 | 0 | 1.00 | {alone * 1e3:.1f} | 1.00 |",
    ]
    for plan in shown:
        mark = "**" if plan is best else ""
        lines.append(
            f"| {mark}{plan.nodes}{mark} | {plan.depth} | {plan.expected_tokens:.2f} | "
            f"{plan.seconds_per_token * 1e3:.1f} | {alone / plan.seconds_per_token:.2f} |"
        )
    return "\n".join(
        [*lines, "", "modelled from measured forwards; drawing and verification are left out"]
    )


def save(
    cfg: DictConfig,
    pair: ModelPair,
    best: Plan,
    acceptance: Sequence[float],
    draft_cost: MeasuredCost,
    target_cost: MeasuredCost,
) -> None:
    costs = {"draft": draft_cost, "target": target_cost}
    facts: dict[str, Any] = {
        "parents": best.parents,
        "depth": best.depth,
        "expected_tokens": best.expected_tokens,
        "modelled_seconds_per_token": best.seconds_per_token,
        "acceptance": list(acceptance),
        "seconds_per_forward": {
            name: dict(zip(cost.rows, cost.seconds, strict=True)) for name, cost in costs.items()
        },
        "pair": pair_identity(pair),
        "warp": instantiate(cfg.warp).to_dict(),
        "draft_warp": instantiate(cfg.draft_warp).to_dict(),
        "command": shlex.join(["python", "scripts/tune.py", *sys.argv[1:]]),
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("draftpredict", "torch", "transformers")},
        },
    }
    write_artefact(Path(cfg.structure.tree), facts)
