"""papers/benchmark.py from its command line."""

import json
import re
from pathlib import Path

import pytest

from papers import benchmark
from tests.helpers.programs import programs

SMALL = (
    "harvest.max_new_tokens=8",
    "harvest.gamma=3",
    "repeats=1",
    "dataset=jsonl",
    "dataset.chat=false",
)


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    lines = [json.dumps({"id": f"p{n}", "prompt": f"w{n + 1} w{n + 2} w{n + 3}"}) for n in range(3)]
    Path("prompts.jsonl").write_text("\n".join(lines))


def run(pair: Path, *arguments: str) -> None:
    given = (
        f"pair.target={pair / 'target'}",
        f"pair.draft={pair / 'draft'}",
        "dataset.path=prompts.jsonl",
    )
    programs.run(benchmark, *SMALL, *given, *arguments)


@pytest.mark.parametrize("warps", [(), ("warp=greedy", "draft_warp.temperature=0")])
def test_harvest(
    warps: tuple[str, ...], tiny_pair_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tiny_pair_dir, *warps)
    printed = capsys.readouterr().out
    assert re.search(r"label [\d.]+ times as many draft tokens a second", printed)
    rounds, agreeing = re.findall(r"(\d+) of (\d+) rounds have the same draft tokens", printed)[0]
    assert rounds == agreeing != "0" and f"{rounds} of those the same accepted length" in printed


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("what=nothing", "what: expected harvest or overlap, got 'nothing'"),
        ("harvest.stride=2", "Could not override 'harvest.stride'"),
    ],
)
def test_bad_input_is_one_line(
    argument: str, message: str, tiny_pair_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_code:
        run(tiny_pair_dir, *argument.split())
    assert exit_code.value.code == 2 and f"error: {message}" in capsys.readouterr().err
