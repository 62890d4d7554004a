"""Shards stream to disk: what a harvest needs at its peak does not grow with the number of
prompts."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.programs.programs import base, write_prompts

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import resource, runpy
runpy.run_path("scripts/gen_data.py", run_name="__main__")
print("peak", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def peak(prompts: int, pair: Path, folder: Path) -> float:
    """MB at the peak of a harvest."""
    source = folder / f"{prompts}.jsonl"
    words = (range(n % 31 + 1, n % 31 + n % 9 + 3) for n in range(prompts))
    write_prompts(({"prompt": " ".join(f"w{n}" for n in each)} for each in words), str(source))
    data = [*base(pair), "pair.name=tiny", f"dataset.path={source}", f"out={folder / str(prompts)}"]
    settings = ["gamma=4", "max_new_tokens=16", "batch_size=20", "anchors.stride=2"]
    command = [sys.executable, "-c", PROGRAM, *settings, *data]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    return int(done.stdout.split("peak ")[1]) / 1024


@pytest.mark.slow
def test_ten_times_the_prompts_take_the_same_memory(tiny_pair_dir: Path, tmp_path: Path) -> None:
    few, many = (peak(prompts, tiny_pair_dir, tmp_path) for prompts in (200, 2000))
    print(f"peak memory: {few:.0f} MB with 200 prompts, {many:.0f} MB with 2,000")
    assert many < 1.1 * few
