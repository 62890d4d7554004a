"""pairs/distill_draft.py in child processes that are killed, forked as in `trainings`."""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from tests.helpers.training.trainings import FORKS


def start(folder: Path, *arguments: str) -> Any:
    process = FORKS.Process(target=_distill, args=(str(folder), arguments))
    process.start()
    return process


def finish(folder: Path, *arguments: str) -> int:
    """The exit code."""
    process = start(folder, *arguments)
    process.join()
    assert process.exitcode is not None
    return int(process.exitcode)


def kill_after(seconds: float, folder: Path, *arguments: str) -> None:
    process = start(folder, *arguments)
    time.sleep(seconds)
    process.kill()
    process.join()


def result(draft: Path) -> tuple[dict[str, bytes], dict[str, Any]]:
    """Content of a draft's folder, and of its record what is not time."""
    record = json.loads((draft / "training.json").read_text())
    del record["progress"]["seconds"]
    return {p.name: p.read_bytes() for p in draft.iterdir() if p.name != "training.json"}, record


def _distill(folder: str, arguments: tuple[str, ...]) -> None:
    import torch

    from pairs import distill_draft

    os.chdir(folder)
    sys.stdout = sys.stderr = open("log.txt", "a")
    torch.set_num_threads(1)
    sys.argv = ["distill_draft.py", *arguments]
    distill_draft.main()
