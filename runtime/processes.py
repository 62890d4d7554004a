"""Processes of `accelerate launch`, `torchrun` or `mpirun` that share one job: the rank of this
one, and its connection to the others."""

import functools
import gc
import os
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple

from runtime.errors import UserError

if TYPE_CHECKING:
    from accelerate import PartialState

PATIENCE = timedelta(days=1)  # until processes that wait for one another give up
_RANK = ("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK")
_SIZE = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")


class Launched(NamedTuple):
    """Process `rank`, from 0 on, of `size`."""

    rank: int = 0
    size: int = 1


def launched() -> Launched:
    """Return rank and sizes as the environment gives them; a rank counts only with a size above 1.
    Raises UserError for what is no number, and for all but the first of the tasks of `srun`, which
    would do the same job each."""
    size = _number(_SIZE, 1)
    if size <= 1:
        if _number(("SLURM_STEP_NUM_TASKS",), 1) > 1 and _number(("SLURM_PROCID",), 0) > 0:
            raise UserError(
                "SLURM_PROCID: srun has started this program several times, and each would do the"
                " same. Harvest with ray symmetric-run and workers=ray, train with accelerate"
                " launch, a task on each node"
            )
        return Launched()
    rank = _number(_RANK, 0)
    if rank >= size:
        raise UserError(
            f"RANK: {rank} is not below WORLD_SIZE={size}. Unset both, or start with accelerate"
            " launch"
        )
    return Launched(rank, size)


def _number(names: tuple[str, ...], default: int) -> int:
    """Return the number in the first of these variables that is set, else `default`. Raises
    UserError if it is none."""
    name = next((name for name in names if os.environ.get(name)), None)
    if name is None:
        return default
    if not os.environ[name].isdecimal():
        raise UserError(f"{name}: {os.environ[name]} is no whole number from 0 on. Unset it")
    return int(os.environ[name])


@functools.cache
def this_process() -> "PartialState":
    """Connect this process to the others, over gloo where there is no GPU, and return its state.

    On a machine without GPUs the launcher starts one process, whatever number was asked for, unless
    told `--multi_gpu`; then this prints so. Raises UserError if MASTER_ADDR or MASTER_PORT is not
    set."""
    import torch
    from accelerate import PartialState

    processes = launched().size
    if processes == 1:
        for name in ("RANK", "LOCAL_RANK"):  # leftovers make `PartialState` wait for others
            os.environ.pop(name, None)
    elif lacking := [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]:
        raise UserError(
            f"{lacking[0]}: not set, so that {processes} processes (WORLD_SIZE) cannot find each"
            " other. Start them with accelerate launch, or unset WORLD_SIZE"
        )
    if (
        processes == 1
        and "ACCELERATE_MIXED_PRECISION" in os.environ
        and "MASTER_PORT" in os.environ
    ):
        print(
            "accelerate launch started one process only. Without GPUs, several take: accelerate"
            " launch --multi_gpu"
        )
    on_host = processes > 1 and not torch.accelerator.is_available()
    return PartialState(cpu=on_host, timeout=PATIENCE)  # the first one reads, the others wait


def leave_others() -> None:
    """End the connection, after collecting what still refers to it (a wrapped module refers to
    itself): otherwise its threads last until the interpreter ends, which then sometimes aborts."""
    gc.collect()
    this_process().destroy_process_group()
