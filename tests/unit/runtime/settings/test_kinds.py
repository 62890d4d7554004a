"""What each kind of setting takes, and what an error line says of it."""

import math
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field

from runtime.settings import kinds
from runtime.settings.check import fits
from runtime.settings.expected import expected, help_of

NAN, INF = math.nan, math.inf


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
def test_a_kind_takes_what_it_says_as_it_stands(
    kind: Any, right: list[Any], wrong: list[Any]
) -> None:
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
def test_expected_in_words(kind: Any, words: str) -> None:
    assert expected(kind) == words


def test_text_in_an_annotation_is_its_help() -> None:
    assert help_of(Annotated[kinds.Count | None, "tokens"]) == "tokens"
    assert help_of(kinds.Count) == ""
