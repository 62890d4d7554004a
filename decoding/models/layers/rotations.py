"""Rotations whose angles depend on the length of the text ("dynamic", "longrope").

Up to a boundary they do not. Beyond it every key would have to be rotated anew with each token, or
once at the boundary; transformers does so for some classes, keeps old keys for others, and takes
the longest row of a batch for all. What was cached would depend on the calls that cached it."""

from collections.abc import Iterator
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from runtime.errors import UserError

LONG = {"longrope", "su"}
MSCALE = "long_mscale"  # of PhiMoE, whatever the type


def steady_length(config: PreTrainedConfig) -> int | None:
    """Tokens of a text up to which the angles do not depend on its length; None: any number."""
    config = config.get_text_config()
    return min(
        (limit for rope in _ropes(config) if (limit := _boundary(rope, config)) is not None),
        default=None,
    )


def refuse_unsteady(key: str, model: PreTrainedModel, longest: int | None) -> None:
    """Raise UserError where texts of `longest` tokens (None: as many as the model takes) reach
    beyond `steady_length`. key: what the user calls the model."""
    steady = steady_length(model.config)
    if steady is None:
        return
    longest = longest or model.config.get_text_config().max_position_embeddings
    if longest > steady:
        raise UserError(
            f"{key}: expected pair.max_length of at most {steady}, for beyond {steady} tokens the"
            f" rotations of {type(model).__name__} depend on the length of the text, got"
            f" {longest}. Set pair.max_length={steady}, or choose another model"
        )


def _ropes(config: Any) -> Iterator[dict[str, Any]]:
    """What the config says of rotations: of all layers, or of each type of them."""
    for name in ("rope_parameters", "rope_scaling"):
        found = getattr(config, name, None)
        if isinstance(found, dict):
            yield found
            yield from (part for part in found.values() if isinstance(part, dict))


def _boundary(rope: dict[str, Any], config: Any) -> int | None:
    kind = str(rope.get("rope_type") or rope.get("type"))
    if kind in LONG or MSCALE in rope:
        name = "original_max_position_embeddings"
        return rope.get(name) or getattr(config, name, None) or config.max_position_embeddings
    return int(config.max_position_embeddings) if "dynamic" in kind else None
