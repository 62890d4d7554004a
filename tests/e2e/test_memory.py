"""Shards stream to disk: what a harvest needs at its peak does not grow with the number of
prompts."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import resource, runpy
runpy.run_path("scripts/gen_data.py", run_name="__main__")
print("peak", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def peak(prompts: int, pair: Path, folder: Path) -> float:
    """MB at the peak of a harvest."""
    source = folder / f"{prompts}.jsonl"
    lines = [
        {"id": f"p{n}", "prompt": " ".join(f"w{n % 31 + k}" for k in range(1, n % 9 + 3))}
        for n in range(prompts)
    ]
    source.write_text("\n".join(map(json.dumps, lines)))
    models = [
        f"pair.target={pair / 'target'}",
        f"pair.draft={pair / 'draft'}",
        "pair.dtype=float64",
        "pair.name=tiny",
    ]
    data = [
        "dataset=jsonl",
        "dataset.chat=false",
        f"dataset.path={source}",
        f"out={folder / str(prompts)}",
    ]
    settings = ["gamma=4", "max_new_tokens=16", "batch_size=20", "anchors.stride=2"]
    command = [sys.executable, "-c", PROGRAM, *settings, *models, *data]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    return int(done.stdout.split("peak ")[1]) / 1024


@pytest.mark.slow
def test_ten_times_the_prompts_take_the_same_memory(tiny_pair_dir: Path, tmp_path: Path) -> None:
    few, many = (peak(prompts, tiny_pair_dir, tmp_path) for prompts in (200, 2000))
    print(f"peak memory: {few:.0f} MB with 200 prompts, {many:.0f} MB with 2,000")
    assert many < 1.1 * few
