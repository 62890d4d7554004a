"""The processes of `accelerate launch` (or torchrun) that share one job."""

import functools
import os

import torch
from accelerate import PartialState


@functools.cache
def this_process() -> PartialState:
    """This process among the others, connected to them: over gloo where there is no GPU.

    On a machine without GPUs the launcher starts several processes if told `--multi_gpu`, else one, whatever it was
    asked for; then this says so.
    """
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if processes == 1 and "ACCELERATE_MIXED_PRECISION" in os.environ and "MASTER_PORT" in os.environ:
        print("accelerate launch started one process only. Without GPUs, several take: accelerate launch --multi_gpu")
    return PartialState(cpu=processes > 1 and not torch.accelerator.is_available())
