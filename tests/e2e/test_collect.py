"""tune.py what=checkpoints from its command line on checkpoints of a sweep over a tiny harvest."""

import json
import re
import shutil
from pathlib import Path

import pytest

import train
from evaluation.replay.collect import checkpoints
from scripts import tune
from tests.helpers.programs.programs import mode, refused, run
from tests.helpers.training.checkpoints import rewrite_checksum

collect = mode(tune.checkpoints)

QUICK = ("data=data/greedy", "trainer.epochs=1", "logger=none")
REPLAY = ("data=data/greedy", "cost=c10", "points=5")


def swept(name: str, *grid: str) -> str:
    """The folder of the checkpoints of a Hydra multirun."""
    shutil.rmtree(name, ignore_errors=True)
    run(train, "-m", *QUICK, *grid, f"out={name}")
    return f"folder={name}"


def cells(path: str) -> list[dict[str, str]]:
    """The rows of a table, by column."""
    header, _, *rows = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in Path(path).read_text().splitlines()
        if line.startswith("|")
    ]
    return [dict(zip(header, row, strict=True)) for row in rows]


@pytest.mark.slow
def test_a_sweep_of_heads_is_one_table(
    replaying: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = swept("heads", "predictor=specdecpp", "predictor.depth=0,1", "predictor.w_rej=1,6")
    run(collect, folder, *REPLAY)
    assert "saved heads/table.md" in capsys.readouterr().out
    rows = cells("heads/table.md")
    assert [(row["depth"], row["w_rej"]) for row in rows] == [
        ("0", "1"),
        ("0", "6"),
        ("1", "1"),
        ("1", "6"),
    ]
    assert list(rows[0])[:4] == ["checkpoint", "depth", "w_rej", "nll"], (
        "no column in which they are the same"
    )
    for row in rows:
        metrics = json.loads(Path("heads", row["checkpoint"], "metrics.json").read_text())
        test = metrics["test"]["specdecpp"]
        assert row["ece"] == f"{test['ece']:.4f}" and row["nll"] == f"{test['kl']:.4f}", (
            "labels of a greedy target have no entropy"
        )
        assert float(row["speed-up, modelled"].split()[0]) > 0 and row["threshold"]


@pytest.mark.slow
def test_inputs_by_number_of_prompts_is_one_table(replaying: list[str]) -> None:
    grid = ("predictor=value", "prompts=2,4", "predictor.inputs=[q_stats],[q_stats,depth]")
    run(collect, swept("inputs", *grid), *REPLAY)
    rows = cells("inputs/table.md")
    read = ("q_stats depth", "q_stats")
    assert [(row["reads"], row["prompts"]) for row in rows] == [
        (names, prompts) for names in read for prompts in ("2", "4")
    ]
    (column,) = (name for name in rows[0] if name.startswith("survival, "))
    assert re.fullmatch(r"0\.\d{4}, [+-]0\.\d{4} \(.* to .*\)", rows[0][column])


@pytest.mark.slow
def test_a_sweep_of_layers_and_draft_lengths_is_one_table(replaying: list[str]) -> None:
    grid = ("predictor=hrad", "predictor.layers=[-1],[-3,-1],null", "predictor.gamma=2,3")
    folder = swept("layers", *grid)
    run(collect, folder, *REPLAY)
    rows = cells("layers/table.md")
    assert [row["gamma"] for row in rows] == ["2"] * 3 + ["3"] * 3
    assert (
        {row["layers"] for row in rows[:3]}
        == {"-1", "-3 -1", "-4 -3 -2 -1"}
        == {row["layers"] for row in rows[3:]}
    )
    assert all(float(row["speed-up, modelled"].split()[0]) > 0 for row in rows)
    run(collect, folder, *REPLAY, "thresholds=[0.2,0.9]")
    every = cells("layers/table.md")
    one, same, other = every[:3]
    assert one["checkpoint"] == same["checkpoint"] != other["checkpoint"]
    assert [row["threshold"] for row in every] == ["0.2", "0.9"] * 6
    run(collect, folder, "data=null")
    alone = cells("layers/table.md")
    assert list(alone[0]) == [
        "checkpoint",
        "layers",
        "gamma",
        "nll",
        "brier",
        "ece",
        "auroc",
        "seconds",
    ]
    assert [row["nll"] for row in alone] == [row["nll"] for row in rows]


def test_checkpoints_are_counted_as_people_do(tmp_path: Path) -> None:
    names = ["depth=0+w_rej=6", "depth=0+w_rej=12", "depth=2+w_rej=1", "depth=10+w_rej=1"]
    for name in reversed(names):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.json").touch()
    assert [folder.name for folder in checkpoints(tmp_path)] == names


def test_what_cannot_be_collected_ends_with_one_line(replaying: list[str], harvest: Path) -> None:
    shutil.copytree(harvest / "checkpoints", "broken", dirs_exist_ok=True)
    score = {"log_loss": [0.25, None, None]}
    whole = {"test": {}, "reliability": {"x": {"token": {"as trained": score}}}, "seconds": 3.0}
    for name in ("specdecpp", "hrad"):
        test = {name: {"brier": 0.5, "ece": 0.25, "auroc": None}}
        Path("broken", name, "metrics.json").write_text(json.dumps(whole | {"test": test}))
        rewrite_checksum(Path("broken", name))
    run(collect, "folder=broken", "data=null", "out=runs/new/table.md")
    assert (
        cells("runs/new/table.md")[1]["auroc"] == "-"
        and cells("runs/new/table.md")[1]["nll"] == "0.2500"
    )
    shutil.rmtree("runs/new")
    for argument in ("[]", "[2]", "0.5"):
        message = refused(collect, "folder=broken", *REPLAY, f"thresholds={argument}")
        assert message.startswith("error: thresholds: ")
    better = json.dumps(whole | {"test": test}).replace("0.25", "0.15")
    for text, fits in ((better, False), ("{", False), ("{", True), (json.dumps(whole), True)):
        Path("broken/hrad/metrics.json").write_text(text)
        if fits:
            rewrite_checksum(Path("broken/hrad"))
        message = refused(collect, "folder=broken", "data=null")
        assert message.startswith("error: folder: broken/hrad") and "damaged" in message
    message = refused(collect, "folder=broken", *REPLAY)
    assert "folder: broken/hrad is incomplete or damaged" in message
    assert "folder: no checkpoints" in refused(collect, "folder=runs", *REPLAY)
