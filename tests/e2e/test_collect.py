"""scripts/collect.py from its command line on a tiny harvest."""

import json
import shutil
from pathlib import Path

import pytest

from scripts import collect
from tests.programs import refused, run


def squeezed(path: str) -> list[str]:
    """The lines of a table, without what makes its columns line up."""
    return [" ".join(line.split()) for line in Path(path).read_text().splitlines()]


def test_collect_shows_what_checkpoints_differ_in(
    replaying: list[str], harvest: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    scores = {name: 0.25 for name in ("kl", "brier", "ece", "auroc")}
    for number, name in enumerate(("specdecpp", "hrad")):
        folder = Path("sweep") / str(number)
        shutil.copytree(harvest / "checkpoints" / name, folder)
        (folder / "metrics.json").write_text(json.dumps({"test": {name: scores}, "seconds": 3.0}))
    run(collect, monkeypatch, "folder=sweep", "data=data/greedy", "cost=c10", "points=5")
    lines = squeezed("sweep/table.md")
    assert len(lines) == 4 and lines[0].startswith("| checkpoint | predictor | layers |") and "w_rej" in lines[0]
    assert lines[2].startswith("| 0 | specdecpp | -1 |") and "0.2500" in lines[2] and "tie_blocks" in lines[0]
    assert "saved sweep/table.md" in capsys.readouterr().out
    metrics = Path("sweep/0/metrics.json")
    metrics.write_text(json.dumps({"test": {"specdecpp": scores | {"auroc": None}}, "seconds": 3.0}))
    run(collect, monkeypatch, "folder=sweep", "data=data/greedy", "cost=c10", "points=5", "out=runs/new/table.md")
    assert "| 0.2500 | - | 3 |" in squeezed("runs/new/table.md")[2]
    shutil.rmtree("runs/new")
    metrics.write_text("{}")
    message = refused(collect, monkeypatch, capsys, "folder=sweep", "data=data/greedy", "cost=c10")
    assert "folder: sweep/0 is incomplete or damaged" in message
    assert "folder: no checkpoints" in refused(
        collect, monkeypatch, capsys, "folder=runs", "data=data/greedy", "cost=c10"
    )
