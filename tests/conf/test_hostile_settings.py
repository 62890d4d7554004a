"""Every key of every program against hostile values: refused in one line that names the key, or a
value of the kind that stood there. Each key meets a thirtieth of the values, those of one program a
tenth, in full tests all."""

import re
from collections import Counter

import pytest

from runtime.settings.check import faults
from tests.helpers.damage.hostile import (
    PROGRAMS,
    VALUES,
    Place,
    at,
    changed,
    compositions,
    is_like,
    places,
    program_of,
)


@pytest.mark.parametrize(
    ("program", "step"),
    [
        (PROGRAMS[0], 10),
        *(pytest.param(name, 30, marks=pytest.mark.slow) for name in PROGRAMS[1:]),
        *(pytest.param(name, 1, marks=pytest.mark.full) for name in PROGRAMS),
    ],
)
def test_a_hostile_value_is_refused_or_is_of_the_right_kind(program: str, step: int) -> None:
    """Every key, with every `step`-th value from another one on each time."""
    settings, tried = program_of(program).settings, Counter[str]()
    composed = [found.values() for _, found in compositions(program)]
    before = [set(map(str, faults(settings, values))) for values in composed]  # what is missing
    wrong = []
    for number, place in enumerate(places(program)):
        values = composed[place.composition]
        for value in VALUES[number % step :: step]:
            new = faults(settings, changed(values, place.key, value))
            known = before[place.composition]
            found = [one for one in new if one.key == place.key or str(one) not in known]
            tried["refused" if found else "accepted"] += 1
            lines = [str(fault) for fault in found]
            if not found and not is_like(value, place.value, place.key):
                wrong.append(f"{place.key} was {place.value!r}, took {value!r}")
            if any("\n" in line or not line.isprintable() for line in lines):
                wrong.append(f"{place.key}={value!r}: {lines}")
            if found and not any(_about(fault.key, place.key) for fault in found):
                wrong.append(f"{place.key}={value!r} is answered with {lines[0]}")
    print(program, dict(tried))
    assert wrong == []


def _about(named: str, key: str) -> bool:
    """Whether an error that names one key is about the other: the same, what holds it, or what is
    in it; or beside it, where two do not go together; or a value tried for it."""
    named, key = (re.sub("^tried", "method", one) for one in (named, key))
    return (
        f"{named}.".startswith(f"{key}.")
        or f"{key}.".startswith(f"{named}.")
        or named.rpartition(".")[0] == key.rpartition(".")[0]
    )


def test_the_oracle_tells_kinds_apart() -> None:
    place = Place("gen_data", 0, "gamma", 20)
    assert is_like(3, place.value) and not is_like("3", place.value)
    assert not is_like(1, True) and not is_like(True, 1) and is_like(3, 0.5)
    assert at(changed({"a": {"b": 1}}, "a.b", 2), "a.b") == 2
