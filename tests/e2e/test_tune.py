"""scripts/tune.py from its command line on a tiny harvest, and scripts/evaluate.py with the
thresholds it found."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from decoding.cost import write_cost
from decoding.models.machine import processor
from decoding.trace import read_traces
from evaluation.replay import thresholds
from predictors.base import load_predictor, read_config, save_predictor
from runtime.json_files import write_checksummed
from scripts import evaluate, tune
from tests.helpers.programs.programs import GREEDY, SPLITS, base, refused, run
from tests.helpers.training.checkpoints import columns, write_checkpoint

METHODS = ["fixed", "confidence", "product", "confidence_before", "adaedl", "specdecpp", "hrad"]
CONTEXT = ("pair", "warp", "draft_warp", "provenance")
COPIES = "{_target_:decoding.structures.lookup.Copies,ngram_max:3,ngram_min:2,stretch:2}"
FILE = "runs/smollm2-eagle-thresholds-T0.0.json"


@pytest.fixture
def arguments(replaying: list[str]) -> list[str]:
    return [*replaying, f"out={FILE}"]


def evaluated(pair: Path, *arguments: str) -> dict[str, Any]:
    """The settings of the methods that an evaluation decoded."""
    small = (
        "split=test",
        "limit=2",
        "repeats=1",
        "max_new_tokens=8",
        "tried.fixed.stop.gamma=[2]",
        "logger=none",
        "out=runs_x",
    )
    run(evaluate, *base(pair), *GREEDY, *SPLITS, *small, *arguments)
    found = json.loads(Path("runs_x/results.json").read_text())["methods"]
    return {name: method["settings"] for name, method in found.items()}


def chosen_rule(found: dict[str, Any]) -> str:
    advice = found["results"]["chosen"]["advice"]
    return "plain decoding" if advice == thresholds.NO_ADVICE else f"{advice} at "


def test_tune_then_evaluate(
    arguments: list[str], tiny_pair_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tune, *arguments, "cost=c10", "verbose=true")
    printed, found = capsys.readouterr().out, json.loads(Path(FILE).read_text())
    assert (
        "oracle of SpecDec++, drafts of any length: " in printed and sum(found["oracle_calls"]) > 0
    )
    assert (
        "## cost chosen (c10)" in printed
        and "predictions cost nothing here" in printed
        and "its frontier dominates" in printed
        and f"saved {FILE}" in printed
    )
    best = chosen_rule(found)
    assert f"Use {best}" in printed and "modelled" in printed
    table = pd.read_parquet(FILE.replace(".json", ".parquet"))
    assert set(table["split"]) == {"calibration", "test"} and set(table["policy"]) == set(METHODS)
    rows = {"c5_row1", "c5_row3", "c10_row1", "c10_row3"}
    assert set(found["results"]) == {"chosen", "a100", "c4", "c5", "c10", "c15"} | rows
    assert found["results"]["chosen"] == found["results"]["c10"]
    chosen = found["results"]["chosen"]["rules"]
    assert sorted(chosen) == sorted(METHODS)
    for choice in chosen.values():
        assert 0 < choice["interval"][0] <= choice["speedup"] <= choice["interval"][1]
        assert (
            choice["speedup"] <= found["results"]["chosen"]["oracle_speedup"]
            and choice["regret"] >= 0
        )
    assert (
        found["gamma"] == 5
        and found["max_new_tokens"] == 12
        and found["rules"]["hrad"]["setting"] == "confidence.threshold"
    )

    some = f"methods=[{','.join(name for name in METHODS if name != 'confidence_before')}]"
    method = evaluated(tiny_pair_dir, some)
    printed = capsys.readouterr().out
    assert f"thresholds: {FILE}, for cost c10, whose advice is: " in printed
    assert method["confidence"]["stop"]["threshold"] == chosen["confidence"]["threshold"]
    assert method["adaedl"]["stop"]["threshold"] == chosen["adaedl"]["threshold"]
    assert method["specdecpp"]["stop"]["threshold"] == chosen["specdecpp"]["threshold"]
    assert method["hrad"]["stop"]["confidence"]["threshold"] == chosen["hrad"]["threshold"]
    assert method["fixed"]["stop"]["gamma"] == chosen["fixed"]["threshold"]
    assert "confidence: stop.threshold=" in printed and "modelled" in printed


def test_choices_are_judged_on_other_harvests_as_well(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree("data/greedy", "data/again", dirs_exist_ok=True)
    few = ("methods=[fixed,confidence]", "cost=c5", "cost.row=0.01", "judge_data=[data/again]")
    run(tune, *arguments, *few, "verbose=true")
    printed, found = capsys.readouterr().out, json.loads(Path(FILE).read_text())
    assert "## cost c4: " in printed and "## cost c4, data/again: " in printed
    assert "| knows p " in printed and "| confidence: " in printed
    own, there = found["results"]["c4"], found["elsewhere"]["data/again"]["c4"]
    for rule in ("fixed", "confidence"):
        assert own["rules"][rule]["threshold"] == there["rules"][rule]["threshold"]
        assert own["rules"][rule]["interval"] != there["rules"][rule]["interval"]
    assert own["bounds"]["knows p"]["speedup"] <= own["oracle_speedup"]
    assert found["results"]["chosen"] == found["results"]["c5_row1"]

    manifest = json.loads(Path("data/again/manifest.json").read_text())
    write_checksummed(Path("data/again/manifest.json"), {**manifest, "gamma": 2})
    message = refused(tune, *arguments, *few)
    assert "judge_data: expected rounds of 5 tokens or more, got 2 in data/again" in message
    changed = {**manifest, "warp": {**manifest["warp"], "temperature": 0.5}}
    write_checksummed(Path("data/again/manifest.json"), changed)
    message = refused(tune, *arguments, *few)
    assert "judge_data: data/again was made with warp.temperature=0.5, data/greedy wi" in message


def write_value() -> None:
    context = {name: read_config(Path("checkpoints/hrad"), "")[name] for name in CONTEXT}
    write_checkpoint(Path("checkpoints/value"), "value", columns("value", 0), context=context)


def test_grown_drafts_need_no_threshold(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    write_value()
    run(tune, *arguments, "cost=c5", "methods=[fixed,value,grown]", "verbose=true")
    printed, found = capsys.readouterr().out, json.loads(Path(FILE).read_text())
    assert "## without tuning: " in printed and re.search(
        r"\| grown +\| c10_row3 +\| test +\|", printed
    )
    assert set(found["results"]["chosen"]["rules"]) == {"fixed", "value"}
    for result in found["results"].values():
        choice, cost = result["structures"]["grown"], result["cost"]
        assert choice["other"] in ("fixed", "value") and choice["gain"] > 0
        assert choice["threshold"] > 0.5 / cost["autoregressive"]
        assert result["untuned"]["grown"]["regret"] >= 0
    grown, copies = "methods=[fixed,grown]", "structures.grown.copies"
    for given, words in {
        "methods=[grown]": "methods: expected one of fixed, confidence, product, ",
        "+structure@structures.chain=chain methods=[fixed,chain]": (
            "structures.chain: expected a structure that can be replayed, got Chain"
        ),
        f"structures.grown.checkpoint=checkpoints/hrad {grown}": (
            "structures.grown.checkpoint: checkpoints/hrad holds 'hrad', which does"
        ),
        "what_if.c4.target={3:5,1:4} methods=[fixed]": (
            "what_if.c4.target: expected numbers of rows in rising order, got [3, 1]"
        ),
        f"structures.grown.rate=0.5 {grown}": (
            "structures.grown.rate: expected null, for replay finds the rate itself, got"
        ),
        f"{copies}={COPIES} {grown}": f"{copies}: expected null, for no harvest says what could be",
    }.items():
        message = refused(tune, *arguments, "cost=c5", *given.split())
        assert words in message


@pytest.mark.slow
def test_what_is_given_wins_and_what_does_not_fit_is_left_out(
    arguments: list[str], tiny_pair_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tune, *arguments, "cost=c10", "methods=[confidence,hrad]")
    only = "methods=[confidence,hrad]"
    method = evaluated(tiny_pair_dir, only, "method.confidence.stop.threshold=0.123")
    assert method["confidence"]["stop"]["threshold"] == 0.123
    assert "confidence: method.confidence.stop.threshold=0.123, as given" in capsys.readouterr().out
    method = evaluated(tiny_pair_dir, only, "thresholds=null")
    assert method["hrad"]["stop"]["confidence"]["threshold"] == 0.2
    assert "thresholds" not in capsys.readouterr().out
    found = json.loads(Path(FILE).read_text())
    found["rules"]["hrad"]["checkpoint"] = "another"
    setup = {key: {"target": "other", "draft": "other"} for key in ("hardware", "dtypes")}
    threads = {"threads": torch.get_num_threads()}
    thresholds.write(Path(FILE), found | {"measured_on": setup | threads})
    evaluated(tiny_pair_dir, only)
    printed = capsys.readouterr().out
    assert (
        "hrad: checkpoints/hrad is not the checkpoint it was tuned with, thresholds left out"
        in printed
    )
    assert f"warning: {FILE} was tuned on another machine: hardware other, here " in printed
    assert "; dtypes other, here torch.float64. Tune anew: python scripts/tune.py " in printed
    thresholds.write(Path(FILE), found | {"warp": {"temperature": 0.5, "top_k": 0, "top_p": 1.0}})
    evaluated(tiny_pair_dir, only)
    assert f"thresholds: those of {FILE} are for another warp, left out" in capsys.readouterr().out
    few = (*base(tiny_pair_dir), *GREEDY, *SPLITS, only, "logger=none", f"thresholds={FILE}")
    message = refused(evaluate, *few)
    assert f"thresholds: {FILE} was tuned for another warp. Tune this one: python" in message
    thresholds.write(Path(FILE), found | {"pair": {**found["pair"], "draft": "whole another"}})
    message = refused(evaluate, *few)
    assert f"thresholds: {FILE} was tuned for another pair. Tune this one: python" in message
    Path(FILE).write_text("{}")
    message = refused(evaluate, *few[:-1])
    assert "thresholds: " in message and "python scripts/tune.py" in message
    message = refused(evaluate, *few[:-1], "thresholds=nowhere.json")
    assert "thresholds: nowhere.json" in message


@pytest.mark.slow
def test_the_test_split_is_that_of_the_harvest(arguments: list[str], tiny_pair_dir: Path) -> None:
    run(tune, *arguments, "cost=c10", "methods=[confidence]")
    small = (*base(tiny_pair_dir), *GREEDY, "logger=none", "out=runs_x", *SPLITS)
    message = refused(evaluate, *small, "methods=[hrad]", "splits.test=0.2")
    assert (
        "splits.test: 0.2 here, 0.3 in data/greedy, on which checkpoints/hrad was trained"
        in message
    )
    message = refused(evaluate, *small, "methods=[confidence]", "splits.calibration=0.2")
    assert (
        f"splits.calibration: 0.2 here, 0.3 in data/greedy, on which thresholds={FILE} was tuned"
        in message
    )
    assert "Set splits.calibration=0.3" in message
    evaluated(tiny_pair_dir, "methods=[hrad]", "splits.test=0.2", "split=all")


def test_costs_are_measured_saved_and_read_again(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    small = ("cost.limit=3", "cost.max_new_tokens=8", "cost.gammas=[1,3]")
    run(tune, *arguments, "cost=measure", *small)
    printed, first = capsys.readouterr().out, json.loads(Path(FILE).read_text())
    assert "N_draft" in printed and "R^2" in printed
    saved = json.loads(Path("runs/smollm2-eagle-cost-T0.0.json").read_text())
    assert saved["regression"]["rows"] == 3 * (1 + 2 + len(METHODS) - 1) and saved["pair"]["target"]
    assert set(saved["seconds"]["calls"]) == set(METHODS) - {"fixed"}
    setup = saved["measured_on"]
    assert setup["threads"] == torch.get_num_threads() and setup["hardware"]["draft"] == processor()
    assert (
        setup["dtypes"] == {"target": "torch.float64", "draft": "torch.float64"}
        and setup["versions"]["torch"]
    )
    run(tune, *arguments[:-1], "cost=measured")
    again = json.loads(Path(FILE).read_text())
    assert again["results"]["chosen"] == first["results"]["chosen"]
    assert again["measured_on"] == first["measured_on"] == setup
    saved["pair"]["draft"] = "another"
    write_cost("runs/smollm2-eagle-cost-T0.0.json", saved)
    message = refused(tune, *arguments, "cost=measured")
    assert "cost.file: runs/smollm2-eagle-cost-T0.0.json belongs to another draft" in message


def test_the_questions_of_a_grown_draft_are_measured(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    write_value()
    small = ("cost.limit=3", "cost.max_new_tokens=8", "cost.gammas=[1,3]")
    run(tune, *arguments, "cost=measure", *small, "methods=[fixed,grown]")
    found = json.loads(Path(FILE).read_text())["results"]["chosen"]
    calls = found["cost"]["calls"]
    assert calls["grown"] == calls["value"] > 0 and set(found["rules"]) == {"fixed"}
    printed = capsys.readouterr().out
    assert "cost nothing" not in printed.partition("## cost chosen")[2].partition("\n")[0]


def test_thresholds_for_another_machine_get_their_own_file(arguments: list[str]) -> None:
    run(tune, *arguments[:-1], "cost=a100", "methods=[fixed]")
    assert json.loads(Path(FILE.replace(".json", "-a100.json")).read_text())["cost"] == "a100"
    assert not Path(FILE).exists()


def test_where_drafting_costs_too_much_nothing_is_drafted(
    arguments: list[str], tiny_pair_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tune, *arguments, "cost=c4", "cost.draft=9", "methods=[fixed,confidence]")
    assert "## cost chosen (c4): do not speculate; oracle 1.00x" in capsys.readouterr().out
    method = evaluated(tiny_pair_dir, "methods=[confidence]")
    printed = capsys.readouterr().out
    assert (
        "confidence: do not speculate, so plain decoding; tuned: the best, stop.threshold="
        in printed
    )
    assert "| plain decoding: no draft is worth it here |" in printed and "(equal)" in printed
    results = json.loads(Path("runs_x/results.json").read_text())
    assert results["methods"]["confidence"]["speculates"] is False
    assert "stop" in results["run"]["config"]["method"]["confidence"], "the config stays as it was"
    assert list(method["confidence"]) == ["engine"] == list(method["autoregressive"])
    assert {
        r.draft_forwards
        for trace in read_traces(Path("runs_x/traces-confidence.jsonl"))
        for r in trace.rounds
    } == {0}


def test_a_checkpoint_for_other_features_is_refused(arguments: list[str], harvest: Path) -> None:
    shutil.copytree("checkpoints", "others", dirs_exist_ok=True)
    config = read_config(Path("others/hrad"), "")
    given = ["rules.specdecpp.checkpoint=others/specdecpp", "rules.hrad.checkpoint=others/hrad"]
    for changed, words in (
        (
            {"target_hidden": [-5, -1]},
            "reads layers that replay lacks: expected some of the recorded layers [-4, -3, -2, -1]",
        ),
        ({"embedding": False}, "is incomplete or damaged (TypeError: "),
    ):
        write_checksummed(
            Path("others/hrad/config.json"), config | {"inputs": config["inputs"] | changed}
        )
        for others in (["cost=c4"], ["cost=c4", "check=true"]):
            message = refused(tune, *arguments, *others, *given)
            assert f"rules.hrad.checkpoint: others/hrad {words}" in message


def test_two_rules_of_one_kind_may_ask_different_checkpoints(arguments: list[str]) -> None:
    shutil.copytree("checkpoints/specdecpp", "other", dirs_exist_ok=True)
    other = load_predictor("other")
    other.calibration = replace(other.calibration, offset=(0.0, 1.0))
    card = read_config(Path("other"), "other")
    save_predictor(
        other, Path("other"), {name: value for name, value in card.items() if name != "sha256"}
    )
    run(tune, *arguments, "methods=[specdecpp]", "cost=c4")
    alone = json.loads(Path(FILE).read_text())["frontier"]["specdecpp"]
    second = ["+stop@rules.second=specdecpp", "rules.second.checkpoint=other"]
    run(tune, *arguments, *second, "methods=[specdecpp,second]", "cost=c4")
    both = json.loads(Path(FILE).read_text())["frontier"]
    assert both["specdecpp"] == alone and both["second"] != alone


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("methods=[fastest]", "methods: expected names among fixed, confidence, "),
        ("points=0", "points: expected a whole number from 1 to 1000, got 0"),
        ("points=100000", "points: expected a whole number from 1 to 1000, got 100000"),
        (
            "methods=null",
            "methods: expected a list of one or more different names, such as [a,b], got null",
        ),
        (
            "+what_if.x=5",
            "what_if.x: expected a choice of the group x, or settings with a _target_, got 5",
        ),
        (
            "rules.hrad.confidence.threshold=2",
            "rules.hrad.confidence.threshold: expected a number from 0 to 1, got 2",
        ),
        ("gamma_max=9", "gamma_max: 9 is more than the 5 harvested"),
        ("max_new_tokens=99", "max_new_tokens: 99"),
        ("warp.temperature=1", "warp: data/greedy was harvested with"),
        ("data=nowhere", "data: nowhere"),
        ("cost=measured", "cost.file: runs/smollm2-eagle-cost-T0.0.json is missing"),
        (
            "cost.gammas=[]",
            "cost.gammas: expected a list of different whole numbers from 1 on, such as [1,2,4], g",
        ),
        ("choose=dev", "choose: expected train, calibration or test, got 'dev'"),
        ("choose=all", "choose: expected train, calibration or test, got 'all'"),
        ("judge=calibration", "judge: expected another split than choose, "),
        ("out=data", "out: data is no file of its own"),
        (
            "gamma_max=2",
            "rules.hrad.checkpoint: checkpoints/hrad drafts gamma=3 tokens, rounds of 2",
        ),
        ("rules.hrad.checkpoint=nowhere", "rules.hrad.checkpoint: no checkpoint"),
    ],
)
@pytest.mark.few(2)
def test_bad_settings_end_with_one_line(argument: str, words: str, arguments: list[str]) -> None:
    cost = () if argument.startswith("cost") else ("cost=c4",)
    assert words in refused(tune, *arguments, *cost, argument)
    assert not Path(FILE).exists()
