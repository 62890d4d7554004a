"""From the folder of a draft that reads its target to the small files `scripts/build_pair.py` makes
it from again."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from decoding.models.draft_model import is_own
from decoding.models.eagle import FILE, MAPS
from runtime.errors import UserError
from runtime.files import write_atomically, write_json

LAYERS = "eagle_layers.safetensors"
PROVENANCE = "eagle_provenance.json"
RECORDS = (
    "training.json",
    "provenance.json",
    "build.json",
)  # what a folder says of how it was made; the first counts
SHIPPED = (
    "the draft's own layers and final norm of that folder's model.safetensors, and both tensors of"
    " its target_features.safetensors, bfloat16"
)


def ship(folder: Path, into: Path, notes: Mapping[str, Any]) -> None:
    """Write `LAYERS` and `PROVENANCE` of the finished draft in `folder` to `into`. notes: join
    those of its training.

    Raises UserError where `folder` holds no such draft or is damaged.
    """
    train = "Train one: python train.py draft=eagle"
    if not all((folder / name).is_file() for name in (FILE, "model.safetensors")):
        raise UserError(
            f"out: {folder} holds no EAGLE-style draft that reads its target's hidden states."
            f" {train}"
        )
    try:
        own = {
            name: tensor
            for name, tensor in load_file(folder / "model.safetensors").items()
            if is_own(name)
        }
        with safe_open(folder / FILE, "pt") as file:
            tensors, layers = (
                own | {name: file.get_tensor(name) for name in MAPS},
                {"layers": file.metadata()["layers"]},
            )
    except (SafetensorError, OSError, LookupError, TypeError) as error:
        raise UserError(f"out: {folder} is damaged ({error}). {train}") from error
    record = record_of(folder) | {"shipped": SHIPPED}
    if both := record.get("notes", {}) | dict(notes):
        record["notes"] = both
    halved = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in tensors.items()}
    write_atomically(into / LAYERS, lambda path: save_file(halved, path, layers), "draft.ship")
    write_json(into / PROVENANCE, record, "draft.ship")
    print(
        f"{into / LAYERS}, {into / PROVENANCE}: shipped from {folder}. Build it: python"
        " scripts/build_pair.py"
    )


def record_of(folder: Path) -> dict[str, Any]:
    """What the folder of a draft says of how it was made; empty where it says nothing. Raises
    UserError where that cannot be read."""
    path = next((folder / name for name in RECORDS if (folder / name).is_file()), None)
    if path is None:
        return {}
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise UserError(
            f"out, pair.draft: {path} is damaged ({error}). Delete it, or make {folder} again"
        ) from error


def earlier_runs(folder: Path) -> list[dict[str, Any]]:
    """The runs that made the draft in `folder`, in order, as its record has them."""
    record = record_of(folder)
    earlier = record.pop("earlier_runs", [])
    return [*earlier, record] if record else []
