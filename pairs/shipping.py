"""From the folder of a draft to the small files that `pairs/build_pair.py` makes it from."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from decoding.models.draft_model import beside, is_own
from decoding.models.draft_vocabulary import FILE as VOCABULARY
from decoding.models.eagle.draft import FILE, MAPS
from runtime.errors import UserError
from runtime.files import refuse_foreign, write_atomically, write_json
from runtime.json_files import read_object

LAYERS, PROVENANCE = "draft_layers.safetensors", "provenance.json"
EAGLE_LAYERS, EAGLE_PROVENANCE = "eagle_layers.safetensors", "eagle_provenance.json"
# What a folder says of how it was made; the first counts.
RECORDS = ("training.json", "provenance.json", "build.json")
SHIPPED = "the draft's own layers and final norm of that folder's model.safetensors, bfloat16"
EAGLE_SHIPPED = (
    "the draft's own layers and final norm of that folder's model.safetensors, and both tensors of"
    " its target_features.safetensors, bfloat16"
)


def ship(folder: Path, into: Path, notes: Mapping[str, Any]) -> None:
    """Write the layers of the finished draft in `folder`, and how they were made, to `into`. notes:
    join those of its training.

    Raises UserError where `folder` holds no draft or is damaged.
    """
    train = "Train one: python pairs/distill_draft.py"
    refuse_foreign(into, LAYERS, EAGLE_LAYERS, VOCABULARY, key="ship")
    if not (folder / "model.safetensors").is_file():
        raise UserError(f"out: expected the folder of a trained draft, got {folder}. {train}")
    maps = beside(folder, FILE)
    try:
        weights = load_file(folder / "model.safetensors")
        tensors = {name: tensor for name, tensor in weights.items() if is_own(name)}
        facts = _add_maps(maps, tensors) if maps else None
    except (SafetensorError, OSError, LookupError, TypeError) as error:
        raise UserError(f"out: {folder} is damaged ({error}). {train}") from error
    record = record_of(folder) | {"shipped": EAGLE_SHIPPED if maps else SHIPPED}
    if both := record.get("notes", {}) | dict(notes):
        record["notes"] = both
    names = (EAGLE_LAYERS, EAGLE_PROVENANCE) if maps else (LAYERS, PROVENANCE)
    layers, provenance = (into / name for name in names)
    halved = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in tensors.items()}
    write_atomically(layers, lambda path: save_file(halved, path, facts), "ship")
    write_json(provenance, record, "ship")
    print(f"{layers}, {provenance}: shipped from {folder}. Build it: python pairs/build_pair.py")


def _add_maps(path: Path, tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    """Add the maps of an EAGLE-style draft to `tensors`. Returns which layers they are of."""
    with safe_open(path, "pt") as file:
        tensors |= {name: file.get_tensor(name) for name in MAPS}
        return {"layers": file.metadata()["layers"]}


def record_of(folder: Path) -> dict[str, Any]:
    """What the folder of a draft says of how it was made; empty where it says nothing. Raises
    UserError where that cannot be read."""
    path = next((folder / name for name in RECORDS if (folder / name).is_file()), None)
    if path is None:
        return {}
    return read_object(path, "out, pair.draft", f"Delete it, or make {folder} again")


def earlier_runs(folder: Path) -> list[dict[str, Any]]:
    """The runs that made the draft in `folder`, in order, as its record has them."""
    record = record_of(folder)
    earlier = record.pop("earlier_runs", [])
    return [*earlier, record] if record else []
