"""scripts/tune.py batch=[...] on a tiny harvest, and what scripts/export.py makes of it."""

import json
import re
from pathlib import Path

import pytest

from decoding.batch_cost import read_batch_cost
from scripts import export, tune
from serving.schedule import read_schedule
from tests.helpers.programs.programs import refused, run

FILE = "runs/schedule.json"
COST = ["batch_cost=per_row", "batch_cost.first_draft=0.001", "batch_cost.draft_row=0"]
FREE = [*COST, "batch_cost.target_row=0"]
FILES = {
    "sglang": "adaptive.json",
    "vllm": "speculative_config.json",
    "tensorrt_llm": "speculative_config.yaml",
}


def test_a_schedule_is_written_and_exported(
    replaying: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    run(tune, *replaying, *FREE, "batch=[1,4]", f"out={FILE}")
    printed, found = capsys.readouterr().out, json.loads(Path(FILE).read_text())
    assert (
        "Costs per_row (given), speeds modelled, test prompts" in printed
        and f"saved {FILE}" in printed
    )
    sizes = found["details"]["sizes"]
    assert [one["requests"] for one in sizes] == [1, 4]
    assert sizes[1]["tokens_per_second"] == pytest.approx(4 * sizes[0]["tokens_per_second"])
    assert read_schedule(FILE).longest == max(one["length"] for one in sizes) > 0
    for engine, file in FILES.items():
        run(export, f"serving={engine}", f"schedule={FILE}", f"out=exported/{engine}")
        assert Path(f"exported/{engine}/{file}").is_file()


def test_nothing_is_drafted_where_rows_are_dear(
    replaying: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    dear = [*COST, "batch_cost.target_row=10"]
    run(tune, *replaying, *dear, "batch=[8]", f"out={FILE}")
    assert read_schedule(FILE).longest == 0
    printed = capsys.readouterr().out
    assert "\nUse plain decoding for 8 request(s).\n" in printed
    assert re.search(r"\| 8 +\| do not speculate \|", printed)


def test_the_scheduler_is_simulated(
    replaying: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ["batch=[1,4]", "scheduler=true", f"out={FILE}"]
    run(tune, *replaying, *FREE, *sizes, "judge_data=[data/greedy]")
    printed = capsys.readouterr().out
    found = json.loads(Path(FILE).read_text())["details"]["scheduler"]
    assert list(found) == ["data/greedy, test prompts", "data/greedy"]
    for name, rows in found.items():
        assert f"Scheduler, judged on {name}\n" in printed
        assert [one["requests"] for one in rows] == [1] * 12 + [4] * 12
        said = {"", "as logged", "position alone", "sts", "platt", "oracle"}
        assert {one["confidences"] for one in rows} == said
        plain, fixed = (row["tokens_per_second"]["value"] for row in rows[:2])
        assert fixed >= plain > 0
    assert re.search(r"\| 4 +\| budget, platt, 2 steps old +\|", printed)


def test_costs_are_measured_and_read_again(
    replaying: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    file, more = "runs/tiny-batch-cost.json", ["batch=[1,3]", "batch_cost.file=runs/costs.json"]
    measure = ["batch_cost=measure", "batch_cost.context=5", "batch_cost.repeats=2"]
    run(tune, *replaying, *measure, *more, f"out={FILE}")
    assert "Costs measure (measured)" in capsys.readouterr().out and not Path(file).exists()
    measured, found = read_batch_cost("runs/costs.json"), read_schedule(FILE).costs
    assert found and measured.requests == found.requests == [1, 3]
    assert found.draft_seconds == measured.draft_seconds and min(found.draft_seconds) > 0
    run(tune, *replaying, "batch_cost=measured", *more, "out=runs/again.json")
    assert read_schedule("runs/again.json") == read_schedule(FILE)
    run(export, "serving=sglang", f"schedule={FILE}", "out=exported/measured")
    assert Path("exported/measured/sps_additive.json").is_file()


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["batch=[0]"], "batch"),
        (["batch=[]"], "batch"),
        (["batch=[4,1]"], "batch: expected numbers in rising order, such as [1, 4]"),
        (
            ["batch=[1]", "check=true"],
            "check: expected false with batch, which decodes nothing, got true",
        ),
        (["batch=[4,4]"], "batch: expected a list of different whole numbers"),
        (["batch=[1]", "judge_data=[data/other]"], "judge_data: expected [] with batch"),
        (["scheduler=true"], "scheduler: expected false without batch"),
        (["batch=[1]", *COST, "batch_cost.first_target=0"], "batch_cost.first_target"),
        (["batch=[1]", "batch_cost=measured"], "batch_cost.file: runs/"),
        (
            ["batch=[1]", "batch_cost=measure", "batch_cost.rows=[1,2]"],
            "batch_cost.rows: expected rows up to",
        ),
        (
            ["batch=[1]", "batch_cost=measure", "batch_cost.rows=[2,1]"],
            "batch_cost.rows: expected rising numbers from 1 on, such as [1, 2]",
        ),
        (
            ["batch=[1]", "batch_cost=measure", "batch_cost.context=100000"],
            "batch_cost.context: expected at most",
        ),
    ],
)
@pytest.mark.few(2)
def test_bad_input(arguments: list[str], line: str, replaying: list[str]) -> None:
    assert line in refused(tune, *replaying, *arguments)
