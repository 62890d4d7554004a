"""scripts/benchmark.py from its command line."""

import json
import re
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from hydra.core.global_hydra import GlobalHydra
from torch._inductor import config as inductor
from transformers import CompileConfig, LlamaConfig, LlamaForCausalLM

from evaluation.baselines import generate_engine, transformers_generate
from evaluation.baselines.transformers_generate import alternating
from scripts import benchmark
from tests.tiny_pair import CONFIG

SMALL = (
    "harvest.max_new_tokens=8",
    "harvest.gamma=3",
    "repeats=1",
    "dataset=jsonl",
    "dataset.chat=false",
)


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    lines = [json.dumps({"id": f"p{n}", "prompt": f"w{n + 1} w{n + 2} w{n + 3}"}) for n in range(3)]
    Path("prompts.jsonl").write_text("\n".join(lines))


def run(monkeypatch: pytest.MonkeyPatch, pair: Path, *arguments: str) -> None:
    GlobalHydra.instance().clear()
    given = (
        f"pair.target={pair / 'target'}",
        f"pair.draft={pair / 'draft'}",
        "dataset.path=prompts.jsonl",
    )
    monkeypatch.setattr("sys.argv", ["scripts/benchmark.py", *SMALL, *given, *arguments])
    benchmark.main()


@pytest.mark.parametrize("warps", [(), ("warp=greedy", "draft_warp.temperature=0")])
def test_harvest(
    warps: tuple[str, ...],
    tiny_pair_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run(monkeypatch, tiny_pair_dir, *warps)
    printed = capsys.readouterr().out
    assert re.search(r"ratio +[\d.]+ \(", printed)
    rounds, agreeing = re.findall(r"(\d+) of (\d+) rounds have the same draft tokens", printed)[0]
    assert rounds == agreeing != "0" and f"{rounds} of those the same accepted length" in printed


def test_decode(
    tiny_pair_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Greedy: everything gives the same outputs, drafts agree where they are accepted, and nothing
    stays behind."""
    monkeypatch.setattr(
        generate_engine, "CompileConfig", lambda: CompileConfig(backend="eager")
    )  # writes no code: quick
    small = [
        "max_new_tokens=12",
        "gammas=[1,2]",
        "tried_prompts=1",
        "longest_draft=3",
        "repeats=2",
        "out=runs/toy",
    ]
    few = [
        "transformers.assisted.num_assistant_tokens=[1,2]",
        "transformers.prompt_lookup.prompt_lookup_num_tokens=3",
    ]
    greedy = ["warp=greedy", "draft_warp.temperature=0"]
    run(monkeypatch, tiny_pair_dir, "what=decode", *small, *few, *greedy)
    printed = capsys.readouterr().out
    found = json.loads(Path("runs/toy/decode.json").read_text())
    names = list(found["methods"]["jsonl"]["paired_comparisons"])
    assert [name.split(" (")[0] for name in names] == [
        *(
            "autoregressive",
            "best fixed gamma",
            "confidence",
            "lookup",
            "sources",
            "transformers generate",
        ),
        *(
            "transformers compiled",
            "transformers assisted",
            "transformers dynamic",
            "transformers heuristic",
            "transformers prompt_lookup",
        ),
    ]
    assert all(
        f"{name}: 6 of 6 outputs equal transformers generate" in printed
        for name in names
        if "generate" not in name
    )
    draft = found["draft"]["datasets"]["jsonl"]
    assert draft["greedy"] == draft["accepted"] and 0 < draft["overlap"] < 1
    assert found["methods"]["jsonl"]["best"] in names and len(found["prompts"][names[0]]) == 6
    assert Path("runs/toy/table.md").read_text().strip() in printed
    assert sorted(path.name for path in Path("runs").iterdir()) == ["toy"]


def test_an_interrupted_decode_goes_on(
    tiny_pair_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = [
        "what=decode",
        "methods=[lookup]",
        "max_new_tokens=4",
        "limit=2",
        "tried_prompts=1",
        "out=runs/toy",
    ]
    given += ["~transformers.compiled"]
    with monkeypatch.context() as stopped, pytest.raises(SystemExit) as ending:
        stopped.setattr(transformers_generate, "draft_of", Mock(side_effect=KeyboardInterrupt))
        run(stopped, tiny_pair_dir, *given)
    assert ending.value.code == 130 and not Path("runs/toy").exists()
    for more, resumed in (
        (f"assistant={tiny_pair_dir / 'target'}", 0),
        ("seed=0", 4),
    ):  # 2 passes over one, 2 prompts
        run(monkeypatch, tiny_pair_dir, *given, more)
        assert json.loads(Path("runs/toy/decode.json").read_text())["resumed"] == resumed
    assert [path.name for path in Path("runs").iterdir()] == ["toy"]


def test_what_does_not_compile_is_left_out_and_named(
    tiny_pair_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.compiler.reset()
    given = [
        "what=decode",
        "methods=[lookup]",
        "max_new_tokens=4",
        "limit=1",
        "tried_prompts=1",
        "out=runs/toy",
    ]
    few = [
        f"~transformers.{name}" for name in ("assisted", "dynamic", "heuristic", "prompt_lookup")
    ]
    with inductor.patch({"force_disable_caches": True, "cpp.cxx": ("none-such",)}):
        run(monkeypatch, tiny_pair_dir, *given, *few)
    found = json.loads(Path("runs/toy/decode.json").read_text())
    assert "transformers compiled: left out" in capsys.readouterr().out
    assert (
        list(found["left_out"]) == ["transformers compiled"]
        and "C++" in found["left_out"]["transformers compiled"]
    )
    assert "transformers compiled" not in found["methods"]["jsonl"]["paired_comparisons"]


def test_both_sides_alternate() -> None:
    assert alternating(["a", "b", "c"], ["x"]) == ["a", "x", "b", "c"] and alternating(
        [], ["x"]
    ) == ["x"]


def test_the_benchmark_may_come_first() -> None:
    assert benchmark.with_key(["decode", "limit=3", "decode"]) == [
        "what=decode",
        "limit=3",
        "decode",
    ]
    assert benchmark.with_key(["warp=greedy"]) == ["warp=greedy"] and benchmark.with_key([]) == []


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("what=nothing", "what: 'nothing' is unknown. Use harvest"),
        ("harvest.stride=2", "harvest.stride: 2 skips"),
        ("what=decode transformers=null", "transformers.generate: "),
        (
            "what=decode ++transformers.compiled.assistant=true",
            "transformers.compiled.compile: it goes with no",
        ),
        (
            "what=decode transformers.compiled.compile=false",
            "transformers.compiled.compile: False cannot be",
        ),
        ("what=decode assistant=5 max_new_tokens=8", "assistant: 5 is no model"),
        ("what=decode assistant=./none max_new_tokens=8", "assistant: no model in"),
        (
            "what=decode assistant=wider max_new_tokens=8",
            "assistant: it has 40 tokens, the target 32",
        ),
    ],
)
def test_bad_input_is_one_line(
    argument: str,
    message: str,
    tiny_pair_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    LlamaForCausalLM(LlamaConfig(**{**CONFIG.to_dict(), "vocab_size": 40})).save_pretrained("wider")
    with pytest.raises(SystemExit) as exit_code:
        run(monkeypatch, tiny_pair_dir, *argument.split())
    assert exit_code.value.code == 2 and f"error: {message}" in capsys.readouterr().err
