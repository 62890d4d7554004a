"""Run in the environment of speculators, not in ours: logits of its own EAGLE-3 model.

    python tests/helpers/models/speculators_reference.py FOLDER...

Each folder holds a draft (`config.json`, `model.safetensors`), and `inputs.safetensors`: `hidden`
[1, n, L * H], `tokens` [1, n] already shifted. Writes `logits.safetensors`, [steps, n, k]."""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig

STEPS = 4


def main(folder: Path) -> None:
    config = Eagle3SpeculatorConfig(**json.loads((folder / "config.json").read_text()))
    config.transformer_layer_config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = Eagle3DraftModel(config).eval().float()
    state, missing = load_file(folder / "model.safetensors"), set(model.state_dict())
    known = {name: tensor for name, tensor in state.items() if name in missing}
    assert known.keys() == state.keys(), state.keys() - known.keys()
    absent = missing - known.keys() - {"verifier_norm.weight", "verifier_lm_head.weight"}
    assert not absent, absent
    model.load_state_dict(known, strict=False)
    found: list[torch.Tensor] = []
    model.lm_head.register_forward_hook(lambda _, __, output: found.append(output[0]))
    inputs = load_file(folder / "inputs.safetensors")
    with torch.no_grad():
        model(
            inputs["hidden"], inputs["tokens"], torch.zeros_like(inputs["tokens"]), ttt_steps=STEPS
        )
    save_file({"logits": torch.stack(found)}, folder / "logits.safetensors")


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        main(Path(argument))
