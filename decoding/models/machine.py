"""The hardware and software that a pair runs on, which decide speeds and the last bits of
logits."""

import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from decoding.models.loading import ModelPair
from runtime.job import versions_of

DECIDES_COSTS = ("hardware", "dtypes", "threads")
CPUINFO = Path("/proc/cpuinfo")  # of Linux


def setup_facts(pair: ModelPair) -> dict[str, Any]:
    """Return the machine as results, costs and thresholds record it. hardware: the name of each
    model's processor."""
    sides = {"target": pair.target, "draft": pair.draft}
    return {
        "hardware": {side: hardware(torch.device(lm.device)) for side, lm in sides.items()},
        "devices": {side: str(lm.device) for side, lm in sides.items()},
        "dtypes": dtypes(pair),
        "eos_ids": sorted(pair.eos_ids),
        "threads": torch.get_num_threads(),
        "machine": platform.node(),
        "versions": {"python": platform.python_version(), **versions_of(("torch", "transformers"))},
    }


def dtypes(pair: ModelPair) -> dict[str, str]:
    """Return the dtype of each model as it was loaded, whatever the config said."""
    return {"target": str(pair.target.model.dtype), "draft": str(pair.draft.model.dtype)}


def hardware(device: torch.device) -> str:
    """Return the product name of a device."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return processor() if device.type == "cpu" else device.type


def processor() -> str:
    """Return the CPU's name, or at least its architecture."""
    lines = CPUINFO.read_text().splitlines() if CPUINFO.is_file() else []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


def other_machine(measured: Mapping[str, Any], here: Mapping[str, Any]) -> str | None:
    """Return in words which of the facts that decide costs differ; None if none does."""
    changed = [key for key in DECIDES_COSTS if measured[key] != here[key]]
    words = [f"{key} {in_words(measured[key])}, here {in_words(here[key])}" for key in changed]
    return "; ".join(words) or None


def in_words(fact: Any) -> str:
    """Return a fact of both models in words, once if they share it."""
    values = list(fact.values()) if isinstance(fact, Mapping) else [fact]
    return (
        str(values[0])
        if len(set(values)) == 1
        else ", ".join(f"{side} {name}" for side, name in fact.items())
    )
