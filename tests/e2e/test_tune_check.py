"""scripts/tune.py check=true from its command line on a tiny harvest."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from decoding.stopping.rollout_table import RolloutTable
from evaluation.replay import check
from evaluation.replay.read import read_table
from scripts import tune
from tests.helpers.programs.programs import refused, run

RULES = ("fixed", "confidence", "product", "confidence_before", "adaedl", "specdecpp", "hrad")


@pytest.fixture
def arguments(replaying: list[str]) -> list[str]:
    return [*replaying, "check=true", "cost=c10"]


def test_replay_is_decode(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_code:
        run(tune, *arguments, "check_prompts=4", "out=runs/check.json")
    assert not exit_code.value.code
    assert capsys.readouterr().out.count("4 of 4 prompts equal") == 3 * len(RULES)
    found = json.loads(Path("runs/check.json").read_text())["rules"]
    assert {name.split()[0] for name in found} == set(RULES)
    rows = found["fixed 4"]
    assert [row["equal"] for row in rows] == [True] * 4 and rows[0]["decoded"]["emitted"] > 0


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
    changed: dict[str, float],
    between: str,
    arguments: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A table that is wrong in one way."""

    def wrong(*given: Any) -> RolloutTable:
        table = read_table(*given)
        return replace(
            table,
            **{name: np.full_like(getattr(table, name), value) for name, value in changed.items()},
        )

    monkeypatch.setattr(check, "read_table", wrong)
    only = ["methods=[confidence]", "check_values=1", "check_prompts=6"]
    with pytest.raises(SystemExit) as exit_code:
        run(tune, *arguments, *only)
    assert exit_code.value.code
    printed = capsys.readouterr().out
    assert f"between {between}: NO NEAR TIE" in printed and "6 of 6" not in printed


def test_rounds_that_agree_are_no_excuse(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    original = check.counted
    monkeypatch.setattr(check, "counted", lambda trace: original(trace) | {"forwards": -1.0})
    only = ["methods=[fixed]", "check_values=1", "check_prompts=1"]
    with pytest.raises(SystemExit) as exit_code:
        run(tune, *arguments, *only, "out=runs/check.json")
    assert exit_code.value.code
    assert "between rounds that agree: NO NEAR TIE" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("check_prompts=0", "check_prompts: expected a whole number from 1 on or null, got 0"),
        ("check_values=0", "check_values: expected a whole number from 1 on, got 0"),
        ("check=maybe", "check: expected true or false, got 'maybe'"),
        (
            "methods=[]",
            "methods: expected a list of one or more different names, such as [a,b], got []",
        ),
        ("out=data", "out: data is no file of its own"),
    ],
)
def test_bad_settings_end_with_one_line(argument: str, words: str, arguments: list[str]) -> None:
    assert words in refused(tune, *arguments, argument)


def test_it_wants_the_dtype_of_the_harvest(arguments: list[str]) -> None:
    message = refused(tune, *arguments, "pair.dtype=float32")
    assert "pair.dtype: expected torch.float64 as harvested, got torch.float32" in message


def test_a_rule_that_cannot_be_replayed_is_named(arguments: list[str]) -> None:
    never = ["+stop@rules.never=never", "methods=[never]"]
    message = refused(tune, *arguments, *never)
    assert "rules.never: expected a rule that can be replayed, got Never" in message
