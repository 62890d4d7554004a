"""scripts/evaluate.py with `generate` of transformers beside our methods, presented as pairs."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch._inductor import config as inductor
from transformers import CompileConfig, LlamaConfig, LlamaForCausalLM

from decoding.trace import read_traces
from evaluation.baselines import generate
from scripts import evaluate
from tests.helpers.models.tiny_pair import CONFIG
from tests.helpers.programs import programs
from tests.helpers.programs.programs import GREEDY, JSONL, models, write_prompts

ASSISTED = ["assisted", "assisted_dynamic", "assisted_heuristic"]
THEIRS = ["generate", "generate_compiled", *ASSISTED, "prompt_lookup"]
OURS = ["autoregressive", "fixed", "confidence", "lookup", "sources"]
DRAFTED = "tried.assisted.engine.settings.num_assistant_tokens"
TOP = "method.generate.engine.settings.top_k"
COPIED = "method.prompt_lookup.engine.settings.prompt_lookup_num_tokens"
SMALL = ("experiment=generate", *JSONL, "tried_prompts=1", "repeats=1", "logger=none")
SMALL += ("out=runs/toy",)


Run = Callable[..., str]


@pytest.fixture
def given(tiny_pair_dir: Path, here: Path) -> list[str]:
    write_prompts(4)
    return [*SMALL, *models(tiny_pair_dir)]


@pytest.fixture
def run(given: list[str]) -> Run:
    return partial(programs.run, evaluate, *given)


def results() -> Any:
    return json.loads(Path("runs/toy/results.json").read_text())


@pytest.mark.slow
def test_pairs(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy: everything gives the same outputs, drafts agree where they are accepted, and nothing
    stays behind. Of four prompts one is for trying settings."""
    eager = partial(CompileConfig, backend="eager")  # writes no code: quick
    monkeypatch.setattr(generate, "CompileConfig", eager)
    few = ["tried.fixed.stop.gamma=[1,2]", f"{DRAFTED}=[1,2]", "~tried.prompt_lookup"]
    few += ["max_new_tokens=12", "longest_draft=3", "repeats=2"]
    printed, found = run("verbose=true", *few, *GREEDY), results()
    rows = found["summary"]["all"]
    assert list(rows) == [*OURS, *THEIRS]
    for name in (*OURS[1:], *THEIRS):
        assert f"{name}: 6 of 6 outputs equal plain decoding (equal)" in printed
    assert {what: name for what, name in found["against"].items() if "best" not in what} == {
        "fixed": "fixed",
        "generate": "generate",
        "autoregressive": "autoregressive",
    }
    best = found["against"]["best of transformers"]
    assert best in THEIRS and f"vs best of transformers ({best})" in printed
    assert {f"over {name}" for name in found["against"].values()} <= set(rows["fixed"])
    draft = found["draft"]["match"]["all"]
    assert draft["greedy"] == draft["accepted"] and 0 < draft["overlap"] < 1
    assert set(found["tried"]) == {"fixed", "assisted"}
    assert len(read_traces(Path("runs/toy/traces-assisted.jsonl"))) == 6
    assert Path("runs/toy/table.md").read_text().strip() in printed
    assert sorted(path.name for path in Path("runs").iterdir()) == ["toy"]


def test_their_methods_stand_in_a_table_too(run: Run) -> None:
    """What they drafted is not known, so nothing is said of it; who speculates is."""
    few = ("bound=false", "methods=[generate,prompt_lookup]", "repeats=2", "limit=1")
    printed = run(*few, "max_new_tokens=24", "~tried.prompt_lookup")
    rows = results()["summary"]["all"]
    assert rows["prompt_lookup"]["drafted/round"][0] == rows["prompt_lookup"]["acceptance"][0] == 0
    assert "| generate " in printed and "does not speculate" in printed
    assert "not enumerated, as it is no code of ours: generate, prompt_lookup" in printed
    assert "responses is sound: " in printed


@pytest.mark.slow
def test_an_interrupted_comparison_goes_on(
    run: Run, tiny_pair_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = ["methods=[lookup,generate,assisted]", "max_new_tokens=4", "limit=2"]
    with monkeypatch.context() as stopped, pytest.raises(SystemExit) as ending:
        stopped.setattr("evaluation.evaluate.draft_along", Mock(side_effect=KeyboardInterrupt))
        run(*given)
    assert ending.value.code == 130 and not Path("runs/toy").exists()
    other = f"assistant={tiny_pair_dir / 'target'}"
    for more, resumed in ((other, 0), ("seed=0", 3)):  # a pass over one, 2 prompts
        run(*given, more)
        assert results()["resumed"] == resumed
    assert [path.name for path in Path("runs").iterdir()] == ["toy"]


@pytest.mark.slow
def test_what_does_not_compile_is_left_out_and_named(run: Run) -> None:
    torch.compiler.reset()
    given = ["methods=[lookup,generate,generate_compiled]", "max_new_tokens=4", "limit=1"]
    with inductor.patch({"force_disable_caches": True, "cpp.cxx": ("none-such",)}):
        assert "generate_compiled: left out" in run(*given)
    found = results()
    assert list(found["left_out"]) == ["generate_compiled"]
    assert "C++" in found["left_out"]["generate_compiled"]
    assert list(found["summary"]["all"]) == ["autoregressive", "lookup", "generate"]


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("methods=[assisted] assistant=5", "assistant: expected a path or null, got 5"),
        ("methods=[assisted] assistant=./none", "assistant: no model in"),
        (
            "methods=[assisted] assistant=wider",
            "assistant: expected 32 tokens, as the target has, got",
        ),
        (f"methods=[prompt_lookup] {COPIED}=0 ~tried.prompt_lookup", f"{COPIED}: expected a whole"),
        (f"methods=[generate] +{TOP}=3", f"{TOP}: expected one of num_assistant_tokens, "),
    ],
)
@pytest.mark.few(2, rest="slow")
def test_bad_input_is_one_line(argument: str, message: str, given: list[str]) -> None:
    LlamaForCausalLM(LlamaConfig(**{**CONFIG.to_dict(), "vocab_size": 40})).save_pretrained("wider")
    line = programs.refused(evaluate, *given, "max_new_tokens=8", *argument.split())
    assert line.startswith(f"error: {message}")
