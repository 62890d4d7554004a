"""papers/benchmark.py from its command line; what it refuses: test_bad_input.py."""

import re
from pathlib import Path

import pytest

from papers import benchmark
from tests.helpers.programs.programs import GREEDY, JSONL, models, run, write_prompts


@pytest.mark.parametrize("warps", [(), GREEDY])
def test_harvest(warps: tuple[str, ...], tiny_pair_dir: Path, here: Path) -> None:
    write_prompts(3)
    small = (*JSONL, "harvest.max_new_tokens=8", "harvest.gamma=3", "repeats=1")
    printed = run(benchmark, *small, *models(tiny_pair_dir), *warps)
    assert re.search(r"label [\d.]+ times as many draft tokens a second", printed)
    rounds, agreeing = re.findall(r"(\d+) of (\d+) rounds have the same draft tokens", printed)[0]
    assert rounds == agreeing != "0" and f"{rounds} of those the same accepted length" in printed
