"""Checkpoints of a small harvest, untrained, as a report finds them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from data_gen.storage.dataset import Harvest
from reports.artifacts import Checkpoint
from tests.helpers.data import harvests
from tests.helpers.data.harvests import DIM, EMBEDDING, PAIR, WARP
from tests.helpers.training.checkpoints import write_checkpoint


def context_of(data: Path) -> Mapping[str, Any]:
    """What a checkpoint says of the harvest it was trained on."""
    provenance = {"data": Harvest.open(data).origin}
    return {"pair": PAIR, "warp": WARP, "draft_warp": WARP, "provenance": provenance}


def checkpoint(folder: Path, data: Path, name: str = "hrad", **settings: Any) -> Checkpoint:
    dim = DIM + EMBEDDING * (name == "hrad")
    context = context_of(data)
    write_checkpoint(folder, name, dim, gamma=3, context=context, settings=settings)
    return Checkpoint(folder, json.loads((folder / "config.json").read_text()))


def rounds_hold(monkeypatch: pytest.MonkeyPatch, **columns: Any) -> None:
    """Let every round of harvests written from now on hold these values."""
    written = harvests._rounds

    def rounds(count: int, gamma: int, generator: Any) -> dict[str, Any]:
        found = written(count, gamma, generator)
        same = {
            name: found[name].new_tensor(value).expand_as(found[name]).contiguous()
            for name, value in columns.items()
        }
        return {**found, **same}

    monkeypatch.setattr(harvests, "_rounds", rounds)
