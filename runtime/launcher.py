"""Which of several processes this one is, as `accelerate launch`, `torchrun` or `mpirun` say it."""

import os
from typing import NamedTuple

from runtime.errors import UserError

_RANK = ("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK")
_SIZE = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
_LOCAL_SIZE = (
    "LOCAL_WORLD_SIZE",
    "MPI_LOCALNRANKS",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MV2_COMM_WORLD_LOCAL_SIZE",
)


class Launched(NamedTuple):
    """Process `rank`, from 0 on, of `size`; `local_size` of them are on this machine."""

    rank: int = 0
    size: int = 1
    local_size: int = 1


def launched() -> Launched:
    """Return the process as the environment has it. A rank without a size above 1 means nothing.
    Raises UserError for what is no number."""
    size = _number(_SIZE, 1)
    if size <= 1:
        return Launched()
    rank = _number(_RANK, 0)
    if rank >= size:
        raise UserError(
            f"RANK: {rank} is not below WORLD_SIZE={size}. Unset both, or start with accelerate"
            " launch"
        )
    return Launched(rank, size, _number(_LOCAL_SIZE, 1))


def _number(names: tuple[str, ...], default: int) -> int:
    """The first of these variables that is set."""
    name = next((name for name in names if os.environ.get(name)), None)
    if name is None:
        return default
    if not os.environ[name].isdecimal():
        raise UserError(f"{name}: {os.environ[name]} is no whole number from 0 on. Unset it")
    return int(os.environ[name])
