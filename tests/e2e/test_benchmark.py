"""papers/benchmark.py from its command line; what it refuses: test_bad_input.py."""

import json
import re
from pathlib import Path

import pytest

from papers import benchmark
from tests.helpers.programs import programs

SMALL = (
    *("harvest.max_new_tokens=8", "harvest.gamma=3", "repeats=1"),
    *("dataset=jsonl", "dataset.chat=false", "dataset.path=prompts.jsonl"),
)


@pytest.mark.parametrize("warps", [(), ("warp=greedy", "draft_warp.temperature=0")])
def test_harvest(
    warps: tuple[str, ...],
    tiny_pair_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    lines = [json.dumps({"id": f"p{n}", "prompt": f"w{n + 1} w{n + 2} w{n + 3}"}) for n in range(3)]
    Path("prompts.jsonl").write_text("\n".join(lines))
    pair = (f"pair.{side}={tiny_pair_dir / side}" for side in ("target", "draft"))
    programs.run(benchmark, *SMALL, *pair, *warps)
    printed = capsys.readouterr().out
    assert re.search(r"label [\d.]+ times as many draft tokens a second", printed)
    rounds, agreeing = re.findall(r"(\d+) of (\d+) rounds have the same draft tokens", printed)[0]
    assert rounds == agreeing != "0" and f"{rounds} of those the same accepted length" in printed
