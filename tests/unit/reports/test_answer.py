"""What the report says first, from evaluations made by hand."""

from pathlib import Path
from typing import Any

import pytest

from evaluation.page import CHOSEN_HERE, times
from evaluation.table import SPEEDUP, compare
from reports.answer import answers
from reports.artifacts import Artifacts, Checkpoint, Evaluation
from reports.settings import SIMULATED
from runtime.intervals import Estimate
from tests.helpers.evaluation.evaluations import chain, evaluation, method, plain, trace

SIDES = {"target": "cpu", "draft": "cpu"}
MACHINE = {"hardware": SIDES, "dtypes": SIDES, "threads": 1, "machine": "here"}
PAIR = {"name": "toy", "target": "t"}
COMMAND = (
    "python scripts/evaluate.py pair=toy limit=4 out=runs/x 'tried.fixed.stop.gamma=[2]'"
    " experiment=specdecpp 'methods=[a,b]'"
)
PROMPTS = "abcd"


def decoded(seconds: float = 0.5, prompts: str = PROMPTS, temperature: float = 1.0) -> Evaluation:
    """Plain decoding takes a second a prompt, `quick` this long, `slow` two."""
    traces = {
        "autoregressive": [plain(4, 1.0, prompt) for prompt in prompts],
        "quick": [trace([chain(3, 3)], seconds, prompt) for prompt in prompts],
        "slow": [trace([chain(3, 3)], 2.0, prompt) for prompt in prompts],
    }
    methods = {
        "quick": method("serial", "chain", "token", "confidence", stop={"threshold": 0.3}),
        "slow": method("serial", "chain", "token", "fixed", stop={"gamma": 3}),
    }
    made = {"method.quick.stop.checkpoint": {"sha256": {"config.json": "x"}}}
    found = evaluation(
        methods, traces, temperature, lossless=["outputs are equal"], checkpoints=made
    )
    found.config["draft_warp"] = {"temperature": temperature}
    found.results["run"] |= {"pair": PAIR, "command": COMMAND, **MACHINE}
    return found


def tuned(advice: str, **changes: Any) -> dict[str, Any]:
    usual = {
        "pair": PAIR,
        "warp": {"temperature": 1.0},
        "draft_warp": {"temperature": 1.0},
        "measured_on": {**MACHINE, "devices": SIDES},
        "results": {"chosen": {"advice": advice}},
        "chosen_on": "calibration",
        "data": {"folder": "data/toy"},
        "file": "runs/thresholds.json",
    }
    return {**usual, **changes}


def test_without_tuning_it_is_the_fastest_and_says_so() -> None:
    (answer,) = answers(Artifacts([decoded()]))
    assert answer.use.startswith("Use quick at 0.3: 2.00 times (2.00 to 2.00) plain")
    assert "4 prompts" in answer.why and answer.why.endswith(f"{CHOSEN_HERE}.")
    assert [(bar.method, bar.settings, bar.chosen) for bar in answer.bars] == [
        ("quick", "threshold 0.3", True),
        ("slow", "gamma 3", False),
    ]
    assert [bar.speed.value for bar in answer.bars] == pytest.approx([2.0, 0.5])
    assert answer.command == "python scripts/evaluate.py pair=toy 'methods=[quick]'"
    assert answer.lossless == ["outputs are equal"] and answer.datasets == "toy"


def test_bars_and_answer_say_the_number_of_the_table() -> None:
    found = decoded()
    (answer,) = answers(Artifacts([found]))
    table, compared = found.summary["all"], compare(found.measurements)
    for bar in answer.bars:
        assert bar.speed == table[bar.method][SPEEDUP] == compared[bar.method]
        assert bar.tokens_per_second == table[bar.method]["tokens/s"].value
    assert times(answer.bars[0].speed) in answer.use


def test_it_says_that_a_draft_is_simulated() -> None:
    found = decoded()
    found.config["pair"] = {"bits": 5}
    (simulated,), (other,) = (answers(Artifacts([one])) for one in (found, decoded()))
    assert simulated.where == f"{other.where}; {SIMULATED}"


def test_where_nothing_is_faster_it_is_plain_decoding() -> None:
    (answer,) = answers(Artifacts([decoded(seconds=1.5)]))
    assert answer.use.startswith("Use plain decoding")
    assert answer.command.endswith("'methods=[autoregressive]'")
    assert not any(bar.chosen for bar in answer.bars)


def test_a_method_without_a_draft_is_not_what_to_use() -> None:
    found = decoded()
    found.results["methods"] = {
        name: {"settings": found.config["method"][name], "note": "", "speculates": name != "quick"}
        for name in ("quick", "slow")
    }
    (answer,) = answers(Artifacts([found]))
    assert answer.use.startswith("Use plain decoding")
    assert answer.bars[0].settings == "plain decoding: no draft is worth it"


def test_tuning_on_other_prompts_decides() -> None:
    found = decoded()
    found.results["run"]["devices"] = SIDES
    (answer,) = answers(Artifacts([found], thresholds=[tuned("slow")]))
    assert answer.use.startswith("Use slow at 3: 0.50 times") and "slower" in answer.use
    assert "data/toy (runs/thresholds.json)" in answer.why
    (answer,) = answers(Artifacts([found], thresholds=[tuned("do not speculate")]))
    assert answer.use.startswith("Use plain decoding") and "do not speculate" in answer.why


@pytest.mark.parametrize(
    "changes",
    [
        {"pair": {**PAIR, "target": "other"}},
        {"warp": {"temperature": 0.0}},
        {"measured_on": None},
        {"measured_on": {**MACHINE, "devices": SIDES, "threads": 2}},
    ],
)
def test_tuning_of_something_else_does_not(changes: dict[str, Any]) -> None:
    found = decoded()
    found.results["run"]["devices"] = SIDES
    (answer,) = answers(Artifacts([found], thresholds=[tuned("slow", **changes)]))
    assert answer.use.startswith("Use quick")


def test_what_is_not_told_apart_is_named() -> None:
    found = decoded()
    seconds = dict(zip(PROMPTS, (0.4, 0.6, 0.45, 0.55), strict=True))
    found.traces["slow"][:] = [trace([chain(3, 3)], seconds[p], p) for p in PROMPTS]  # type: ignore[index]
    (answer,) = answers(Artifacts([found]))
    assert "No clear difference from it: " in answer.use


def test_each_temperature_has_an_answer_from_its_largest_evaluation() -> None:
    few = decoded(prompts="ab", seconds=0.25)
    found = answers(Artifacts([decoded(), few, decoded(temperature=0.0)]))
    assert [answer.where.split(",")[1] for answer in found] == [" T = 1", " T = 0"]
    assert found[0].bars[0].speed.value == pytest.approx(2.0)
    assert answers(Artifacts()) == []


def test_calibration_is_that_of_the_checkpoints_decoded_with() -> None:
    stages = {"as trained": {"ece": [0.3, 0.2, 0.4]}, "calibrated": {"ece": [0.05, None, None]}}
    metrics = {"reliability": {"data/toy (test split)": {"token": stages}}}
    used, other = (
        Checkpoint(Path(f"ck/{name}"), {"sha256": {"config.json": name}, "metrics": metrics})
        for name in "xy"
    )
    (answer,) = answers(Artifacts([decoded()], checkpoints=[other, used]))
    assert answer.calibration == [
        "x, data/toy (test split): predictions are off by 5.0 % on average, by 30.0 %"
        " (20.0-40.0) before calibration"
    ]


def test_an_estimate_in_words() -> None:
    assert times(Estimate(1.5)) == "1.50 times"
    assert times(Estimate(1.5, 1.25, 1.75)) == "1.50 times (1.25 to 1.75)"
