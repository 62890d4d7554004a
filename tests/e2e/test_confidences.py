"""From an engine's log to its calibration, from the command line."""

import json
from pathlib import Path

import pytest
import torch

import train
from predictors.confidences.maps import FILE, read_maps
from runtime.errors import UserError
from runtime.json_files import write_checksummed
from scripts import import_confidence
from tests.helpers.data.harvests import write_harvest
from tests.helpers.programs.programs import refused, run
from tests.helpers.training.confidences import TEMPERATURES, logged


@pytest.fixture(autouse=True)
def logs(here: Path) -> None:
    """Shards in the current folder."""
    for number in range(2):
        rows = logged(1500, number)
        shard = {"logits": rows.logits.float(), "prefix_mask": rows.labels.float()}
        torch.save(shard, f"sts.{number}.pt")


def imported(out: str, *more: str) -> str:
    return run(import_confidence, "source.files=sts.*.pt", f"out={out}", *more)


@pytest.mark.parametrize(
    "method", ["sts", "sts_sglang", "temperature", "platt", "isotonic", "none"]
)
@pytest.mark.few(2, rest="slow")
def test_shards_are_imported_and_calibrated(method: str) -> None:
    printed = imported("served", "source.domain=chat", "gamma=3")
    assert "chat: 3000 proposals of 3 tokens, 48 groups" in printed
    printed = run(train, "data=served", f"calibration={method}")
    found = read_maps("checkpoints/confidences")
    assert (Path("checkpoints/confidences/README.md").read_text().strip()) in printed
    assert found["method"] == method and found["gamma"] == 3
    assert found["kept"] is (method != "none")
    if method != "none":
        for t, true in zip(found["temperatures"], TEMPERATURES, strict=True):
            assert t == pytest.approx(true, rel=0.35)
    rows = found["scores"]["served"]["chat"]["positions"]
    errors = [rows[0]["stages"][stage]["deepspec"][0] for stage in ("as logged", "fitted here")]
    assert errors[1] <= errors[0] and "20 bins of equal width (DeepSpec)" in printed


def test_calibration_is_asked_elsewhere() -> None:
    imported("served")
    imported("other", "source.domain=code", "source.files=sts.1.pt")
    run(train, "data=served", "calibration=sts_sglang", "drift=[other]", "out=x")
    stages = read_maps("x")["scores"]["other"]["code"]["loss"]
    assert list(stages) == ["as logged", "fitted elsewhere", "fitted here"]
    changed = Path("x", FILE).read_text().replace('"gamma": 3', '"gamma": 4')
    Path("x", FILE).write_text(changed)
    with pytest.raises(UserError, match="^calibration: .* is damaged"):
        read_maps("x")


def test_jobs_of_a_sweep_have_folders_of_their_own() -> None:
    imported("served")
    run(train, "-m", "data=served", "calibration=sts_sglang,none")
    found = [read_maps(path.parent)["method"] for path in Path("checkpoints").rglob(FILE)]
    assert sorted(found) == ["none", "sts_sglang"]


def test_another_pair_is_refused() -> None:
    for name in ("a", "b"):
        write_harvest(Path(name), gamma=3)
        if name == "b":
            manifest = json.loads(Path("b/manifest.json").read_text())
            pair = {**manifest["pair"], "draft": "zz"}
            write_checksummed(Path("b/manifest.json"), {**manifest, "pair": pair})
        run(import_confidence, "source=harvest", f"source.data={name}", f"out=q-{name}")
    line = refused(train, "data=q-a", "drift=[q-b]")
    assert line == "error: drift: q-b was made with pair.draft=zz, q-a with bb. Leave it out"
    imported("served")
    run(train, "data=q-a", "drift=[served]", "calibration=sts_sglang")


def test_bad_input_is_one_line() -> None:
    here = ("source.files=sts.*.pt", "out=served")
    wrong = refused(import_confidence, *here, "gamma=4")
    assert wrong.startswith("error: gamma: expected proposals of 4 tokens, got 3")
    assert "no file matches" in refused(import_confidence, "source.files=no.*.pt")
    Path("mine").mkdir()
    Path("mine/x").write_text("mine")
    assert "out: mine holds something else" in refused(import_confidence, *here, "out=mine")
    imported("served")
    assert "out: mine holds something else" in refused(train, "data=served", "out=mine")
    torch.save({"logits": torch.zeros(99, 2), "prefix_mask": torch.zeros(99, 2)}, "two.pt")
    run(import_confidence, "source.files=two.pt", "out=two")
    assert "drift: expected proposals of 3 tokens" in refused(train, "data=served", "drift=[two]")
    write_harvest(Path("harvest"))
    sequential = refused(train, "data=harvest", "calibration=sts")
    assert sequential.startswith("error: calibration: sequential temperatures are for imported")
    assert "drift:" in refused(train, "data=served", "drift=[harvest]")
    assert "drift: expected other folders" in refused(train, "data=served", "drift=[./served]")
    facts = json.loads(Path("served/confidences.json").read_text())
    Path("served/confidences.json").write_text(json.dumps({**facts, "gamma": 2}))
    assert "data: served" in refused(train, "data=served")
