"""From a harvest to an engine's files, from the command line, and back."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from pydantic import TypeAdapter

import train
from data_gen.storage.dataset import Harvest
from predictors.confidences.maps import PositionMaps, read_maps
from predictors.confidences.table import read_confidences
from scripts import export, import_confidence
from serving.schedule import Schedule, write_schedule
from tests.helpers.data.harvests import write_harvest
from tests.helpers.programs.programs import refused, run

COSTS = '{"seconds": {"draft": 0.002, "target": {"1": 0.02, "5": 0.025}}}'


@pytest.fixture(autouse=True)
def shards(here: Path) -> None:
    """In SGLang's layout, of a harvest, in the current folder."""
    rounds = Harvest.open(write_harvest(Path("data/rounds"))).records("rounds", "all")
    logits = torch.logit(rounds["q_drawn"].float(), 1e-6)
    mask = (torch.arange(logits.shape[1]) < rounds["accepted"][:, None]).float()
    for number, some in enumerate(torch.arange(len(logits)).split(256)):
        torch.save({"logits": logits[some], "prefix_mask": mask[some]}, f"sts.{number}.pt")
    Path("costs.json").write_text(COSTS)
    write_schedule(Path("schedule.json"), Schedule.at({4: 4, 8: 2}), "python tune.py")


def calibrated(method: str) -> None:
    run(import_confidence, "source.files=sts.*.pt")
    run(train, "data=data/served", f"calibration={method}")


@pytest.mark.parametrize("method", ["sts", "sts_sglang", "temperature"])
def test_the_engine_computes_our_probabilities(method: str) -> None:
    calibrated(method)
    run(export, "confidences=checkpoints/confidences")
    found = json.loads(Path("runs/export/sts.json").read_text())
    shard = torch.load("sts.0.pt", weights_only=True)
    served = torch.sigmoid(shard["logits"] / torch.tensor(found["temperatures"]))
    ours = json.dumps(read_maps("checkpoints/confidences")["maps"])
    maps = TypeAdapter(PositionMaps).validate_json(ours)
    rows = read_confidences("data/served")
    assert torch.equal(rows.logits[: len(shard["logits"])].float(), shard["logits"])
    expected = maps.conditional(rows.logits)[: len(served)]
    assert (served - expected).abs().max() < 1e-6
    survival = expected.cumprod(1)
    assert (served.cumprod(1) - survival).abs().max() < 1e-6
    if maps.survival.is_product:
        assert torch.equal(survival, maps.surviving(rows.logits)[: len(served)])
    else:
        assert "the map of survival" in Path("runs/export/README.md").read_text()
    assert found["num_samples"] == len(rows.logits)


@pytest.mark.parametrize("serving", ["sglang", "vllm", "tensorrt_llm", "deepspec", "transformers"])
@pytest.mark.few(2, rest="slow")
def test_every_engine_gets_a_folder(serving: str) -> None:
    calibrated("isotonic")
    given = ("confidences=checkpoints/confidences", "costs=costs.json", "schedule=schedule.json")
    printed = run(export, f"serving={serving}", *given, 'target_model="~/target"', "out=x")
    facts = json.loads(Path("x/export.json").read_text())
    assert "~" not in " ".join(facts["launch"])
    names = {path.name for path in Path("x").iterdir()}
    assert names == {"export.json", "README.md", *facts["files"]}
    assert facts["serving"] == serving and facts["checked_for"]
    readme = Path("x/README.md").read_text()
    assert printed.startswith(f"Start {serving} (checked for {facts['checked_for']}): ")
    for line in (*facts["launch"], *facts["left_out"], facts["command"]):
        assert line in readme
    printed = run(export, f"serving={serving}", *given, "verbose=true", "out=y")
    assert Path("y/README.md").read_text().strip() in printed


def test_bad_input_is_one_line() -> None:
    line = partial(refused, export)
    calibrated("none")
    given = "confidences=checkpoints/confidences"
    assert line().startswith("error: serving: nothing that was given can be told sglang. Give")
    assert line("confidences=nowhere").startswith("error: confidences: nowhere")
    assert line("costs=none.json").startswith("error: costs: none.json is missing")
    assert line("schedule=costs.json").startswith("error: schedule: costs.json is damaged")
    assert line("thresholds=costs.json").startswith("error: thresholds: costs.json")
    assert line(given, "gamma=7").startswith("error: gamma: expected 4, as in checkpoints")
    nothing = line("serving=deepspec", "schedule=schedule.json")
    assert nothing.startswith("error: serving: nothing that was given can be told deepspec")
    Path("mine").mkdir()
    Path("mine/notes.txt").write_text("mine")
    assert "out: mine holds something else" in line(given, "out=mine")
