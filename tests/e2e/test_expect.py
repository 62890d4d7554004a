"""scripts/evaluate.py what=expected from its command line, along a tiny harvest."""

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from evaluation.decode import Journal
from scripts import evaluate
from tests.helpers.programs.processes import die, forked
from tests.helpers.programs.programs import SPLITS, mode, models, refused, run

expect = mode(evaluate.expected)

SMALL = ("data=data/greedy", "prompts=3", "positions=3", *SPLITS)
METHODS = "methods=[token,block,rrsw,rrs,spechub,dyspec]"


@pytest.fixture
def asked(harvest: Path, tiny_pair_dir: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.chdir(harvest)
    return [*models(tiny_pair_dir), "pair.dtype=float64", *SMALL]


def test_a_table_of_methods(asked: list[str], tmp_path: Path) -> None:
    out = tmp_path / "x"
    printed = run(expect, *asked, METHODS, "against=rrsw", "draws=2", f"out={out}")
    answer = r"\nMost tokens per target call, expected: [\d.]+ \(.*\), of (\w+)\.\n3 prompts, "
    best = re.match(answer, printed)[1]
    assert "2 drafts in each" in printed and "tokens less rrsw" in printed
    assert (out / "table.md").read_text().strip() in printed
    files = ["expected.json", "measurements.parquet", "table.md"]
    assert sorted(path.name for path in out.iterdir()) == files
    found = json.loads((out / "expected.json").read_text())
    contexts = [len(one["methods"]["rrs"]) for one in found["contexts"]]
    assert len(contexts) == 3 and f"3 prompts, {sum(contexts)} contexts" in printed
    rows = found["expected"]["all"]
    assert rows[best]["tokens"][0] == max(row["tokens"][0] for row in rows.values())
    assert rows["rrsw"]["tokens less rrsw"] == [0, 0, 0]
    assert rows["block"]["nodes"] == rows["token"]["nodes"]
    for row in rows.values():
        assert 1 <= row["tokens"][0] <= 1 + row["accepted"][0] + 1e-6
    assert list(tmp_path.glob(".*.resume")) == []


def result(folder: Path) -> tuple[dict[str, Any], str]:
    """What of it does not change from day to day."""
    found = json.loads((folder / "expected.json").read_text())
    del found["checksum"], found["run"]["date"]
    return found, (folder / "table.md").read_text()


@pytest.mark.parametrize("cut", [0, 7], ids=["between lines", "in a line"])
@pytest.mark.slow
def test_a_killed_run_goes_on(
    cut: int, asked: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, add, added = tmp_path / "x", Journal.add, list[str]()
    run(expect, *asked, f"out={out}")
    whole = result(out)

    def last(journal: Journal, key: str, found: dict) -> None:
        add(journal, key, found)
        added.append(key)
        if len(added) == 4:
            os.truncate(journal.path, journal.path.stat().st_size - cut)
            die()

    def killed() -> None:
        monkeypatch.setattr(Journal, "add", last)
        run(expect, *asked, f"out={out}")

    assert forked(killed).wait() == -signal.SIGKILL
    assert result(out) == whole, "nothing of an unfinished run is there"
    monkeypatch.setattr(Journal, "add", lambda *of: (added.append(of[1]), add(*of)))
    run(expect, *asked, f"out={out}")
    contexts = sum(len(one["methods"]["token"]) for one in whole[0]["contexts"])
    assert len(added) == len(set(added)) == contexts - 4 + bool(cut)
    assert result(out) == whole
    assert list(tmp_path.glob(".*.resume")) == []


def test_a_killed_run_does_not_go_on_with_other_limits(
    asked: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = Journal.add

    def killed() -> None:
        monkeypatch.setattr(Journal, "add", lambda *of: (add(*of), die()))
        run(expect, *asked, f"out={tmp_path / 'x'}")

    assert forked(killed).wait() == -signal.SIGKILL
    printed = run(expect, *asked, f"out={tmp_path / 'x'}", "pair.max_length=60")
    assert "going on after" not in printed


def test_contexts_may_come_from_another_temperature(asked: list[str], tmp_path: Path) -> None:
    warps = ("warp.temperature=0.6", "draft_warp.temperature=0.3")
    printed = run(expect, *asked, *warps, f"out={tmp_path / 'x'}")
    assert "temperature 0.6: expected per target call" in printed
    assert "Contexts are of responses of smollm2-eagle at temperature 0." in printed


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("+method@method.plain=autoregressive methods=[plain]", "methods: .* got plain of Auto"),
        ("+method@method.pearl=pearl methods=[pearl]", "methods: expected .* got pearl of"),
        ("methods=[nobody]", "methods: expected names among token"),
        ("against=rrs", "against: expected null or one of methods: token, block"),
        ("data=data/none", "data: data/none is no harvested dataset"),
        ("positions=0", "positions: expected"),
        ("out=data/greedy", "out: "),
    ],
)
def test_what_cannot_work_is_refused(arguments: str, words: str, asked: list[str]) -> None:
    assert re.search(words, refused(expect, *asked, *arguments.split()))
