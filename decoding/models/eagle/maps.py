"""Our own EAGLE-style draft: an ordinary draft with a vector added to each token's embedding.

After Li et al. 2024 (EAGLE, 2401.15077) and 2025 (EAGLE-3, 2503.01840). The row of the token at
position t gets that token's embedding plus a linear map of the target's hidden states at t - 1.
Where there are none (from the second token of a draft on), another map of the draft's own last
hidden state at t - 1 stands in for them. Everything after that is an ordinary draft: its layers,
the target's output layer.

How we differ: the draft need not have a single layer; the maps are added to the embedding instead
of joined with it, so that training can start from an ordinary draft (maps of zeros)."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from decoding.models.draft_model import beside
from runtime.errors import UserError

MAPS = ("from_states", "from_own")
FILE = "target_features.safetensors"  # of a draft (`beside`): it makes it one that reads along


@dataclass(frozen=True)
class FeatureMaps:
    """What is added to the embeddings.

    layers: the target's hidden states that are read besides the last one (0: embeddings, i: after
    layer i)
    from_states: [H, (L + 1) * H_target], of the target's states, each divided by its root mean
    square
    from_own: [H, H], of the draft's last hidden state
    """

    layers: tuple[int, ...]
    from_states: Tensor
    from_own: Tensor

    @property
    def described(self) -> str:
        """What a fingerprint says besides `tensors`."""
        return json.dumps(self.layers)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Weights that are not the draft model's own."""
        return self.from_states, self.from_own

    def of_target(self, states: Tensor) -> Tensor:
        """[..., H] from the target's states [..., L + 1, H_target]; zeros for zeros, which stand
        for no state."""
        wide = states.to(torch.promote_types(states.dtype, torch.float32))
        scaled = F.rms_norm(wide, states.shape[-1:], eps=EPS).to(self.from_states)
        return F.linear(scaled.flatten(-2), self.from_states)

    def of_own(self, hidden: Tensor) -> Tensor:
        """[n, H] from the draft's last hidden states [n, H]."""
        return F.linear(hidden.to(self.from_own), self.from_own)


EPS = 1e-5


def read_maps(folder: Path, like: PreTrainedModel, target: PreTrainedModel) -> FeatureMaps | None:
    """The maps in the folder of a draft, in its dtype and on its device; None for an ordinary
    draft.

    Raises UserError where the file is damaged or does not fit these models.
    """
    path = beside(folder, FILE)
    if path is None:
        return None
    try:
        with safe_open(path, "pt") as file:
            layers = tuple(json.loads(file.metadata()["layers"]))
            from_states, from_own = file.get_tensor("from_states"), file.get_tensor("from_own")
    except (SafetensorError, OSError, LookupError, TypeError, ValueError) as error:
        raise UserError(
            f"pair.draft: {path} is damaged ({error}). Train it: python pairs/distill_draft.py"
            " draft=eagle"
        ) from error
    width, source = like.config.hidden_size, target.config.hidden_size
    wanted = {(width, (len(layers) + 1) * source), (width, width)}
    known = range(target.config.num_hidden_layers + 1)
    if {tuple(from_states.shape), tuple(from_own.shape)} != wanted or not all(
        layer in known for layer in layers
    ):
        raise UserError(
            f"pair.draft: {path} reads states of another target than pair.target. Train one for it:"
            " python pairs/distill_draft.py draft=eagle"
        )
    return FeatureMaps(
        layers, from_states.to(like.device, like.dtype), from_own.to(like.device, like.dtype)
    )
