"""The files that a pattern names."""

from glob import glob
from pathlib import Path

from runtime.errors import UserError


def matching(pattern: str | Path) -> list[Path]:
    """Return the files in the order of their names, numbers by value; a file of that very name is
    meant first. Raises UserError for none."""
    exact = Path(pattern).expanduser()
    names = [exact] if exact.is_file() else [Path(name) for name in glob(str(exact))]
    found = [path for path in names if path.is_file()]
    if not found:
        raise UserError(
            f"source.files: no file matches {pattern}. Write e.g. source.files='logs/sts.*.pt'"
        )
    return sorted(found, key=lambda path: (len(path.name), path.name))
