"""scripts/evaluate.py what=served, with a program that pretends to be vLLM."""

import json
from pathlib import Path

import pandas as pd
import pytest

from scripts import evaluate
from tests.helpers.programs.pretend_vllm import pretend_vllm
from tests.helpers.programs.programs import JSONL, mode, models, refused, run, write_prompts

served = mode(evaluate.served)


@pytest.fixture
def asked(
    harvest: Path, tiny_pair_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> list[str]:
    monkeypatch.chdir(harvest)
    write_prompts(3, str(tmp_path / "prompts.jsonl"))
    python = pretend_vllm(tmp_path)
    monkeypatch.setenv("VLLM_PYTHON", str(python))
    data = [*JSONL, f"dataset.path={tmp_path / 'prompts.jsonl'}"]
    few = ["requests=[1,2]", "max_new_tokens=8", f"out={tmp_path / 'out'}"]
    return [*models(tiny_pair_dir), "pair.assistant=null", "pair.dtype=float64", *data, *few]


def test_speeds_outputs_and_acceptance(asked: list[str], tmp_path: Path) -> None:
    names = "methods=[vllm_ngram,vllm_draft]"
    printed = run(served, *asked, names, "data=data/greedy")
    assert "Fastest, measured: 1 at once: vllm_draft" in printed
    assert "vllm_draft: 7 of 7 outputs equal those of vllm (equal)" in printed
    assert "vllm_ngram: 2 of 7 outputs equal those of vllm" in printed
    assert "1, predicted" in printed and "2, measured" in printed
    rows = pd.read_parquet(tmp_path / "out/measurements.parquet")
    assert sorted(set(rows["requests"])) == [1, 2]
    assert rows.groupby("requests")["emitted"].sum().to_dict() == {1: 3 * 3 * 8, 2: 3 * 4 * 8}
    found = json.loads((tmp_path / "out/served.json").read_text())
    assert list(found["predicted"]) == ["vllm_draft"]
    assert list(tmp_path.glob(".*.resume")) == []


def test_our_engine_beside_a_serving_one(asked: list[str], tmp_path: Path) -> None:
    names = "methods=[autoregressive,fixed,sources,vllm_draft]"
    printed = run(served, *asked, names, "against=autoregressive", "method.fixed.stop.gamma=3")
    for name in ("fixed", "sources"):
        assert f"{name}: 7 of 7 outputs equal plain decoding" in printed
    rows = pd.read_parquet(tmp_path / "out/measurements.parquet")
    drafted = rows.groupby("policy")["drafted"].sum()
    assert drafted["autoregressive"] == 0 and drafted["fixed"] > 0


def test_a_queue_of_requests(asked: list[str], tmp_path: Path) -> None:
    printed = run(served, *asked, "methods=[fixed,vllm]", "against=autoregressive", "waves=2")
    assert "fixed: 7 of 7 outputs equal plain decoding" in printed
    assert "A group has 2 requests for each" in printed
    rows = pd.read_parquet(tmp_path / "out/measurements.parquet")
    assert rows.groupby("requests")["emitted"].sum().to_dict() == {1: 3 * 3 * 8, 2: 3 * 4 * 8}


def test_requests_of_a_category_are_asked_together(asked: list[str], tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows = [row | {"category": name} for row, name in zip(rows, ("qa", "rag", "qa"), strict=True)]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    ours = ["methods=[fixed]", "against=autoregressive", "by_category=true"]
    printed = run(served, *asked, *ours)
    assert "- qa  | autoregressive |" in printed and "- rag | fixed " in printed
    found = pd.read_parquet(tmp_path / "out/measurements.parquet")
    twice = found[(found["requests"] == 2) & (found["policy"] == "fixed")]
    assert twice.groupby("category")["emitted"].sum().to_dict() == {"qa": 16, "rag": 16}


def test_nothing_is_predicted_of_single_tokens(asked: list[str], tmp_path: Path) -> None:
    run(served, *asked, "methods=[vllm_draft]", "data=data/greedy", "max_new_tokens=1")
    assert json.loads((tmp_path / "out/served.json").read_text())["predicted"] == {}


def test_the_file_of_a_proposer_is_checked_before_anything_of_it_is_made(
    asked: list[str], tmp_path: Path
) -> None:
    file = tmp_path / "proposer.json"
    given = [*asked, "methods=[vllm_proposer]", "data=data/greedy"]
    given.append(f"method.vllm_proposer.engine.proposer={file}")
    facts = {"format_version": 1, "draft": "draft", "dtype": "float32", "adaptive": False}
    shell = {"_target_": "os.system", "command": f"touch {tmp_path / 'made'}"}
    file.write_text(json.dumps(facts | {"structure": shell, "stop": shell}))
    assert "structure: expected classes of decoding.structures, got 'os.system'" in refused(
        served, *given
    )
    file.write_text(json.dumps(facts))
    assert "engine.proposer" in refused(served, *given)
    assert not (tmp_path / "made").exists()


def test_refusals(asked: list[str]) -> None:
    ours = [*asked, "methods=[custom]", "engine=lookahead"]
    assert "stop, engine: LookaheadEngine takes no stop" in refused(served, *ours, "stop=never")
    wrong = refused(served, *ours)
    assert "methods: expected engines that decode many requests at once, got custom" in wrong
    assert "methods: expected names among" in refused(served, *asked, "methods=[nothing]")
