"""Sweeps (``python train.py -m ...``): one folder per job, named after its overrides."""

from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode

from runtime.errors import UserError
from runtime.files import file_name

ASIDE = ("out", "overwrite", "logger", "verbose")
"""Keys that do not change what a job makes."""


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
