"""Total variation of verifiers from the target, enumerated in contexts of a real pair (in place of
HSD's accuracies).

    python papers/hsd/total_variation.py +method@method.hsd=hsd_released methods=[block,hsd] \\
        method.hsd.verifier.allow_lossy=true warp.top_k=3 draft_warp.top_k=3

Takes the settings of scripts/evaluate.py what=expected, of chains with stop=fixed. Every draft of
stop.gamma tokens is verified, so a top_k of the draft keeps their number small."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from decoding.draft import Draft, RoundContext, Shape
from decoding.draft_tree import DraftTree
from decoding.engines.serial import SerialEngine
from decoding.interfaces import DraftStructure, Verifier
from decoding.picking import Draw
from decoding.sampling import Sampler, SiblingSampler, iid
from decoding.stopping.never import Never
from runtime.cli import Program
from runtime.errors import UserError
from runtime.settings.kinds import MOST_NODES
from scripts import evaluate

COMMAND = "python papers/hsd/total_variation.py"


class Everything(DraftStructure):
    """Every token that the draft may draw, `gamma` deep."""

    shape: Shape = "tree"
    max_siblings = None
    asks_stop = False

    def __init__(self, gamma: int) -> None:
        self.gamma = gamma

    def grow(self, tree: DraftTree) -> None:
        layer = [0]
        for _ in range(self.gamma):
            layer = [row for row in layer if tree.may_grow(row)]
            tree.run(layer)
            layer = [new for row in layer for new in self._all(tree, row)]

    def _all(self, tree: DraftTree, row: int) -> Iterator[int]:
        q = tree.q(row)
        tokens = q.nonzero()[:, 0].tolist()
        if len(tree.token) + len(tokens) > MOST_NODES:
            raise UserError(
                f"draft_warp.top_k: expected so few tokens that all drafts of {self.gamma} have"
                f" {MOST_NODES} nodes at most, got {tree.warp.top_k}. Write draft_warp.top_k=3"
            )
        for token in tokens:
            yield tree.add(row, Draw(token, q[token].item()))


class Enumerated:
    """Says of a draft that holds everything how far `rule` on its paths is from the target."""

    lossless = False
    siblings: SiblingSampler = staticmethod(iid)
    shapes = ("tree",)
    max_siblings = None

    def __init__(self, rule: Verifier) -> None:
        self.rule = rule

    def distribution(self, draft: Draft, p: Tensor) -> Any:
        return total_variation(draft, p.double(), self.rule)


def total_variation(draft: Draft, p: Tensor, rule: Any) -> float:
    """Return the total variation between the text that a round of `rule` begins, which the target
    goes on with, and the target's own. draft: every chain; p: [n + 1, V] float64."""
    children, q = draft.children(), torch.stack(list(draft.q)).double()
    possible = (p.amax(0) > 0) | (q.amax(0) > 0)
    p, q = p[:, possible], q[:, possible]
    token = (possible.cumsum(0) - 1)[draft.token].tolist()
    ended, follows = p.new_zeros(len(p)), torch.zeros_like(p)  # here: at the end, or before
    for leaf in (row for row, below in enumerate(children) if not below):
        rows = [0, *draft.rows_to(leaf)]
        tokens, above = [token[row - 1] for row in rows[1:]], list(q[rows])
        chance = np.prod([above[t][x].item() for t, x in enumerate(tokens)])
        chain = Draft(list(range(len(tokens))), tokens, above)
        verdict = rule.distribution(chain, p[rows])
        ended[leaf] += chance * verdict.end_prob[-1]
        for t, row in enumerate(rows[:-1]):
            if verdict.end_prob[t] > 0:
                follows[row] += chance * verdict.end_prob[t] * verdict.residual(t)
    target, moved = p.new_ones(len(p)), 0.0
    for row, below in enumerate(children):  # parents come before their children
        if not below:
            moved += abs(ended[row] - target[row]).item()
            continue
        text, exact = ended[row] * p[row] + follows[row], target[row] * p[row]
        for child in below:
            drawn = token[child - 1]
            ended[child] += text[drawn]
            target[child] = exact[drawn]
            text[drawn] = exact[drawn] = 0
        moved += (text - exact).abs().sum().item()
    return moved / 2


def enumerated(engine: SerialEngine) -> SerialEngine:
    """Return the engine whose expected verdict is a total variation. Raises UserError for one that
    does not draft chains of a fixed length."""
    gamma = getattr(engine.stop, "gamma", None)
    if gamma is None or engine.structure.shape != "chain":
        raise UserError(
            "methods: expected chains with stop=fixed, got other drafts. Write"
            " methods=[token,block]"
        )
    rule: Any = Enumerated(engine.verifier)
    warps = engine.warp, engine.draft_warp, engine.eos_ids
    return SerialEngine(engine.pair, Everything(gamma), Never(), rule, *warps)


def measure(settings: evaluate.Expected) -> None:
    """Print the mean over contexts for each method."""
    from data_gen.storage.dataset import Harvest
    from evaluation import methods
    from evaluation.expect import Plan, contexts, pair_of, recorded, serial
    from evaluation.table import ratio_of, with_interval

    cfg = settings.composed
    harvest = Harvest.open(cfg.data)
    texts, pair = recorded(cfg, harvest), pair_of(cfg, harvest)
    compared = {name: methods.Method(name, methods.configured(cfg, name)) for name in cfg.methods}
    engines = {name: enumerated(serial(cfg, each, pair)) for name, each in compared.items()}
    plan = Plan(cfg.positions, 1, cfg.seed)
    found: dict[str, list[list[float]]] = {name: [] for name in engines}
    for text in texts:
        by_method: dict[str, list[float]] = {name: [] for name in engines}
        for length, _ in contexts(pair, text, plan.lengths(text), ()):
            left = pair.target.max_length - length
            draft_context = pair.draft.max_length
            for name, engine in engines.items():
                context = RoundContext(
                    text.tokens[:length], left, 0, None, pair.target.embed, engine.eos_ids,
                    draft_context=draft_context, prompt=text.prompt,
                )  # fmt: skip
                verdict: Any = engine.expected(context, Sampler.seeded(0)).verdict
                by_method[name].append(verdict)
        for name, values in by_method.items():
            found[name].append(values)
    counts = np.array([len(values) for values in found[cfg.methods[0]]], float)
    print(f"{len(texts)} prompts, {int(counts.sum())} contexts")
    for name, of_prompts in found.items():
        mean = ratio_of(np.array([sum(each) for each in of_prompts]), counts)
        print(f"{name}: {with_interval(mean, '.4f')}, at most {max(map(max, of_prompts)):.4f}")


main = Program(evaluate.__file__, evaluate.Expected, measure, what="expected")
main.called = COMMAND

if __name__ == "__main__":
    main()
