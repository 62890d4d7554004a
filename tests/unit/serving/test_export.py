"""Every engine's files, letter for letter, read by its own code or against what its sources demand,
and what is said of the rest; draft lengths by requests.

To write the golden files anew: python tests/unit/serving/test_export.py"""

import ast
import importlib.util
import json
import shlex
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from transformers import GenerationConfig

from decoding.batch_cost import BatchTable, PerRow, Roofline, tabled
from decoding.cost import cost_table
from evaluation.replay.thresholds import checkpoint_hash
from predictors.calibration import Calibration
from predictors.confidences.maps import PositionMaps, of_temperatures
from predictors.confidences.sts import Sts, equal_width_ece
from predictors.survival import Survival
from serving.export.base import Engine, Export, Given
from serving.export.deepspec import Deepspec
from serving.export.sglang import Sglang, additive, steps_by_batch
from serving.export.tensorrt_llm import TensorrtLlm
from serving.export.transformers import Transformers
from serving.export.vllm import Vllm
from serving.schedule import Range, Schedule, read_schedule, write_schedule
from serving.sources.sglang import SglangShards
from tests.helpers.damage.refusals import refuses
from tests.helpers.training.checkpoints import columns, write_checkpoint
from tests.helpers.training.confidences import logged

SCHEDULE = Schedule((Range(1, 4, 3), Range(5, 8, 2), Range(9, 32, 0)))
COSTS = cost_table(0.002, {1: 0.02, 4: 0.024, 8: 0.0275})
TEMPERATURES = [1.5, 2.0, 0.5]
CURVES = PositionMaps(
    (
        Calibration("temperature", scale=(0.5, 0.5)),
        Calibration("platt", scale=(0.5, 0.5), bias=(0.0, 0.25)),
        Calibration("isotonic", curves=(((-1.0, 1.0), (0.25, 0.75)),)),
    ),
    Survival(0.75, 0.125, -0.5),
)
STS = {"lowest": 0.05, "highest": 20.0, "points": 256, "with_one": True, "bins": 20}
SGLANG, VLLM = "sglang==0.5.23", "vllm==0.33.0"
SCHEDULES = [SCHEDULE, Schedule.at({1: 5}), Schedule((Range(1, 2, 2), Range(3, 9, 6)))]


def calibration(maps: PositionMaps | None = None, **changed: Any) -> dict[str, Any]:
    """As `read_maps` gives it."""

    def errors(value: float) -> dict[str, list[float]]:
        return {error: [value, value / 2, value * 2] for error in ("deepspec", "sglang")}

    positions = []
    for n in (1, 2, 3):
        stages = {"as logged": errors(n / 16), "fitted here": errors(n / 64)}
        positions.append({"position": n, "rows": 1000, "accepted": 0.5, "stages": stages})
    return {
        "method": "sts" if maps is None else "isotonic",
        "gamma": 3,
        "maps": asdict(maps or of_temperatures(TEMPERATURES)),
        "temperatures": TEMPERATURES,
        "temperatures_fitted": "sequential, on the survival",
        "accepted": [0.75, 0.5, 0.25],
        "proposals": 1000,
        "note": "",
        "sts": STS if maps is None else None,
        "scores": {"data/served": {"chat": {"positions": positions}}},
        "data": {"folder": "data/served", "domains": ["chat"]},
        **changed,
    }


def thresholds(**rules: Any) -> dict[str, Any]:
    sampled = {"temperature": 1.0}
    return {"draft_warp": sampled, "results": {"chosen": {"advice": "x", "rules": rules}}}


def told(**changed: Any) -> Given:
    """Everything there is, but for what is changed."""
    tuned = {"threshold": 0.375, "speculate": True, "speedup": 1.5, "interval": (1.25, 1.75)}
    given = {
        "calibration": calibration(),
        "costs": COSTS,
        "schedule": SCHEDULE,
        "thresholds": thresholds(confidence=tuned),
        "gamma": 3,
        "target": "org/target",
        "draft": "org/draft",
        "folder": "runs/export",
    }
    return Given(**{**given, **changed})


GOLDEN = Path(__file__).with_name("golden")
VLLM_EXPORT = Vllm("eagle3", None, None, "python", True, True)
ENGINES: dict[str, Engine] = {
    "sglang": Sglang(0.001, "EAGLE3"),
    "vllm": VLLM_EXPORT,
    "tensorrt_llm": TensorrtLlm("Eagle3", 256),
    "deepspec": Deepspec(),
    "transformers": Transformers("confidence"),
}
NEVER = Schedule((Range(1, 32, 0),))


def golden(made: Export) -> str:
    files = [f"== {name}\n{text}" for name, text in made.files.items()]
    return "\n".join([*files, "== to start with", *made.launch, "== left out", *made.left_out, ""])


@pytest.mark.parametrize("name", list(ENGINES))
def test_golden_files(name):
    assert golden(ENGINES[name].export(told())) == (GOLDEN / f"{name}.txt").read_text()


@pytest.mark.parametrize("name", list(ENGINES))
def test_what_is_not_given_is_not_written(name):
    nothing = told(calibration=None, costs=None, schedule=None, thresholds=None, gamma=None)
    made = ENGINES[name].export(nothing)
    assert made.files == {} and made.launch == [] and made.left_out == []


@pytest.mark.parametrize("name", ["sglang", "deepspec"])
def test_maps_that_are_no_temperatures_are_named(name):
    made = ENGINES[name].export(told(calibration=calibration(CURVES, note="it helps nobody")))
    said = "\n".join(made.left_out)
    assert "the maps of positions 2, 3 are no temperatures (isotonic)" in said
    assert "the map of survival" in said and "although it helps nobody" in said


@pytest.mark.parametrize("name", ["sglang", "vllm", "tensorrt_llm", "transformers"])
def test_a_schedule_that_never_drafts(name):
    only = told(calibration=None, costs=None, thresholds=None, gamma=None, schedule=NEVER)
    made = ENGINES[name].export(only)
    assert made.files == {} and "nothing is drafted" in "\n".join(made.left_out)


def tensorrt(schedule: Schedule | None, **more: Any) -> tuple[dict[str, Any], Export]:
    made = ENGINES["tensorrt_llm"].export(told(schedule=schedule, **more))
    return yaml.safe_load(made.files["speculative_config.yaml"])["speculative_config"], made


def test_lines_to_paste_hold_any_path():
    odd = {"folder": "my runs/it's", "target": "a b", "draft": "c;d"}
    for name in ("sglang", "vllm", "tensorrt_llm"):
        for line in ENGINES[name].export(told(**odd)).launch:
            kept, folder = line.replace('"$(cat ', "").replace(')"', ""), odd["folder"]
            words = shlex.split(kept)
            assert odd["target"] in words and "c" not in words
            assert any(word.startswith(f"{folder}/") for word in words)
    said = ENGINES["transformers"].export(told(folder='a"b')).launch[1]
    assert ast.literal_eval(said.split("from_pretrained")[1]) == 'a"b'


@pytest.mark.parametrize("name", ["tensorrt_llm", "sglang", "transformers"])
def test_what_lacks_a_length_says_so(name):
    given = "thresholds" if name == "transformers" else "costs"
    others = {"calibration", "costs", "schedule", "thresholds", "gamma"} - {given}
    made = ENGINES[name].export(told(**dict.fromkeys(others)))
    assert not made.files
    assert made.left_out[0] == f"{given}: they take a draft's length. Write gamma="


def test_tensorrt_takes_no_later_length_above_the_first():
    schedule = Schedule((Range(1, 2, 2), Range(3, 4, 5), Range(5, 8, 1)))
    config, made = tensorrt(schedule)
    assert config["max_draft_len"] == 2 and config["draft_len_schedule"] == {4: 2, 8: 1}
    assert "longer ones are cut" in made.left_out[0]
    _, made = tensorrt(Schedule((Range(1, 16, 4), Range(17, 64, 0))))
    config = yaml.safe_load(made.files["max_concurrency.yaml"])["speculative_config"]
    assert config["max_concurrency"] == 16 and "draft_len_schedule" not in config


def test_the_floor_is_where_the_longest_draft_costs_what_it_brings():
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


def test_costs_of_one_number_of_rows_a_rule_not_tuned_and_rates_that_rise():
    made = ENGINES["sglang"].export(told(costs=cost_table(1, 10)))
    assert "sps.json" not in made.files and "one number of rows" in "\n".join(made.left_out)
    made = ENGINES["sglang"].export(told(calibration=None, gamma=None))
    assert "they take a draft's length" in "\n".join(made.left_out)
    made = ENGINES["transformers"].export(told(thresholds=thresholds()))
    assert '"assistant_confidence_threshold": 0.0' in made.files["generation_config.json"]
    assert made.left_out[0] == "thresholds: nothing is tuned of confidence"
    made = ENGINES["vllm"].export(told(calibration=calibration(accepted=[0.75, 0.5, 0.625])))
    rates = yaml.safe_load(made.files["synthetic.json"])["synthetic_acceptance_rates"]
    assert rates == [0.75, 0.5, 0.5]


# SGLang's tables of costs by batch size, looked up as SGLang does.
GAMMA, OVERHEAD, SIZES = 3, 0.001, [1, 2, 4, 8]
SUM = tabled(PerRow(0.02, 0.001, 0.002, 0.0005), SIZES, GAMMA)
H100 = Roofline(3350.0, 989.0, 7.505, 0.374, 2.0, 131072.0, 4096.0, 1024, 0.0)
ROOF = tabled(H100, [1, 16, 64, 256, 512], GAMMA)


def seconds(table: dict[str, Any], requests: int, rows: int) -> float:
    """SGLang's: a bias and two functions, linear between their probes."""
    alpha = np.interp(requests, table["bs_probes"], table["alpha_seconds"])
    theta = np.interp(rows, table["m_probes"], table["theta_seconds"])
    return float(table["bias_seconds"] + alpha + theta)


def test_steps_are_of_whole_drafts_and_a_sum_is_told_whole():
    found = steps_by_batch(SUM, GAMMA, OVERHEAD)
    assert found["sample_batch_tokens"] == [4, 8, 16, 32] and found["max_batch_tokens"] == 32
    step = SUM.target(4, 16) + 3 * SUM.draft(4) + OVERHEAD
    assert 1 / found["sample_steps_per_sec"][2] == pytest.approx(step)
    table, error = additive(SUM, GAMMA, OVERHEAD)
    assert error < 1e-6
    for size in SIZES:
        for rows in range(size, size * (GAMMA + 1) + 1):
            step = SUM.target(size, rows) + GAMMA * SUM.draft(size) + OVERHEAD
            assert seconds(table, size, rows) == pytest.approx(step, rel=1e-6)


def test_what_is_none_is_told_as_nearly_as_said():
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


def test_a_schedule_with_costs_gives_them_by_requests():
    made = exported(SUM)
    assert json.loads(made.files["sps.json"]) == steps_by_batch(SUM, GAMMA, OVERHEAD)
    assert json.loads(made.files["sps_additive.json"])["bs_probes"] == SIZES
    assert "costs: those of the schedule (given), by requests" in "\n".join(made.left_out)
    alone = exported(SUM, costs=None, calibration=None, gamma=None)
    assert alone.files["sps.json"] == made.files["sps.json"]


def test_costs_of_shorter_drafts_and_of_one_size_are_left_out():
    made = exported(SUM, gamma=5, calibration=None)
    assert "its costs end at 4 rows of a request, gamma is 5" in "\n".join(made.left_out)
    one_size = exported(tabled(PerRow(0.02, 0.001, 0.002, 0.0), [1], GAMMA))
    for each in (made, one_size):
        assert json.loads(each.files["sps_additive.json"])["bs_probes"] == [1]


# Read by the engines' own code where a CPU can run it, else against what their sources demand -----


def written(folder: Path, engine: Engine, **changed: Any) -> Export:
    made = engine.export(told(**changed))
    for name, text in made.files.items():
        (folder / name).write_text(text)
    return made


def test_transformers_reads_its_file(tmp_path):
    written(tmp_path, Transformers("confidence"))
    found = GenerationConfig.from_pretrained(str(tmp_path))
    assert (found.num_assistant_tokens, found.num_assistant_tokens_schedule) == (3, "constant")
    assert found.assistant_confidence_threshold == 0.375
    draft = GenerationConfig()
    assert draft.update(**found.to_diff_dict()) == {}
    assert draft.num_assistant_tokens == 3 and draft.assistant_confidence_threshold == 0.375


# As vllm/v1/spec_decode/dynamic/utils.py and vllm/config/speculative.py of 0.33.0 demand.


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_vllm_finds_a_length_for_every_batch(schedule, tmp_path):
    written(tmp_path, VLLM_EXPORT, schedule=schedule)
    found = json.loads((tmp_path / "speculative_config.json").read_text())
    ranges, most = found["num_speculative_tokens_per_batch_size"], found["num_speculative_tokens"]
    assert most > 0 and ranges[0][0] == 1
    for (low, high, length), after in zip(ranges, [*ranges[1:], None], strict=True):
        assert 1 <= low <= high and 0 <= length <= most
        assert after is None or after[0] == high + 1
    assert [list(one) for one in schedule.ranges] == ranges
    rates = json.loads((tmp_path / "synthetic.json").read_text())
    cumulative = rates["synthetic_acceptance_rates"]
    assert len(cumulative) == rates["num_speculative_tokens"]
    assert cumulative == sorted(cumulative, reverse=True) and 0 <= min(cumulative) <= 1
    assert rates["rejection_sample_method"] == "synthetic"


def greedy(tmp_path: Path, **changed: Any) -> dict[str, Any]:
    """Thresholds of a greedy draft: a fixed length, H-RAD's confidence, and a rule that loses."""
    confidence = {"_target_": "decoding.stopping.confidence.Confidence", "threshold": None}
    hrad = {"_target_": "decoding.stopping.hrad.HRADStop", "none": None, "confidence": confidence}
    fixed = {"_target_": "decoding.stopping.fixed.Fixed", "gamma": None}
    chosen = {
        name: {"threshold": value, "speculate": name != "confidence", "speedup": 1.5}
        for name, value in {"fixed": 3.0, "hrad": 0.25, "confidence": 0.5}.items()
    }
    checkpoint = write_checkpoint(tmp_path / "hrad", "hrad", columns("hrad", 4), gamma=3)
    held = checkpoint_hash(checkpoint, "")
    tuned = {
        "draft_warp": {"temperature": 0.0},
        "gamma": 3,
        "measured_on": {"dtypes": {"draft": "torch.bfloat16"}},
        "rules": {
            "fixed": {"setting": "gamma", "stop": fixed, "checkpoint": None},
            "hrad": {"setting": "confidence.threshold", "stop": hrad, "checkpoint": held},
            "confidence": {"setting": "threshold", "stop": confidence, "checkpoint": None},
        },
        "results": {"chosen": {"advice": "fixed", "rules": chosen}},
    }
    return told(calibration=None, costs=None, schedule=None, thresholds=tuned | changed)


def test_vllm_gets_a_proposer(tmp_path):
    def settings(rule: str | None, checkpoint: Path | None = None, copies: bool = False) -> Any:
        made = Vllm("", rule, checkpoint, "python", copies, True).export(greedy(tmp_path))
        config = json.loads(str(made.files["speculative_config.json"]))
        assert config["model"] == "serving.vllm.Proposer" and config["num_speculative_tokens"] == 3
        line = made.launch[-1]
        named = json.dumps({"draftpredict": str(Path("runs/export/proposer.json").absolute())})
        assert line.endswith(f"--additional-config '{named}'")
        return json.loads(str(made.files["proposer.json"]))

    assert settings(None)["stop"] == {"_target_": "decoding.stopping.fixed.Fixed", "gamma": 3}
    assert settings(None, copies=True)["structure"]["stretch"] == 2
    found = settings("hrad", tmp_path / "hrad")["stop"]
    assert found["confidence"]["threshold"] == 0.25 and found["checkpoint"] == str(
        tmp_path / "hrad"
    )


def test_vllm_gets_no_proposer(tmp_path):
    refuses(
        "serving.checkpoint", Vllm("", "hrad", None, "python", True, True).export, greedy(tmp_path)
    )
    write_checkpoint(tmp_path / "other", "hrad", columns("hrad", 4), gamma=5)
    other = Vllm("", "hrad", tmp_path / "other", "python", True, True)
    refuses("serving.checkpoint", other.export, greedy(tmp_path))
    for rule, changed, why in (
        ("confidence", {}, "no draft pays"),
        ("adaedl", {}, "none of their rules"),
        (None, {"draft_warp": {"temperature": 1.0}}, "sampled draft"),
    ):
        made = Vllm("", rule, None, "python", True, True).export(greedy(tmp_path, **changed))
        assert "proposer.json" not in made.files and why in made.left_out[0]


@pytest.mark.parametrize(
    ("lengths", "written", "why"),
    [
        ({8: 0}, None, "nothing is drafted at any batch size"),
        ({1: 12, 8: 2}, [[1, 1, 3], [2, 8, 2]], "drafts are at most 3 long"),
    ],
)
def test_vllm_drafts_no_more_than_schedule_and_tuning_say(tmp_path, lengths, written, why):
    given = replace(greedy(tmp_path), schedule=Schedule.at(lengths))
    made = Vllm("", None, None, "python", True, True).export(given)
    assert why in made.left_out[0] and ("proposer.json" in made.files) == (written is not None)
    if written:
        config = json.loads(str(made.files["speculative_config.json"]))
        assert config["num_speculative_tokens_per_batch_size"] == written


@pytest.mark.slow
def test_vllm_reads_its_files(clean, tmp_path):
    names = ("vllm.v1.spec_decode.dynamic.utils", "vllm.config.speculative")
    utils, config = extracted(VLLM, names, tmp_path)
    lookup = module(names[0], utils).build_dynamic_sd_schedule_lookup
    methods = [
        node
        for node in ast.walk(ast.parse(config.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name == "_resolve_synthetic_acceptance_rates"
    ]
    space: dict[str, Any] = {}
    methods[0].decorator_list = []
    exec(compile(ast.Module(methods, []), str(config), "exec"), space)
    for schedule in SCHEDULES:
        written(tmp_path, VLLM_EXPORT, schedule=schedule)
        found = json.loads((tmp_path / "speculative_config.json").read_text())
        most = found["num_speculative_tokens"]
        dense = lookup(found["num_speculative_tokens_per_batch_size"], 64, most)
        for one in schedule.ranges:
            assert set(dense[one.low : one.high + 1]) == {one.length}
        rates = json.loads((tmp_path / "synthetic.json").read_text())
        count, said = rates["num_speculative_tokens"], rates["synthetic_acceptance_rates"]
        assert space["_resolve_synthetic_acceptance_rates"](count, said, None) == said


# As tensorrt_llm/llmapi/llm_args.py demands.


@pytest.mark.parametrize("schedule", [*SCHEDULES, None])
def test_tensorrt_accepts_the_schedule(schedule, tmp_path):
    made = written(tmp_path, TensorrtLlm("Eagle3", 256), schedule=schedule)
    for name in made.files:
        found = yaml.safe_load((tmp_path / name).read_text())["speculative_config"]
        assert not {"max_concurrency", "draft_len_schedule"} <= found.keys()
        assert found["max_draft_len"] >= 1 and found.get("max_concurrency", 1) >= 1
        assert 0 <= found["acceptance_rate_threshold"] <= 1
        lengths = found.get("draft_len_schedule", {1: found["max_draft_len"]})
        assert lengths[min(lengths)] == found["max_draft_len"] == max(lengths.values())
        assert all(size >= 1 and length >= 0 for size, length in lengths.items())


# SGLang's own modules.
PARTS = {
    "dspark_sts": "sglang.srt.speculative.dspark_components.dspark_sts",
    "dspark_sps": "sglang.srt.speculative.dspark_components.dspark_sps",
    "adaptive": "sglang.srt.speculative.adaptive_spec_params",
    "dspark_sts_fit": "sglang.benchmark.dspark_sts_fit",
}
ABSENT = {  # what adaptive_spec_params imports of the rest of the engine and needs for no reading
    "sglang.srt.arg_groups.overrides": ("resolved_view", "resolving_view"),
    "sglang.srt.runtime_context": ("attn_dp_enabled_of",),
    "sglang.srt.speculative.spec_info": ("SpeculativeAlgorithm",),
    "sglang.srt.utils": ("log_info_on_rank0",),
}


def pip(*command: str) -> None:
    whole = [sys.executable, "-m", "pip", "-q", *command]
    if subprocess.run(whole, capture_output=True, timeout=600, check=False).returncode:
        pytest.skip(f"pip {' '.join(command[:3])} fails here")


def extracted(engine: str, names: Iterable[str], folder: Path) -> list[Path]:
    """Files of an engine's wheel, read one by one; nothing of it is installed."""
    pip("download", "--no-deps", engine, "-d", str(folder))
    (path,) = folder.glob("*.whl")
    with zipfile.ZipFile(path) as wheel:
        found = [Path(wheel.extract(f"{name.replace('.', '/')}.py", folder)) for name in names]
    path.unlink()
    return found


def module(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec and spec.loader
    found = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


@pytest.fixture
def clean() -> Iterator[None]:
    """What is imported in between is forgotten."""
    before, paths = set(sys.modules), list(sys.path)
    yield
    for name in set(sys.modules) - before:
        del sys.modules[name]
    sys.path[:] = paths


@pytest.fixture
def sglang(clean: None, tmp_path: Path) -> dict[str, ModuleType]:
    pip("install", "--no-deps", "msgspec", "--target", str(tmp_path / "with"))
    sys.path.insert(0, str(tmp_path / "with"))
    for name, words in ABSENT.items():
        sys.modules[name] = ModuleType(name)
        for word in words:
            setattr(sys.modules[name], word, lambda *_, **__: None)
    files = zip(PARTS.items(), extracted(SGLANG, PARTS.values(), tmp_path), strict=True)
    return {part: module(name, path) for (part, name), path in files}


@pytest.mark.slow
def test_sglang_reads_its_files(sglang, tmp_path):
    written(tmp_path, Sglang(0.001, "EAGLE3"))
    sts = sglang["dspark_sts"].load_sts_calibration_from_path(str(tmp_path / "sts.json"))
    assert sts.temperatures == TEMPERATURES and sts.num_samples == 1000
    assert len(sts.ece_before) == len(sts.ece_after) == 3
    load = sglang["dspark_sps"].load_sps_table_from_path
    steps, parts = load(str(tmp_path / "sps.json")), load(str(tmp_path / "sps_additive.json"))
    assert not sglang["dspark_sps"].is_uninitialized_sps_table(steps)
    for rows in COSTS.target.rows:
        seconds = COSTS.target(rows) + 3 * COSTS.draft + 0.001
        assert 1 / steps.lookup(rows) == pytest.approx(seconds)
        assert parts.step_time(num_reqs=1, budget=rows - 1) == pytest.approx(seconds)
    adaptive = str(tmp_path / "adaptive.json")
    assert sglang["adaptive"].resolve_candidate_steps_from_config(adaptive) == [0, 2, 3]
    slots = sglang["adaptive"].AdaptiveSpeculativeParams(3, adaptive)
    for one in SCHEDULE.ranges:
        assert {slots.get_steps_for_batch(size) for size in one[:2]} == {one.length}


@pytest.mark.slow
def test_our_fit_is_that_of_sglang(sglang, tmp_path):
    fit, rows = sglang["dspark_sts_fit"], logged(2000, 5)
    stem = str(tmp_path / "sts")
    recorder = sglang["dspark_sts"].StsDataRecorder(path_stem=stem, gamma=3, flush_every=4)
    for some in torch.arange(2000).split(250):
        right = rows.labels[some].sum(1)
        recorder.record(confidence_raw=rows.logits[some], num_correct_drafts=right)
    found = SglangShards(str(tmp_path / "sts.*.pt"), "toy").read()
    assert torch.equal(found.logits, rows.logits) and torch.equal(found.labels, rows.labels)
    logits, mask = fit.load_collected_shards(data_glob=str(tmp_path / "sts.*.pt"))
    grid = fit.default_temperature_grid()
    theirs = fit.fit_sts_temperatures(logits=logits, prefix_mask=mask, grid=grid)
    assert Sts(0.1, 10.0, 41, False, 15)(found) == theirs["temperatures"]
    said, labels = torch.sigmoid(rows.logits).cumprod(1), rows.labels
    logged_errors = [equal_width_ece(said[:, i], labels[:, i], 15) for i in range(3)]
    assert logged_errors == pytest.approx(theirs["ece_before"], abs=1e-12)


def test_sizes_in_between_draft_as_the_next_larger_one():
    found = Schedule.at({8: 2, 1: 5, 2: 5, 32: 0})
    assert found.ranges == (Range(1, 2, 5), Range(3, 8, 2), Range(9, 32, 0))
    assert found.longest == 5


@pytest.mark.parametrize(
    "ranges",
    [(), ((2, 4, 5),), ((1, 4, 5), (6, 8, 2)), ((1, 4, 5), (4, 8, 2)), ((1, 0, 1),), ((1, 4, -1),)],
)
def test_other_ranges_are_refused(ranges):
    refuses("^schedule: expected ranges", Schedule, tuple(Range(*one) for one in ranges))


def test_a_file_comes_back_and_a_person_may_write_ranges_alone(tmp_path):
    path, schedule = tmp_path / "schedule.json", Schedule.at({4: 5, 8: 2})
    write_schedule(path, schedule, "python scripts/tune.py batch=[4,8]", {"tokens/s": [1.5, 2.0]})
    assert read_schedule(path.rename(tmp_path / "renamed.json")) == schedule
    path = tmp_path / "mine.json"
    path.write_text('{"ranges": [[1, 4, 5], [5, 8, 0]]}')
    assert read_schedule(path).ranges == (Range(1, 4, 5), Range(5, 8, 0))


@pytest.mark.parametrize("ranges", [None, [[1, 4, "5"]], [], [[1, 4, -5]]])
def test_a_damaged_file_is_refused_in_one_line(tmp_path, ranges):
    path = tmp_path / "x.json"
    for text in ("", "[]") if ranges is None else (json.dumps({"ranges": ranges}),):
        path.write_text(text)
        refuses("^schedule:", read_schedule, path)


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for engine, made_of in ENGINES.items():
        (GOLDEN / f"{engine}.txt").write_text(golden(made_of.export(told())))
