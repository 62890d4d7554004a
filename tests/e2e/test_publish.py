"""A checkpoint as a hub shows it, from the command line."""

import json
import shutil
from pathlib import Path

import pytest
import yaml

from evaluation.replay import thresholds
from predictors.base import CARD, FILES, load_predictor, read_metrics
from programs.serving.publish import ADDED
from scripts import publish
from tests.checkpoints import write_checkpoint
from tests.hostile import ROOT
from tests.programs import refused, run

CHOICE = {"threshold": 0.25, "speculate": True, "speedup": 1.5, "interval": [1.25, 1.75]}


@pytest.fixture(autouse=True)
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One that was trained on the real pair."""
    monkeypatch.chdir(tmp_path)
    return Path(shutil.copytree(ROOT / "pairs/smollm2/value", "value"))


def tune(folder: Path) -> None:
    """A file of thresholds for the checkpoint in `folder`, and for a rule without one."""
    rule = {"setting": "threshold", "stop": {}}
    found = {
        "format_version": thresholds.FORMAT_VERSION,
        **{"pair": {}, "warp": {}, "draft_warp": {}, "gamma": 8, "cost": "measured"},
        "measured_on": {"hardware": {"target": "CPU", "draft": "CPU"}, "dtypes": {}, "threads": 1},
        "data": {"folder": "data/toy", "sha256": "00"},
        "command": "python scripts/tune.py",
        "rules": {
            "value": {**rule, "checkpoint": thresholds.checkpoint_hash(folder, "x")},
            "fixed": {**rule, "checkpoint": None},
        },
        "results": {
            "chosen": {"advice": "value", "rules": {"value": CHOICE, "fixed": CHOICE}},
            "c10": {
                "advice": "none",
                "rules": {"value": {**CHOICE, "speedup": 0.5, "speculate": False}},
            },
        },
    }
    thresholds.write(Path("thresholds.json"), found)


def test_the_folder_has_a_plot_and_thresholds(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tune(checkpoint)
    run(publish, monkeypatch, "checkpoint=value", "thresholds=thresholds.json", "out=x")
    names = {path.name for path in Path("x").iterdir()}
    assert names == {*FILES, CARD, "config.json", "reliability.png"}
    assert Path("x/reliability.png").read_bytes()[:4] == b"\x89PNG"
    card = Path("x", CARD).read_text()
    assert "| measured | value | threshold | 0.25 | 1.500x (1.250-1.750) | yes |" in card
    assert "| c10 | value | threshold | 0.25 | 0.500x (1.250-1.750) | no |" in card
    assert "| fixed |" not in card and "(reliability.png)" in card
    header = yaml.safe_load(card.split("---")[1])
    assert header["library_name"] == "draftpredict" and "speculative-decoding" in header["tags"]
    assert load_predictor(Path("x")).name == "value"
    capsys.readouterr()
    assert read_metrics(Path("x"), "checkpoint") and "warning" not in capsys.readouterr().out


def test_published_again_nothing_is_there_twice(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(publish, monkeypatch, "checkpoint=value", "out=x")
    once = Path("x", CARD).read_text()
    run(publish, monkeypatch, "checkpoint=x", "out=y")
    assert Path("y", CARD).read_text() == once and once.count(ADDED) == 1
    assert "## Thresholds" not in once


def test_scores_without_bins_have_no_plot(monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(Path("bare"), "specdecpp", 4)
    run(publish, monkeypatch, "checkpoint=bare", "out=x")
    assert not Path("x/reliability.png").exists()
    assert "reliability.png" not in Path("x", CARD).read_text()


def test_bad_input_is_one_line(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tune(checkpoint)
    write_checkpoint(Path("other"), "specdecpp", 4)
    Path("full").mkdir()
    Path("full/letter.txt").write_text("mine")

    def line(*overrides: str) -> str:
        return refused(publish, monkeypatch, capsys, *overrides)

    assert "checkpoint: no checkpoint in nowhere" in line("checkpoint=nowhere")
    wrong = line("checkpoint=other", "thresholds=thresholds.json")
    assert "thresholds: thresholds.json has none for other" in wrong
    assert "thresholds:" in line("checkpoint=value", "thresholds=nowhere.json")
    assert "repository: expected owner/name, got 'mine'" in line(
        "checkpoint=value", "repository=mine"
    )
    assert "out: full holds something else" in line("checkpoint=value", "out=full")
    found = json.loads(Path("value/metrics.json").read_text())
    Path("value/metrics.json").write_text(json.dumps({**found, "seconds": 0}))
    assert "metrics.json is not as it was written" in line("checkpoint=value")
    assert not Path("runs/published").exists()
