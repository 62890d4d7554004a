"""scripts/tune.py from its command line on a tiny harvest: thresholds, and scripts/evaluate.py with
what was found; check=true; batch=[...], and what scripts/export.py makes of it."""

import json
import re
import shlex
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from data_gen.storage.dataset import Harvest, HarvestedPrompt
from decoding.batch_cost import read_batch_cost, write_batch_cost
from decoding.cost import write_cost
from decoding.models.machine import processor
from decoding.stopping.rollout_table import RolloutTable
from decoding.trace import read_traces
from evaluation.replay import check, read, thresholds
from evaluation.replay.read import read_table
from predictors.base import load_predictor, read_config, save_predictor
from runtime.json_files import write_checksummed
from scripts import evaluate, export, tune
from serving.schedule import read_schedule
from tests.helpers.programs.programs import GREEDY, SPLITS, base, refused, run
from tests.helpers.training.checkpoints import columns, write_checkpoint

METHODS = ["fixed", "confidence", "product", "confidence_before", "adaedl", "specdecpp", "hrad"]
COPIES = "{_target_:decoding.structures.lookup.Copies,ngram_max:3,ngram_min:2,stretch:2}"
COSTS = "runs/smollm2-eagle-cost-T0.0.json"
FILE = "runs/smollm2-eagle-thresholds-T0.0.json"


@pytest.fixture
def arguments(replaying: list[str]) -> list[str]:
    return [*replaying, f"out={FILE}"]


def tuned() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(FILE).read_text())
    return found


def evaluated(pair: Path, *arguments: str) -> tuple[dict[str, Any], str]:
    """The settings of the methods that an evaluation decoded, and what it printed."""
    small = ("split=test", "limit=2", "repeats=1", "max_new_tokens=8")
    more = ("tried.fixed.stop.gamma=[2]", "logger=none", "out=runs_x")
    printed = run(evaluate, *base(pair), *GREEDY, *SPLITS, *small, *more, *arguments)
    found = json.loads(Path("runs_x/results.json").read_text())["methods"]
    return {name: method["settings"] for name, method in found.items()}, printed


def test_tune_then_evaluate(arguments: list[str], tiny_pair_dir: Path) -> None:
    printed = run(tune, *arguments, "cost=c10", "verbose=true")
    found = tuned()
    advice = found["results"]["chosen"]["advice"]
    best = "plain decoding" if advice == thresholds.NO_ADVICE else f"{advice} at "
    for words in (
        f"Use {best}",
        "## cost chosen (c10)",
        "predictions cost nothing here",
        "its frontier dominates",
        "oracle of SpecDec++, drafts of any length: ",
        "modelled",
        f"saved {FILE}",
    ):
        assert words in printed
    table = pd.read_parquet(FILE.replace(".json", ".parquet"))
    assert set(table["split"]) == {"calibration", "test"} and set(table["policy"]) == set(METHODS)
    rows = {"c5_row1", "c5_row3", "c10_row1", "c10_row3"}
    assert set(found["results"]) == {"chosen", "a100", "c4", "c5", "c10", "c15"} | rows
    assert found["results"]["chosen"] == found["results"]["c10"]
    chosen, oracle = found["results"]["chosen"]["rules"], sum(found["oracle_calls"])
    assert sorted(chosen) == sorted(METHODS) and oracle > 0
    for choice in chosen.values():
        assert 0 < choice["interval"][0] <= choice["speedup"] <= choice["interval"][1]
        assert choice["speedup"] <= found["results"]["chosen"]["oracle_speedup"]
        assert choice["regret"] >= 0
    assert (found["gamma"], found["max_new_tokens"]) == (5, 12)
    assert found["rules"]["hrad"]["setting"] == "confidence.threshold"

    some = f"methods=[{','.join(name for name in METHODS if name != 'confidence_before')}]"
    method, printed = evaluated(tiny_pair_dir, some)
    assert f"thresholds: {FILE}, for cost c10, whose advice is: " in printed
    for name in ("confidence", "adaedl", "specdecpp"):
        assert method[name]["stop"]["threshold"] == chosen[name]["threshold"]
    assert method["hrad"]["stop"]["confidence"]["threshold"] == chosen["hrad"]["threshold"]
    assert method["fixed"]["stop"]["gamma"] == chosen["fixed"]["threshold"]
    assert "confidence: stop.threshold=" in printed and "modelled" in printed


def test_repeated_texts_are_a_warning(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read, "prompt_texts", lambda *_: [(1, 2), (3,), (1, 2)])
    printed = run(tune, *arguments, "methods=[fixed]", "cost=c5")
    for split in ("calibration", "test"):
        assert f"warning: 1 of 3 prompts of data/greedy ({split}) repeat the text" in printed


def test_choices_are_judged_on_other_harvests_as_well(arguments: list[str]) -> None:
    shutil.copytree("data/greedy", "data/again", dirs_exist_ok=True)
    few = ("methods=[fixed,confidence]", "cost=c5", "cost.row=0.01", "judge_data=[data/again]")
    printed = run(tune, *arguments, *few, "verbose=true")
    found = tuned()
    assert "## cost c4: " in printed and "## cost c4, data/again: " in printed
    assert "| knows p " in printed and "| confidence: " in printed
    here, there = found["results"]["c4"], found["elsewhere"]["data/again"]["c4"]
    for rule in ("fixed", "confidence"):
        assert here["rules"][rule]["threshold"] == there["rules"][rule]["threshold"]
        assert here["rules"][rule]["interval"] != there["rules"][rule]["interval"]
    assert here["bounds"]["knows p"]["speedup"] <= here["oracle_speedup"]
    assert found["results"]["chosen"] == found["results"]["c5_row1"]
    manifest = json.loads(Path("data/again/manifest.json").read_text())
    hotter = {"warp": {**manifest["warp"], "temperature": 0.5}}
    for changed, words in (
        ({"gamma": 2}, "judge_data: expected rounds of 5 tokens or more, got 2 in data/again"),
        (hotter, "judge_data: data/again was made with warp.temperature=0.5, data/greedy wi"),
    ):
        write_checksummed(Path("data/again/manifest.json"), manifest | changed)
        assert words in refused(tune, *arguments, *few)


@pytest.fixture
def worth() -> None:
    """A predictor of the structure `grown`, and of the rule `value`."""
    made = read_config(Path("checkpoints/hrad"), "")
    context = {name: made[name] for name in ("pair", "warp", "draft_warp", "provenance")}
    write_checkpoint(Path("checkpoints/value"), "value", columns("value", 0), context=context)


def test_grown_drafts_need_no_threshold(arguments: list[str], worth: None) -> None:
    printed = run(tune, *arguments, "cost=c5", "methods=[fixed,value,grown]", "verbose=true")
    found = tuned()
    assert "## without tuning: " in printed
    assert re.search(r"\| grown +\| c10_row3 +\| test +\|", printed)
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
        assert words in refused(tune, *arguments, "cost=c5", *given.split())


@pytest.mark.slow
def test_what_is_given_wins_and_what_does_not_fit_is_left_out(
    arguments: list[str], tiny_pair_dir: Path
) -> None:
    only = "methods=[confidence,hrad]"
    run(tune, *arguments, "cost=c10", only)
    method, printed = evaluated(tiny_pair_dir, only, "method.confidence.stop.threshold=0.123")
    assert method["confidence"]["stop"]["threshold"] == 0.123
    assert "confidence: method.confidence.stop.threshold=0.123, as given" in printed
    method, printed = evaluated(tiny_pair_dir, only, "thresholds=null")
    assert method["hrad"]["stop"]["confidence"]["threshold"] == 0.2
    assert "thresholds" not in printed
    found = tuned()
    found["rules"]["hrad"]["checkpoint"] = "another"
    setup = {key: {"target": "other", "draft": "other"} for key in ("hardware", "dtypes")}
    setup["threads"] = torch.get_num_threads()
    thresholds.write(Path(FILE), found | {"measured_on": setup})
    _, printed = evaluated(tiny_pair_dir, only)
    another = "checkpoints/hrad is not the checkpoint it was tuned with"
    assert f"hrad: {another}, thresholds left out" in printed
    assert f"warning: {FILE} was tuned on another machine: hardware other, here " in printed
    assert "; dtypes other, here torch.float64. Tune anew: python scripts/tune.py " in printed
    warp = {"warp": {"temperature": 0.5, "top_k": 0, "top_p": 1.0}}
    thresholds.write(Path(FILE), found | warp)
    _, printed = evaluated(tiny_pair_dir, only)
    assert f"thresholds: those of {FILE} are for another warp, left out" in printed
    few = (*base(tiny_pair_dir), *GREEDY, *SPLITS, only, "logger=none")
    another = {"pair": {**found["pair"], "draft": "whole another"}}
    for changed, part in ((warp, "warp"), (another, "pair")):
        thresholds.write(Path(FILE), found | changed)
        message = refused(evaluate, *few, f"thresholds={FILE}")
        assert f"thresholds: {FILE} was tuned for another {part}. Tune this one: pyth" in message
    Path(FILE).write_text("{}")
    message = refused(evaluate, *few)
    assert "thresholds: " in message and "python scripts/tune.py" in message
    assert "thresholds: nowhere.json" in refused(evaluate, *few, "thresholds=nowhere.json")


@pytest.mark.slow
def test_the_test_split_is_that_of_the_harvest(arguments: list[str], tiny_pair_dir: Path) -> None:
    run(tune, *arguments, "cost=c10", "methods=[confidence]")
    small = (*base(tiny_pair_dir), *GREEDY, "logger=none", "out=runs_x", *SPLITS)
    in_data = "0.2 here, 0.3 in data/greedy, on which"
    message = refused(evaluate, *small, "methods=[hrad]", "splits.test=0.2")
    assert f"splits.test: {in_data} checkpoints/hrad was trained" in message
    message = refused(evaluate, *small, "methods=[confidence]", "splits.calibration=0.2")
    assert f"splits.calibration: {in_data} thresholds={FILE} was tuned" in message
    assert "Set splits.calibration=0.3" in message
    evaluated(tiny_pair_dir, "methods=[hrad]", "splits.test=0.2", "split=all")


def test_costs_are_measured_saved_and_read_again(arguments: list[str], worth: None) -> None:
    small = ("cost.limit=3", "cost.max_new_tokens=8", "cost.gammas=[1,3]")
    methods = f"methods=[{','.join([*METHODS, 'grown'])}]"
    printed, first = run(tune, *arguments, "cost=measure", *small, methods), tuned()
    assert "N_draft" in printed and "R^2" in printed
    assert "cost nothing" not in printed.partition("## cost chosen")[2].partition("\n")[0]
    saved = json.loads(Path(COSTS).read_text())
    asking = {*METHODS, "value"} - {"fixed"}  # what a structure asks costs what its rule does
    assert saved["regression"]["rows"] == 3 * (1 + 2 + len(asking)) and saved["pair"]["target"]
    assert set(saved["seconds"]["calls"]) == asking and set(first["rules"]) == set(METHODS)
    calls = first["results"]["chosen"]["cost"]["calls"]
    assert calls["grown"] == calls["value"] > 0
    setup = saved["measured_on"]
    assert setup["threads"] == torch.get_num_threads() and setup["hardware"]["draft"] == processor()
    assert setup["dtypes"] == {"target": "torch.float64", "draft": "torch.float64"}
    assert setup["versions"]["torch"]
    run(tune, *arguments[:-1], "cost=measured", methods)
    again = tuned()
    assert again["results"]["chosen"] == first["results"]["chosen"]
    assert again["measured_on"] == first["measured_on"] == setup
    saved["pair"]["draft"] = "another"
    write_cost(COSTS, saved)
    message = refused(tune, *arguments, "cost=measured")
    assert f"cost.file: {COSTS} belongs to another draft" in message


def test_what_is_to_be_measured_is_a_whole_command(arguments: list[str]) -> None:
    for group, missing in {"cost": [], "batch_cost": ["batch=[1,8]"]}.items():
        given = ["methods=[fixed]", *missing]
        message = refused(tune, *arguments, *given, f"{group}=measured", f"{group}.file=none.json")
        command = shlex.split(message.partition(" Measure it: ")[2])
        shared = ("pair", "dataset", "warp", "draft_warp", "splits", "data", "methods", "batch")
        kept = [each for each in arguments if re.split("[.=]", each)[0] in shared]
        kept = [each for each in kept if not each.startswith("methods=")]
        assert command[:2] == ["python", "scripts/tune.py"]
        assert sorted(command[2:]) == sorted([f"{group}=measure", *kept, *given])


def test_thresholds_for_another_machine_get_their_own_file(arguments: list[str]) -> None:
    run(tune, *arguments[:-1], "cost=a100", "methods=[fixed]")
    assert json.loads(Path(FILE.replace(".json", "-a100.json")).read_text())["cost"] == "a100"
    assert not Path(FILE).exists()


def test_where_drafting_costs_too_much_nothing_is_drafted(
    arguments: list[str], tiny_pair_dir: Path
) -> None:
    printed = run(tune, *arguments, "cost=c4", "cost.draft=9", "methods=[fixed,confidence]")
    assert "Use plain decoding: no rule pays beyond the noise at these costs. The best, " in printed
    assert "## cost chosen (c4): do not speculate; oracle 1.00x" in printed
    method, printed = evaluated(tiny_pair_dir, "methods=[confidence]")
    best = "confidence: do not speculate, so plain decoding; tuned: the best, stop.threshold="
    assert best in printed
    assert "| plain decoding: no draft is worth it here |" in printed and "(equal)" in printed
    results = json.loads(Path("runs_x/results.json").read_text())
    assert results["methods"]["confidence"]["speculates"] is False
    assert "stop" in results["run"]["config"]["method"]["confidence"], "the config stays as it was"
    assert list(method["confidence"]) == ["engine"] == list(method["autoregressive"])
    traces = read_traces(Path("runs_x/traces-confidence.jsonl"))
    assert not any(round_.draft_forwards for trace in traces for round_ in trace.rounds)


def test_a_checkpoint_for_other_features_is_refused(arguments: list[str], harvest: Path) -> None:
    shutil.copytree("checkpoints", "others", dirs_exist_ok=True)
    file, config = Path("others/hrad/config.json"), read_config(Path("others/hrad"), "")
    given = ["rules.specdecpp.checkpoint=others/specdecpp", "rules.hrad.checkpoint=others/hrad"]
    layers = "expected some of the recorded layers [-4, -3, -2, -1]"
    for changed, words in (
        ({"target_hidden": [-5, -1]}, f"reads layers that replay lacks: {layers}"),
        ({"embedding": False}, "is incomplete or damaged (TypeError: "),
    ):
        write_checksummed(file, config | {"inputs": config["inputs"] | changed})
        for others in (["cost=c4"], ["cost=c4", "check=true"]):
            message = refused(tune, *arguments, *others, *given)
            assert f"rules.hrad.checkpoint: others/hrad {words}" in message


def test_two_rules_of_one_kind_may_ask_different_checkpoints(arguments: list[str]) -> None:
    shutil.copytree("checkpoints/specdecpp", "other", dirs_exist_ok=True)
    other, card = load_predictor("other"), read_config(Path("other"), "other")
    other.calibration = replace(other.calibration, offset=(0.0, 1.0))
    card.pop("sha256")
    save_predictor(other, Path("other"), card)
    run(tune, *arguments, "methods=[specdecpp]", "cost=c4")
    alone = tuned()["frontier"]["specdecpp"]
    second = ["+stop@rules.second=specdecpp", "rules.second.checkpoint=other"]
    run(tune, *arguments, *second, "methods=[specdecpp,second]", "cost=c4")
    both = tuned()["frontier"]
    assert both["specdecpp"] == alone and both["second"] != alone


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("methods=[fastest]", "methods: expected names among fixed, confidence, "),
        ("+what_if.x=5", "what_if.x: expected a choice of the group x, or settings with a _target"),
        ("rules.hrad.confidence.threshold=2", "rules.hrad.confidence.threshold: expected a number"),
        ("gamma_max=9", "gamma_max: 9 is more than the 5 harvested"),
        ("gamma_max=2", "rules.hrad.checkpoint: checkpoints/hrad drafts gamma=3 tokens, rounds of"),
        ("max_new_tokens=99", "max_new_tokens: 99"),
        ("warp.temperature=1", "warp: data/greedy was harvested with"),
        ("data=nowhere", "data: nowhere"),
        ("cost=measured", f"cost.file: {COSTS} is missing"),
        ("choose=all", "choose: expected train, calibration or test, got 'all'"),
        ("judge=calibration", "judge: expected another split than choose, "),
        ("out=data", "out: data is no file of its own"),
        ("rules.hrad.checkpoint=nowhere", "rules.hrad.checkpoint: no checkpoint"),
        ("batch=[4,1]", "batch: expected numbers in rising order, such as [1, 4]"),
        ("batch=[1] check=true", "check: expected false with batch, which decodes nothing, got tr"),
        ("batch=[1] judge_data=[data/other]", "judge_data: expected [] with batch"),
        ("scheduler=true", "scheduler: expected false without batch"),
        ("batch=[1] batch_cost=measured", "batch_cost.file: runs/"),
        ("judge_data=[data/other] check=true", "judge_data: expected [] with check=true"),
        ("methods=[fixed,grown] check=true", "methods: expected names among rules with check=tr"),
        ("+cost@what_if.chosen=c4", "what_if: expected other names than chosen"),
        ("+stop@rules.autoregressive=fixed", "rules: expected other names than autoregressive"),
        ("+calibration@calibrations.oracle=sts", "calibrations: expected other names than oracle"),
        ("+structure@structures.fixed=grown", "structures: expected other names than fixed"),
        ("out=runs/x.parquet", "out: expected the name of a JSON file, got runs/x.parquet"),
    ],
)
@pytest.mark.few(2, rest="slow")
def test_bad_settings_end_with_one_line(argument: str, words: str, arguments: list[str]) -> None:
    cost = () if argument.startswith("cost") else ("cost=c4",)
    assert words in refused(tune, *arguments, *cost, *argument.split())
    assert not Path(FILE).exists()


# check=true ---------------------------------------------------------------------------------------


SHORTER = ("gamma_max=2", "max_new_tokens=5")


@pytest.fixture
def checking(replaying: list[str]) -> list[str]:
    return [*replaying, "check=true", "cost=c10", "out=runs/check.json"]


@pytest.fixture
def checked(checking: list[str], capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """Whether a check ends well, and what it prints."""

    def check(*arguments: str) -> tuple[bool, str]:
        with pytest.raises(SystemExit) as exit_code:
            run(tune, *checking, *arguments)
        return not exit_code.value.code, capsys.readouterr().out

    return check


def test_replay_is_decode(checked: Callable[..., Any]) -> None:
    (well, printed), decodes = checked("check_prompts=4"), 4 * 3 * len(METHODS)
    assert well
    assert printed.startswith(f"\nReplay counts what {decodes} of {decodes} decodes count.\n")
    assert printed.count("4 of 4 prompts equal") == 3 * len(METHODS)
    found = json.loads(Path("runs/check.json").read_text())["rules"]
    assert {name.split()[0] for name in found} == set(METHODS)
    rows = found["fixed 4"]
    assert [row["equal"] for row in rows] == [True] * 4 and rows[0]["decoded"]["emitted"] > 0
    (well, printed) = checked("check_prompts=2", "methods=[fixed,confidence]", *SHORTER)
    assert well and "Replay counts what 8 of 8 decodes count" in printed
    found = json.loads(Path("runs/check.json").read_text())["rules"]
    rows = [row["decoded"] for name, rows in found.items() for row in rows]
    assert list(found)[0] == "fixed 1" and max(row["emitted"] for row in rows) == 5


@pytest.mark.parametrize(
    ("changed", "between"),
    [
        ({"accepted": 0, "tokens": 31}, "draft's tokens"),
        ({"confidence": 0.0}, "value and threshold"),
        ({"confidence": 0.499}, "value and threshold"),
        ({"accepted": 0}, "target's tokens"),
    ],
)
def test_it_says_what_differs(
    changed: dict[str, float], between: str, checked: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A table that is wrong in one way."""

    def wrong(*given: Any) -> RolloutTable:
        table = read_table(*given)
        columns = {name: np.full_like(getattr(table, name), each) for name, each in changed.items()}
        return replace(table, **columns)

    monkeypatch.setattr(check, "read_table", wrong)
    well, printed = checked("methods=[confidence]", "check_values=1", "check_prompts=6")
    assert not well and f"between {between}: NO NEAR TIE" in printed and "6 of 6" not in printed


@pytest.mark.parametrize(("parted", "between"), [(0, "rounds that agree"), (1, "target's tokens")])
def test_rounds_that_agree_are_no_excuse_unless_their_texts_part(
    parted: int, between: str, checked: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where texts part, the target decides, whatever is drafted behind it."""
    original, prompts = check.counted, Harvest.prompts

    def other_drafts(*given: Any) -> RolloutTable:
        table = read_table(*given)
        return replace(table, tokens=table.tokens ^ parted)

    def other_texts(harvest: Harvest, split: str) -> Iterator[HarvestedPrompt]:
        for prompt in prompts(harvest, split):
            first, *rest = prompt.response_tokens
            yield replace(prompt, response_tokens=[first ^ parted, *rest])

    monkeypatch.setattr(check, "read_table", other_drafts)
    monkeypatch.setattr(Harvest, "prompts", other_texts)
    monkeypatch.setattr(check, "counted", lambda trace: original(trace) | {"forwards": -1.0})
    well, printed = checked("methods=[fixed]", "check_values=1", "check_prompts=1")
    assert not well
    assert f"round {0 if parted else ''}" in printed and f"between {between}: NO NEAR" in printed


def test_what_it_cannot_check_is_refused(checking: list[str]) -> None:
    message = refused(tune, *checking, "pair.dtype=float32")
    assert "pair.dtype: expected torch.float64 as harvested, got torch.float32" in message
    message = refused(tune, *checking, "+stop@rules.never=never", "methods=[never]")
    assert "rules.never: expected a rule that can be replayed, got Never" in message


# batch=[...] --------------------------------------------------------------------------------------


SCHEDULE = "runs/schedule.json"
PER_ROW = ["batch_cost=per_row", "batch_cost.first_draft=0.001", "batch_cost.draft_row=0"]
FREE = [*PER_ROW, "batch_cost.target_row=0", f"out={SCHEDULE}"]


def test_a_schedule_is_written_and_exported(replaying: list[str]) -> None:
    printed = run(tune, *replaying, *FREE, "batch=[1,4]")
    found = json.loads(Path(SCHEDULE).read_text())
    assert re.search(r"\nDraft \d tokens for 1 request\(s\) \(.* plain decoding\), ", printed)
    assert "Costs per_row (given), speeds modelled, test prompts" in printed
    assert f"saved {SCHEDULE}" in printed
    sizes = found["details"]["sizes"]
    assert [one["requests"] for one in sizes] == [1, 4]
    assert sizes[1]["tokens_per_second"] == pytest.approx(4 * sizes[0]["tokens_per_second"])
    assert read_schedule(SCHEDULE).longest == max(one["length"] for one in sizes) > 0
    for engine, file in {
        "sglang": "adaptive.json",
        "vllm": "speculative_config.json",
        "tensorrt_llm": "speculative_config.yaml",
    }.items():
        run(export, f"serving={engine}", f"schedule={SCHEDULE}", f"out=exported/{engine}")
        assert Path(f"exported/{engine}/{file}").is_file()


def test_no_draft_is_made_where_rows_are_dear(replaying: list[str]) -> None:
    dear = ("batch_cost.target_row=10", "batch=[8]", f"out={SCHEDULE}")
    printed = run(tune, *replaying, *PER_ROW, *dear)
    assert read_schedule(SCHEDULE).longest == 0
    assert "\nUse plain decoding for 8 request(s).\n" in printed
    assert re.search(r"\| 8 +\| do not speculate \|", printed)


def test_the_scheduler_is_simulated(replaying: list[str]) -> None:
    asked = ("batch=[1,4]", "scheduler=true", "judge_data=[data/greedy]")
    printed = run(tune, *replaying, *FREE, *asked)
    found = json.loads(Path(SCHEDULE).read_text())["details"]["scheduler"]
    assert list(found) == ["data/greedy, test prompts", "data/greedy"]
    for name, rows in found.items():
        assert f"Scheduler, judged on {name}\n" in printed
        assert [one["requests"] for one in rows] == [1] * 12 + [4] * 12
        by = {"", "as logged", "position alone", "sts", "platt", "oracle"}
        assert {one["confidences"] for one in rows} == by
        plain, fixed = (row["tokens_per_second"]["value"] for row in rows[:2])
        assert fixed >= plain > 0
    assert re.search(r"\| 4 +\| budget, platt, 2 steps old +\|", printed)


def test_batched_costs_are_measured_and_read_again(replaying: list[str]) -> None:
    more = ["batch=[1,3]", "batch_cost.file=runs/costs.json"]
    measure = [*replaying, "batch_cost=measure", "batch_cost.context=5", "batch_cost.repeats=2"]
    assert "Costs measure (measured)" in run(tune, *measure, *more, f"out={SCHEDULE}")
    measured, found = read_batch_cost("runs/costs.json"), read_schedule(SCHEDULE).costs
    assert found and measured.requests == found.requests == [1, 3]
    assert found.draft_seconds == measured.draft_seconds and min(found.draft_seconds) > 0
    run(tune, *replaying, "batch_cost=measured", *more, "out=runs/again.json")
    assert read_schedule("runs/again.json") == read_schedule(SCHEDULE)
    others = json.loads(Path("runs/costs.json").read_text())
    others["pair"]["draft"] = "another"
    write_batch_cost(Path("runs/others.json"), others)
    theirs = ("batch=[1,3]", "batch_cost=measured", "batch_cost.file=runs/others.json")
    message = refused(tune, *replaying, *theirs)
    assert "batch_cost.file: runs/others.json belongs to another draft than the har" in message
    message = refused(tune, *measure, *more, f"pair.draft={measure[0].partition('=')[2]}")
    assert "pair: smollm2-eagle belongs to another draft than the harvest" in message
    run(export, "serving=sglang", f"schedule={SCHEDULE}", "out=exported/measured")
    assert Path("exported/measured/sps_additive.json").is_file()
    for given, words in {
        "rows=[1,2]": "batch_cost.rows: expected rows up to",
        "rows=[2,1]": "batch_cost.rows: expected rising numbers from 1 on, such as [1, 2]",
        "context=100000": "batch_cost.context: expected at most",
    }.items():
        assert words in refused(tune, *measure, "batch=[1]", f"batch_cost.{given}")
    short = [*replaying, "batch=[1]", "batch_cost=vllm", "batch_cost.gammas=[1,2]"]
    assert "batch_cost.gammas: expected lengths up to" in refused(tune, *short)
