"""The files that a pattern names."""

from glob import glob
from pathlib import Path

from runtime.errors import UserError


def matching(pattern: str | Path) -> list[Path]:
    """In the order of their names, numbers by value. Raises UserError for none."""
    found = [Path(name) for name in glob(str(pattern)) if Path(name).is_file()]
    if not found:
        raise UserError(
            f"source.files: no file matches {pattern}. Write e.g. source.files='logs/sts.*.pt'"
        )
    return sorted(found, key=lambda path: (len(path.name), path.name))
