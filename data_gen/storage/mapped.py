"""Samples in a file that memory is mapped to: more of them than the memory holds can be trained on.

The file has the form of safetensors. The matrix `inputs` is written as it comes, every other column
is a few numbers a sample."""

import json
import os
from collections.abc import Iterable, Mapping
from itertools import chain
from math import prod
from pathlib import Path

import torch
from accelerate.utils import broadcast_object_list
from safetensors.torch import load_file
from torch import Tensor

from runtime.errors import UserError
from runtime.files import remove_left_over, temporary_of
from runtime.processes import this_process

LARGE = "inputs"
NAMES = {
    **{torch.bfloat16: "BF16", torch.float32: "F32", torch.float64: "F64"},
    **{torch.float16: "F16", torch.int64: "I64", torch.int32: "I32", torch.int16: "I16"},
    **{torch.uint8: "U8", torch.bool: "BOOL"},
}
HEADER = 2**16  # bytes
PADDING = "(padding)"


def mapped(
    parts: Iterable[Mapping[str, Tensor]], path: Path, shared: bool = False
) -> dict[str, Tensor]:
    """Return the samples of all parts together, their `inputs` read from the disk when they are
    used; what was read is given back to the system where memory runs short.

    path: of the file, in whose place a temporary one is written, which has no name any more on
    return. shared: the processes of one training
    call this together, and read what the first one on their machine has written."""
    state, number = this_process() if shared else None, os.getpid()
    if state is not None:
        (number,) = broadcast_object_list([number])
    remove_left_over(path)
    path = temporary_of(path, number)  # another training may go to the same folder
    try:
        if state is None or state.is_local_main_process:
            _write(parts, path)
        if state is not None:
            state.wait_for_everyone()
        samples: dict[str, Tensor] = load_file(path)
        samples.pop(PADDING, None)
        if state is not None:
            state.wait_for_everyone()
    except OSError as error:
        raise UserError(
            f"out: samples cannot be written to {path} ({error.strerror or error}). Make room, or"
            " set another out="
        ) from error
    finally:
        if state is None or state.is_local_main_process:
            path.unlink(missing_ok=True)
    return samples


def _write(parts: Iterable[Mapping[str, Tensor]], path: Path) -> None:
    following, small, rows = iter(parts), dict[str, list[Tensor]](), 0
    first = next(following)  # nothing is written where there is none
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.seek(HEADER)
        for part in chain([first], following):
            _refuse_unlike(part, first)
            file.write(_bytes(part[LARGE]))
            rows += len(part[LARGE])
            for name, values in part.items():
                if name != LARGE:
                    small.setdefault(name, []).append(values)
        padding = -file.tell() % 8  # numbers lie at multiples of their size
        columns = {PADDING: torch.zeros(padding, dtype=torch.uint8)} if padding else {}
        columns |= {name: torch.cat(values) for name, values in small.items()}
        shapes = {LARGE: (first[LARGE].dtype, [rows, *first[LARGE].shape[1:]])}
        shapes |= {name: (values.dtype, [*values.shape]) for name, values in columns.items()}
        entries, end = {}, 0
        for name, (dtype, shape) in shapes.items():
            start, end = end, end + prod(shape) * dtype.itemsize
            entries[name] = {"dtype": NAMES[dtype], "shape": shape, "data_offsets": [start, end]}
        for values in columns.values():
            file.write(_bytes(values))
        file.seek(0)
        file.write((HEADER - 8).to_bytes(8, "little"))
        file.write(json.dumps(entries).encode().ljust(HEADER - 8))


def _refuse_unlike(part: Mapping[str, Tensor], first: Mapping[str, Tensor]) -> None:
    forms = [
        {name: (values.dtype, values.shape[1:]) for name, values in each.items()}
        for each in (part, first)
    ]
    if forms[0] != forms[1] or len({len(values) for values in part.values()}) > 1:
        raise UserError(
            "data: its samples are not all of one form, so that it is damaged. Harvest again with"
            " another out=..."
        )


def _bytes(values: Tensor) -> memoryview:
    """Return the bytes of a tensor, without a copy where it lies in a row."""
    return values.contiguous().flatten().view(torch.uint8).numpy().data
