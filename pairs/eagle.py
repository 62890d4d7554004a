"""Training of our EAGLE-style draft (`decoding.models.eagle.draft`) on several tokens of a draft at
once.

Step 1 computes every row from the target's hidden states. Step k computes the same rows for the
case that the last k - 1 tokens before them were drafted: its input is the output of step k - 1 one
row before, and it attends to rows of step 1 up to the last verified token and to one row of each
step since (the training-time test of EAGLE-3, Li et al. 2025). The losses of later steps weigh
less."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaForCausalLM

from decoding.models.draft_model import own_layers, to_write_beside
from decoding.models.eagle.draft import EPS, FILE, FeatureMaps, read_maps
from decoding.models.loading import load_llama
from decoding.settings import Pair
from pairs.chats import Chat, ChatPool
from pairs.ordinary import write_model
from runtime.errors import UserError
from runtime.settings.kinds import Field

LATER = 0.8  # weight of a step's losses, relative to the step before
# Learning rate of the maps relative to the layers': they begin at zero and have large inputs.
MAPS = 0.2


@dataclass(frozen=True)
class Eagle:
    """The kind `draft=eagle`, trained from `pair.draft` on."""

    name = "eagle"
    steps: Annotated[
        int,
        Field(ge=1, le=100),
        "tokens of a draft that are trained on; from the second one on it is given its own states",
    ]

    def check(self, target: LlamaForCausalLM) -> None:
        """Accept any target."""

    def load(self, pair: Pair, target: LlamaForCausalLM, pool: ChatPool) -> "EagleInTraining":
        """Load the draft of the pair, with maps of zeros, or with its own if it is EAGLE-style
        already. Raises UserError if it does not fit the target."""
        model, hidden = load_llama(pair.model("draft")).float(), target.config.hidden_size
        if model.config.hidden_size != hidden:
            raise UserError(
                f"pair.draft: expected hidden states of size {hidden}, as the target's, got"
                f" {model.config.hidden_size}. Make a draft: python pairs/distill_draft.py"
            )
        maps = Maps(pool.layers, hidden, hidden).to(model.device)
        known = read_maps(Path(pair.draft).expanduser(), model, target.config)
        if known is not None and known.layers == maps.layers:
            maps.from_states.weight.data.copy_(known.from_states)
            maps.from_own.weight.data.copy_(known.from_own)
        head: Tensor = target.lm_head.weight
        if model.lm_head.weight.shape != head.shape:
            raise UserError(
                f"pair.draft: expected an output layer of {len(head)} tokens, as the target's, got"
                f" {len(model.lm_head.weight)}. Make a draft: python pairs/distill_draft.py"
            )
        model.lm_head.weight.data.copy_(head.data)
        return EagleInTraining(model, maps, self.steps)

    def origin(self, pair: Any) -> tuple[str, Path | None]:
        """Return the start of the training in words, and the folder with its provenance."""
        return str(pair.draft), Path(pair.draft).expanduser()


class Maps(nn.Module):
    """`FeatureMaps` in training; they begin as zeros, equal to an ordinary draft."""

    def __init__(self, layers: Sequence[int], hidden: int, target_hidden: int) -> None:
        super().__init__()
        self.layers = tuple(layers)
        self.from_states = nn.Linear((len(self.layers) + 1) * target_hidden, hidden, bias=False)
        self.from_own = nn.Linear(hidden, hidden, bias=False)
        for linear in (self.from_states, self.from_own):
            nn.init.zeros_(linear.weight)

    def of_target(self, states: Tensor) -> Tensor:
        """Return [..., H] from the target's states [..., L + 1, H_target]."""
        added: Tensor = self.from_states(F.rms_norm(states, states.shape[-1:], eps=EPS).flatten(-2))
        return added

    def finished(self, dtype: torch.dtype) -> FeatureMaps:
        return FeatureMaps(
            self.layers, *(m.weight.detach().to(dtype) for m in (self.from_states, self.from_own))
        )


class EagleInTraining:
    """A `DraftInTraining`: a model and the maps of the target's states, unrolled for `steps`
    steps."""

    def __init__(self, model: LlamaForCausalLM, maps: Maps, steps: int) -> None:
        self.model, self.maps, self.steps = model, maps, steps
        self.weights = [LATER**step for step in range(steps)]
        self.factors = {name: MAPS for name in self.trained() if name.startswith("maps.")}

    def trained(self) -> dict[str, nn.Parameter]:
        """Return the parameters of the draft's own layers and of the maps."""
        own = own_layers(self.model)
        layers = {name: p for name, p in self.model.named_parameters() if name in own}
        return layers | {f"maps.{name}": p for name, p in self.maps.named_parameters()}

    def states(
        self, chats: list[Chat], dtype: torch.dtype = torch.float32
    ) -> list[tuple[Tensor, Tensor]]:
        """Return states as `DraftInTraining` does; the rows of step k are those after k - 1 drafted
        tokens."""
        device = self.model.device
        ids, states = padded(chats, device)
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            outputs = unrolled(self.model, self.maps, ids, states.to(self.model.dtype), self.steps)
        pairs = []
        for step, output in enumerate(outputs):
            rows = [slice(max(chat.start - 1, step), len(chat.tokens) - 1) for chat in chats]
            own = [output[row, kept] for row, kept in enumerate(rows)]
            target = [states[row, kept, -1] for row, kept in enumerate(rows)]
            pairs.append((torch.cat(own).float(), torch.cat(target).float()))
        return pairs

    def write(self, folder: Path, vocabulary: Path | None) -> None:
        """See `DraftInTraining`. Also writes the maps, which mark a draft as EAGLE-style, in
        bfloat16."""
        write_model(self.model, folder, vocabulary)
        maps = self.maps.finished(torch.bfloat16)
        tensors = {"from_states": maps.from_states, "from_own": maps.from_own}
        contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
        save_file(contiguous, to_write_beside(folder, FILE), {"layers": json.dumps(maps.layers)})


def padded(chats: list[Chat], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return tokens [B, n] and the target's states there, [B, n, L + 1, H], for all but the last
    token of each chat."""
    width = max(len(chat.states) for chat in chats)
    ids = torch.zeros(len(chats), width, dtype=torch.long)
    states = torch.zeros(len(chats), width, *chats[0].states.shape[1:], dtype=torch.bfloat16)
    for row, chat in enumerate(chats):
        ids[row, : len(chat.states)] = chat.tokens[:-1]
        states[row, : len(chat.states)] = chat.states
    return ids.to(device), states.to(device)


def unrolled(
    draft: LlamaForCausalLM, maps: Maps, ids: Tensor, states: Tensor, steps: int
) -> list[Tensor]:
    """Return last hidden states [B, n, H] of step 1, 2, ..., `steps` for each token of ids [B, n].
    states: [B, n, L + 1, H], the target's at the same tokens; each row reads those of the row
    before."""
    layers: Any = draft.model.layers
    embedding = draft.model.embed_tokens(ids)
    cos, sin = draft.model.rotary_emb(
        embedding, torch.arange(ids.shape[1], device=ids.device)[None]
    )
    x = embedding + maps.of_target(shifted(states, 1, dim=1))
    known: list[list[tuple[Tensor, Tensor]]] = [[] for _ in layers]
    outputs: list[Tensor] = []
    for step in range(steps):
        if step:
            x = embedding + maps.from_own(shifted(outputs[-1], 1, dim=1))
        for layer, before in zip(layers, known, strict=True):
            attention, normed = layer.self_attn, layer.input_layernorm(x)
            query, key, value = (
                linear(normed).unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)
                for linear in (attention.q_proj, attention.k_proj, attention.v_proj)
            )
            query, key = (rotated(part, cos[0], sin[0]) for part in (query, key))
            before.append((key, value))
            x = x + attention.o_proj(attend(query, before).transpose(1, 2).flatten(2))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        outputs.append(draft.model.norm(x))
    return outputs


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply the rotary embedding (half-split layout of Llama) to x [..., n, d]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos.to(x) + torch.cat((-second, first), dim=-1) * sin.to(x)


def attend(query: Tensor, known: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Return the attention output [B, heads, n, d]. known: keys and values [B, kv_heads, n, d] of
    every step so far, the query's own last.

    Row i of step k sees rows up to i - k + 1 of step 1 and row i - k + s of each step s from 2 to
    k."""
    steps, n = len(known), query.shape[2]
    groups = query.shape[1] // known[0][0].shape[1]
    keys, values = (
        [part.repeat_interleave(groups, 1) for part in parts] for parts in zip(*known, strict=True)
    )
    if steps == 1:
        return F.scaled_dot_product_attention(query, keys[0], values[0], is_causal=True)
    visible = torch.ones(n, n, dtype=torch.bool, device=query.device).tril(1 - steps)
    scores = (query @ keys[0].transpose(2, 3)).masked_fill(~visible, -1e4)
    later = [shifted(key, steps - step, dim=2) for step, key in enumerate(keys[1:], 2)]
    drafted = torch.stack([(query * key).sum(-1) for key in later], -1)
    scaled = torch.cat([scores, drafted.to(scores)], -1) * query.shape[-1] ** -0.5
    weight = scaled.softmax(-1).to(query)
    result = weight[..., :n] @ values[0]
    for step, value in enumerate(values[1:], 2):
        result = result + weight[..., n + step - 2, None] * shifted(value, steps - step, dim=2)
    return result


def shifted(x: Tensor, by: int, dim: int) -> Tensor:
    """Return x moved `by` places towards the end of `dim`, zeros before it."""
    if by == 0:
        return x
    by = min(by, x.shape[dim])
    kept = x.narrow(dim, 0, x.shape[dim] - by)
    return torch.cat([torch.zeros_like(x.narrow(dim, 0, by)), kept], dim)
