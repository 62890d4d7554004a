"""The job that this process does: the command it was called by and, in a sweep (``python train.py
-m ...``), its own folder, named after its overrides."""

import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode

from runtime.errors import UserError
from runtime.files import file_name

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


def job_folder(sweep: Path, marker: str) -> Path:
    """Folder of this job in the folder `sweep`. marker: the file that single runs leave in
    theirs."""
    if (sweep / marker).exists():
        raise UserError(
            f"out: {sweep} is the result of a single run. Choose another out=<folder> for a sweep"
        )
    return sweep / job_name(HydraConfig.get().overrides.task)


def job_name(overrides: list[str]) -> str:
    """``predictor.depth=1+predictor.w_rej=3``: no two jobs share one, and the order of the
    overrides is no matter."""
    kept = sorted(
        o
        for o in overrides
        if o.lstrip("+~").split("=")[0].split(".")[0].split("@")[0] not in ASIDE
    )
    return file_name(*kept) or "defaults"
