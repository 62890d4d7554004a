"""Where an interrupted training is kept: a safetensors file, replaced after every epoch, gone when
training is done."""

import glob
import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save

from predictors.base import UNREADABLE
from runtime.compatibility import differences
from runtime.errors import UserError
from runtime.files import write_atomically

Tensors = dict[str, torch.Tensor]


class ResumeFile:
    """The state of a training that is to end up in the folder `out`.

    run: what decides the result (settings, seed, data; plain values). It is part of the file and of
    its name, so trainings with other settings keep files of their own, and a file never continues
    another run."""

    def __init__(self, out: Path, run: Mapping[str, Any]) -> None:
        text = json.dumps(run, sort_keys=True)
        self.run: dict[str, Any] = json.loads(text)
        digest = hashlib.sha256(text.encode()).hexdigest()[:12]
        self.path = out.with_name(f".{out.name}-{digest}.resume")
        self.others = f".{glob.escape(out.name)}-{'[0-9a-f]' * 12}.resume"

    def write(self, tensors: Tensors, progress: Mapping[str, Any]) -> None:
        """Replace the file. progress: plain values."""
        contents = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        text = json.dumps({"run": self.run, **progress})
        metadata = {"progress": text, "sha256": _digest(contents, text)}
        write_atomically(
            self.path, lambda temporary: temporary.write_bytes(save(contents, metadata))
        )

    def read(self) -> tuple[Tensors, dict[str, Any]] | None:
        """Return (tensors, progress) as written; None where there is nothing to continue.

        Raises UserError where the file is damaged or another run's. Prints what else was
        interrupted on its way to `out`."""
        for path in sorted(set(self.path.parent.glob(self.others)) - {self.path}):
            what = "something unreadable"
            with suppress(*UNREADABLE), safe_open(path, framework="pt") as file:
                run = json.loads(file.metadata()["progress"])["run"]
                unlike = differences(run, self.run)
                what = f"an interrupted training with other settings ({unlike})"
            print(
                f"out: {path} holds {what}. It is not used here; delete it if nobody continues it"
            )
        if not self.path.exists():
            return None
        try:
            tensors, progress = _read(self.path)
        except UNREADABLE as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0][:120]
            raise UserError(
                f"out: {self.path} is damaged ({reason}). Delete it to train from the start"
            ) from error
        if progress["run"] != self.run:
            unlike = differences(progress["run"], self.run)
            raise UserError(
                f"out: {self.path} is of another run ({unlike}). Delete it to train from the start"
            )
        return tensors, progress

    def forget(self) -> None:
        """Remove the file."""
        self.path.unlink(missing_ok=True)


def _read(path: Path) -> tuple[Tensors, dict[str, Any]]:
    with safe_open(path, framework="pt") as file:
        tensors: Tensors = {name: file.get_tensor(name) for name in file.keys()}
        metadata = file.metadata()
    if _digest(tensors, metadata["progress"]) != metadata["sha256"]:
        raise ValueError("its checksum is wrong")
    return tensors, json.loads(metadata["progress"])


def _digest(tensors: Tensors, progress: str) -> str:
    """Return the SHA-256 of names, types, shapes and values."""
    sha256 = hashlib.sha256(progress.encode())
    for name, tensor in sorted(tensors.items()):
        sha256.update(f"\n{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        sha256.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return sha256.hexdigest()


def named(tensors: Tensors, prefix: str) -> Tensors:
    """Return those whose names begin with `prefix`, which they lose."""
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }
