"""Llama 4's temperature of attention, for rows of a tree or of a padded batch.

Layers without rotation scale the query at position t by 1 + a log(1 + floor((t + 1) / s)) (scaling
after 2501.19399). The class takes the row's place in the cache for its position, which it is only
in a chain."""

from typing import Any

import torch
from torch import Tensor

OPTION = "row_positions"  # by which positions reach attention through the model's forward


def has_temperature(config: Any) -> bool:
    """config: of the text part."""
    return bool(getattr(config, "attn_temperature_tuning", False))


def at_positions(module: Any, query: Tensor, before: int, positions: Tensor) -> Tensor:
    """The query [B, heads, n, d] of attention `module`, scaled for `positions` [B or 1, n] instead
    of for rows that come after `before` cached ones."""
    if module.use_rope or not module.attn_temperature_tuning:
        return query
    rows = torch.arange(before, before + query.shape[2], device=positions.device)
    factor = _scale(module, positions) / _scale(module, rows)
    return query * factor[:, None, :, None].to(query)


def _scale(module: Any, positions: Tensor) -> Tensor:
    steps = torch.floor((positions.float() + 1.0) / module.floor_scale)
    return torch.log1p(steps) * module.attn_scale + 1.0
