"""A checkpoint as a hub shows it, from the command line."""

import json
import shutil
from functools import partial
from pathlib import Path

import pytest
import yaml

from evaluation.replay import thresholds
from predictors.base import CARD, FILES, load_predictor, read_config, read_metrics
from predictors.hub import push_to_hub, refuse_private
from reports.publish import ADDED
from runtime.errors import UserError
from scripts import export
from tests.helpers.damage.hostile import ROOT
from tests.helpers.programs.programs import refused, run
from tests.helpers.training.checkpoints import rewrite_checksum, write_checkpoint

CHOICE = {"threshold": 0.25, "speculate": True, "speedup": 1.5, "interval": [1.25, 1.75]}
SLOWER = {**CHOICE, "speedup": 0.5, "speculate": False}


@pytest.fixture(autouse=True)
def checkpoint(here: Path) -> Path:
    """One that was trained on the real pair."""
    return Path(shutil.copytree(ROOT / "pairs/smollm2/value", "value"))


def tune(folder: Path) -> None:
    """A file of thresholds for the checkpoint in `folder`, and for a rule without one."""
    rule = {"setting": "threshold", "stop": {}}
    found = {
        "format_version": thresholds.FORMAT_VERSION,
        **{"pair": {}, "warp": {}, "draft_warp": {}, "gamma": 8, "cost": "measured"},
        "measured_on": {"hardware": {"target": "CPU", "draft": "CPU"}, "dtypes": {}, "threads": 1},
        "data": {"folder": "data/toy", "identity": "00"},
        "command": "python scripts/tune.py",
        "rules": {
            "value": {**rule, "checkpoint": thresholds.checkpoint_hash(folder, "x")},
            "fixed": {**rule, "checkpoint": None},
        },
        "results": {
            "chosen": {"advice": "value", "rules": {"value": CHOICE, "fixed": CHOICE}},
            "c10": {"advice": "none", "rules": {"value": SLOWER}},
        },
    }
    thresholds.write(Path("thresholds.json"), found)


made = partial(run, export, "serving=hub")


def test_the_folder_has_a_plot_and_thresholds(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tune(checkpoint)
    made("serving.checkpoint=value", "thresholds=thresholds.json", "out=x")
    names = {path.name for path in Path("x").iterdir()}
    assert names == {*FILES, CARD, "config.json", "reliability.png"}
    assert Path("x/reliability.png").read_bytes()[:4] == b"\x89PNG"
    card = Path("x", CARD).read_text()
    assert "| measured | value | threshold | 0.25 | 1.500x (1.250 to 1.750) | yes |" in card
    assert "| c10 | value | threshold | 0.25 | 0.500x (1.250 to 1.750) | no |" in card
    assert "| fixed |" not in card and "(reliability.png)" in card
    header = yaml.safe_load(card.split("---")[1])
    assert header["library_name"] == "draftpredict" and "speculative-decoding" in header["tags"]
    assert load_predictor(Path("x")).name == "value"
    capsys.readouterr()
    assert read_metrics(Path("x"), "checkpoint") and "warning" not in capsys.readouterr().out


@pytest.mark.slow
def test_published_again_nothing_is_there_twice(checkpoint: Path) -> None:
    made("serving.checkpoint=value", "out=x")
    once = Path("x", CARD).read_text()
    made("serving.checkpoint=x", "out=y")
    assert Path("y", CARD).read_text() == once and once.count(ADDED) == 1
    assert "## Thresholds" not in once


def test_scores_without_bins_have_no_plot() -> None:
    write_checkpoint(Path("bare"), "specdecpp", 4)
    made("serving.checkpoint=bare", "out=x")
    assert not Path("x/reliability.png").exists()
    assert "reliability.png" not in Path("x", CARD).read_text()


KEY = "hf_" + 24 * "k"


def private(checkpoint: Path) -> None:
    """As if it had been trained with absolute paths and a key among the pair's options."""
    data, token = "/home/somebody/my data/train-T1", f"+pair.target_options.token={KEY}"
    for name in ("config.json", "metrics.json", CARD):
        text = (checkpoint / name).read_text().replace("data/train-T1", data)
        (checkpoint / name).write_text(text.replace("logger=none", token))
    config = json.loads((checkpoint / "config.json").read_text())
    target = {"target_options": {"token": KEY}, "target": "/home/somebody/models/target"}
    config["provenance"]["config"]["pair"] |= target
    (checkpoint / "config.json").write_text(json.dumps(config))
    rewrite_checksum(checkpoint)


@pytest.mark.slow
def test_no_path_of_the_machine_and_no_key_is_published(checkpoint: Path) -> None:
    private(checkpoint)
    tune(checkpoint)
    found = json.loads(Path("thresholds.json").read_text())
    found["data"]["folder"] = "/home/somebody/my data/tuned"
    thresholds.write(Path("thresholds.json"), found)
    with pytest.raises(UserError, match=r"^folder: value/config\.json holds paths of this machine"):
        push_to_hub("value", "me/value")
    made("serving.checkpoint=value", "thresholds=thresholds.json", "out=x")
    for name in ("config.json", "metrics.json", CARD):
        text = Path("x", name).read_text()
        assert "somebody" not in text and KEY not in text and "my data" not in text, name
    assert "Data: train-T1 (harvest" in Path("x", CARD).read_text()
    assert next(iter(read_metrics(Path("x"), "x")["reliability"])) == "train-T1 (test split)"
    assert load_predictor(Path("x")).name == "value"
    refuse_private(Path("x"), read_config(Path("x"), "x"))


@pytest.mark.slow
def test_a_card_that_is_gone_is_made_again_and_one_that_is_no_text_is_refused(
    checkpoint: Path,
) -> None:
    (checkpoint / CARD).unlink()
    made("serving.checkpoint=value", "out=x")
    assert Path("x", CARD).read_text().startswith("---\nlibrary_name: draftpredict")
    (checkpoint / CARD).write_bytes(b"# caf\xe9")
    assert "README.md is not UTF-8" in refused(export, "serving=hub", "serving.checkpoint=value")
    write_checkpoint(Path("bare"), "specdecpp", 4)
    Path("bare", CARD).unlink()
    line = refused(export, "serving=hub", "serving.checkpoint=bare")
    assert "bare has no README.md, and too little is known" in line


@pytest.mark.slow
def test_bad_input_is_one_line(checkpoint: Path) -> None:
    tune(checkpoint)
    write_checkpoint(Path("other"), "specdecpp", 4)
    Path("full").mkdir()
    Path("full/letter.txt").write_text("mine")

    value, tuned = "serving.checkpoint=value", "thresholds=thresholds.json"
    for overrides, says in (
        (["serving.checkpoint=nowhere"], "checkpoint: no checkpoint in nowhere"),
        (["serving.checkpoint=other", tuned], "thresholds: thresholds.json has none for other"),
        ([value, "thresholds=nowhere.json"], "thresholds:"),
        ([value, "serving.repository=mine"], "repository: expected owner/name, got 'mine'"),
        ([value, "out=full"], "out: full holds something else"),
    ):
        assert says in refused(export, "serving=hub", *overrides)
    found = json.loads(Path("value/metrics.json").read_text())
    Path("value/metrics.json").write_text(json.dumps({**found, "seconds": 0}))
    assert "metrics.json is not as it was written" in refused(export, "serving=hub", value)
    assert not Path("runs/export").exists()
