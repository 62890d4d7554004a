"""scripts/evaluate.py from its command line, every method, on a tiny pair."""

import json
import time
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from decoding.draft import Verdict
from decoding.engines.autoregressive import AutoregressiveEngine
from decoding.trace import Trace, read_traces
from decoding.verifiers.token import TokenVerifier
from evaluation import evaluate as flow
from evaluation import token_texts
from evaluation.table import compare
from runtime.files import only_writer
from tests.helpers.evaluation.evaluating import (
    ALL,
    GREEDY,
    METHODS,
    refused,
    run,
    write_checkpoints,
)
from tests.helpers.programs.processes import end, forked, wait_for


def test_two_runs_do_not_write_one_folder(
    evaluating: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def hold() -> None:
        with only_writer(Path("runs/x")):
            (tmp_path / "begun").touch()
            time.sleep(60)

    child = forked(hold)
    wait_for(tmp_path, "begun")
    with pytest.raises(SystemExit):
        run(*evaluating, "methods=[autoregressive]")
    assert "error: out: another process is making runs/x. Wait for it" in capsys.readouterr().err
    end(child)
    run(*evaluating, "methods=[autoregressive]")
    assert Path("runs/x/results.json").is_file() and not list(Path("runs").glob(".*"))


@pytest.mark.smoke
def test_greedy_equals_autoregressive_for_every_method(
    evaluating: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    write_checkpoints(evaluating, {"temperature": 0.0, "top_k": 0, "top_p": 1.0})
    run(*evaluating, *GREEDY, ALL, "verbose=true", "structure.gamma_max=6")
    printed, out = capsys.readouterr().out, Path("runs/x")
    assert printed.count("8 of 8 outputs equal autoregressive decoding (equal)") == len(METHODS) - 1
    assert "Share of decode time" in printed and "## odd: 3 prompts, 2 repeats" in printed
    assert (out / "table.md").read_text().strip() in printed

    results = json.loads((out / "results.json").read_text())
    summary = results["summary"]
    assert list(summary["all"]) == METHODS and list(summary) == ["all", "even", "odd"]
    rows = pd.read_parquet(out / "measurements.parquet")
    assert len(rows) == 8 * len(METHODS) and set(rows["kind"]) == {"timed"}
    speed = compare(rows)["confidence"]
    assert list(speed) == summary["all"]["confidence"]["speed-up"], "one definition"
    assert f"{speed.value:.2f}x ({speed.low:.2f} to {speed.high:.2f})" in printed
    assert "\nUse " in printed and "\nMeasured on 4 prompts" in printed
    assert set(results["tried"]["fixed"]) == {"stop.gamma=1", "stop.gamma=3"}
    assert 0 < summary["all"]["confidence"]["acceptance"][0] < 1
    traces = {name: read_traces(out / f"traces-{name}.jsonl") for name in METHODS}
    assert {len(found) for found in traces.values()} == {8}
    texts = token_texts.read(out)
    assert (
        texts.prompt(traces["hrad"][0]).startswith("w")
        and sum(map(len, texts.prompts.values())) == 4
    )
    assert all(
        token in texts.tokens
        for found in traces.values()
        for trace in found
        for token in trace.tokens
    )
    plain = [trace.tokens for trace in traces["autoregressive"]]
    assert all([trace.tokens for trace in found] == plain for found in traces.values())


def test_a_dataset_may_be_called_all(evaluating: list[str], tmp_path: Path) -> None:
    """Its numbers stand beside those of all prompts, in the table and in results.json."""
    names = ["all", "odd", "odd"]
    prompts = [{"prompt": f"w{n} w2", "dataset": name} for n, name in enumerate(names, 1)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, prompts)))
    run(*evaluating, "methods=[custom]", "repeats=1")
    results = json.loads(Path("runs/x/results.json").read_text())
    assert results["prompts"] == {"all": 3, '"all"': 1, "odd": 2}
    assert set(results["summary"]) == set(results["prompts"])
    headings = [
        line
        for line in Path("runs/x/table.md").read_text().splitlines()
        if line.endswith("1 repeats")
    ]
    assert headings == [
        "## all: 3 prompts, 1 repeats",
        '## "all": 1 prompts, 1 repeats',
        "## odd: 2 prompts, 1 repeats",
    ]


def test_sampling_is_reproducible_and_checks_invariants(evaluating: list[str]) -> None:
    small = (
        *evaluating,
        "methods=[custom]",
        "stop=confidence_before",
        "verifier=block",
        "repeats=1",
    )
    run(*small)
    first = [trace.tokens for trace in read_traces(Path("runs/x/traces-custom.jsonl"))]
    run(*small)
    assert [trace.tokens for trace in read_traces(Path("runs/x/traces-custom.jsonl"))] == first
    lines = json.loads(Path("runs/x/results.json").read_text())["lossless"]
    assert "hold" in lines[0] and "lossless by its verifiers" in lines[1]


def test_an_interrupted_run_is_taken_up_by_the_same_command(
    evaluating: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And by no other: other settings are another run."""
    small = (*evaluating, "methods=[custom]", "repeats=1")
    decode, calls = AutoregressiveEngine.decode, 0

    def interrupted(*arguments: Any) -> Trace:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise KeyboardInterrupt
        return decode(*arguments)

    monkeypatch.setattr(AutoregressiveEngine, "decode", interrupted)
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        run(*small)
    assert len(list(Path("runs").glob(".x-*.resume"))) == 1 and not Path("runs/x").exists()
    run(*small, "pair.draft_dtype=float32", "out=runs/x")
    assert not json.loads(Path("runs/x/results.json").read_text())["resumed"]
    assert calls == 4 + 5, "a warm-up and four requests"
    run(*small)
    assert calls == 9 + 1 + 2, "the warm-up and the two requests that were missing"
    assert not list(Path("runs").glob(".*"))
    assert json.loads(Path("runs/x/results.json").read_text())["resumed"] == 2
    assert "more than one sitting" in Path("runs/x/table.md").read_text()
    assert len(read_traces(Path("runs/x/traces-custom.jsonl"))) == 4


def test_settings_are_tried_on_prompts_that_are_not_judged(
    evaluating: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pass that chooses the fixed length sees calibration prompts alone; a length that is
    given is not chosen."""
    decoded: dict[str, set[str]] = {}
    whole = flow.decode

    def seen(engines: Any, requests: Any, *more: Any) -> Any:
        stage = "judged" if "autoregressive" in engines else "tried"
        decoded[stage] = {request.split + request.prompt_id for request in requests}
        return whole(engines, requests, *more)

    monkeypatch.setattr(flow, "decode", seen)
    small = (*evaluating, "methods=[fixed]", "split=test", "repeats=1", "tried_prompts=2")
    splits = ("splits.calibration=0.3", "splits.test=0.3")
    run(*small, *splits)
    assert {name[:11] for name in decoded["tried"]} == {"calibration"}
    assert {name[:4] for name in decoded["judged"]} == {"test"}
    results = json.loads(Path("runs/x/results.json").read_text())
    method = results["methods"]["fixed"]
    assert "the fastest of 2 on" in method["note"] and "of the calibration split" in method["note"]
    speeds = results["tried"]["fixed"]
    assert f"stop.gamma={method['settings']['stop']['gamma']}" == max(
        speeds, key=lambda k: speeds[k]
    )
    assert results["run"]["config"]["method"]["fixed"]["stop"]["gamma"] == 4, "as it was given"
    assert f"fixed: {method['note']}." in Path("runs/x/table.md").read_text()
    decoded.clear()
    run(*small, *splits, "method.fixed.stop.gamma=2")
    results = json.loads(Path("runs/x/results.json").read_text())
    assert list(decoded) == ["judged"] and results["tried"] == {}
    decoded.clear()
    run(*(word for word in small if word != "split=test"), *splits, "split=all")
    tried, judged = ({name[-2:] for name in decoded[stage]} for stage in ("tried", "judged"))
    assert tried and judged and not tried & judged, "of the whole set the others"
    assert results["methods"]["fixed"]["settings"]["stop"]["gamma"] == 2


def test_lookahead_needs_an_engine_and_nothing_else(
    evaluating: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    small = (*evaluating, "methods=[custom]", "engine=lookahead", "engine.window=3", "repeats=1")
    run(*small, *GREEDY)
    assert "custom: 4 of 4 outputs equal autoregressive decoding (equal)" in capsys.readouterr().out
    traces = read_traces(Path("runs/x/traces-custom.jsonl"))
    assert sum(round_.accepted for trace in traces for round_ in trace.rounds) > 0
    run(*small, "modelled=[measured,5]")
    assert "lossless by its verifiers" in capsys.readouterr().out
    rows = json.loads(Path("runs/x/results.json").read_text())["summary"]["all"]
    assert rows["autoregressive"]["speed-up, measured"][0] == 1
    assert rows["custom"]["speed-up, c=5"][0] > 1
    rounds = [
        round_
        for trace in read_traces(Path("runs/x/traces-custom.jsonl"))
        for round_ in trace.rounds
    ]
    assert max(round_.extra_rows for round_ in rounds) == 3 * 4 - 1, (
        "a full window, without the last committed token"
    )
    run(*small, "~method.custom.structure", "~method.custom.verifier", "~method.custom.stop")
    assert "lossless by its verifiers" in capsys.readouterr().out


@pytest.mark.parametrize("more", [[], ["warp=greedy", "draft_warp.temperature=0"]])
def test_a_checkpoint_that_is_not_there_is_made_by_two_commands(
    more: list[str], evaluating: list[str]
) -> None:
    """An experiment may take another pair than the default."""
    message = refused(*evaluating, "experiment=specbranch", *more)
    pair = [one for one in evaluating if one.startswith("pair.")]
    harvest = " ".join(["pair=smollm2", *pair, *more, "out=data/smollm2"])
    assert message.endswith(
        "method.specbranch.stop.checkpoint: no checkpoint in checkpoints/hrad-smollm2. Train one:"
        f" python scripts/gen_data.py {harvest}; python train.py predictor=hrad data=data/smollm2"
        " out=checkpoints/hrad-smollm2"
    )


def test_greedy_check_catches_a_lossy_rule(
    evaluating: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that accepts every draft. Filters change nothing about a greedy target, so it is checked
    all the same."""
    verify = TokenVerifier.verify

    def credulous(self: TokenVerifier, draft: Any, p: Any, sampler: Any) -> Verdict:
        token = verify(self, draft, p, sampler).token
        return Verdict(len(draft), draft.path(len(draft)), token, len(draft))

    monkeypatch.setattr(TokenVerifier, "verify", credulous)
    run(*evaluating, *GREEDY, "warp.top_k=3", "methods=[custom]", "repeats=1")
    printed = capsys.readouterr().out
    assert "NOT LOSSLESS" in printed and "too large" in printed


@pytest.mark.parametrize("engine", ["overlapped", "pearl"])
def test_draft_and_target_side_by_side(
    engine: str, evaluating: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = ("methods=[custom]", f"engine={engine}", "structure=branch_point", "stop=never")
    run(*evaluating, *GREEDY, *chosen, "structure.gamma_max=3", "verbose=true")
    printed = capsys.readouterr().out
    assert "custom: 8 of 8 outputs equal autoregressive decoding (equal)" in printed
    assert "Draft and target side by side" in printed
    found = json.loads(Path("runs/x/results.json").read_text())["summary"]["all"]["custom"]
    assert 0 <= found["waste"][0] <= 1
    assert (found["draft stages"][0] > 0) == (engine == "overlapped")
    with pytest.raises(SystemExit):
        run(*evaluating, *chosen[:2], "stop=never")
    assert "structure, engine: Chain" in capsys.readouterr().err
