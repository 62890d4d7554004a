"""A setting is described once, by the class of its program or the constructor of what its YAML
makes, with its kind and a line of help; and the YAML fits (`test_configs` tries every option)."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from omegaconf import OmegaConf

from runtime.settings.check import MAKING, OWN, faults, help_of, settings_of
from runtime.settings.composed import rows
from runtime.settings.kinds import alternatives, group_among
from tests.conf.test_configs import SCRIPTS, description
from tests.helpers.damage.hostile import CONF, PROGRAMS, ROOT
from tests.helpers.programs.programs import composed


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_setting_is_described_and_its_default_is_right(program: str) -> None:
    values: Any = OmegaConf.to_container(composed(program), resolve=True)
    known = description(program).described()
    found = list(rows(known, values))
    own = set(leaves(known, values))
    assert set(known) == set(values) and own <= {row.key for row in found}
    assert not [row.key for row in found if row.key in own and not (row.about and row.takes)]
    assert not list(faults(description(program), values))


def leaves(known: Any, values: Any, before: str = "") -> Iterator[str]:
    """Dotted keys of the settings of groups, parts aside."""
    for name, value in values.items():
        if isinstance(value, dict) and "_target_" in value:
            continue
        group = group_among(alternatives(known[name].annotation))
        if group is not None and isinstance(value, dict):
            yield from leaves(group.described(), value, f"{before}{name}.")
        else:
            yield f"{before}{name}"


def test_descriptions_import_no_model_library() -> None:
    files = [path.relative_to(ROOT).with_suffix("") for path in SCRIPTS.values()]
    names = [".".join(file.parts) for file in files]
    found = "{'torch', 'transformers', 'pyarrow'} & set(sys.modules)"
    code = f"import sys, {', '.join(names)}; sys.exit(str({found}) if {found} else 0)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


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
