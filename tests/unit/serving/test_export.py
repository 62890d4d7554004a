"""Every engine's files, letter for letter, and what is said of the rest.

To write the golden files anew: python tests/unit/serving/test_export.py"""

import ast
import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from decoding.batch_cost import BatchTable, PerRow, Roofline, tabled
from decoding.cost import cost_table
from serving.export.base import Engine, Export
from serving.export.deepspec import Deepspec
from serving.export.sglang import Sglang, additive, steps_by_batch
from serving.export.tensorrt_llm import TensorrtLlm
from serving.export.transformers import Transformers
from serving.export.vllm import Vllm
from serving.schedule import Range, Schedule
from tests.helpers.serving.exports import COSTS, CURVES, SCHEDULE, calibration, thresholds, told

GOLDEN = Path(__file__).with_name("golden")
ENGINES: dict[str, Engine] = {
    "sglang": Sglang(0.001, "EAGLE3"),
    "vllm": Vllm("eagle3"),
    "tensorrt_llm": TensorrtLlm("Eagle3", 256),
    "deepspec": Deepspec(),
    "transformers": Transformers("confidence"),
}
NEVER = Schedule((Range(1, 32, 0),))


def golden(made: Export) -> str:
    files = [f"== {name}\n{text}" for name, text in made.files.items()]
    return "\n".join([*files, "== to start with", *made.launch, "== left out", *made.left_out, ""])


@pytest.mark.parametrize("name", list(ENGINES))
def test_golden_files(name: str) -> None:
    assert golden(ENGINES[name].export(told())) == (GOLDEN / f"{name}.txt").read_text()


@pytest.mark.parametrize("name", list(ENGINES))
def test_what_is_not_given_is_not_written(name: str) -> None:
    nothing = told(calibration=None, costs=None, schedule=None, thresholds=None, gamma=None)
    made = ENGINES[name].export(nothing)
    assert made.files == {} and made.launch == [] and made.left_out == []


@pytest.mark.parametrize("name", ["sglang", "deepspec"])
def test_maps_that_are_no_temperatures_are_named(name: str) -> None:
    made = ENGINES[name].export(told(calibration=calibration(CURVES, note="it helps nobody")))
    said = "\n".join(made.left_out)
    assert "the maps of positions 2, 3 are no temperatures (isotonic)" in said
    assert "the map of survival" in said and "although it helps nobody" in said


@pytest.mark.parametrize("name", ["sglang", "vllm", "tensorrt_llm", "transformers"])
def test_a_schedule_that_never_drafts(name: str) -> None:
    only = told(calibration=None, costs=None, thresholds=None, gamma=None, schedule=NEVER)
    made = ENGINES[name].export(only)
    assert made.files == {} and "nothing is drafted" in "\n".join(made.left_out)


def tensorrt(schedule: Schedule | None, **more: Any) -> tuple[dict[str, Any], Export]:
    made = ENGINES["tensorrt_llm"].export(told(schedule=schedule, **more))
    return yaml.safe_load(made.files["speculative_config.yaml"])["speculative_config"], made


def test_lines_to_paste_hold_any_path() -> None:
    odd = {"folder": "my runs/it's", "target": "a b", "draft": "c;d"}
    for name in ("sglang", "vllm", "tensorrt_llm"):
        for line in ENGINES[name].export(told(**odd)).launch:
            kept, folder = line.replace('"$(cat ', "").replace(')"', ""), odd["folder"]
            words = shlex.split(kept)
            assert odd["target"] in words and "c" not in words
            assert any(word.startswith(f"{folder}/") for word in words)
    said = ENGINES["transformers"].export(told(folder='a"b')).launch[1]
    assert ast.literal_eval(said.split("from_pretrained")[1]) == 'a"b'


@pytest.mark.parametrize(
    ("name", "given"),
    [("tensorrt_llm", "costs"), ("sglang", "costs"), ("transformers", "thresholds")],
)
def test_what_lacks_a_length_says_so(name: str, given: str) -> None:
    others = {"calibration", "costs", "schedule", "thresholds", "gamma"} - {given}
    made = ENGINES[name].export(told(**dict.fromkeys(others)))
    assert not made.files
    assert made.left_out[0] == f"{given}: they take a draft's length. Write gamma="


def test_tensorrt_takes_no_later_length_above_the_first() -> None:
    schedule = Schedule((Range(1, 2, 2), Range(3, 4, 5), Range(5, 8, 1)))
    config, made = tensorrt(schedule)
    assert config["max_draft_len"] == 2 and config["draft_len_schedule"] == {4: 2, 8: 1}
    assert "longer ones are cut" in made.left_out[0]
    _, made = tensorrt(Schedule((Range(1, 16, 4), Range(17, 64, 0))))
    config = yaml.safe_load(made.files["max_concurrency.yaml"])["speculative_config"]
    assert config["max_concurrency"] == 16 and "draft_len_schedule" not in config


def test_the_floor_is_where_the_longest_draft_costs_what_it_brings() -> None:
    schedule = Schedule((Range(1, 4, 5), Range(5, 8, 2)))
    config, _ = tensorrt(schedule, gamma=None, calibration=None)
    step = COSTS.target(6) + 5 * COSTS.draft
    floor = (step / COSTS.autoregressive - 1) / 5
    assert config["acceptance_rate_threshold"] == round(floor, 6)
    config, _ = tensorrt(None, costs=cost_table(1, {1: 10, 4: 11}))
    assert config["acceptance_rate_threshold"] == pytest.approx((14 / 10 - 1) / 3, abs=1e-6)
    config, made = tensorrt(None, costs=cost_table(10, {1: 10, 4: 20}))
    assert config["acceptance_rate_threshold"] == 1.0
    assert "never pays" in "\n".join(made.left_out)


def test_costs_of_one_number_of_rows_are_no_table() -> None:
    made = ENGINES["sglang"].export(told(costs=cost_table(1, 10)))
    assert "sps.json" not in made.files and "one number of rows" in "\n".join(made.left_out)
    made = ENGINES["sglang"].export(told(calibration=None, gamma=None))
    assert "they take a draft's length" in "\n".join(made.left_out)


def test_a_rule_that_was_not_tuned_and_rates_of_prefixes_that_rise() -> None:
    made = ENGINES["transformers"].export(told(thresholds=thresholds()))
    assert '"assistant_confidence_threshold": 0.0' in made.files["generation_config.json"]
    assert made.left_out[0] == "thresholds: nothing is tuned of confidence"
    made = ENGINES["vllm"].export(told(calibration=calibration(accepted=[0.75, 0.5, 0.625])))
    rates = yaml.safe_load(made.files["synthetic.json"])["synthetic_acceptance_rates"]
    assert rates == [0.75, 0.5, 0.5]


# SGLang's tables of costs by batch size, looked up as SGLang does -------------------------------

GAMMA, OVERHEAD, SIZES = 3, 0.001, [1, 2, 4, 8]
SUM = tabled(PerRow(0.02, 0.001, 0.002, 0.0005), SIZES, GAMMA)
ROOF = tabled(
    Roofline(3350.0, 989.0, 7.505, 0.374, 2.0, 131072.0, 4096.0, 1024, 0.0),
    [1, 16, 64, 256, 512],
    GAMMA,
)


def seconds(table: dict[str, Any], requests: int, rows: int) -> float:
    """SGLang's: a bias and two functions, linear between their probes."""
    alpha = np.interp(requests, table["bs_probes"], table["alpha_seconds"])
    return float(
        table["bias_seconds"] + alpha + np.interp(rows, table["m_probes"], table["theta_seconds"])
    )


def test_steps_are_of_whole_drafts() -> None:
    found = steps_by_batch(SUM, GAMMA, OVERHEAD)
    assert found["sample_batch_tokens"] == [4, 8, 16, 32] and found["max_batch_tokens"] == 32
    step = SUM.target(4, 16) + 3 * SUM.draft(4) + OVERHEAD
    assert 1 / found["sample_steps_per_sec"][2] == pytest.approx(step)


def test_what_is_a_sum_is_told_whole() -> None:
    table, error = additive(SUM, GAMMA, OVERHEAD)
    assert error < 1e-6
    for size in SIZES:
        for rows in range(size, size * (GAMMA + 1) + 1):
            step = SUM.target(size, rows) + GAMMA * SUM.draft(size) + OVERHEAD
            assert seconds(table, size, rows) == pytest.approx(step, rel=1e-6)


def test_what_is_none_is_told_as_nearly_as_said() -> None:
    table, error = additive(ROOF, GAMMA, OVERHEAD)
    assert 0 < error < 0.5 and table["bias_seconds"] > 0
    assert min(table["alpha_seconds"] + table["theta_seconds"]) >= 0
    for name in ("bs_probes", "m_probes"):
        assert table[name] == sorted(set(table[name]))
    gaps = [
        seconds(table, size, size * each) - GAMMA * ROOF.draft(size) - OVERHEAD - target
        for size, line in zip(ROOF.requests, ROOF.target_seconds, strict=True)
        for each, target in zip(ROOF.rows, line, strict=True)
    ]
    flat = [one for line in ROOF.target_seconds for one in line]
    assert max(np.abs(gaps) / flat) == pytest.approx(error)


def exported(costs: BatchTable, /, **changed: Any) -> Export:
    schedule = replace(SCHEDULE, costs=costs)
    return Sglang(OVERHEAD, "EAGLE3").export(told(schedule=schedule, **changed))


def test_a_schedule_with_costs_gives_them_by_requests() -> None:
    made = exported(SUM)
    assert json.loads(made.files["sps.json"]) == steps_by_batch(SUM, GAMMA, OVERHEAD)
    assert json.loads(made.files["sps_additive.json"])["bs_probes"] == SIZES
    assert "costs: those of the schedule (given), by requests" in "\n".join(made.left_out)
    alone = exported(SUM, costs=None, calibration=None, gamma=None)
    assert alone.files["sps.json"] == made.files["sps.json"]


def test_costs_of_shorter_drafts_and_of_one_size_are_left_out() -> None:
    made = exported(SUM, gamma=5, calibration=None)
    assert "its costs end at 4 rows of a request, gamma is 5" in "\n".join(made.left_out)
    one_size = exported(tabled(PerRow(0.02, 0.001, 0.002, 0.0), [1], GAMMA))
    for each in (made, one_size):
        assert json.loads(each.files["sps_additive.json"])["bs_probes"] == [1]


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for engine, made_of in ENGINES.items():
        (GOLDEN / f"{engine}.txt").write_text(golden(made_of.export(told())))
