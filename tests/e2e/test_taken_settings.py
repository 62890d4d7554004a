"""What a description takes, the program can be run with: it ends well, or in one line that says
what is wrong with it. A quarter of the keys of three programs, a twelfth of evaluate.py's, a value
each (full: every key, two values); the settings of a class that many methods have are tried in one
of them."""

import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from runtime.settings.check import faults
from tests.helpers.damage.hostile import (
    VALUES,
    Place,
    at,
    changed,
    compositions,
    places,
    program_of,
)
from tests.helpers.programs.programs import GREEDY, SPLITS, base, run

REPLAYED = " ".join(["data=data/greedy", *GREEDY, *SPLITS])
QUICK = {
    "gen_data": "max_new_tokens=4 gamma=3 dataset.limit=6 out=data/new",
    "train": "data=data/greedy trainer.epochs=1 logger=none out=checkpoints/new",
    "evaluate": "max_new_tokens=4 repeats=1 limit=1 logger=none methods=[custom] out=runs/new",
    "tune": f"{REPLAYED} points=3 cost=c4 methods=[fixed] out=runs/new.json",
}
PAIRLESS = ("train", "tune")
LONG = ("batch_tokens", "responses.", "pair=", "trainer.epochs", "dataset=gsm8k", "workers")
"""Of settings with these words a run would take long, or ask somebody who is not there."""


def taken(program: str, most: int, step: int) -> Iterator[tuple[Place, Any]]:
    settings = program_of(program).settings
    composed, seen = [found.values() for _, found in compositions(program)], set()
    for place in places(program):
        here = composed[place.composition]
        above, _, name = place.key.rpartition(".")
        owner = at(here, above).get("_target_")
        setting = (owner, name) if owner else (place.composition, place.key)
        if setting in seen:
            continue
        seen.add(setting)
        if len(seen) % step:
            continue
        right = lambda value: not [*faults(settings, changed(here, place.key, value))]  # noqa: E731
        values = list(filter(right, VALUES))
        for value in values[:: max(1, len(values) // most)][:most]:
            if not any(word in f"{place.key} {overrides(place)}" for word in LONG):
                yield place, value


def overrides(place: Place) -> list[str]:
    """The choice that makes the setting what it is."""
    top = place.key.split(".")[0]
    chosen, found = compositions(place.program)[place.composition]
    if top not in chosen:
        return []
    group, option = found.choices[top]
    return [f"{group if group == top else f'{group}@{top}'}={option}"]


def spelled(value: Any) -> str:
    """As Hydra's command line has it."""
    if isinstance(value, dict):
        return f"{{{','.join(f'{key}:{spelled(inner)}' for key, inner in value.items())}}}"
    if isinstance(value, list):
        return f"[{','.join(map(spelled, value))}]"
    if isinstance(value, str):
        return "'" + value.replace("'", "\\'") + "'"
    return {None: "null", True: "true", False: "false"}.get(value, str(value))


def arguments(place: Place, value: Any, pair: Path) -> list[str]:
    own = [] if place.program in PAIRLESS else base(pair)
    given = [*own, *QUICK[place.program].split(), *overrides(place)]
    if place.key.startswith(("method.", "rules.")) and place.key.count(".") > 1:
        given.append(f"methods=[{place.key.split('.')[1]}]")
    last = {one.split("=")[0]: one for one in given}
    last.pop(place.key, None)
    return [*last.values(), f"++{place.key}={spelled(value)}"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "most", "step"),
    [
        *((name, 1, 12 if name == "evaluate" else 4) for name in QUICK),  # it has most keys
        *(pytest.param(name, 2, 1, marks=pytest.mark.full) for name in QUICK),
    ],
)
def test_what_is_taken_runs_or_is_refused_in_one_line(
    program: str, most: int, step: int, harvest: Path, tiny_pair_dir: Path, here: Path, capsys: Any
) -> None:
    ends, wrong = Counter[str](), []
    shutil.copytree(harvest, here, dirs_exist_ok=True)
    for place, value in taken(program, most, step):
        given = arguments(place, value, tiny_pair_dir)
        try:
            run(SimpleNamespace(__name__=program, main=program_of(program)), *given)
            ends["ran"] += 1
        except SystemExit as stop:
            said = capsys.readouterr().err.strip().splitlines()
            ends["refused" if stop.code else "ran"] += 1
            if stop.code and not (stop.code == 2 and said[-1].startswith("error: ")):
                wrong.append(f"{given[-1]}: {said[-1:]}")
        except BaseException as error:
            ends["bug"] += 1
            wrong.append(f"{' '.join(given)}: {type(error).__name__} {str(error)[:200]}")
        for made in ("data/new", "checkpoints/new", "runs"):
            shutil.rmtree(made, ignore_errors=True)
    with capsys.disabled():
        print(program, dict(ends))
    assert wrong == []
