"""The description of every program's settings fits its YAML (`test_configs` tries every option of
every group)."""

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from omegaconf import OmegaConf

from runtime.settings.check import faults
from runtime.settings.help import rows
from runtime.settings.kinds import alternatives, group_among
from tests.conf.test_configs import PROGRAMS, ROOT, SCRIPTS, composed, description


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
