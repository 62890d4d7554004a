"""The layers whose hidden states are recorded, and those of them that are read."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor

from runtime.errors import UserError
from runtime.settings.kinds import Layers

LAYERS = {
    "draft_hidden": "draft_layers",
    "draft_before": "draft_layers",
    "target_hidden": "target_layers",
}
"""Inputs that are hidden states, and the settings that say which layers."""


@dataclass(frozen=True)
class RecordedLayers:
    """Layers of both models whose hidden states a harvest holds: negative indices (-1: what the
    output layer reads), in the order of the columns."""

    draft_layers: Annotated[Layers, "at every drawn token"]
    target_layers: Annotated[Layers, "at the last verified position before every round"]

    def __post_init__(self) -> None:
        for name in dict.fromkeys(LAYERS.values()):
            object.__setattr__(self, name, tuple(getattr(self, name)))

    def of(self, column: str) -> tuple[int, ...]:
        """Return the layers of `column`, one of `LAYERS`."""
        layers: tuple[int, ...] = getattr(self, LAYERS[column])
        return layers

    def to_dict(self) -> dict[str, list[int]]:
        return {name: list(getattr(self, name)) for name in dict.fromkeys(LAYERS.values())}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "RecordedLayers":
        return cls(**values)


def checked_layers(layers: Any, key: str = "predictor.layers") -> tuple[int, ...] | None:
    """Return layers as a tuple; None for all that were recorded."""
    if layers is None:
        return None
    listed = isinstance(layers, Sequence) and not isinstance(layers, str)
    if listed and all(type(n) is int and n < 0 for n in layers):
        return tuple(layers)
    raise UserError(f"{key}: expected negative layers, got {layers}. Give some, e.g. {key}=[-2,-1]")


def among(
    wanted: Sequence[int] | None, recorded: Sequence[int], column: str, where: str
) -> tuple[int, ...]:
    """Return the layers `wanted`, or all of `recorded` if that is None. Raises UserError unless
    they are among `recorded`, in that order. where: config key, and what it names."""
    if wanted is None:
        return tuple(recorded)
    if list(wanted) != [layer for layer in recorded if layer in wanted]:
        raise UserError(
            f"{where}: expected some of the recorded layers {list(recorded)}, in their order, got"
            f" {list(wanted)}. Choose among them, or record others: python scripts/gen_data.py"
            f" inputs.{LAYERS[column]}=..."
        )
    return tuple(wanted)


def narrowed(hidden: Tensor, recorded: Sequence[int], wanted: Sequence[int]) -> Tensor:
    """Return the hidden states of the layers `wanted` among [..., len(recorded) * H]."""
    if tuple(wanted) == tuple(recorded):
        return hidden
    kept = torch.tensor([layer in wanted for layer in recorded], device=hidden.device)
    return hidden.unflatten(-1, (len(recorded), -1))[..., kept, :].flatten(-2)


def side_by_side(hidden: Tensor) -> Tensor:
    """Return hidden states [L, n, H] of L layers as [n, L * H] bfloat16, the precision they are
    stored and read in."""
    rows = hidden[0] if len(hidden) == 1 else torch.cat(list(hidden), dim=-1)
    return rows.to(torch.bfloat16)
