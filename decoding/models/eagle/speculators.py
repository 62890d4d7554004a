"""Writing a published draft as speculators has it: what vLLM serves.

`config.json` says everything, each flag whatever its default, and one safetensors file holds the
weights under the names of `PublishedModel`. A draft vocabulary is two more tensors: token j of the
draft is j + d2t[j] of the target, and t2d[v] says whether the draft has token v."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from decoding.models.eagle.published import PublishedModel
from runtime.files import write_atomically, write_json

KIND = "speculators_model_type"
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
VERSION = "0.9.0"  # of the format
WEIGHTS = "model.safetensors"
# Of a model's configuration: nothing of its training, generation or files.
KEPT = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_parameters",
    "attention_bias",
    "mlp_bias",
)


@dataclass(frozen=True)
class Proposal:
    """verifier: folder or hub id of the target; architecture: its class; tokens: of a draft."""

    verifier: str
    architecture: str
    tokens: int


def write_published(
    folder: Path, model: PublishedModel, tokens: Tensor | None, proposal: Proposal
) -> None:
    """Write `config.json` and the weights, in the model's dtype. tokens: [k] increasing, of the
    whole output layer those that are kept; None: all. The target's embeddings are written too:
    speculators' own model has no other place for them."""
    state = {name: tensor.detach().cpu() for name, tensor in model.state_dict().items()}
    if tokens is not None:
        state["lm_head.weight"] = state["lm_head.weight"][tokens]
        state["d2t"] = tokens - torch.arange(len(tokens))
        state["t2d"] = torch.zeros(model.config.vocab_size, dtype=torch.bool)
        state["t2d"][tokens] = True
    whole = {name: tensor.contiguous() for name, tensor in state.items()}
    write_atomically(folder / WEIGHTS, lambda path: save_file(whole, path, {"format": "pt"}))
    write_json(folder / "config.json", configuration(model, len(whole["lm_head.weight"]), proposal))


def configuration(model: PublishedModel, says: int, proposal: Proposal) -> dict[str, Any]:
    """`config.json` of an EAGLE-3 draft with `says` tokens."""
    values, flavour = model.config.to_dict(), model.flavour
    layer = {key: values[key] for key in KEPT if key in values}
    assert flavour.layers and flavour.final_norm, "speculators has no other EAGLE-3"
    return {
        "architectures": ["Eagle3Speculator"],
        KIND: "eagle3",
        "speculators_version": VERSION,
        "dtype": str(model.dtype).removeprefix("torch."),
        "draft_vocab_size": says,
        **{flag: getattr(flavour, flag) for flag in FLAGS},
        "eagle_aux_hidden_state_layer_ids": list(flavour.layers),
        "target_hidden_size": None,
        "embed_requires_grad": False,
        "transformer_layer_config": {**layer, "num_aux_hidden_states": len(flavour.layers)},
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": proposal.tokens,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {
                "name_or_path": proposal.verifier,
                "architectures": [proposal.architecture],
            },
        },
    }
