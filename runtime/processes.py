"""The processes of `accelerate launch` (or torchrun) that share one job."""

import functools
import gc
import os

import torch
from accelerate import PartialState

from runtime.errors import UserError
from runtime.launcher import launched


@functools.cache
def this_process() -> PartialState:
    """This process among the others, connected to them: over gloo where there is no GPU.

    On a machine without GPUs the launcher starts several processes if told `--multi_gpu`, else one,
    whatever it was asked for; then this says so. Raises UserError where they are not told where to
    meet."""
    processes = launched().size
    if processes == 1:
        for name in ("RANK", "LOCAL_RANK"):  # left over: `PartialState` would wait for others
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
    return PartialState(cpu=processes > 1 and not torch.accelerator.is_available())


def leave_others() -> None:
    """End the connection. What still knows it goes first (a wrapped module refers to itself):
    else its threads last until the interpreter ends, which then aborts now and then."""
    gc.collect()
    this_process().destroy_process_group()
