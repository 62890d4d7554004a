"""The job that this process does: the command it was called by and, in a sweep (``python train.py
-m ...``), its own folder, named after its overrides."""

import re
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode

from runtime.errors import UserError
from runtime.files import checked_folder, file_name

ASIDE = ("out", "overwrite", "logger", "verbose")
"""Keys that do not change what a job makes."""


_CALLED: list[str] = []  # the words of the command


@contextmanager
def called(program: str) -> Iterator[None]:
    """Record in this block that `program` runs, with the overrides that Hydra has given it."""
    _CALLED[:] = [*program.split(), *HydraConfig.get().overrides.task]
    try:
        yield
    finally:
        _CALLED.clear()


def command_line() -> str:
    """Return the command of this job as it was called: ``python scripts/tune.py ...`` or
    ``draftpredict tune ...``, of a job of a sweep the one that repeats this job alone."""
    return shlex.join(_CALLED or ["python", *sys.argv])


def is_job() -> bool:
    """Whether this program is running as a job of a sweep."""
    return HydraConfig.get().mode == RunMode.MULTIRUN


def result_folder(out: str | Path | None, name: str, marker: str) -> Path:
    """Return the folder that this job writes: `out`, checkpoints/`name` where that is None; for a
    job of a sweep a folder in it. marker: the file that single runs leave in theirs."""
    default = f"checkpoints/{name}{'-sweep' if is_job() else ''}"
    folder = checked_folder("out", default if out is None else out)
    if not is_job():
        return folder
    if (folder / marker).exists():
        raise UserError(
            f"out: {folder} is the result of a single run. Choose another out=<folder> for a sweep"
        )
    return folder / job_name(HydraConfig.get().overrides.task)


def job_name(overrides: list[str]) -> str:
    """``predictor.depth=1+predictor.w_rej=3``: no two jobs share one, and the order of the
    overrides is no matter."""
    keys = {override: re.split(r"[=.@]", override.lstrip("+~"))[0] for override in overrides}
    kept = sorted(override for override, key in keys.items() if key not in ASIDE)
    return file_name(*kept) or "defaults"
