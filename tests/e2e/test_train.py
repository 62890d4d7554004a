"""train.py from its command line: data in, checkpoint folder out."""

import json
import pkgutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter
from safetensors.torch import save_file

import train
from data_gen.samples import first_prompts
from data_gen.storage.dataset import Harvest
from predictors.base import load_predictor
from predictors.calibration import Calibration
from predictors.card import interval
from runtime.json_files import write_checksummed
from tests.helpers.data.harvests import DIM, EMBEDDING, PAIR, WARP, write_harvest
from tests.helpers.programs import programs
from train import verdict

QUICK = ("trainer.epochs=2", "trainer.lr=0.01", "logger=none")
TOY, OTHER = ("data=data/toy", *QUICK), "drift=[data/other]"
MADE, ON = "drift: data/other was made with", "the data to train on with"
ROUND = "tokens per round of data/other"
run, refused = partial(programs.run, train), partial(programs.refused, train)


@pytest.fixture(autouse=True)
def toy(here: Path) -> None:
    """A harvest in data/toy."""
    write_harvest(Path("data/toy"))


def read(path: str) -> Any:
    return json.loads(Path(path).read_text())


@pytest.mark.smoke
@pytest.mark.parametrize("name", ["specdecpp", "hrad"])
def test_checkpoint_folder(name: str) -> None:
    printed = run(f"predictor={name}", "verbose=true", *TOY)
    folder = Path("checkpoints") / name
    files = {"config.json", "model.safetensors", "calibration.json", "metrics.json", "README.md"}
    assert {path.name for path in folder.iterdir()} == files
    assert [path.name for path in folder.parent.iterdir()] == [name]  # the resume file is gone

    config, metrics = (read(f"{folder}/{file}.json") for file in ("config", "metrics"))
    assert config["gamma"] == {"specdecpp": None, "hrad": 3}[name]
    assert config["provenance"]["data"]["splits"]["train"] == {"rows": 360, "prompts": 12}
    assert config["provenance"]["command"].startswith(f"python train.py predictor={name}")
    load_predictor(folder, expect={"pair": PAIR, "warp": WARP, "draft_warp": WARP, "gamma": 3})

    rows = {name, f"{name}, before calibration", "constant", "base rate"}
    rows.add("draft confidence (q_max)")
    assert rows <= metrics["test"].keys()
    assert metrics["train"].keys() == {f"{name}, before calibration"}
    assert len(metrics["history"]) == metrics["epochs"] == 2
    measured = list(metrics["reliability"]["data/toy (test split)"])
    prefixes = [f"prefix {k}" for k in ("all", 1, 2, 3, 4)]
    assert measured == (["class"] if name == "hrad" else ["token", *prefixes])
    card = (folder / "README.md").read_text()
    for shown in (*rows, *(f"| {what} " for what in measured)):
        assert shown in printed and shown in card
    assert ("accuracy" in printed) == (name == "hrad")
    assert " worth asking: " in printed.splitlines()[-1]
    assert "Test split: 120 rows of 4 prompts." in printed


def test_a_released_head_is_calibrated_and_scored_in_place_of_training() -> None:
    """A file that holds one block for all, as released, gives what the same head saved by us
    gives."""
    folder = Path("acc_head")
    folder.mkdir()
    (folder / "config.json").write_text('{"hidden_size": 8, "num_layers": 2}')
    tied = ("predictor=specdecpp", "predictor.depth=2", "predictor.tie_blocks=true")
    run(*tied, *TOY)
    ours = load_predictor("checkpoints/specdecpp")
    weights = ours.head.state_dict()
    parts = {"model.0.linear": "blocks.0", "model.2": "out"}
    names = {f"{k}.{part}": f"{v}.{part}" for k, v in parts.items() for part in ("weight", "bias")}
    save_file({name: weights[of] for name, of in names.items()}, folder / "model.safetensors")
    run(*tied, *TOY, "predictor.released=acc_head", "out=checkpoints/released")
    theirs, metrics = (
        load_predictor("checkpoints/released"),
        read("checkpoints/released/metrics.json"),
    )
    assert theirs.calibration == ours.calibration and metrics["epochs"] == 0
    assert metrics["test"] == read("checkpoints/specdecpp/metrics.json")["test"]


def test_one_prompt_decides_nothing() -> None:
    nan, scores = float("nan"), {"calibrated": {"rows": 9, "prompts": 1}}
    one = {"reliability": {"data/toy (test split)": {"token": scores}}}
    one["test"] = {"x": {"brier": 0.1}, "draft confidence (q)": {"brier": 0.2}}
    survival = {"log_loss": {"last q": [0.5, nan, nan]}, "difference": {"last q": [-0.1, nan, nan]}}
    for metrics in (one, one | {"survival": {"data/toy (test split)": survival}}):
        told = verdict("x", metrics)
        assert told.startswith("Undecided whether x is worth asking: the test split has 1 prompt;")
        assert "nan" not in told and "lower is better" in told
    assert interval([0.5, nan, nan]) == "0.500"


def test_the_context_of_rollouts_trains_on_rounds() -> None:
    run("predictor=specdecpp", "predictor.context=rollout", *TOY, "trainer.epochs=8")
    config = read("checkpoints/specdecpp/config.json")
    assert config["settings"]["context"] == "rollout" and config["gamma"] is None
    assert load_predictor("checkpoints/specdecpp").kind == "rounds"
    assert read("checkpoints/specdecpp/metrics.json")["test"]["specdecpp"]["auroc"] > 0.7


@pytest.mark.parametrize("name", ["specdecpp", "hrad"])
def test_drift_is_measured_on_other_harvests(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write_harvest(Path("data/other"), rows=20, names="other")
    reads, reading = list[Path](), pkgutil.resolve_name("data_gen.storage.dataset.read_json")
    monkeypatch.setattr(
        "data_gen.storage.dataset.read_json",
        lambda path, *given: [reads.append(path), reading(path, *given)][1],
    )
    printed = run(f"predictor={name}", "calibration=platt", OTHER, "verbose=true", *TOY)
    assert [path.parent.name for path in reads] == ["toy", "other"], "a manifest is read once"
    here, there = read(f"checkpoints/{name}/metrics.json")["reliability"].values()
    what = "class" if name == "hrad" else "prefix 2"
    assert there[what]["calibrated"]["prompts"] == 20 and here[what]["calibrated"]["prompts"] == 4
    assert f"data/other: {what} " in printed


def test_prompts_that_were_trained_on_are_left_out_of_drift() -> None:
    write_harvest(Path("data/other"), rows=20, names="other", shared=15)
    assert "drift: 5 of 20 prompts of data/other are not in data/toy" in run(OTHER, *TOY)
    _, there = read("checkpoints/specdecpp/metrics.json")["reliability"].values()
    assert {stage["calibrated"]["prompts"] for stage in there.values()} == {5}


@pytest.mark.parametrize(
    ("changed", "drift", "says"),
    [
        (
            {"warp": {**WARP, "temperature": 0.5}},
            "[data/other]",
            f"{MADE} warp.temperature=0.5, {ON}",
        ),
        ({"pair": {**PAIR, "draft": "dd"}}, "[data/other]", f"{MADE} pair.draft=dd, {ON}"),
        ({"gamma": 2}, "[data/other]", f"predictor.gamma: 3 is more than the 2 {ROUND}"),
        ({}, "[data/none]", "drift: data/none is no harvested dataset"),
        ({}, "[1]", "drift: expected a list of different paths, such as [a,b], got [1]"),
        ({}, "null", "drift: expected a list of different paths, such as [a,b], got null"),
        ({}, "[data/../data/toy]", "drift: data/../data/toy holds no prompts besides those of"),
    ],
)
def test_a_wrong_drift_folder_is_refused_before_anything_is_read(
    changed: dict[str, Any], drift: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = Harvest.open(write_harvest(Path("data/other"))).manifest.written
    write_checksummed(Path("data/other/manifest.json"), {**manifest, **changed})
    monkeypatch.setattr("data_gen.samples.sample_parts", None)
    assert refused("predictor=hrad", f"drift={drift}", *TOY).startswith(f"error: {says}")


def test_one_harvest_serves_fewer_layers() -> None:
    manifest = Harvest.open("data/toy").manifest.written
    manifest["inputs"]["target_layers"] = [-4, -3, -2, -1]  # of the width DIM / 4
    write_checksummed(Path("data/toy/manifest.json"), manifest)
    run("predictor=hrad", "predictor.layers=[-3,-1]", *TOY)
    config = read("checkpoints/hrad/config.json")
    assert config["inputs"]["target_hidden"] == config["settings"]["layers"] == [-3, -1]
    assert config["dim"] == DIM // 2 + EMBEDDING
    assert load_predictor("checkpoints/hrad").inputs.target_layers == (-3, -1)
    line = refused("predictor=hrad", "predictor.layers=[-1,-3]", *TOY)
    assert line.startswith("error: predictor.layers: expected some of the recorded layers")


@pytest.mark.smoke
@pytest.mark.parametrize("method", ["temperature", "platt", "isotonic", "none"])
@pytest.mark.few(1, rest="slow")
def test_every_calibration_trains_and_decodes_as_saved(method: str) -> None:
    run(f"calibration={method}", *TOY)
    saved = read("checkpoints/specdecpp/calibration.json")
    loaded = load_predictor("checkpoints/specdecpp").calibration
    assert loaded == TypeAdapter(Calibration).validate_json(json.dumps(saved))
    if method == "none":
        assert saved["method"] == "none" and saved["survival"]["rows"] == 0
    else:
        assert saved["method"] == method or f"{method} left out" in saved["note"]
        assert saved["survival"]["rows"] > 0


def test_no_harvest_names_the_command() -> None:
    assert "python scripts/gen_data.py" in refused("data=data/none")


@pytest.mark.parametrize("name", ["mixed-00000.parquet", "manifest.json"])
def test_a_damaged_harvest_is_one_line(name: str) -> None:
    path = Path("data/toy") / name
    content = path.read_bytes()
    path.write_bytes(content[:-9] + bytes([content[-9] ^ 1]) + content[-8:])
    line = refused("predictor=specdecpp", *TOY)
    assert line.startswith("error: data: ") and "out=data/toy" in line
    assert not Path("checkpoints").exists()


def test_out_holds_other_things() -> None:
    assert "holds something else" in refused("out=data/toy", *TOY)
    assert "hold more than a result" in refused("out=.", *TOY)
    assert Path("data/toy/manifest.json").is_file()


def test_survival_is_scored_against_the_draft_on_every_harvest() -> None:
    write_harvest(Path("data/other"), rows=20, names="other")
    value = ("predictor=value", "predictor.inputs=[draft_hidden,depth]", "trainer.epochs=20")
    printed = run(OTHER, "verbose=true", *TOY, *value)
    metrics = read("checkpoints/value/metrics.json")
    assert list(metrics["survival"]) == ["data/toy (test split)", "data/other"]
    here, there = metrics["survival"].values()
    for found, rows, prompts in ((here, 4 * 30 * 3, 4), (there, 20 * 20 * 3, 20)):
        assert (found["rows"], found["prompts"]) == (rows, prompts), "gamma - 1 of each round"
        losses = {name: value for name, (value, *_) in found["log_loss"].items()}
        assert losses["value"] < min(losses["product of q"], losses["last q"])
        for name, (gap, low, high) in found["difference"].items():
            assert gap == pytest.approx(losses["value"] - losses[name])
            assert low < gap < high < 0
    table = "| product of q |"
    assert table in printed and table in Path("checkpoints/value/README.md").read_text()
    assert printed.splitlines()[-1].startswith("value is worth asking: log loss -0.")
    assert not any("priors" in name for name in metrics["test"])


def test_fewer_prompts_are_some_of_more() -> None:
    for prompts in (3, 5):
        run(f"prompts={prompts}", f"out=some-{prompts}", *TOY)
        splits = read(f"some-{prompts}/config.json")["provenance"]["data"]["splits"]
        assert splits["train"]["prompts"] == prompts and splits["test"]["prompts"] == 4
    few, more = (first_prompts(Harvest.open("data/toy"), count) for count in (3, 5))
    assert (few & more).equal(few) and few.sum() == 3 and more.sum() == 5
    line = refused("prompts=13", *TOY)
    assert line.startswith("error: prompts: expected at most the 12 prompts")
