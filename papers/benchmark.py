"""Measure a part of the toolkit against the simple way to do the same, in one process.

    python papers/benchmark.py                           # all positions at once, or one at a time
    python papers/benchmark.py warp=greedy draft_warp.temperature=0
    python papers/benchmark.py what=overlap pair=smollm2 repeats=30  # side by side, or in turn

Both take turns, so that drift of the machine affects them alike. Methods of decoding are compared
by scripts/evaluate.py.
"""

import sys
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from decoding.settings import Pair
from runtime.cli import program
from runtime.settings.groups import Dataset, DraftWarp, Harvest, Splits, Warp
from runtime.settings.kinds import Count, Counts, Group


class Overlap(Group):
    """One branch stage of an overlapped engine."""

    gamma: Annotated[int, Field(ge=1, le=1000), "pending tokens, and tokens of a branch"]
    branches: Annotated[Counts, "numbers of branches, a row each"]
    context: Annotated[int, Field(ge=2, le=1_000_000), "tokens before the pending ones"]
    draft_threads: Annotated[Count | None, "CPU threads of the draft; null: a quarter of them"]


class Benchmark(Group):
    pair: Pair
    dataset: Dataset
    warp: Warp
    draft_warp: DraftWarp
    what: Annotated[
        Literal["harvest", "overlap"],
        "all positions at once against one round at a time; or draft and target side by side",
    ]
    repeats: Annotated[Count, "of each way, in turn"]
    plain_prompts: Annotated[
        Count,
        "of the prompts, evenly spaced, that are also labelled the plain way, whose rate does not"
        " depend on their number",
    ]
    splits: Splits
    harvest: Harvest
    overlap: Overlap


@program(__file__, Benchmark)
def main(settings: Benchmark) -> None:
    """Run the benchmark that `what` names and print its figures."""
    sys.path.append(str(Path(__file__).parents[1]))  # where `papers` is, which is not installed
    from papers.plain_harvest import compare_harvests
    from papers.specbranch.side_by_side import compare_stages

    compare = {"harvest": compare_harvests, "overlap": compare_stages}[settings.what]
    print(compare(settings.composed))


if __name__ == "__main__":
    main()
