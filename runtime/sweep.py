"""Sweeps (``python train.py -m ...``): one folder per job, named after its overrides."""

import hashlib
from pathlib import Path
from urllib.parse import quote

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode

from runtime.errors import UserError

ASIDE = ("out", "overwrite", "logger")
"""Keys that do not change what a job makes."""
LONGEST = 150  # of a folder name, in bytes; file systems take 255, and names are made from it


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
    name = "+".join(quote(override, safe="=,.[]-_~@:") for override in kept) or "defaults"
    return (
        name
        if len(name) <= LONGEST
        else f"{name[:LONGEST]}-{hashlib.sha256(name.encode()).hexdigest()[:12]}"
    )
