"""Which hidden states a predictor reads, and the one function that reads them.

Harvesting, training and decoding all call `extract`, so a predictor is served exactly the numbers
it was trained on: the values are rounded to bfloat16, the precision of the harvested files, also
while decoding."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from runtime.errors import UserError, checked_switch


@dataclass(frozen=True)
class FeatureSpec:
    """Where a feature vector comes from.

    side: model whose hidden states are read, ``"draft"`` or ``"target"``.
    layers: indices into `hidden_states`, all negative (-1 = after the final norm), in the order of
    concatenation.
    embedding: append the target's input embedding of the next committed token.
    """

    side: str
    layers: Sequence[int]
    embedding: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(int(layer) for layer in self.layers))
        checked_switch("features.embedding", self.embedding)
        if self.side not in ("draft", "target"):
            raise UserError(f"features.side: {self.side!r} is no model. Use draft or target")
        if not self.layers or max(self.layers) >= 0:
            raise UserError(
                f"features.layers: {list(self.layers)} must be one or more negative indices, -1 ="
                " last layer"
            )

    def dim(self, hidden_size: int, embedding_size: int) -> int:
        """Length D of a feature vector for models of these sizes."""
        return len(self.layers) * hidden_size + self.embedding * embedding_size

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "layers": list(self.layers)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "FeatureSpec":
        return cls(**values)


def checked_layers(layers: Any) -> tuple[int, ...] | None:
    """`predictor.layers` as a tuple; None for all that were harvested."""
    if layers is None:
        return None
    if (
        isinstance(layers, str)
        or not isinstance(layers, Sequence)
        or not all(type(n) is int and n < 0 for n in layers)
    ):
        raise UserError(
            f"predictor.layers: {layers} are no layers. Give negative ones, e.g."
            " predictor.layers=[-2,-1]"
        )
    return tuple(layers)


def narrowed(features: torch.Tensor, harvested: FeatureSpec, wanted: FeatureSpec) -> torch.Tensor:
    """Feature vectors [..., D] of `harvested` -> those of `wanted` [..., D'], which reads some of
    its layers.

    An embedding counts as one more layer: as wide as a hidden state, as in every model that is
    loaded here."""
    if wanted == harvested:
        return features
    refuse_unharvested(harvested, wanted)
    kept = [layer in wanted.layers for layer in harvested.layers] + [True] * harvested.embedding
    parts = features.unflatten(-1, (len(kept), -1))
    return parts[..., torch.tensor(kept, device=features.device), :].flatten(-2)


def refuse_unharvested(
    harvested: FeatureSpec, wanted: FeatureSpec, where: str = "predictor.layers"
) -> None:
    """Raise UserError where `wanted` reads other things than `harvested`, or its layers in another
    order. where: config key, and what it names."""
    have, want = list(harvested.layers), list(wanted.layers)
    if replace(wanted, layers=have) != harvested or want != [
        layer for layer in have if layer in want
    ]:
        raise UserError(
            f"{where}: {want} are not some of the harvested layers {have}, in their order. Choose"
            " among them, or harvest others: python scripts/gen_data.py features.hrad.layers=..."
            " (or features.specdecpp.layers)"
        )


def extract(
    hidden: torch.Tensor, spec: FeatureSpec, embedding: torch.Tensor | None = None
) -> torch.Tensor:
    """Feature vectors of n positions.

    hidden: [len(spec.layers), n, H], hidden states of the `spec.side` model in these layers.
    embedding: [n, E], required when `spec.embedding`. Returns float32 [n, D] of bfloat16 precision,
    layers first, then the embedding."""
    assert len(hidden) == len(spec.layers), "hidden states of exactly the layers that are read"
    parts = list(hidden)
    if spec.embedding:
        if embedding is None:
            raise ValueError("this FeatureSpec needs the embedding of the next committed token")
        parts.append(embedding)
    rows = parts[0] if len(parts) == 1 else torch.cat([part.to(hidden) for part in parts], dim=-1)
    return rows.to(torch.bfloat16).float()
