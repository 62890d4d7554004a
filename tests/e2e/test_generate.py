"""scripts/evaluate.py with `generate` of transformers beside our methods, presented as pairs."""

import json
from pathlib import Path
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

ASSISTED = ["assisted", "assisted_dynamic", "assisted_heuristic"]
THEIRS = ["generate", "generate_compiled", *ASSISTED, "prompt_lookup"]
OURS = ["autoregressive", "fixed", "confidence", "lookup", "sources"]
DRAFTED = "tried.assisted.engine.settings.num_assistant_tokens"
COPIED = "method.prompt_lookup.engine.settings.prompt_lookup_num_tokens"
SMALL = (
    *("experiment=generate", "dataset=jsonl", "dataset.chat=false", "dataset.path=prompts.jsonl"),
    *("tried_prompts=1", "repeats=1", "logger=none", "out=runs/toy"),
)


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    lines = [json.dumps({"id": f"p{n}", "prompt": f"w{n + 1} w{n + 2} w{n + 3}"}) for n in range(4)]
    Path("prompts.jsonl").write_text("\n".join(lines))


def run(pair: Path, *arguments: str) -> None:
    given = (f"pair.target={pair / 'target'}", f"pair.draft={pair / 'draft'}")
    programs.run(evaluate, *SMALL, *given, *arguments)


@pytest.mark.slow
def test_pairs(
    tiny_pair_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Greedy: everything gives the same outputs, drafts agree where they are accepted, and nothing
    stays behind. Of four prompts one is for trying settings."""
    monkeypatch.setattr(
        generate, "CompileConfig", lambda: CompileConfig(backend="eager")
    )  # writes no code: quick
    few = [
        *(
            "tried.fixed.stop.gamma=[1,2]",
            "tried.assisted.engine.settings.num_assistant_tokens=[1,2]",
        ),
        *("~tried.prompt_lookup", "max_new_tokens=12", "longest_draft=3", "repeats=2"),
    ]
    run(tiny_pair_dir, "verbose=true", *few, "warp=greedy", "draft_warp.temperature=0")
    printed = capsys.readouterr().out
    found = json.loads(Path("runs/toy/results.json").read_text())
    rows = found["summary"]["all"]
    assert list(rows) == [*OURS, *THEIRS]
    for name in (*OURS[1:], *THEIRS):
        assert f"{name}: 6 of 6 outputs equal autoregressive decoding (equal)" in printed
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


def test_their_methods_stand_in_a_table_too(
    tiny_pair_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What they drafted is not known, so nothing is said of it; who speculates is."""
    few = ("bound=false", "methods=[generate,prompt_lookup]", "repeats=2", "limit=1")
    run(tiny_pair_dir, *few, "max_new_tokens=24", "~tried.prompt_lookup")
    rows = json.loads(Path("runs/toy/results.json").read_text())["summary"]["all"]
    assert rows["prompt_lookup"]["drafted/round"][0] == rows["prompt_lookup"]["acceptance"][0] == 0
    printed = capsys.readouterr().out
    assert "| generate " in printed and "does not speculate" in printed
    assert "not enumerated, as no code of ours: generate, prompt_lookup" in printed
    assert "bookkeeping of a lossless decode: hold" in printed


@pytest.mark.slow
def test_an_interrupted_comparison_goes_on(
    tiny_pair_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = ["methods=[lookup,generate,assisted]", "max_new_tokens=4", "limit=2"]
    with monkeypatch.context() as stopped, pytest.raises(SystemExit) as ending:
        stopped.setattr("evaluation.evaluate.draft_along", Mock(side_effect=KeyboardInterrupt))
        run(tiny_pair_dir, *given)
    assert ending.value.code == 130 and not Path("runs/toy").exists()
    for more, resumed in (
        (f"assistant={tiny_pair_dir / 'target'}", 0),
        ("seed=0", 3),
    ):  # a pass over one, 2 prompts
        run(tiny_pair_dir, *given, more)
        assert json.loads(Path("runs/toy/results.json").read_text())["resumed"] == resumed
    assert [path.name for path in Path("runs").iterdir()] == ["toy"]


@pytest.mark.slow
def test_what_does_not_compile_is_left_out_and_named(
    tiny_pair_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.compiler.reset()
    given = ["methods=[lookup,generate,generate_compiled]", "max_new_tokens=4", "limit=1"]
    with inductor.patch({"force_disable_caches": True, "cpp.cxx": ("none-such",)}):
        run(tiny_pair_dir, *given)
    found = json.loads(Path("runs/toy/results.json").read_text())
    assert "generate_compiled: left out" in capsys.readouterr().out
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
            "assistant: expected 32 tokens, as the target has, got 40",
        ),
        (
            f"methods=[prompt_lookup] {COPIED}=0 ~tried.prompt_lookup",
            f"{COPIED}: expected a whole number",
        ),
        (
            "methods=[generate] +method.generate.engine.settings.top_k=3",
            "method.generate.engine.settings.top_k: expected one of num_assistant_tokens, ",
        ),
    ],
)
@pytest.mark.few(2)
def test_bad_input_is_one_line(
    argument: str, message: str, tiny_pair_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    LlamaForCausalLM(LlamaConfig(**{**CONFIG.to_dict(), "vocab_size": 40})).save_pretrained("wider")
    with pytest.raises(SystemExit) as exit_code:
        run(tiny_pair_dir, "max_new_tokens=8", *argument.split())
    error = capsys.readouterr().err
    assert exit_code.value.code == 2 and f"error: {message}" in error
