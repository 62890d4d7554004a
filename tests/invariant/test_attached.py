"""What is attached to a model takes part in every forward: adapters, hooks, patches, other modules
and other weights, before the cached model is made or between two texts."""

from collections.abc import Callable
from copy import deepcopy
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from decoding.models.cached_lm import CachedLM
from decoding.models.cpu_llama import LlamaForward, fits
from decoding.models.draft_vocabulary import keep_rows
from decoding.models.packing import pack_linears
from runtime.errors import UserError
from tests.helpers.models.cached import SMALL, build, close, random_tokens
from tests.helpers.models.eagles import FLAVOURS, published_pair

TEXT = random_tokens(12, 0)


class Lora(nn.Module):
    """A layer and a product of two small ones."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.a = nn.Linear(base.in_features, 2, bias=False)
        self.b = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + 3 * self.b(self.a(x))


class Gated(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Halved(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight / 2


def lora(*names: str) -> Callable[[Any], None]:
    def attach(model: Any) -> None:
        torch.manual_seed(5)
        for layer in model.model.layers:
            for name in names:
                parent = layer.self_attn if hasattr(layer.self_attn, name) else layer.mlp
                setattr(parent, name, Lora(getattr(parent, name)))

    return attach


def hook(path: str, before: bool = False) -> Callable[[Any], None]:
    """One that doubles what comes out of a module, or goes into it."""

    def twice(value: Any) -> Any:
        if isinstance(value, tuple):
            return twice(value[0]), *value[1:]
        return value * 2 if value.is_floating_point() else (value + 1) % SMALL["vocab_size"]

    def attach(model: Any) -> None:
        module = model.get_submodule(path)
        if before:
            module.register_forward_pre_hook(lambda _, args: twice(args))
        else:
            module.register_forward_hook(lambda _, __, out: twice(out))

    return attach


def patched(path: str) -> Callable[[Any], None]:
    def attach(model: Any) -> None:
        module = model.get_submodule(path)
        forward = type(module).forward
        module.forward = MethodType(
            lambda self, *args, **more: forward(self, *args, **more) * 2, module
        )

    return attach


def assigned(path: str, name: str, make: Callable[[], Any]) -> Callable[[Any], None]:
    return lambda model: setattr(model.get_submodule(path), name, make())


def other_weights(model: Any) -> None:
    """Behind the back of autograd."""
    for parameter in model.parameters():
        parameter.data.mul_(0.9)


def few_other_weights(model: Any) -> None:
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight[3, 5] += 4
        model.model.layers[0].self_attn.o_proj.weight[3, 5] += 4


def new_parameters(model: Any) -> None:
    values = {name: 0.9 * value for name, value in model.state_dict().items()}
    model.load_state_dict(values, assign=True)


ATTACHED: dict[str, Callable[[Any], None]] = {
    "lora q v": lora("q_proj", "v_proj"),
    "lora mlp": lora("gate_proj", "up_proj", "down_proj"),
    "lora o": lora("o_proj"),
    "hook on a projection": hook("model.layers.1.self_attn.q_proj"),
    "hook on a norm": hook("model.layers.0.input_layernorm"),
    "hook on the embedding": hook("model.embed_tokens"),
    "hook on a layer": hook("model.layers.1"),
    "hook on rotations": hook("model.rotary_emb"),
    "hook on the output layer": hook("lm_head"),
    "hook before a projection": hook("model.layers.1.mlp.down_proj", before=True),
    "patched projection": patched("model.layers.0.self_attn.v_proj"),
    "patched norm": patched("model.norm"),
    "bias of keys alone": assigned(
        "model.layers.0.self_attn.k_proj", "bias", lambda: nn.Parameter(torch.arange(16) / 8)
    ),
    "size of the rotations": assigned("model.rotary_emb", "attention_scaling", lambda: 1.4),
    "longest embedding": assigned("model.embed_tokens", "max_norm", lambda: 1.0),
    "class of a layer": assigned("model.layers.1.mlp.up_proj", "__class__", lambda: Gated),
    "class of an activation": assigned("model.layers.0.mlp", "act_fn", nn.GELU),
    "parametrization": lambda m: parametrize.register_parametrization(
        m.model.layers[0].self_attn.q_proj, "weight", Halved()
    ),
    "other weights": other_weights,
    "a few other weights": few_other_weights,
    "new parameters": new_parameters,
}
AT_FIRST: dict[str, Callable[[Any], None]] = {
    "scaling of attention": assigned("model.layers.0.self_attn", "scaling", lambda: 1.0),
    "fewer layers": lambda m: setattr(m.config, "num_hidden_layers", 2),
}


def expected(attach: Callable[[Any], None], kind: str = "llama") -> Tensor:
    """What transformers says, [n, V]; checked to differ from what the bare model says."""
    model = build(kind).eval()
    with torch.no_grad():
        bare = model(TEXT[None]).logits[0]
        attach(model)
        logits = model(TEXT[None]).logits[0]
    assert (logits - bare).abs().max() > 1e-2
    return logits


def logits_of(lm: CachedLM) -> Tensor:
    """Of a text in three calls, [n, V]."""
    lm.reset()
    return torch.cat([lm.forward(part).logits for part in TEXT.split([7, 1, 4])])


@pytest.mark.parametrize("name", ATTACHED | AT_FIRST)
def test_attached_before(name: str) -> None:
    attach = (ATTACHED | AT_FIRST)[name]
    model = build("llama")
    attach(model)
    pack_linears(model)
    close(logits_of(CachedLM(model)), expected(attach))


def test_other_weights_of_packed_layers_that_stay_where_they_are() -> None:
    model = build("llama")
    pack_linears(model)
    lm = CachedLM(model, joins=False)
    logits_of(lm)
    other_weights(model)
    close(logits_of(lm), expected(other_weights))


WEIGHTS = ("other weights", "a few other weights", "new parameters", "lora q v")


@pytest.mark.parametrize(
    ("name", "kind"),
    [(name, "llama") for name in ATTACHED] + [(name, "gemma2") for name in WEIGHTS],
)
def test_attached_between_two_texts(name: str, kind: str) -> None:
    model = build(kind)
    pack_linears(model)
    lm = CachedLM(model)
    logits_of(lm)
    ATTACHED[name](model)
    close(logits_of(lm), expected(ATTACHED[name], kind))


def test_a_hook_inside_of_a_text_and_its_end() -> None:
    model = build("llama")
    lm = CachedLM(model)
    before = logits_of(lm)
    lm.crop(7)
    doubled = model.lm_head.register_forward_hook(lambda _, __, out: out * 2)
    close(lm.forward(TEXT[7:]).logits, 2 * before[7:])
    doubled.remove()
    close(logits_of(lm), before)
    assert isinstance(lm.network, LlamaForward) and lm.network.plain()


def test_a_hook_on_all_modules() -> None:
    model, kind = build("llama"), type(build("llama").model.norm)
    lm = CachedLM(model)
    logits_of(lm)

    def double(module: nn.Module, _: Any, out: Any) -> Any:
        return out * 2 if type(module) is kind else None

    handle = nn.modules.module.register_module_forward_hook(double)
    try:
        close(logits_of(lm), model(TEXT[None]).logits[0].detach())
        assert not fits(model)
    finally:
        handle.remove()
    assert fits(model)


def test_a_patched_class(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama")
    lm, norm = CachedLM(model), type(model.model.norm)
    logits_of(lm)
    original = norm.forward
    monkeypatch.setattr(norm, "forward", lambda self, x: 2 * original(self, x))
    close(logits_of(lm), build("llama").eval()(TEXT[None]).logits[0].detach())


def test_subclasses_are_left_to_transformers_and_hooks_that_only_look_change_nothing() -> None:
    class Mine(LlamaForCausalLM):
        pass

    assert not fits(Mine(LlamaConfig(**SMALL)))
    model = build("llama").eval()
    model(TEXT[None], output_hidden_states=True)  # leaves hooks of transformers behind
    assert fits(model)


@pytest.mark.parametrize("attach", [hook("lm_head"), patched("lm_head")])
def test_part_of_an_output_layer_with_more_to_it_is_refused(attach: Callable[[Any], None]) -> None:
    model: PreTrainedModel = build("llama")
    attach(model)
    with pytest.raises(UserError, match="pair.draft_vocabulary: the output layer of pair.draft"):
        keep_rows(model, torch.tensor([1, 2, 3]))


def test_what_a_published_draft_would_leave_out_is_refused_and_other_weights_are_seen() -> None:
    text, lora_of = TEXT % 32, "layers.0.mlp.up_proj"
    attachments = hook("layers.0.mlp"), patched("layers.0.mlp"), None
    for attach in attachments:
        pair = published_pair(FLAVOURS["plain"])
        model: Any = pair.draft.model
        pair.target.forward(text)
        pair.draft.forward(text)
        if attach is None:
            model.layers[0].mlp.up_proj = Lora(model.get_submodule(lora_of))
        else:
            attach(model)
        pair.draft.reset()
        with pytest.raises(UserError, match="pair.draft: expected an EAGLE draft as its files"):
            pair.draft.forward(text)
    pair, other = (published_pair(FLAVOURS["plain"]) for _ in range(2))
    for each in (pair, other):
        each.target.forward(text)
    pair.draft.forward(text)
    pair.draft.reset()
    values = {name: 0.9 * value for name, value in pair.draft.model.state_dict().items()}
    pair.draft.model.load_state_dict(deepcopy(values), assign=True)
    other.draft.model.load_state_dict(values)
    close(pair.draft.forward(text).logits, other.draft.forward(text).logits)
