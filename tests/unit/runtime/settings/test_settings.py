"""Settings against their description: what each kind takes, which key is at fault, what the line
says; and the object that settings become."""

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import pytest
from omegaconf import OmegaConf
from pydantic import Field

from runtime.errors import shown
from runtime.settings import kinds
from runtime.settings.check import expected, faults, fits, help_of, part
from runtime.settings.kinds import Count, Group, Part, Probability

NAN, INF, SECRET = math.nan, math.inf, "S3CR3T"
CONFIDENCE = {"_target_": "decoding.stopping.confidence.Confidence", "threshold": 0.4}


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
    layers: kinds.Layers | None
    free: Any


class Server(Group):
    url: Annotated[kinds.Address, "of a server"]
    key_variable: Annotated[kinds.Variable | None, "holds its key"]


class Outer(Group):
    inner: Splits
    named: dict[str, Method]
    part: Annotated[Part | Splits, "made, or settings"]
    counts: kinds.Counts
    absent: Count | None


RIGHT: dict[str, Any] = {
    "limit": None,
    "splits": {"test": 0.1, "rest": 0.9},
    "stop": CONFIDENCE,
    "method": {"a": {"stop": CONFIDENCE}},
    "layers": [-1],
    "free": {"x": 1},
}


@pytest.mark.parametrize(
    ("kind", "right", "wrong"),
    [
        (bool, [True, False], ["no", "off", "n", "false", "true", 0, 1, None, [], {}]),
        (kinds.Count, [1, 7], [0, -1, 1.0, 1.5, True, "1", 2**64, None, NAN, [1], {}]),
        (kinds.Size, [0, 3], [-1, 0.0, False, "0", 2**31]),
        (kinds.Seed, [0, 2**32 - 1], [-1, 2**32, 2**64, "abc", True, None]),
        (kinds.Number, [0, -2, 0.5], [NAN, INF, -INF, True, "1", 1e13, None]),
        (kinds.Positive, [1, 1e-9], [0, -1, NAN, INF, "1", True]),
        (kinds.NotNegative, [0, 3.5], [-1e-9, NAN, INF]),
        (kinds.Probability, [0, 1, 0.5], [-0.1, 1.1, NAN, INF, "0.5", True]),
        (kinds.Temperature, [0, 1, 0.6, 1e-6], [1e-46, 1e-7, -1, NAN, INF, 2000, "abc", False]),
        (kinds.TopP, [1, 0.9], [0, 1e-46, 1.1, NAN]),
        (kinds.Text, ["a", "a b", "müßig"], ["", " ", "a\nb", "a\x1b[31m", "a\u2028", "\ud800", 1]),
        (kinds.Path, ["a/b", "~/x", "/"], ["", "a\0b", "x" * 200, "\u202e", 3, None, ["a"]]),
        (kinds.Names, [["a", "b"], []], [["a", "a"], [1], "a", None, [""], {"a": 1}]),
        (kinds.Counts, [[1, 2]], [[], [1, 1], [0], [1.0], [True], 1, "1"]),
        (kinds.Layers, [[-1], [-2, -1]], [[], [-1, -1], [-1.5], ["a"], -1, "-1", None]),
        (kinds.Count | None, [None, 1], [0, "null", "None", ""]),
        (Literal["a", "b"], ["a"], ["c", "", None, 1, ["a"]]),
    ],
)
def test_a_kind_takes_what_it_says_as_it_stands(kind, right, wrong):
    assert [value for value in right if not fits(kind, value)] == []
    assert [value for value in wrong if fits(kind, value)] == []


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (bool, "true or false"),
        (kinds.Count, "a whole number from 1 on"),
        (kinds.Count | None, "a whole number from 1 on or null"),
        (kinds.Probability, "a number from 0 to 1"),
        (kinds.Positive, "a number above 0"),
        (Annotated[int, Field(ge=1, le=64)], "a whole number from 1 to 64"),
        (Annotated[float, Field(ge=0, lt=1), "share"], "a number from 0 on, below 1"),
        (Annotated[kinds.Count, Field(le=8)], "a whole number from 1 to 8"),
        (list[kinds.Count], "a list, each a whole number from 1 on"),
        (Literal["a", "b", None], "a, b or null"),
        (Annotated[kinds.Path | None, "file"], "a path or null"),
        (dict[str, Any], "settings by name"),
    ],
)
def test_expected_in_words(kind, words):
    assert expected(kind) == words
    assert help_of(Annotated[kinds.Count, "help"]) == "help" and help_of(kinds.Count) == ""


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
def test_values_are_shown_so_that_no_terminal_obeys(value, text):
    assert shown(value) == text


def changed(key: str, value: Any) -> dict[str, Any]:
    *above, name = key.split(".")
    found = node = {**RIGHT}
    for part_name in above:
        node[part_name] = {**node[part_name]}
        node = node[part_name]
    node[name] = value
    return found


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
def test_the_key_at_fault_is_named(key, value, at, says):
    first, *_ = faults(Settings, changed(key, value))
    assert first.key == at and says in str(first) and "\n" not in str(first)


def test_a_missing_setting_is_named_and_right_ones_have_no_faults():
    assert list(faults(Settings, RIGHT)) == []
    values = {name: value for name, value in RIGHT.items() if name not in ("limit", "splits")}
    (only,) = faults(Settings, values)
    assert str(only) == "splits: expected settings by name, got null. Add +splits=..."


def test_parts_within_parts_are_checked():
    value = {
        "_target_": "decoding.stopping.hrad.HRADStop",
        "checkpoint": "checkpoints/hrad",
        "balance": 1.0,
        "confidence": {**CONFIDENCE, "threshold": 2},
    }
    assert [fault.key for fault in part(value, "stop")] == ["stop.confidence.threshold"]
    assert [f.key for f in part({**value, "confidence": 5}, "stop")] == ["stop.confidence"]
    # one of another library says itself what is wrong
    assert list(part({"_target_": "no_such_library.Thing", "x": math.nan}, "stop")) == []


def told(**values: object) -> list[str]:
    right = {"url": "http://[::1]:8000/v1", "key_variable": None}
    return [str(fault) for fault in faults(Server, {**right, **values})]


@pytest.mark.parametrize(
    "url",
    [
        *(f"http://me:{SECRET}@host/v1", f"HTTPS://{SECRET}@host/v1", f"me:{SECRET}@host/v1"),
        *(f"http://host/v1?api_key={SECRET}", f"http://host/v1#{SECRET}", f"host:80/v1?k={SECRET}"),
        *("http://host/v1?", "http://host/v1#", f"http://host:{SECRET}/v1", f"http://[{SECRET}/v1"),
        *("127.0.0.1:8000", "ftp://x/v1", "http://", "http://x:abc/v1", "", 5, None, [SECRET]),
    ],
)
def test_no_other_address_is_taken_and_none_is_shown(url):
    assert told() == told(key_variable="API_KEY", url="https://host/a/v1") == []
    (line,) = told(url=url)
    assert line.startswith("url: expected an address such as http://127.0.0.1:8000/v1, without")
    assert SECRET not in line


@pytest.mark.parametrize("value", [f"sk-{SECRET.lower()}", f"{SECRET} ", "api_key", "", 5, ["A"]])
def test_a_key_in_place_of_the_name_of_its_variable_is_not_shown(value):
    (line,) = told(key_variable=value)
    assert line.startswith("key_variable: expected the name of an environment variable, such as")
    assert SECRET.lower() not in line.lower()


def test_groups_are_objects_and_parts_stay_nodes():
    splits = {"test": "${counts.0}", "rest": 2}
    named, made = {"a": {"stop": CONFIDENCE}}, {"_target_": "builtins.dict", "x": 1}
    cfg = OmegaConf.create({"inner": splits, "named": named, "part": made, "counts": [3, 4]})
    settings = Outer.of(cfg)
    assert settings.inner.test == 3 and settings.named["a"].stop is cfg.named.a.stop
    assert settings.part is cfg.part and settings.composed is cfg
    assert settings.counts == [3, 4] and settings.absent is None
    cfg.part = {"test": 5, "rest": 6}
    assert Outer.of(cfg).part.test == 5  # type: ignore[attr-defined]
