"""train.py from its command line: data in, checkpoint folder out."""

import json
import pkgutil
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

import train
from data_gen.storage.dataset import Harvest
from predictors.base import load_predictor
from predictors.calibration import Calibration
from runtime.json_files import write_checksummed
from tests.helpers.data.harvests import DIM, EMBEDDING, PAIR, WARP, write_harvest
from tests.helpers.programs import programs

QUICK = ("trainer.epochs=2", "trainer.lr=0.01", "logger=none")


@pytest.fixture(autouse=True)
def somewhere_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(*arguments: str) -> None:
    programs.run(train, *arguments)


def count_calls(monkeypatch: pytest.MonkeyPatch, function: str) -> list[tuple[Any, ...]]:
    """The arguments of every call from now on."""
    calls: list[tuple[Any, ...]] = []
    called = pkgutil.resolve_name(function)
    monkeypatch.setattr(function, lambda *given: [calls.append(given), called(*given)][1])
    return calls


@pytest.mark.smoke
@pytest.mark.parametrize("name", ["specdecpp", "hrad"])
def test_checkpoint_folder(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_harvest(tmp_path / "data" / "toy")
    run(f"predictor={name}", "data=data/toy", "verbose=true", *QUICK)
    folder = tmp_path / "checkpoints" / name
    files = {"config.json", "model.safetensors", "calibration.json", "metrics.json", "README.md"}
    assert {path.name for path in folder.iterdir()} == files
    assert [path.name for path in folder.parent.iterdir()] == [name]  # the resume file is gone

    config = json.loads((folder / "config.json").read_text())
    assert config["gamma"] == {"specdecpp": None, "hrad": 3}[name]
    assert config["provenance"]["data"]["splits"]["train"] == {"rows": 360, "prompts": 12}
    assert config["provenance"]["command"].startswith(f"python train.py predictor={name}")
    load_predictor(folder, expect={"pair": PAIR, "warp": WARP, "draft_warp": WARP, "gamma": 3})

    metrics = json.loads((folder / "metrics.json").read_text())
    rows = {
        name,
        f"{name}, before calibration",
        "constant",
        "base rate",
        "draft confidence (q_max)",
    }
    assert rows <= metrics["test"].keys()
    assert len(metrics["history"]) == metrics["epochs"] == 2
    measured = metrics["reliability"]["data/toy (test split)"]
    assert list(measured) == (
        ["class"] if name == "hrad" else ["token", *(f"prefix {k}" for k in ("all", 1, 2, 3, 4))]
    )
    printed = capsys.readouterr().out
    assert all(
        f"| {what} " in printed and f"| {what} " in (folder / "README.md").read_text()
        for what in measured
    )
    assert all(row in printed and row in (folder / "README.md").read_text() for row in rows)
    assert ("accuracy" in printed) == (name == "hrad")
    assert " worth asking: " in printed.splitlines()[-1]


def test_the_context_of_rollouts_trains_on_rounds(tmp_path: Path) -> None:
    write_harvest(tmp_path / "data" / "toy")
    run(
        "predictor=specdecpp",
        "predictor.context=rollout",
        "data=data/toy",
        *QUICK,
        "trainer.epochs=8",
    )
    config = json.loads((tmp_path / "checkpoints" / "specdecpp" / "config.json").read_text())
    assert config["settings"]["context"] == "rollout" and config["gamma"] is None
    assert load_predictor(tmp_path / "checkpoints" / "specdecpp").kind == "rounds"
    test = json.loads((tmp_path / "checkpoints" / "specdecpp" / "metrics.json").read_text())["test"]
    assert test["specdecpp"]["auroc"] > 0.7


@pytest.mark.parametrize("name", ["specdecpp", "hrad"])
def test_drift_is_measured_on_other_harvests(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_harvest(Path("data/toy"))
    write_harvest(Path("data/other"), rows=20, names="other")
    reads = count_calls(monkeypatch, "data_gen.storage.dataset.read_json")
    run(
        f"predictor={name}",
        "data=data/toy",
        "calibration=platt",
        "drift=[data/other]",
        "verbose=true",
        *QUICK,
    )
    assert [path.parent.name for path, *_ in reads] == ["toy", "other"], "a manifest is read once"
    metrics = json.loads(Path(f"checkpoints/{name}/metrics.json").read_text())
    here, there = metrics["reliability"].values()
    what = "class" if name == "hrad" else "prefix 2"
    assert there[what]["calibrated"]["prompts"] == 20 and here[what]["calibrated"]["prompts"] == 4
    assert f"data/other: {what} " in capsys.readouterr().out


def test_prompts_that_were_trained_on_are_left_out_of_drift(
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_harvest(Path("data/toy"))
    write_harvest(Path("data/other"), rows=20, names="other", shared=15)
    run("data=data/toy", "drift=[data/other]", *QUICK)
    assert "drift: 5 of 20 prompts of data/other are not in data/toy" in capsys.readouterr().out
    _, there = json.loads(Path("checkpoints/specdecpp/metrics.json").read_text())[
        "reliability"
    ].values()
    assert {stage["calibrated"]["prompts"] for stage in there.values()} == {5}


def test_drift_without_other_prompts_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    write_harvest(Path("data/toy"))
    with pytest.raises(SystemExit) as exit_code:
        run("data=data/toy", "drift=[data/../data/toy]", *QUICK)
    assert exit_code.value.code == 2
    assert (
        "error: drift: data/../data/toy holds no prompts besides those of data/toy"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("changed", "drift", "says"),
    [
        (
            {"warp": {**WARP, "temperature": 0.5}},
            "[data/other]",
            "drift: data/other was made with warp.temperature=0.5, the data to train on with",
        ),
        (
            {"pair": {**PAIR, "draft": "dd"}},
            "[data/other]",
            "drift: data/other was made with pair.draft=dd, the data to train on with",
        ),
        (
            {"gamma": 2},
            "[data/other]",
            "predictor.gamma: 3 is more than the 2 tokens per round of data/other",
        ),
        ({}, "[data/none]", "drift: data/none is no harvested dataset"),
        ({}, "[1]", "drift: expected a list of different paths, such as [a,b], got [1]"),
        ({}, "null", "drift: expected a list of different paths, such as [a,b], got null"),
    ],
)
def test_a_wrong_drift_folder_is_refused_before_anything_is_read(
    changed: dict[str, Any],
    drift: str,
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_harvest(Path("data/toy"))
    manifest = Harvest.open(write_harvest(Path("data/other"))).manifest.written
    write_checksummed(Path("data/other/manifest.json"), {**manifest, **changed})
    monkeypatch.setattr("data_gen.samples.read_samples", None)
    with pytest.raises(SystemExit) as exit_code:
        run("predictor=hrad", "data=data/toy", f"drift={drift}", *QUICK)
    assert exit_code.value.code == 2
    assert f"error: {says}" in capsys.readouterr().err


def test_one_harvest_serves_fewer_layers(capsys: pytest.CaptureFixture[str]) -> None:
    manifest = Harvest.open(write_harvest(Path("data/toy"))).manifest.written
    manifest["inputs"]["target_layers"] = [-4, -3, -2, -1]  # of the width DIM / 4
    write_checksummed(Path("data/toy/manifest.json"), manifest)
    run("predictor=hrad", "predictor.layers=[-3,-1]", "data=data/toy", *QUICK)
    config = json.loads(Path("checkpoints/hrad/config.json").read_text())
    assert (
        config["inputs"]["target_hidden"] == config["settings"]["layers"] == [-3, -1]
        and config["dim"] == DIM // 2 + EMBEDDING
    )
    assert load_predictor("checkpoints/hrad").inputs.target_layers == (-3, -1)
    with pytest.raises(SystemExit):
        run("predictor=hrad", "predictor.layers=[-1,-3]", "data=data/toy", *QUICK)
    assert (
        "error: predictor.layers: expected some of the recorded layers" in capsys.readouterr().err
    )


@pytest.mark.smoke
@pytest.mark.parametrize("method", ["temperature", "platt", "isotonic", "none"])
@pytest.mark.few(1)
def test_every_calibration_trains_and_decodes_as_saved(method: str) -> None:
    write_harvest(Path("data/toy"))
    run("data=data/toy", f"calibration={method}", *QUICK)
    saved = json.loads(Path("checkpoints/specdecpp/calibration.json").read_text())
    assert (
        load_predictor("checkpoints/specdecpp").calibration.to_dict()
        == TypeAdapter(Calibration).validate_json(json.dumps(saved)).to_dict()
    )
    if method == "none":
        assert saved["method"] == "none" and saved["survival"]["rows"] == 0
    else:
        assert saved["method"] == method or f"{method} left out" in saved["note"]
        assert saved["survival"]["rows"] > 0


def test_no_harvest_names_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_code:
        run("data=data/none")
    assert exit_code.value.code == 2
    assert "python scripts/gen_data.py" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["mixed-00000.parquet", "manifest.json"])
def test_a_damaged_harvest_is_one_line(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_harvest(Path("data/toy")) / name
    content = path.read_bytes()
    path.write_bytes(content[:-9] + bytes([content[-9] ^ 1]) + content[-8:])
    with pytest.raises(SystemExit) as exit_code:
        run("predictor=specdecpp", "data=data/toy", *QUICK)
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert exit_code.value.code == 2 and error.startswith("error: data: ")
    assert (
        f"{path} is damaged" in error
        and "gain with out=data/toy" in error
        or "gen_data.py out=data/toy" in error
    )
    assert not Path("checkpoints").exists()


def test_out_holds_other_things(capsys: pytest.CaptureFixture[str]) -> None:
    write_harvest(Path("data/toy"))
    for out, said in (("data/toy", "holds something else"), (".", "hold more than a result")):
        with pytest.raises(SystemExit) as exit_code:
            run("data=data/toy", f"out={out}", *QUICK)
        assert exit_code.value.code == 2
        assert said in capsys.readouterr().err
    assert Path("data/toy/manifest.json").is_file()
