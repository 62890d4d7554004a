"""A setting is described once: by the constructor of what its YAML makes, with its kind and a line
of help, and not in the YAML again."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from runtime.settings.check import MAKING, alternatives
from runtime.settings.expected import help_of
from runtime.settings.signatures import OWN, settings_of

CONF = Path(__file__).resolve().parents[2] / "conf"
TRAILING = re.compile(r"^[^#\"']*\S\s+#")


class Made(NamedTuple):
    """Something that a YAML says how to make."""

    file: str
    target: str
    keys: tuple[str, ...]


def made(file: str, values: Any) -> Iterator[Made]:
    """In a YAML, also inside of it: what a ``_target_`` of ours makes."""
    if not isinstance(values, dict):
        return
    if str(values.get("_target_")).split(".")[0] in OWN:
        keys = (str(key) for key in values if key not in (*MAKING, "defaults"))
        yield Made(file, values["_target_"], tuple(keys))
    for inner in values.values():
        yield from made(file, inner)


def all_made(path: Path) -> list[Made]:
    return list(made(str(path.relative_to(CONF)), yaml.safe_load(path.read_text())))


FILES = sorted(CONF.rglob("*.yaml"))
ALL = [one for path in FILES for one in all_made(path)]
PLUGINS = [path for path in FILES if path.parent != CONF and all_made(path)]


def test_the_constructor_describes_every_key() -> None:
    for made in ALL:
        settings = settings_of(made.target)
        for key in made.keys:
            kind = settings[key].annotation
            assert Any not in alternatives(kind), f"{made.file}: {key} may be anything"
            assert help_of(kind), f"{made.file}: {key} has no line of help"


def test_the_yaml_does_not_say_it_again() -> None:
    for path in PLUGINS:
        head, *_ = re.split(r"^(?=[^#\n])", path.read_text(), maxsplit=1, flags=re.M)
        body = path.read_text().removeprefix(head).splitlines()
        again = [line for line in body if TRAILING.match(line) or line.lstrip().startswith("#")]
        assert again == [], path


def test_the_walk_sees_all_kinds_of_plugins() -> None:
    groups = {path.parent.name for path in PLUGINS}
    assert groups >= {"stop", "structure", "verifier", "engine", "warp", "dataset", "responses"}
    assert groups >= {"predictor", "trainer", "draft", "cost", "logger"}
    assert {"benchmark.yaml", "train.yaml"} & {one.file for one in ALL} and len(ALL) > 40
    assert TRAILING.match("gamma: 4 # tokens") and not TRAILING.match("gamma: 4")
