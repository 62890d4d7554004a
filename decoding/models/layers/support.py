"""Which models `CachedLM` runs: those whose layers are attention behind the transformers interface,
full, with a sliding window or in chunks, each row of which sees rows before it alone."""

from transformers import PreTrainedModel

from decoding.models.layers.states import keeps_states, refuse_old_transformers
from decoding.models.layers.windows import CHUNKED, FULL, SLIDING
from runtime.errors import UserError

FROM_PADDING = "create_position_ids_from_input_ids"  # of embeddings whose positions begin there


def refuse_other_layers(key: str, model: PreTrainedModel) -> None:
    """Raises UserError for a model of other layers. key: what the user calls it."""
    name, remedy = type(model).__name__, "Choose a Llama, Qwen2, Gemma, Mistral or similar model"
    types = set(getattr(model.config.get_text_config(), "layer_types", None) or ())
    known = types <= {FULL, SLIDING, CHUNKED}
    known = known and model._supports_attention_backend and not model._is_stateful
    if not known and not keeps_states(model):
        raise UserError(
            f"{key}: {name} keeps other state than keys and values of full attention. {remedy}"
        )
    refuse_old_transformers(key, model)
    parts = list(model.get_decoder().modules())
    if any(getattr(part, "is_causal", True) is False for part in parts):
        raise UserError(
            f"{key}: expected a causal model, got {name} with tokens that see those after them."
            f" Set is_decoder in its config if it is trained as one, or choose another: {remedy}"
        )
    if any(hasattr(part, FROM_PADDING) for part in parts):
        raise UserError(
            f"{key}: expected positions that begin at 0, got {name}, where they begin behind the"
            f" pad token. {remedy}"
        )
