"""States of recurrent layers, of linear attention and of short convolutions, beside the keys and
values of attention.

A state is about one text as a whole: nothing can be taken out of it, and padding goes into it."""

import math
from collections.abc import Iterator
from typing import Any

import transformers
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer, LinearAttentionLayer

from decoding.models.kv_cache import BufferCache, BufferLayer
from runtime.errors import UserError

# Model types whose states lie in the cache of transformers and whose layers go on from them by any
# number of rows, as they would row by row. Mamba, FalconMamba, Jamba and Zamba go on by one row
# alone; Zamba2 and Nemotron-H limit time steps, but not those of one row; RWKV, xLSTM, MiniMax and
# RecurrentGemma keep states elsewhere.
STATEFUL = {
    "bamba",
    "falcon_h1",
    "granitemoehybrid",
    "kimi_linear",
    "lfm2",
    "lfm2_moe",
    "lfm3",
    "mamba2",
    "olmo_hybrid",
    "qwen3_5_moe_text",
    "qwen3_5_text",
    "qwen3_next",
    "zaya",
}

SINCE = (5, 23)  # transformers whose cache layers keep several states each

State = tuple[bool, Tensor | None, Tensor | None]
"""Whether there is one, what a convolution sees of the past, what a recurrence keeps of it."""


def keeps_states(model: PreTrainedModel) -> bool:
    """Whether `StateCache` holds what the model keeps."""
    known = model.config.get_text_config().model_type in STATEFUL
    limits = [getattr(part, "time_step_limit", None) for part in model.modules()]
    limited = any(limit is not None and tuple(limit) != (0.0, math.inf) for limit in limits)
    return known and not limited and type(model).__module__.startswith("transformers.")


def refuse_old_transformers(key: str, model: PreTrainedModel) -> None:
    """Raises UserError for a model that keeps states where transformers is older than `SINCE`."""
    version = transformers.__version__
    if keeps_states(model) and tuple(map(int, version.split(".")[:2])) < SINCE:
        raise UserError(
            f"{key}: {type(model).__name__} keeps states, which needs transformers"
            f" {'.'.join(map(str, SINCE))} or newer, got {version}. Upgrade it, or choose a"
            " model of attention alone"
        )


class StatesAndRows(LinearAttentionLayer, BufferLayer):  # type: ignore[override]
    """State of a layer with both kinds of heads."""

    def __init__(self, number_of_states: int) -> None:
        BufferLayer.__init__(self)
        LinearAttentionLayer.__init__(self, number_of_states)

    def lazy_initialization(self, *rows: Tensor, **states: Any) -> None:  # type: ignore[override]
        if rows:
            BufferLayer.lazy_initialization(self, *rows)
        else:
            LinearAttentionLayer.lazy_initialization(self, **states)

    def reset(self) -> None:
        LinearAttentionLayer.reset(self)
        BufferLayer.reset(self)


class StateCache(BufferCache):
    """The ``past_key_values`` of a model of `STATEFUL`."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__()
        layers: list[Any] = [_layer(plain) for plain in DynamicCache(config=config).layers]
        self.layers = layers

    @property
    def is_linear(self) -> list[bool]:
        """Return of each layer whether it keeps no keys and values."""
        return [
            isinstance(layer, LinearAttentionLayer) and not isinstance(layer, BufferLayer)
            for layer in self.layers
        ]

    def saved(self) -> list[State]:
        """Copies of all states."""
        return [
            (
                layer.has_previous_state[index],
                _copy(layer.conv_states[index]),
                _copy(layer.recurrent_states[index]),
            )
            for layer, index in self._states()
        ]

    def restore(self, length: int, saved: list[State]) -> None:
        """Go back to the first `length` rows. saved: the states after them."""
        self.set_length(length)
        for (layer, index), (known, *states) in zip(self._states(), saved, strict=True):
            layer.has_previous_state[index] = known
            held = layer.conv_states[index], layer.recurrent_states[index]
            for ours, theirs in zip(held, states, strict=True):
                if ours is not None and theirs is not None:
                    ours.copy_(theirs)

    def _states(self) -> Iterator[tuple[LinearAttentionLayer, int]]:
        for layer in self.layers:
            if isinstance(layer, LinearAttentionLayer):
                yield from ((layer, index) for index in range(layer.number_of_states))


def _layer(plain: object) -> object:
    """Return the layer that stands for one of transformers: a layer that keeps nothing stays."""
    if isinstance(plain, LinearAttentionLayer) and isinstance(plain, DynamicLayer):
        return StatesAndRows(plain.number_of_states)
    return BufferLayer() if isinstance(plain, DynamicLayer) else plain


def _copy(state: Tensor | None) -> Tensor | None:
    return None if state is None else state.clone()
