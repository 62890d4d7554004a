"""Products of cases: the default run has each value of each part once, `make test-all` the rest."""

from collections.abc import Callable, Hashable, Iterable
from itertools import product
from typing import Any

import pytest

Part = Callable[..., Hashable]


def covering(cases: Iterable[Any], *parts: Part) -> list[Any]:
    """Mark as full every case in which no part has a value that is new among the marked cases,
    or among the others.

    cases: parameters of a test, one at a time or in tuples; parts: functions of them, by default
    each of them"""
    seen, marked = set[Hashable](), []
    for case in cases:
        values, marks, name = parameters(case)
        keys = [part(*values) for part in parts] if parts else list(map(str, values))
        new = {(bool(marks), *found) for found in enumerate(keys)} - seen
        seen |= new
        marked.append(
            pytest.param(*values, id=name, marks=marks if new else [*marks, pytest.mark.full])
        )
    return marked


def crossed(*cases: Iterable[Any]) -> list[Any]:
    """Return the product of parameters as those of one test, the first ones varying fastest."""
    found = []
    for several in product(*reversed([list(each) for each in cases])):
        each = [parameters(case) for case in reversed(several)]
        values = [value for values, _, _ in each for value in values]
        marks = [mark for _, marks, _ in each for mark in marks][:1]
        found.append(pytest.param(*values, marks=marks))
    return found


def parameters(case: Any) -> tuple[tuple[Any, ...], list[Any], str | None]:
    """Return values, marks and name of a case."""
    if hasattr(case, "marks"):
        return case.values, list(case.marks), case.id
    return (case if type(case) is tuple else (case,)), [], None
