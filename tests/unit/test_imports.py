"""Every module of every package, on whatever versions are installed."""

from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = sorted(path.parent.name for path in ROOT.glob("*/__init__.py"))


@pytest.mark.smoke
@pytest.mark.parametrize("package", PACKAGES)
def test_every_module_can_be_imported(package):
    for path in sorted((ROOT / package).rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        import_module(name.removesuffix(".__init__"))
