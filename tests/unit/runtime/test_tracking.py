import json

import pytest

from runtime.tracking import NullLogger, WandbLogger, tracked
from tests.helpers.training.wandb_runs import read_run

PIXEL = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000001000000010802000000907753de0000000c49444154789c63f8ffff3f0005fe02fe0def46b80000"
    "000049454e44ae426082"
)


def test_a_run_is_read_back_with_config_curves_pictures_and_tables(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("WANDB_MODE", "offline")
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    (checkpoint / "config.json").write_text("{}")
    (tmp_path / "pixel.png").write_bytes(PIXEL)
    logger = WandbLogger("test", folder=str(tmp_path / "runs"))
    logger.start("train", {"predictor": {"depth": 3}}, "tiny T=1", ["specdecpp", "x" * 99])
    logger.used("harvest of/mine", "harvest", tmp_path / "pixel.png")
    logger.log({"train/loss": 0.5}, step=1)
    logger.log({"train/loss": 0.25}, step=2)
    logger.log({"test/kl": 0.1})
    logger.image("figures/pixel", tmp_path / "pixel.png", "One pixel.")
    table = {"columns": ["method", "speed-up"], "data": [["hrad", 1.5], ["plain", None], [3, "x"]]}
    logger.table("tables/mixed", table["columns"], table["data"])
    logger.artifact("specdecpp", "predictor", checkpoint)
    logger.finish()
    run = read_run(tmp_path / "runs")
    assert f"wandb sync {run.folder}" in capsys.readouterr().out
    assert run.config["predictor"] == {"depth": 3}
    assert run.about == {"job": "train", "group": "tiny T=1", "tags": ["specdecpp", "x" * 64]}
    assert run.config["uses"].keys() == {"harvest_of_mine"}
    assert run.artifacts == {"used": ["harvest_of_mine"], "made": ["specdecpp"]}
    losses = {s["_step"]: s["train/loss"] for s in run.history if "train/loss" in s}
    assert losses == {1: 0.5, 2: 0.25}
    assert run.summary["test/kl"] == 0.1
    image = run.summary["figures/pixel"]
    assert image["caption"] == "One pixel." and run.file(image).read_bytes() == PIXEL
    assert json.loads(run.file(run.summary["tables/mixed"]).read_text()) == table


def test_nothing_is_written_without_a_start_or_a_logger(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    WandbLogger("test").finish()
    logger = NullLogger()
    logger.start("train", {})
    logger.log({"loss": 1.0}, step=1)
    logger.image("x", tmp_path / "x.png", "")
    logger.table("x", [], [])
    logger.artifact("x", "predictor", tmp_path)
    logger.used("x", "predictor", tmp_path)
    logger.finish()
    assert list(tmp_path.iterdir()) == [] and capsys.readouterr().out == ""


def test_a_tracked_run_has_a_group_of_one_pair_and_ends_as_failed(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    warp = {"temperature": 1.0}
    about = {"pair": {"name": "tiny"}, "warp": warp, "draft_warp": {"temperature": 0.0}}
    chosen = {
        "_target_": "runtime.tracking.WandbLogger",
        "project": "test",
        "folder": str(tmp_path / "runs"),
    }
    with pytest.raises(KeyError), tracked(chosen, "tune", {}, [about, about]) as logger:
        logger.log({"x": 1})
        raise KeyError
    run = read_run(tmp_path / "runs")
    assert run.about["group"] == "tiny T=1/0" and run.exit_code == 1
    other = {**about, "pair": {"name": "another"}}
    with tracked({"_target_": "runtime.tracking.NullLogger"}, "tune", {}, [about, other]) as logger:
        logger.used("x", "y", tmp_path)


def test_long_names_are_cut_and_stay_apart(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    logger = WandbLogger("test", folder=str(tmp_path))
    logger.start("report", {})
    for end in "ab":
        logger.table(f"tables/{'long%2F' * 30}{end}", ["x"], [[1]])
    keys = [key for key in dict(logger.run.summary) if key.startswith("tables/")]
    logger.finish()
    assert len(keys) == 2 and max(map(len, keys)) == 64
