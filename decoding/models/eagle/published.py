"""Published EAGLE-1 and EAGLE-3 drafts (Li et al. 2024, 2401.15077; 2025, 2503.01840).

The row of the token x_t reads a feature f of the text up to x_{t-1}: `fc` of some of the target's
hidden states there, or the draft's own output one row before where the target has none yet. EAGLE-3
joins the embedding e and f before the attention of its first layer, u = [norm(e); norm(f)], and
adds the output to f; EAGLE-1 combines them before its layers, x = fc([e; f]).

The first token of a text has no feature. Published drafts have no row for it; here it has one,
which no other row sees (`without_first`)."""

import copy
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaPreTrainedModel, PreTrainedModel
from transformers.models.llama.modeling_llama import (
    LlamaDecoderLayer,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from decoding.interfaces import RowsWanted
from decoding.models.bare import Watch
from decoding.models.cached_lm import CachedLM
from decoding.models.cpu_llama import DecoderLayer, norm_of, rotations
from decoding.models.eagle.draft import EagleDraft
from decoding.models.forward import Forward, Result, Rows, picked
from decoding.models.kv_cache import BufferCache, folded
from decoding.models.packing import refresh
from runtime.errors import UserError

LAYERS = {"llama": LlamaDecoderLayer, "qwen3": Qwen3DecoderLayer}  # by `model_type`


@dataclass(frozen=True)
class Flavour:
    """The differences between published drafts.

    layers: hidden states of the target that `fc` joins (0: embeddings, i: after layer i); none:
        EAGLE-1, which reads the last one
    norm_before_residual: attention is added to norm(f) instead of f
    norm_before_fc, fc_norm: the joined states have a norm, or each of them has one
    norm_output: the states that are fed back come after the final norm
    final_norm: there is a norm before the output layer
    fc_bias: `fc` has a bias (EAGLE-1)
    """

    layers: tuple[int, ...] = ()
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    final_norm: bool = True
    fc_bias: bool = False


class PublishedModel(LlamaPreTrainedModel):
    """The weights of such a draft, under the names that speculators gives them."""

    def __init__(self, config: Any, flavour: Flavour, says: int, target_width: int) -> None:
        """config: of a Llama or Qwen3, whose layers the draft has; says: number of tokens of its
        output layer; target_width: width of the target's hidden states."""
        super().__init__(config)
        self.flavour = flavour
        width, eps, joined = config.hidden_size, config.rms_norm_eps, len(flavour.layers)
        self.embed_tokens = nn.Embedding(config.vocab_size, width)
        inputs = joined * target_width if joined else width + target_width
        self.fc = nn.Linear(inputs, width, bias=flavour.fc_bias)
        if flavour.norm_before_fc:
            self.input_norm = LlamaRMSNorm(inputs, eps)
        if flavour.fc_norm:
            norms = [LlamaRMSNorm(target_width, eps) for _ in flavour.layers]
            self.fc_norm = nn.ModuleList(norms)
        kind: Any = LAYERS[config.model_type]
        self.layers = nn.ModuleList(kind(config, i) for i in range(config.num_hidden_layers))
        first: Any = self.layers[0]
        if joined:  # the first layer reads embedding and feature
            first.hidden_norm = LlamaRMSNorm(width, eps)
            for name in ("q_proj", "k_proj", "v_proj"):
                old = getattr(first.self_attn, name)
                wide = nn.Linear(2 * width, old.out_features, old.bias is not None)
                setattr(first.self_attn, name, wide)
        else:
            first.input_layernorm = nn.Identity()
        if flavour.final_norm:
            self.norm = LlamaRMSNorm(width, eps)
        self.lm_head = nn.Linear(width, says, bias=False)
        self.rotary_emb = rotary_of(config)

    def fused(self, states: Tensor) -> Tensor:
        """Return the feature of each row, [..., H], from the target's states [..., L + 1,
        H_target], the last one among them; zeros for zeros."""
        flavour, dtype = self.flavour, self.fc.weight.dtype
        if not flavour.layers:
            return states[..., -1, :].to(self.device, dtype)
        states = states[..., :-1, :].to(self.device, dtype)
        if flavour.fc_norm:
            parts = zip(self.fc_norm, states.unbind(-2), strict=True)
            states = torch.stack([norm(part) for norm, part in parts], -2)
        joined = states.flatten(-2)
        fused: Tensor = self.fc(self.input_norm(joined) if flavour.norm_before_fc else joined)
        return fused


def rotary_of(config: Any) -> LlamaRotaryEmbedding:
    """Return the rotary embedding of the layers of `config`, of the first dimensions of each head
    if `partial_rotary_factor` says so (a Llama's ignores that for the type "default")."""
    rope = config.rope_parameters
    if rope["rope_type"] == "default" and rope.get("partial_rotary_factor", 1) != 1:
        config = copy.deepcopy(config)
        config.rope_parameters = rope | {"rope_type": "linear", "factor": 1.0}  # the same angles
    return LlamaRotaryEmbedding(config)


class PublishedForward(Watch):
    """The `Forward` of a `PublishedModel`. With L layers it has L + 2 hidden states: embeddings,
    the output of each layer, and the input of the output layer."""

    def __init__(self, model: PublishedModel, max_length: int) -> None:
        """max_length: positions lie below it."""
        super().__init__(model)
        self._flavour, self._max_length = model.flavour, max_length
        self._kinds = kinds(model)
        self._check()

    def _check(self) -> None:
        """Take the current weights. Raises UserError if something was attached that this forward
        would leave out."""
        bare, same = self.look()
        if not bare or (not same and kinds(self._model) != self._kinds):
            raise UserError(
                "pair.draft: expected an EAGLE draft as its files give it, got one with hooks, an"
                " adapter or a patched forward. Remove them"
            )
        if not same:
            model = self._model
            self._layers = [DecoderLayer(layer) for layer in model.layers]
            self._norm = norm_of(model.norm if self._flavour.final_norm else nn.Identity())
            if self._flavour.layers:
                self._of_token = norm_of(model.layers[0].input_layernorm)
                self._of_feature = norm_of(model.layers[0].hidden_norm)
            self._rotation = rotations(model.rotary_emb, self._max_length, model.dtype)
            self.note()
        ends = self._model.fc, self._model.lm_head
        refresh([*ends, *(part for layer in self._layers for part in layer.linears)])

    def __call__(
        self, rows: Rows, cache: BufferCache, hidden: Sequence[int] = (), logits: RowsWanted = "all"
    ) -> Result:
        """See `Forward`; `rows.added` are the features."""
        if self.due(not cache.layer(0).length):
            self._check()
        e = F.embedding(rows.tokens, self._model.embed_tokens.weight)
        f = torch.zeros_like(e) if rows.added is None else rows.added
        cos, sin = self._rotation[:, rows.positions].unsqueeze(2)
        mask = without_first(rows, cache.layer(0).length, e.dtype)
        mask = None if mask is None else folded(mask, self._layers[0].groups)
        if self._flavour.layers:  # x: what the first layer adds to; u: what it reads
            normed = self._of_feature(f)
            u = torch.cat([self._of_token(e), normed], -1)
            x = normed if self._flavour.norm_before_residual else f
        else:
            x = u = self._model.fc(torch.cat([e, f], -1))
        x = self._layers[0].rest(x, u, (cos, sin), cache.layer(0), mask)
        states = [e, x]
        for index, layer in enumerate(self._layers[1:], 1):
            x = layer(x, cos, sin, cache.layer(index), mask)
            states.append(x)
        states.append(self._norm(x))
        wanted = torch.stack([states[i] for i in hidden], 2) if hidden else None
        return self._model.lm_head(picked(states[-1], logits)), wanted


def kinds(model: nn.Module) -> list[type]:
    """Return the classes of all modules."""
    return [type(part) for part in model.modules()]


def without_first(rows: Rows, length: int, dtype: torch.dtype) -> Tensor | None:
    """Return the mask of `rows`, appended to `length` cached ones, that hides each text's first row
    (the first that a row sees) from all other rows. None for a single row that begins its text."""
    n, lowest = rows.tokens.shape[1], torch.finfo(dtype).min
    mask = rows.mask
    if mask is None and n == 1:
        if not length:
            return None
        mask = torch.zeros(1, 1, 1, length + 1, dtype=dtype, device=rows.tokens.device)
    elif mask is None:
        whole = torch.full((n, n), lowest, dtype=dtype, device=rows.tokens.device)
        mask = whole.triu(1)[None, None]
    first = (mask == 0).to(torch.uint8).argmax(-1, keepdim=True)
    later = (rows.positions > 0).to(mask.dtype)[:, None, :, None]
    return mask.scatter(-1, first, (later * lowest).expand(first.shape).to(mask))


class Fusion:
    """The `Reader` of a published draft."""

    tensors: tuple[Tensor, ...] = ()  # all weights are the model's

    def __init__(self, model: PublishedModel) -> None:
        self._model = model
        self.layers = model.flavour.layers
        self.described = json.dumps(asdict(model.flavour))

    def of_target(self, states: Tensor) -> Tensor:
        return self._model.fused(states)

    def of_own(self, hidden: Tensor) -> Tensor:
        return hidden  # already features


class PublishedDraft(EagleDraft):
    """The `EagleDraft` of a published checkpoint, for any engine."""

    def __init__(self, model: PublishedModel, target: CachedLM, **options: Any) -> None:
        """options: of `CachedLM`."""
        super().__init__(model, target, Fusion(model), **options)
        self.hidden_states = len(model.layers) + 2
        self.record([] if model.flavour.norm_output else [-2])  # what is fed back comes first

    @property
    def cached_layers(self) -> int:
        return self.hidden_states - 2

    def _network_of(self, model: PreTrainedModel) -> Forward:
        assert isinstance(model, PublishedModel)
        return PublishedForward(model, self.max_length)
