"""train.py on what drafts survive, and on some of the prompts."""

import json
from pathlib import Path

import pytest
import torch

from data_gen.samples import first_prompts
from tests.e2e.test_train import QUICK, run
from tests.helpers.data.harvests import write_harvest


@pytest.fixture(autouse=True)
def somewhere_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_survival_is_scored_against_the_draft_on_every_harvest(
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_harvest(Path("data/toy"))
    write_harvest(Path("data/other"), rows=20, names="other")
    value = ("predictor=value", "predictor.inputs=[draft_hidden,depth]", "trainer.epochs=20")
    run("data=data/toy", "drift=[data/other]", "verbose=true", *QUICK, *value)
    folder = Path("checkpoints/value")
    metrics = json.loads((folder / "metrics.json").read_text())
    assert list(metrics["survival"]) == ["data/toy (test split)", "data/other"]
    for found, rows, prompts in zip(
        metrics["survival"].values(), (4 * 30 * 3, 20 * 20 * 3), (4, 20), strict=True
    ):
        assert (found["rows"], found["prompts"]) == (rows, prompts), "gamma - 1 of each round"
        losses = {name: value for name, (value, *_) in found["log_loss"].items()}
        assert losses["value"] < min(losses["product of q"], losses["last q"])
        for name, (gap, low, high) in found["difference"].items():
            assert gap == pytest.approx(losses["value"] - losses[name])
            assert low < gap < high < 0
    table = "| product of q |"
    printed = capsys.readouterr().out
    assert table in printed and table in (folder / "README.md").read_text()
    assert printed.splitlines()[-1].startswith("value is worth asking: log loss -0.")
    assert not any("priors" in name for name in metrics["test"])


def test_fewer_prompts_are_some_of_more() -> None:
    write_harvest(Path("data/toy"))
    for prompts in (3, 5):
        run("data=data/toy", f"prompts={prompts}", f"out=some-{prompts}", *QUICK)
        config = json.loads(Path(f"some-{prompts}/config.json").read_text())
        assert config["provenance"]["data"]["splits"]["train"]["prompts"] == prompts
        assert config["provenance"]["data"]["splits"]["test"]["prompts"] == 4
    records = {"group": torch.arange(40) // 4}
    few, more = (set(first_prompts(records, count)["group"].tolist()) for count in (3, 5))
    assert few < more and len(few) == 3


def test_more_prompts_than_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    write_harvest(Path("data/toy"))
    with pytest.raises(SystemExit) as exit_code:
        run("data=data/toy", "prompts=13", *QUICK)
    assert exit_code.value.code == 2
    assert "error: prompts: expected at most the 12 prompts" in capsys.readouterr().err
