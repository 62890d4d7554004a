"""Find the static tree that decodes fastest on your pair and machine: measure, solve, save.

    python scripts/tune_tree.py
    python scripts/tune_tree.py nodes=64
    python scripts/evaluate.py methods=[custom] structure=sequoia verifier=rrsw stop=never

Measures how often the b-th sibling is the accepted one along responses of the target, and what
forwards of 1 to max_nodes + 1 rows cost; a dynamic programme then gives the best tree of every size
and depth. What it promises is modelled: it leaves out drawing and verification. Writes
`structure.tree`, which structure=sequoia reads."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from omegaconf import DictConfig
from pydantic import Field

from decoding.settings import Pair
from runtime.cli import program
from runtime.files import refuse_foreign_file
from runtime.settings.groups import AnySplit, Dataset, DraftWarp, Limit, Splits, Warp
from runtime.settings.kinds import Count, Counts, Group, Part, Seed

Nodes = Annotated[int, Field(ge=1, le=1024)]


class TuneTree(Group):
    pair: Pair
    dataset: Dataset
    warp: Warp
    draft_warp: DraftWarp
    structure: Annotated[Part, "its `tree` is the file written"]
    nodes: Annotated[Nodes | None, "of the tree; null: as many as are fastest"]
    max_nodes: Annotated[Nodes, "most of them tried"]
    max_depth: Annotated[Nodes, "most tokens of a path"]
    max_children: Annotated[Nodes, "most of one node; 2 for verifier=spechub"]
    split: Annotated[AnySplit, "prompts measured on"]
    splits: Splits
    limit: Limit
    max_new_tokens: Annotated[Count, "tokens of each response"]
    rows: Annotated[Counts, "of timed forwards, besides the largest; packed weights serve 2 to 32"]
    repeats: Annotated[Count, "timed forwards for each"]
    seed: Annotated[Seed, "of the responses' draws"]

    @staticmethod
    def misfits(values: Mapping[str, Any]) -> Mapping[str, str]:
        if "tree" not in values["structure"]:
            return {"structure": "one that reads its `tree` from a file: structure=sequoia"}
        return {}


@program(__file__, TuneTree)
def main(cfg: DictConfig) -> None:
    """Pair and prompts in, a tree out."""
    from decoding.models.loading import load_pair
    from evaluation.page import simulated
    from evaluation.replay.tree_search import Programme, best_plans
    from evaluation.replay.tune_tree import (
        MARK,
        choose,
        load_requests,
        measure_acceptance,
        measure_costs,
        most_nodes,
        save,
        table,
    )

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


if __name__ == "__main__":
    main()
