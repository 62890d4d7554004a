"""The search for the static tree that decodes fastest on a pair and machine: measure, solve,
save."""

import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from torch import Tensor
from tqdm import tqdm

from data_gen.prompts import load_prompts
from data_gen.requests import Request, requests_of_split
from decoding.cost import measure_cost
from decoding.engines.autoregressive import AutoregressiveEngine
from decoding.models.loading import ModelPair, load_pair, pair_identity
from decoding.picking import draw
from decoding.processors import scored
from decoding.sampling import Sampler, Warp
from decoding.settings import Pair
from decoding.structures.sequoia import write_artefact
from evaluation.decode import request_seed
from evaluation.page import simulated
from evaluation.table import markdown
from runtime.errors import UserError
from runtime.files import refuse_foreign_file
from runtime.job import command_line, versions_of
from runtime.tracking import tracked

SECONDS = "modelled_seconds_per_token"
RowCost = Callable[[int], float]
"""Number of rows -> seconds of one forward."""


def sibling_acceptance(p: Tensor, q: Tensor, width: int, generator: torch.Generator) -> Tensor:
    """Return the probability that child b is the accepted one, [n, width] float64, for children
    drawn without replacement.

    p, q: [n, V], target and draft distributions at n positions. Given that the children before it
    are all rejected, child b is accepted with probability sum min(R, D), where R is the target's
    residual and D the rest of q. That factor is exact; the rejected children are drawn from their
    distribution norm([D - R]+). So every entry is unbiased, and the first one exact."""
    residual, left = p.double(), q.double()
    reached = torch.ones(len(p), dtype=torch.float64)
    columns = []
    for _ in range(width):
        columns.append(reached * torch.minimum(residual, left).sum(-1))
        reached = reached - columns[-1]
        rejected = (left - residual).clamp_(min=0)
        for instead in (left, torch.ones_like(left)):  # if no child can be rejected: probability 0
            rejected = torch.where(rejected.sum(-1, keepdim=True) > 0, rejected, instead)
        token = draw(rejected, generator)[:, None]
        residual = _normalised((residual - left).clamp_(min=0))
        left = _normalised(left.scatter(-1, token, 0.0))
    return torch.stack(columns, dim=-1).clamp_(min=0)


def _normalised(distribution: Tensor) -> Tensor:
    """Return rows that sum to one; empty ones stay empty."""
    return distribution / distribution.sum(-1, keepdim=True).clamp(
        min=torch.finfo(distribution.dtype).tiny
    )


class Programme:
    """The most expected tokens of a tree, by dynamic programming over rows, depth and children
    (Sequoia, 2402.12374).

    acceptance: [B], a_b. `value[m, l]` is the largest expected number of tokens (accepted ones and
    the one after them) of a tree with exactly m rows and at most l layers below its root; -inf
    if there is no such tree."""

    def __init__(self, acceptance: Sequence[float], most_rows: int, most_depth: int) -> None:
        self.acceptance = acceptance
        shape = (most_rows + 1, most_depth + 1, len(acceptance) + 1)
        self._table = np.full(shape, -np.inf)  # [m, l, b]: with b children at the root
        self._table[1, :, 0] = 1
        for depth, b, rows in product(range(1, shape[1]), range(1, shape[2]), range(2, shape[0])):
            self._table[rows, depth, b] = self._splits(rows, depth, b).max()

    @property
    def value(self) -> np.ndarray:
        return self._table.max(-1)

    def tree(self, rows: int, depth: int) -> list[int]:
        """Return the parents of a best tree, in depth-first order."""
        return list(self._parents(rows, depth, int(self._table[rows, depth].argmax()), 0))

    def _splits(self, rows: int, depth: int, b: int) -> np.ndarray:
        """Return the value for each number of rows y = 1 .. m - 1 left to the root and its first
        b - 1 children, [m - 1]."""
        last = self._table[1:rows, depth - 1].max(-1)[::-1]
        gained = self.acceptance[b - 1] * np.maximum(last, 0)  # 0 * -inf is NaN
        gained[np.isneginf(last)] = -np.inf
        return self._table[1:rows, depth, b - 1] + gained

    def _parents(self, rows: int, depth: int, b: int, root: int) -> Iterator[int]:
        if b == 0:
            return
        before = int(self._splits(rows, depth, b).argmax()) + 1
        yield from self._parents(before, depth, b - 1, root)
        yield root
        last = rows - before
        children = int(self._table[last, depth - 1].argmax())
        yield from self._parents(last, depth - 1, children, root + before)


def expected_tokens(parents: Sequence[int], acceptance: Sequence[float]) -> float:
    """Return the tokens of a round with this tree: the sum over rows of the product of a_b along
    their paths."""
    reached, children = [1.0], [0] * (len(parents) + 1)
    for parent in parents:
        reached.append(reached[parent] * acceptance[children[parent]])
        children[parent] += 1
    return sum(reached)


def layer_rows(parents: Sequence[int]) -> list[int]:
    """Return the number of rows that the draft runs on to draw each layer: those with children."""
    depth = [0]
    for parent in parents:
        depth.append(depth[parent] + 1)
    inner = [depth[row] for row in set(parents)]
    return [inner.count(layer) for layer in range(max(depth))]


@dataclass(frozen=True)
class Plan:
    """A tree and its expected speed. seconds_per_token: modelled, (draft calls + target call) /
    expected_tokens."""

    parents: list[int]
    depth: int
    expected_tokens: float
    seconds_per_token: float

    @property
    def nodes(self) -> int:
        return len(self.parents)


def best_plans(programme: Programme, draft_cost: RowCost, target_cost: RowCost) -> list[Plan]:
    """Return the fastest depth for every number of nodes that has a tree."""
    value, best = programme.value, dict[int, Plan]()
    for rows, depth in product(range(2, value.shape[0]), range(1, value.shape[1])):
        if value[rows, depth] <= value[rows, depth - 1]:
            continue
        parents = programme.tree(rows, depth)
        layers, tokens = layer_rows(parents), expected_tokens(parents, programme.acceptance)
        seconds = sum(map(draft_cost, layers)) + target_cost(rows)
        plan = Plan(parents, len(layers), tokens, seconds / tokens)
        if rows not in best or plan.seconds_per_token < best[rows].seconds_per_token:
            best[rows] = plan
    return list(best.values())


# Measured, chosen, saved --------------------------------------------------------------------------


def tune_tree(cfg: DictConfig) -> None:
    """Write the tree that is fastest for measured acceptance and costs."""
    file = Path(cfg.structure.tree)
    refuse_foreign_file(file, "tune", "structure.tree")
    config: Any = OmegaConf.to_container(cfg, resolve=True)
    with tracked(cfg.logger, "tune tree", config, [config]) as logger:
        facts = found(cfg, file)
        logger.log({name: facts[name] for name in ("depth", "expected_tokens", SECONDS)})
        logger.artifact("tree", "tree", file)


def found(cfg: DictConfig, file: Path) -> dict[str, Any]:
    """Find the tree, write it to `file` and print it. Return what is written."""
    pair = load_pair(Pair.of(cfg.pair))
    requests = requests_of_split(
        load_prompts(cfg.dataset), pair, cfg.max_new_tokens + 1, cfg.split, cfg.splits, cfg.limit
    )
    texts, acceptance = measure_acceptance(cfg, pair, requests)
    context = sorted(texts, key=len)[len(texts) // 2]
    most = (cfg.nodes or cfg.max_nodes) + 1
    rows = sorted({1, most, *(count for count in cfg.rows if count < most)})
    with tqdm(total=2 * len(rows) * (cfg.repeats + 1), desc="seconds", unit="forward") as bar:
        draft_cost, target_cost = (
            measure_cost(lm, context, rows, cfg.repeats, bar.update)
            for lm in (pair.draft, pair.target)
        )
    plans = best_plans(Programme(acceptance, most, cfg.max_depth), draft_cost, target_cost)
    allowed = [plan for plan in plans if cfg.nodes in (None, plan.nodes)]
    if not allowed:
        raise UserError(
            f"nodes: no tree of {cfg.nodes} nodes has depth {cfg.max_depth} and {cfg.max_children}"
            " children at most. Raise max_depth or max_children"
        )
    best = min(allowed, key=lambda plan: plan.seconds_per_token)
    costs = {"draft": draft_cost, "target": target_cost}
    facts: dict[str, Any] = {
        "parents": best.parents,
        "depth": best.depth,
        "expected_tokens": best.expected_tokens,
        SECONDS: best.seconds_per_token,
        "acceptance": acceptance,
        "seconds_per_forward": {
            name: dict(zip(cost.rows, cost.seconds, strict=True)) for name, cost in costs.items()
        },
        "pair": pair_identity(pair),
        "warp": instantiate(cfg.warp).to_dict(),
        "draft_warp": instantiate(cfg.draft_warp).to_dict(),
        "command": command_line(),
        "versions": {
            "python": platform.python_version(),
            **versions_of(("draftpredict", "torch", "transformers")),
        },
    }
    write_artefact(file, facts)
    alone = target_cost(1)
    answer = (
        f"{use(best, alone)}\nAcceptance and forwards measured on {len(texts)} responses; drawing"
        " and verification are left out."
    )
    children = ", ".join(f"{value:.3f}" for value in acceptance)
    print("", answer, f"acceptance of the b-th child, measured: {children}", sep="\n\n")
    print("", table(plans, best, alone), *simulated(cfg.pair), f"saved {file}", sep="\n\n")
    return facts


def use(best: Plan, alone: float) -> str:
    """Return the advice: use the best tree, or no draft if it is not faster than decoding without
    one at `alone` seconds a token."""
    gain = alone / best.seconds_per_token
    if gain > 1:
        tree = f"a tree of {best.nodes} nodes, {best.depth} deep"
        return f"Use {tree}: {gain:.2f} times plain decoding, modelled."
    tree = f"the best tree, of {best.nodes} nodes"
    return f"Use plain decoding: {tree}, is at {gain:.2f} times, modelled."


def measure_acceptance(
    cfg: DictConfig, pair: ModelPair, requests: Sequence[Request]
) -> tuple[list[Tensor], list[float]]:
    """Return texts (prompt and the target's response), and a_b averaged over all positions of the
    responses."""
    warp, draft_warp = instantiate(cfg.warp), instantiate(cfg.draft_warp)
    engine = AutoregressiveEngine(pair, warp, frozenset(pair.eos_ids))
    texts, columns = list[Tensor](), list[Tensor]()
    for request in tqdm(requests, desc="acceptance", unit="response"):
        sampler = Sampler.seeded(request_seed(cfg.seed, request, 0))
        response = engine.decode(request.tokens, cfg.max_new_tokens, sampler).tokens
        texts.append(torch.cat([request.tokens, torch.tensor(response)]))
        p, q = distributions(pair, texts[-1], len(response), warp, draft_warp)
        columns.append(sibling_acceptance(p, q, cfg.max_children, sampler.generator))
    return texts, torch.cat(columns).mean(0).tolist()


@torch.inference_mode()
def distributions(
    pair: ModelPair, text: Tensor, last: int, warp: Warp, draft_warp: Warp
) -> list[Tensor]:
    """Return p and q of the `last` tokens of `text`, [last, V] each."""
    both, prompt, ends = [], len(text) - last, pair.eos_ids
    for lm, distribution in ((pair.target, warp), (pair.draft, draft_warp)):
        lm.reset()
        if len(text) > last + 1:
            lm.forward(text[: -last - 1], logits="none")
        logits = lm.forward(text[-last - 1 : -1]).logits
        scores = scored(distribution, logits, lambda row: (text[: prompt + row], prompt), ends)
        both.append(distribution.rest.probs(scores))
    return both


def table(plans: Sequence[Plan], best: Plan, alone: float) -> str:
    """Return a table of the best trees of a few sizes, compared with decoding without a draft at
    `alone` seconds a token."""
    rows = [
        [
            f"**{plan.nodes}**" if plan is best else str(plan.nodes),
            *(str(plan.depth), f"{plan.expected_tokens:.2f}"),
            *(f"{plan.seconds_per_token * 1e3:.1f}", f"{alone / plan.seconds_per_token:.2f}"),
        ]
        for plan in [Plan([], 0, 1.0, alone), *plans]
        if plan is best or plan.nodes & (plan.nodes - 1) == 0
    ]
    head = ["nodes", "depth", "tokens/target call, expected", "ms/token, modelled"]
    return markdown([*head, "speed-up, modelled"], rows)
