"""The forward of a Llama on the CPU, in C++ where `native` has a library for the processor, else
one matrix product after another.

With weights packed (`decoding.models.packing`) the products of a small model's layer take no longer
than what surrounds them: wrappers, hooks, masks, norms in six steps. Here the products of one input
are one (queries, keys and values; gate and up), a norm is three steps and a rotation three. Numbers
are those of transformers up to rounding: in bfloat16 it rounds in between where this does not.

It reads weights and calls no module, so that it stands for a model of the very classes it was
written for alone, without hooks, adapters or patches. What comes later is noticed when the next
text begins."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel, Qwen3ForCausalLM
from transformers.activations import ACT2FN

from decoding.interfaces import RowsWanted
from decoding.models.bare import Watch, state_of
from decoding.models.forward import (
    FAMILY,
    Call,
    Result,
    Rows,
    TransformersForward,
    of_layers,
    picked,
)
from decoding.models.kv_cache import BufferCache, BufferLayer, attend, folded
from decoding.models.native import NativeLlama, takes
from decoding.models.packing import PackedLinear, refresh

FIXED_ROTATIONS = {
    "default",
    "linear",
    "llama3",
    "yarn",
}  # of the others the angles depend on the context's length


class LlamaForward(Watch):
    """The `Forward` of a model that `fits`, as long as it does; then that of transformers."""

    def __init__(self, model: PreTrainedModel, max_length: int, joins: bool = True) -> None:
        """max_length: positions lie below it; joins: see `DecoderLayer`. The model's linear layers
        share their weights with this forward."""
        super().__init__(model)
        self._max_length, self._joins = max_length, joins
        self._half, self._pause = -1, nothing
        self._slow = TransformersForward(model)
        self._native: NativeLlama | None = None
        self._plain = self.plain()

    @property
    def exact(self) -> bool:
        """Whether rows are equal to the bit however they come, as long as the model is plain."""
        return self._plain and self._native is not None

    def plain(self) -> bool:
        """Whether the model still `fits`; made anew of its weights where they are others."""
        bare, same = self.look()
        self._plain = bare and (same or fits(self._model))
        written = same and self._native is not None and self._native.written()
        if self._plain and (written or not same):
            self._take(self._model.model)
            self.note()
        if self._plain and self._native is None:
            refresh([*self._model.modules(), *(part for x in self._layers for part in x.linears)])
        return self._plain

    def _take(self, body: Any) -> None:
        self._embedding: nn.Embedding = body.embed_tokens
        self._native = None  # before the new one, so that there are never two
        if takes(self._model):
            for part in self._model.modules():
                if isinstance(part, PackedLinear):
                    part.unpack()
            rotation = rotations(body.rotary_emb, self._max_length, torch.float32)
            self._native = NativeLlama(self._model, rotation)
            return
        self._norm = RMSNorm(body.norm)
        self._layers = [DecoderLayer(layer, self._joins) for layer in body.layers]
        self._rotation = rotations(body.rotary_emb, self._max_length, self._model.dtype)

    @contextmanager
    def pausing(self, pause: Callable[[], None]) -> Iterator[None]:
        """Call `pause` between the first and the second half of the layers."""
        self._half, self._pause = len(self._model.model.layers) // 2, pause
        try:
            yield
        finally:
            self._half, self._pause = -1, nothing

    def __call__(
        self, rows: Rows, cache: BufferCache, hidden: Sequence[int] = (), logits: RowsWanted = "all"
    ) -> Result:
        """See `Forward`."""
        return self.together([Call(rows, cache, hidden, logits)])[0]

    def together(self, asked: Sequence[Sequence[Any]]) -> list[Result]:
        """Do several calls, each of its own cache. In C++ they are one, with rows equal to the bit
        to those of calls of their own. asked: the arguments of each `Call`."""
        calls = [Call(*each) for each in asked]
        if self.due(any(call.rows.begin for call in calls)):
            self.plain()
        if self._plain and self._native is not None:
            return self._run(self._native, calls)
        run = self._alone if self._plain else self._slow
        return [run(*call.masked(self._model.dtype)) for call in calls]

    def _embedded(self, calls: Sequence[Rows]) -> Tensor:
        """Return what the first layer reads of the rows of all calls, [rows, H]."""
        tokens = torch.cat([rows.tokens.flatten() for rows in calls])
        x = F.embedding(tokens, self._embedding.weight)
        if any(rows.added is not None for rows in calls):
            parts = zip(x.split([rows.tokens.numel() for rows in calls]), calls, strict=True)
            added = (
                part if rows.added is None else part + rows.added.reshape(part.shape)
                for part, rows in parts
            )
            x = torch.cat(list(added))
        return x

    def _alone(
        self, rows: Rows, cache: BufferCache, hidden: Sequence[int], logits: RowsWanted
    ) -> Result:
        x = self._embedded([rows]).view(*rows.tokens.shape, -1)
        cos, sin = self._rotation[:, rows.positions].unsqueeze(2)
        mask = None if rows.mask is None else folded(rows.mask, self._layers[0].groups)
        last = len(self._layers)
        wanted = [layer % (last + 1) for layer in hidden]
        found: dict[int, Tensor] = {}
        for index, layer in enumerate(self._layers):
            if index in wanted:
                found[index] = x
            if index == self._half:
                self._pause()
            x = layer(x, cos, sin, cache.layer(index), mask)
        if last in wanted:
            x = found[last] = self._norm(x)
        x = picked(x, logits)
        x = x if last in wanted else self._norm(x)
        states = torch.stack([found[index] for index in wanted], 2) if wanted else None
        return self._model.lm_head(x), states

    def _run(self, native: NativeLlama, calls: Sequence[Call]) -> list[Result]:
        """Run the rows of all calls in C++.

        Logits are float32; hidden states have the model's dtype."""
        last, sizes = len(self._model.model.layers), [call.rows.tokens.numel() for call in calls]
        x = self._embedded([call.rows for call in calls]).float()
        wanted = [[layer % (last + 1) for layer in call.hidden] for call in calls]
        layers = sorted({layer for each in wanted for layer in each})
        states = torch.empty(len(x), len(layers), x.shape[1], dtype=self._model.dtype)
        run, done = native.over(x, [(call.rows, call.cache) for call in calls]), 0
        for stop in sorted({last, *layers, *({self._half} - {-1})}):
            if stop > done:
                run(done, stop)
                done = stop
            if stop == self._half:
                self._pause()
            if stop == last and stop in layers:
                x = native.normed(x)
            if stop in layers:
                states[:, layers.index(stop)] = x
        given = [
            part.view(*call.rows.tokens.shape, -1)
            for part, call in zip(x.split(sizes), calls, strict=True)
        ]
        read = [picked(part, call.logits) for part, call in zip(given, calls, strict=True)]
        if any(call.logits != "all" for call in calls):
            x = torch.cat([part.flatten(0, 1) for part in read])
        scores = native.head(x if last in layers else native.normed(x))
        return [
            (
                part.view(*rows.shape[:2], part.shape[1]),
                of_layers(some.view(*call.rows.tokens.shape, *some.shape[1:]), layers, own),
            )
            for part, rows, some, call, own in zip(
                scores.split([rows.shape[:2].numel() for rows in read]),
                read,
                states.split(sizes),
                calls,
                wanted,
                strict=True,
            )
        ]


def nothing() -> None:
    pass


class DecoderLayer:
    """One Llama layer: attention with rotated queries and keys, then a gated MLP, each after a norm
    and added to what came in."""

    def __init__(self, layer: Any, joins: bool = True) -> None:
        """layer: as transformers has it. Queries, keys and values, and gate and up, become views of
        joined weights where it `joins`."""
        together = joined if joins else SideBySide
        attention, mlp = layer.self_attn, layer.mlp
        self.dim: int = attention.head_dim
        self.heads = attention.q_proj.out_features // self.dim
        self.kv_heads = attention.k_proj.out_features // self.dim
        self.groups = self.heads // self.kv_heads
        self._norms = norm_of(layer.input_layernorm), norm_of(layer.post_attention_layernorm)
        norms = (getattr(attention, name, None) for name in ("q_norm", "k_norm"))
        self._head_norms = [norm_of(norm) for norm in norms if norm is not None]
        self._qkv = together(attention.q_proj, attention.k_proj, attention.v_proj)
        self._gate_up = together(mlp.gate_proj, mlp.up_proj)
        self._out: nn.Linear = attention.o_proj
        self._down: nn.Linear = mlp.down_proj
        products = self._qkv, self._gate_up, self._out, self._down
        self.linears = [part for part in products if isinstance(part, nn.Linear)]

    def __call__(
        self, x: Tensor, cos: Tensor, sin: Tensor, cache: BufferLayer, mask: Tensor | None
    ) -> Tensor:
        """x: [B, n, H]; cos, sin: [B or 1, 1, n, d], see `rotations`; mask: `folded`, [B or 1, 1,
        groups * n, L].

        The n rows are appended to `cache`. Returns [B, n, H], a new tensor.
        """
        return self.rest(x, self._norms[0](x), (cos, sin), cache, mask)

    def rest(
        self,
        x: Tensor,
        u: Tensor,
        rotation: tuple[Tensor, Tensor],
        cache: BufferLayer,
        mask: Tensor | None,
    ) -> Tensor:
        """What comes after the first norm. x: [B, n, H], what attention is added to; u: what it
        reads."""
        x = x + self._out.forward(self._attend(u, *rotation, cache, mask))
        gate, up = self._gate_up.forward(self._norms[1](x)).chunk(2, -1)
        return x + self._down.forward(F.silu(gate).mul_(up))

    def _attend(
        self, x: Tensor, cos: Tensor, sin: Tensor, cache: BufferLayer, mask: Tensor | None
    ) -> Tensor:
        states = self._qkv.forward(x).view(*x.shape[:2], -1, self.dim).transpose(1, 2)
        turned = self.heads + self.kv_heads
        values = states.narrow(1, turned, self.kv_heads)
        rotated = rotate(self._normed(states.narrow(1, 0, turned)), cos, sin)
        queries, keys = (
            rotated.narrow(1, 0, self.heads),
            rotated.narrow(1, self.heads, self.kv_heads),
        )
        return attend(queries, *cache.update(keys, values), mask).flatten(2)

    def _normed(self, x: Tensor) -> Tensor:
        """Queries and keys [B, heads + kv_heads, n, d], each after its norm where there is one."""
        if not self._head_norms:
            return x
        parts = x.split([self.heads, self.kv_heads], 1)
        return torch.cat([norm(p) for norm, p in zip(self._head_norms, parts, strict=True)], 1)


class RMSNorm:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension [H], in float32 inside.

    Computed as the layer norm of a row followed by its negative, whose mean is 0: torch has a
    kernel for that."""

    def __init__(self, norm: Any) -> None:
        self._weight: Tensor = norm.weight
        self._eps: float = norm.variance_epsilon

    def __call__(self, x: Tensor) -> Tensor:
        size = x.shape[-1]
        return (
            F.layer_norm(torch.cat([x, -x], -1), (2 * size,), eps=self._eps)[..., :size]
            * self._weight
        )


def norm_of(module: Any) -> Callable[[Tensor], Tensor]:
    """A norm as transformers has it, or an `nn.Identity`, which is its own."""
    return module if isinstance(module, nn.Identity) else RMSNorm(module)


def rotations(rotary: Any, length: int, dtype: torch.dtype) -> Tensor:
    """cos and sin of the positions up to `length` as the model's own `rotary` module gives them,
    [2, length, d]; the first half of sin negated, as `rotate` needs it."""
    positions = torch.arange(length, device=rotary.inv_freq.device)
    cos, sin = rotary(torch.empty((), dtype=dtype, device=positions.device), positions[None])
    first, second = sin[0].chunk(2, -1)
    return torch.stack([cos[0], torch.cat([-first, second], -1)])


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding (2104.09864, in the half-split layout of transformers). x: [B,
    heads, n, d]; cos, sin: of the first r <= d dimensions, the others pass."""
    if (turned := cos.shape[-1]) < x.shape[-1]:
        return torch.cat([rotate(x[..., :turned], cos, sin), x[..., turned:]], -1)
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


class SideBySide:
    """Linear layers of one input as one, each with its own weights, which may be in use elsewhere:
    [..., in] -> [..., sum of out]."""

    def __init__(self, *linears: nn.Linear) -> None:
        self._linears = linears

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([linear.forward(x) for linear in self._linears], -1)


def joined(*linears: nn.Linear) -> nn.Linear:
    """Linear layers of one input as one, [..., in] -> [..., sum of out]. Packed if they are, which
    they are no longer.

    Their parameters become views of the joined ones, so that each weight is there once.
    """
    with torch.device("meta"):
        whole = nn.Linear(
            linears[0].in_features, sum(linear.out_features for linear in linears), bias=False
        )
    whole.weight = _joined([linear.weight for linear in linears])
    if linears[0].bias is not None:
        whole.bias = _joined([linear.bias for linear in linears])
    packed = [linear for linear in linears if isinstance(linear, PackedLinear)]
    for linear in packed:
        linear.unpack()
    return PackedLinear(whole) if packed else whole


def _joined(parameters: Sequence[Tensor]) -> nn.Parameter:
    whole = torch.cat([parameter.detach() for parameter in parameters])
    for parameter, part in zip(
        parameters, whole.split([len(parameter) for parameter in parameters]), strict=True
    ):
        parameter.data = part
    return nn.Parameter(whole, requires_grad=False)


def fits(model: PreTrainedModel) -> bool:
    """Whether `LlamaForward` does what `model` does: a Llama or alike with plain weights on the
    CPU, of one dtype, all of whose modules are of the known classes and bare."""
    if type(model) not in FAMILY or state_of(model) is None or not _all_known(model):
        return False
    body: Any = model.model
    attentions, mlps = zip(*((layer.self_attn, layer.mlp) for layer in body.layers), strict=True)
    return (
        body.rotary_emb.rope_type in FIXED_ROTATIONS
        and body.embed_tokens.max_norm is None
        and len(body.layers) == model.config.num_hidden_layers
        and all(part.scaling == part.head_dim**-0.5 for part in attentions)
        and all(_join(part.q_proj, part.k_proj, part.v_proj) for part in attentions)
        and all(_join(part.gate_proj, part.up_proj) for part in mlps)
        and all(
            type(p) is nn.Parameter and p.device.type == "cpu" and p.dtype == model.dtype
            for p in model.parameters()
        )
    )


def _join(*linears: nn.Linear) -> bool:
    """Whether these have biases all of them, or none."""
    return len({linear.bias is None for linear in linears}) == 1


def _parts(head: type[nn.Module]) -> dict[type[nn.Module], dict[str, type[nn.Module]]]:
    """The modules of each module of a causal model, by name, for all classes that have some. Those
    of the list of layers are called "*"."""
    code, name = sys.modules[head.__module__], head.__name__.removesuffix("ForCausalLM")
    body, layer, attention, mlp, norm, rotary = (
        getattr(code, name + part)
        for part in ("Model", "DecoderLayer", "Attention", "MLP", "RMSNorm", "RotaryEmbedding")
    )
    ends = {"norm": norm, "rotary_emb": rotary}
    norms = {"input_layernorm": norm, "post_attention_layernorm": norm}
    products = {f"{part}_proj": nn.Linear for part in ("gate", "up", "down")}
    of_heads = {"q_norm": norm, "k_norm": norm} if head is Qwen3ForCausalLM else {}
    return {
        head: {"model": body, "lm_head": nn.Linear},
        body: {"embed_tokens": nn.Embedding, "layers": nn.ModuleList, **ends},
        nn.ModuleList: {"*": layer},
        layer: {"self_attn": attention, "mlp": mlp, **norms},
        attention: {**{f"{part}_proj": nn.Linear for part in "qkvo"}, **of_heads},
        mlp: {**products, "act_fn": type(ACT2FN["silu"])},
    }


PARTS: dict[type[nn.Module], dict[type[nn.Module], dict[str, type[nn.Module]]]] = {
    head: _parts(head) for head in FAMILY
}
FORWARDS = {  # as their authors wrote them
    kind: kind.forward
    for parts in PARTS.values()
    for kind in (*parts, *(part for inner in parts.values() for part in inner.values()))
    if kind is nn.ModuleList or kind.forward.__module__ == kind.__module__
}


def _all_known(model: nn.Module) -> bool:
    """Whether each module is of the class that belongs there, and does what the class was written
    to do."""
    parts, modules = PARTS[type(model)], [model]
    for module in modules:  # grows
        kind: Any = _class(module)
        known = parts.get(kind, {})
        if kind is nn.ModuleList:
            known = dict.fromkeys(module._modules, known["*"])
        if {name: _class(child) for name, child in module._modules.items()} != known:
            return False
        if FORWARDS.get(kind) is not kind.forward:
            return False
        modules += module.children()
    return True


def _class(module: nn.Module | None) -> Any:
    return nn.Linear if isinstance(module, PackedLinear) else type(module)
