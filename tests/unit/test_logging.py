from pathlib import Path

import pytest

from predictors.logging import NullLogger, WandbLogger


def test_offline_run_keeps_curves_and_artifact_without_asking(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    (checkpoint / "config.json").write_text("{}")
    logger = WandbLogger("test", folder=str(tmp_path / "runs"))
    logger.start("train", {"predictor": {"depth": 3}})
    logger.log({"train/loss": 0.5}, step=1)
    logger.log({"test/kl": 0.1})
    logger.artifact("specdecpp", "predictor", checkpoint)
    logger.finish()
    (run,) = (tmp_path / "runs" / "wandb").glob("offline-run-*")
    assert list(run.glob("*.wandb"))
    assert f"wandb sync {run}" in capsys.readouterr().out


def test_finish_without_start_is_harmless(capsys: pytest.CaptureFixture[str]) -> None:
    WandbLogger("test").finish()
    assert capsys.readouterr().out == ""


def test_no_logger_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    logger = NullLogger()
    logger.start("train", {})
    logger.log({"loss": 1.0}, step=1)
    logger.artifact("x", "predictor", tmp_path)
    logger.finish()
    assert list(tmp_path.iterdir()) == []
