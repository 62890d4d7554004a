"""Exported files, read by the engines' own code where a CPU can run it, else against what the
engines' sources demand of them."""

import ast
import importlib.util
import json
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import yaml
from transformers import GenerationConfig

from predictors.confidences.sts import Sts, equal_width_ece
from serving.export.base import Engine, Export
from serving.export.sglang import Sglang
from serving.export.tensorrt_llm import TensorrtLlm
from serving.export.transformers import Transformers
from serving.export.vllm import Vllm
from serving.schedule import Range, Schedule
from serving.sources.sglang import SglangShards
from tests.helpers.serving.exports import COSTS, SCHEDULE, TEMPERATURES, told
from tests.helpers.training.confidences import logged

SGLANG, VLLM = "sglang==0.5.23", "vllm==0.33.0"
SCHEDULES = [SCHEDULE, Schedule.at({1: 5}), Schedule((Range(1, 2, 2), Range(3, 9, 6)))]


def written(folder: Path, engine: Engine, **changed: Any) -> Export:
    made = engine.export(told(**changed))
    for name, text in made.files.items():
        (folder / name).write_text(text)
    return made


def test_transformers_reads_its_file(tmp_path: Path) -> None:
    written(tmp_path, Transformers("confidence"))
    found = GenerationConfig.from_pretrained(str(tmp_path))
    assert (found.num_assistant_tokens, found.num_assistant_tokens_schedule) == (3, "constant")
    assert found.assistant_confidence_threshold == 0.375
    draft = GenerationConfig()
    assert draft.update(**found.to_diff_dict()) == {}
    assert draft.num_assistant_tokens == 3 and draft.assistant_confidence_threshold == 0.375


# As vllm/v1/spec_decode/dynamic/utils.py and vllm/config/speculative.py of 0.33.0 demand --------


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_vllm_finds_a_length_for_every_batch(schedule: Schedule, tmp_path: Path) -> None:
    written(tmp_path, Vllm("eagle3"), schedule=schedule)
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


@pytest.mark.slow
def test_vllm_reads_its_files(clean: None, tmp_path: Path) -> None:
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
        written(tmp_path, Vllm("eagle3"), schedule=schedule)
        found = json.loads((tmp_path / "speculative_config.json").read_text())
        most = found["num_speculative_tokens"]
        dense = lookup(found["num_speculative_tokens_per_batch_size"], 64, most)
        for one in schedule.ranges:
            assert set(dense[one.low : one.high + 1]) == {one.length}
        rates = json.loads((tmp_path / "synthetic.json").read_text())
        count, said = rates["num_speculative_tokens"], rates["synthetic_acceptance_rates"]
        assert space["_resolve_synthetic_acceptance_rates"](count, said, None) == said


# As tensorrt_llm/llmapi/llm_args.py demands -------------------------------------------------------


@pytest.mark.parametrize("schedule", [*SCHEDULES, None])
def test_tensorrt_accepts_the_schedule(schedule: Schedule | None, tmp_path: Path) -> None:
    made = written(tmp_path, TensorrtLlm("Eagle3", 256), schedule=schedule)
    for name in made.files:
        found = yaml.safe_load((tmp_path / name).read_text())["speculative_config"]
        assert not {"max_concurrency", "draft_len_schedule"} <= found.keys()
        assert found["max_draft_len"] >= 1 and found.get("max_concurrency", 1) >= 1
        assert 0 <= found["acceptance_rate_threshold"] <= 1
        lengths = found.get("draft_len_schedule", {1: found["max_draft_len"]})
        assert lengths[min(lengths)] == found["max_draft_len"] == max(lengths.values())
        assert all(size >= 1 and length >= 0 for size, length in lengths.items())


# SGLang's own modules -----------------------------------------------------------------------------

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
    files = extracted(SGLANG, PARTS.values(), tmp_path)
    return {
        part: module(name, path) for (part, name), path in zip(PARTS.items(), files, strict=True)
    }


@pytest.mark.slow
def test_sglang_reads_its_files(sglang: dict[str, Any], tmp_path: Path) -> None:
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
def test_our_fit_is_that_of_sglang(sglang: dict[str, Any], tmp_path: Path) -> None:
    fit, rows = sglang["dspark_sts_fit"], logged(2000, 5)
    recorder = sglang["dspark_sts"].StsDataRecorder(
        path_stem=str(tmp_path / "sts"), gamma=3, flush_every=4
    )
    for some in torch.arange(2000).split(250):
        recorder.record(
            confidence_raw=rows.logits[some], num_correct_drafts=rows.labels[some].sum(1)
        )
    found = SglangShards(str(tmp_path / "sts.*.pt"), "toy").read()
    assert torch.equal(found.logits, rows.logits) and torch.equal(found.labels, rows.labels)
    logits, mask = fit.load_collected_shards(data_glob=str(tmp_path / "sts.*.pt"))
    theirs = fit.fit_sts_temperatures(
        logits=logits, prefix_mask=mask, grid=fit.default_temperature_grid()
    )
    assert Sts(0.1, 10.0, 41, False, 15)(found) == theirs["temperatures"]
    logged_errors = [
        equal_width_ece(torch.sigmoid(rows.logits).cumprod(1)[:, i], rows.labels[:, i], 15)
        for i in range(3)
    ]
    assert logged_errors == pytest.approx(theirs["ece_before"], abs=1e-12)
