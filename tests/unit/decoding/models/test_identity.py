"""Fingerprints: what alters them, and what does not."""

from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrize import register_parametrization
from transformers import LlamaConfig, LlamaForCausalLM

from decoding.models.cached_lm import CachedLM
from decoding.models.identity import model_fingerprint
from decoding.models.loading import pair_identity
from decoding.models.packing import pack_linears
from tests.helpers.models.tiny_pair import tiny_pair

SIZES: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}


def model(**changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, **changes)).eval()


def projection(model: Any) -> nn.Linear:
    linear: nn.Linear = model.model.layers[1].self_attn.q_proj
    return linear


def steer(module: nn.Module, given: Any, output: Tensor) -> Tensor:
    return output + 1


def steered(by: Any) -> Callable[..., Any]:
    return lambda module, given, output: output + by


def patched(self: Any, x: Tensor) -> Tensor:
    return x


def thrice(module: nn.Module, given: Any, output: Tensor) -> Tensor:
    return output * 3


def fourfold(module: nn.Module, given: Any, output: Tensor) -> Tensor:
    return output * 4


fourfold.__qualname__ = thrice.__qualname__


class Scaled(nn.Module):
    def __init__(self, inner: nn.Module, factor: float) -> None:
        super().__init__()
        self.inner, self.factor = inner, factor

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.factor


class Negated(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return -super().forward(x)


def scaled(factor: float) -> Callable[[Any], None]:
    return lambda m: setattr(m.model, "norm", Scaled(m.model.norm, factor))


def scale_of(buffer: Tensor) -> Callable[[Any], None]:
    return lambda model: projection(model).register_buffer("scales", buffer)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "a value between": lambda m: m.model.embed_tokens.weight.data[7, 3].add_(1),
    "the last value": lambda m: m.lm_head.weight.data[-1, -1].add_(1),
    "a sign": lambda m: m.lm_head.weight.data[:, 1::2].neg_(),
    "two rows change places": lambda m: m.lm_head.weight.data.copy_(m.lm_head.weight.flip(0)),
    "a buffer": scale_of(torch.ones(4)),
    "another buffer": scale_of(torch.tensor([1.0, 1, 1, 2])),
    "whole numbers": scale_of(torch.ones(4, dtype=torch.int32)),
    "more of them": scale_of(torch.tensor([1, 1, 1, 65537], dtype=torch.int32)),
    "zeros": scale_of(torch.zeros(5)),
    "more zeros": scale_of(torch.zeros(6)),
    "frequencies": lambda m: m.model.rotary_emb.inv_freq.mul_(1.02),
    "attention scaling": lambda m: setattr(m.model.rotary_emb, "attention_scaling", 1.1),
    "a hook": lambda m: projection(m).register_forward_hook(steer),
    "a hook elsewhere": lambda m: m.lm_head.register_forward_hook(steer),
    "a hook before": lambda m: projection(m).register_forward_pre_hook(patched),
    "a vector": lambda m: m.lm_head.register_forward_hook(steered(torch.ones(50))),
    "another vector": lambda m: m.lm_head.register_forward_hook(steered(torch.zeros(50))),
    "a vector of many": lambda m: m.lm_head.register_forward_hook(steered({1: [torch.ones(50)]})),
    "another": lambda m: m.lm_head.register_forward_hook(steered({1: [torch.zeros(50)]})),
    "what a hook does": lambda m: m.lm_head.register_forward_hook(thrice),
    "what it does under the same name": lambda m: m.lm_head.register_forward_hook(fourfold),
    "a module around another": scaled(2.0),
    "its number": scaled(3.0),
    "a class": lambda m: setattr(projection(m), "__class__", Negated),
    "a constant of a norm": lambda m: setattr(m.model.norm, "variance_epsilon", 0.5),
    "scaling of scores": lambda m: setattr(m.model.layers[0].self_attn, "scaling", 1.0),
    "longest embedding": lambda m: setattr(m.model.embed_tokens, "max_norm", 1.0),
    "a number": lambda m: m.lm_head.register_forward_hook(steered(2)),
    "a forward": lambda m: setattr(projection(m), "forward", MethodType(patched, projection(m))),
    "a parametrization": lambda m: register_parametrization(projection(m), "weight", nn.Tanh()),
}


def test_whatever_a_model_computes_with_is_seen():
    fingerprints = {"nothing": model_fingerprint(model())}
    for name, change in CHANGES.items():
        changed = model()
        with torch.no_grad():
            change(changed)
        fingerprints[name] = model_fingerprint(changed)
    assert len(set(fingerprints.values())) == len(fingerprints), fingerprints
    named = fingerprints["a hook"]
    assert named.endswith(f", hooked {__name__}.steer")
    assert fingerprints["a vector"].partition(",")[2].endswith("steered.<locals>.<lambda>")


def test_hooks_of_all_modules_are_seen():
    before = model_fingerprint(model())
    handle = nn.modules.module.register_module_forward_hook(steer)
    try:
        assert model_fingerprint(model()) != before
    finally:
        handle.remove()
    assert model_fingerprint(model()) == before


def on_several_devices(model: Any) -> None:
    """As accelerate patches the forwards of a model that is on more than one."""
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    for module in model.modules():
        add_hook_to_module(module, AlignDevicesHook("cpu"))


def held_as(change: Callable[[Tensor], Tensor]) -> Callable[[Any], None]:
    return lambda m: setattr(m.lm_head, "weight", nn.Parameter(change(m.lm_head.weight.detach())))


SAME: dict[str, Callable[[Any], Any]] = {
    "packed": pack_linears,
    "joined": CachedLM,
    "eager": lambda m: m.set_attn_implementation("eager"),
    "in training": lambda m: m.train(),
    "hidden states asked for": lambda m: m(torch.ones(1, 3).long(), output_hidden_states=True),
    "compiled": lambda m: setattr(m, "forward", torch.compile(m.forward)),
    "hooks of accelerate": on_several_devices,
    "float64": lambda m: m.double(),
    "no gradients": lambda m: m.requires_grad_(False),
    "not contiguous": held_as(lambda weight: weight.T.contiguous().T),
    "an odd place in memory": held_as(lambda w: F.pad(w.reshape(-1), (1, 0))[1:].view(50, 16)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_how_a_model_is_held_and_run_is_not(dtype):
    plain = model_fingerprint(model().to(torch.bfloat16).float())
    for name, change in SAME.items():
        other = model().to(torch.bfloat16).to(dtype)
        change(other)
        assert model_fingerprint(other) == plain, name


def test_frequencies_that_follow_the_text_are_those_of_a_short_one():
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    used = model(max_position_embeddings=16, rope_parameters=rope)
    before = model_fingerprint(used)
    used(torch.ones(1, 40).long())
    assert model_fingerprint(used) == before
    used.model.rotary_emb.original_inv_freq.mul_(1.02)
    assert model_fingerprint(used) != before


def test_what_ends_a_response_belongs_to_a_pair_and_earlier_versions_are_named_as_such():
    pair, other = tiny_pair(), tiny_pair()
    other.eos_ids = (1, 5)
    assert pair_identity(other) == {**pair_identity(pair), "eos_ids": [1, 5]}
    assert pair_identity(pair)["eos_ids"] != [1, 5]


def test_an_adapter_is_part_of_a_model():
    peft = pytest.importorskip("peft")

    def adapted(alpha: int = 8, **changes: Any) -> Any:
        made, config = model(), {"target_modules": ["q_proj"], "r": 2, "init_lora_weights": False}
        torch.manual_seed(1)
        made.add_adapter(peft.LoraConfig(lora_alpha=alpha, **(config | changes)))
        return made.eval()

    def merged(model: Any) -> Any:
        for part in model.modules():
            if hasattr(part, "merge"):
                part.merge()
        return model

    def with_other_weights(model: Any) -> Any:
        next(p for n, p in model.named_parameters() if "lora_A" in n).data[0, 0] += 1
        return model

    def switched_off(model: Any) -> Any:
        model.disable_adapters()
        return model

    kinds = [model(), adapted(), adapted(alpha=4), adapted(use_rslora=True), merged(adapted())]
    kinds += [with_other_weights(adapted()), switched_off(adapted()), adapted(r=1)]
    prints = [model_fingerprint(kind) for kind in kinds]
    assert len(set(prints)) == len(prints)
    assert model_fingerprint(adapted(target_modules=["q_proj"])) == prints[1]
    assert not any("hooked" in found for found in prints)
