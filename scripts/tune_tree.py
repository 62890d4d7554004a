"""Find the static tree that decodes fastest on your pair and machine: measure, solve, save.

    python scripts/tune_tree.py
    python scripts/tune_tree.py nodes=64
    python scripts/evaluate.py methods=[custom] structure=sequoia verifier=rrsw stop=never

Measures how often the b-th sibling is the accepted one along responses of the target, and what
forwards of 1 to max_nodes + 1 rows cost; a dynamic programme then gives the best tree of every size
and depth. What it promises is modelled: it leaves out drawing and verification. Writes
`structure.tree`, which structure=sequoia reads."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from decoding.settings import Pair
from programs.groups import AnySplit, Dataset, DraftWarp, Limit, Splits, Warp
from runtime.cli import Program
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


main = Program(__file__, TuneTree, "programs.tune_tree")

if __name__ == "__main__":
    main()
