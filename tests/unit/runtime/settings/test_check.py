"""Settings against their description: which key is at fault, and what the line says."""

import math
from collections.abc import Mapping
from typing import Annotated, Any

import pytest

from runtime.errors import shown
from runtime.settings.check import faults, part
from runtime.settings.kinds import Count, Group, Layers, Part, Probability


class Splits(Group):
    test: Probability
    rest: Probability

    @staticmethod
    def misfits(values: Mapping[str, Any]) -> Mapping[str, str]:
        return {"test": "less than the rest"} if values["test"] > values["rest"] else {}


class Method(Group):
    stop: Part
    verifier: Part | None


class Settings(Group):
    limit: Annotated[Count | None, "prompts"]
    splits: Splits
    stop: Annotated[Part, "rule"]
    method: dict[str, Method]
    layers: Layers | None
    free: Any


CONFIDENCE = {"_target_": "decoding.stopping.confidence.Confidence", "threshold": 0.4}
RIGHT: dict[str, Any] = {
    "limit": None,
    "splits": {"test": 0.1, "rest": 0.9},
    "stop": CONFIDENCE,
    "method": {"a": {"stop": CONFIDENCE}},
    "layers": [-1],
    "free": {"x": 1},
}


def changed(key: str, value: Any) -> dict[str, Any]:
    *above, name = key.split(".")
    found = node = {**RIGHT}
    for part_name in above:
        node[part_name] = {**node[part_name]}
        node = node[part_name]
    node[name] = value
    return found


def test_right_settings_have_no_faults() -> None:
    assert list(faults(Settings, RIGHT)) == []


@pytest.mark.parametrize(
    ("key", "value", "at", "says"),
    [
        ("limit", 1.5, "limit", "expected a whole number from 1 on or null, got 1.5"),
        ("limt", 1, "limt", "expected limit, perhaps, got something else. Leave limt away"),
        ("splits", 3, "splits", "expected settings by name, got 3"),
        ("splits.test", math.nan, "splits.test", "expected a number from 0 to 1, got nan"),
        ("splits.test", 0.95, "splits.test", "expected less than the rest, got 0.95"),
        ("splits.x", 1, "splits.x", "expected one of test, rest, got something else"),
        ("stop", 5, "stop", "expected a choice of the group stop, or settings with a _target_"),
        ("stop", None, "stop", "expected a choice of the group stop"),
        ("stop.threshold", "abc", "stop.threshold", "expected a number"),
        ("stop.treshold", 1, "stop.treshold", "expected threshold, perhaps"),
        ("stop._target_", "decoding.no.Such", "stop._target_", "a class or function that there is"),
        ("stop._target_", "x", "stop._target_", "a class or function that there is"),
        ("method", ["a"], "method", "expected settings by name, got ['a']"),
        ("method.a", None, "method.a", "expected settings by name, got null"),
        ("method.a.stop", {}, "method.a.stop", "expected a choice of the group stop"),
        ("layers", [-1, -1], "layers", "expected a list of different layers"),
    ],
)
def test_the_key_at_fault_is_named(key: str, value: Any, at: str, says: str) -> None:
    first, *_ = faults(Settings, changed(key, value))
    assert first.key == at and says in str(first) and "\n" not in str(first)


def test_a_missing_setting_is_named() -> None:
    values = {name: value for name, value in RIGHT.items() if name not in ("limit", "splits")}
    (only,) = faults(Settings, values)
    assert str(only) == "splits: expected settings by name, got null. Add +splits=..."


def test_parts_within_parts_are_checked() -> None:
    value = {
        "_target_": "decoding.stopping.hrad.HRADStop",
        "checkpoint": "checkpoints/hrad",
        "balance": 1.0,
        "confidence": {**CONFIDENCE, "threshold": 2},
    }
    assert [fault.key for fault in part(value, "stop")] == ["stop.confidence.threshold"]
    assert [f.key for f in part({**value, "confidence": 5}, "stop")] == ["stop.confidence"]


def test_a_part_of_another_library_says_itself_what_is_wrong() -> None:
    assert list(part({"_target_": "no_such_library.Thing", "x": math.nan}, "stop")) == []


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "null"),
        (True, "true"),
        ("a\x1b[31m\u2028", "'a\\x1b[31m\\u2028'"),
        ("x" * 100, "'" + "x" * 76 + "..."),
        ("müßig", "'müßig'"),
    ],
)
def test_values_are_shown_so_that_no_terminal_obeys(value: Any, text: str) -> None:
    assert shown(value) == text
