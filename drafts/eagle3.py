"""A draft of EAGLE-3's form in training (`decoding.models.eagle.published`), unrolled as
`drafts.eagle` does: saved as speculators has it, so that vLLM can serve it.

It has one layer. What reads its embeddings starts as the target's first layer does, all else as its
last one, and `fc` hands on the last of the states it joins: at first the draft goes on from there
with the target's last layer. Its output layer is the target's, and stays it."""

import copy
from collections.abc import Collection
from dataclasses import dataclass
from os.path import expanduser
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from decoding.models.draft_vocabulary import read_vocabulary, with_ends
from decoding.models.eagle.published import Flavour, PublishedModel
from decoding.models.eagle.speculators import Proposal, write_published
from decoding.models.ends import end_ids
from decoding.models.loading import load_tokenizer
from drafts.chats import Chat, ChatPool
from drafts.eagle import LATER, attend, padded, projected, shifted
from runtime.errors import UserError
from runtime.settings.kinds import Field

FUSION = 0.3  # learning rate of `fc`, whose inputs are large, relative to the layer's
READS = ("q_proj", "k_proj", "v_proj")


@dataclass(frozen=True)
class Eagle3:
    """`draft=eagle3`, trained from the target's own layers on."""

    name = "eagle3"
    steps: Annotated[
        int,
        Field(ge=1, le=100),
        "tokens of a draft that are trained on; from the second one on it is given its own states",
    ]

    def check(self, target: LlamaForCausalLM) -> None:
        """Any target will do."""

    def load(self, pair: Any, target: LlamaForCausalLM, pool: ChatPool) -> "Eagle3InTraining":
        """The draft that training starts with. Raises UserError for chats without states of inner
        layers."""
        depth = target.config.num_hidden_layers
        if not pool.layers or not all(layer < depth for layer in pool.layers):
            raise UserError(
                f"chats.feature_layers: expected layers from 0 to {depth - 1}, got"
                f" {[*pool.layers]}. Write other chats: chats.feature_layers=[10,20,29]"
            )
        rms = torch.cat([chat.states[1:, -2] for chat in pool.chats[:100]]).float().square().mean()
        model = first_draft(target, pool.layers, float(rms.sqrt()))
        proposal = Proposal(expanduser(pair.target), type(target).__name__, self.steps)
        ends = end_ids(target, load_tokenizer("target", pair))
        return Eagle3InTraining(model, proposal, ends)

    def origin(self, pair: Any) -> tuple[str, Path | None]:
        """What training starts from: in words, and the folder that says how that was made."""
        return "the target's first and last layer", None


@torch.no_grad()
def first_draft(target: LlamaForCausalLM, layers: tuple[int, ...], size: float) -> PublishedModel:
    """float32, with the target's whole output layer. layers: of the target, whose states it joins;
    size: root mean square of the last of them."""
    config = copy.deepcopy(target.config)
    config.num_hidden_layers, config.tie_word_embeddings = 1, False
    rope: Any = config.rope_parameters
    rope.pop("partial_rotary_factor", None)  # which the layers of a Llama ignore
    with target.device:
        model = PublishedModel(config, Flavour(layers, fc_norm=True), *target.lm_head.weight.shape)
    first, last = (target.model.layers[index] for index in (0, -1))
    layer: Any = model.layers[0]
    same = {name: x for name, x in last.state_dict().items() if name.split(".")[-2] not in READS}
    layer.load_state_dict(same, strict=False)
    for name in READS:
        halves = [getattr(side.self_attn, name).weight for side in (first, last)]
        getattr(layer.self_attn, name).weight.copy_(torch.cat(halves, 1))
    layer.input_layernorm.weight.copy_(first.input_layernorm.weight)
    layer.hidden_norm.weight.copy_(last.input_layernorm.weight)
    for norm in model.fc_norm:
        norm.weight.fill_(size)  # type: ignore[operator]
    nn.init.zeros_(model.fc.weight)
    nn.init.eye_(model.fc.weight[:, -config.hidden_size :])
    for ours, theirs in (
        (model.norm, target.model.norm),
        (model.embed_tokens, target.model.embed_tokens),
        (model.lm_head, target.lm_head),
    ):
        ours.weight.copy_(theirs.weight)
    return model.float()


class Eagle3InTraining:
    """A `DraftInTraining` of a `PublishedModel` of one layer, unrolled for so many steps."""

    factors = {"fc.weight": FUSION}

    def __init__(self, model: PublishedModel, proposal: Proposal, ends: Collection[int]) -> None:
        """ends: tokens that end a response, which the saved draft can say."""
        self.model, self._proposal, self._ends = model, proposal, ends
        self.weights = [LATER**step for step in range(proposal.tokens)]

    def trained(self) -> dict[str, nn.Parameter]:
        """All but embeddings and output layer, which are the target's."""
        return {
            name: parameter
            for name, parameter in self.model.named_parameters()
            if not name.startswith(("embed_tokens.", "lm_head."))
        }

    def states(
        self, chats: list[Chat], dtype: torch.dtype = torch.float32
    ) -> list[tuple[Tensor, Tensor]]:
        """As `DraftInTraining`: the rows of step k are those where k - 1 tokens were drafted
        before."""
        device = self.model.device
        ids, states = padded(chats, device)
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            outputs = unrolled(self.model, ids, states.to(self.model.dtype), len(self.weights))
        found = []
        for step, output in enumerate(outputs):
            rows = [slice(max(chat.start - 1, step), len(chat.tokens) - 1) for chat in chats]
            own = [output[row, kept] for row, kept in enumerate(rows)]
            target = [states[row, kept, -1] for row, kept in enumerate(rows)]
            found.append((torch.cat(own).float(), torch.cat(target).float()))
        return found

    def write(self, folder: Path, vocabulary: Path | None) -> None:
        """See `DraftInTraining`."""
        size = self.model.config.vocab_size
        tokens = None
        if vocabulary is not None:
            tokens = with_ends(read_vocabulary(vocabulary, size, "vocabulary"), self._ends)
        write_published(folder, self.model.bfloat16(), tokens, self._proposal)


def unrolled(model: PublishedModel, ids: Tensor, states: Tensor, steps: int) -> list[Tensor]:
    """What the output layer reads, [B, n, H], in step 1, 2, ..., `steps` for each token of ids
    [B, n]. states: [B, n, L + 1, H], the target's at the same tokens, of which each row reads those
    one row before."""
    layer: Any = model.layers[0]
    attention, flavour = layer.self_attn, model.flavour
    embedding = model.embed_tokens(ids)
    cos, sin = model.rotary_emb(embedding, torch.arange(ids.shape[1], device=ids.device)[None])
    normed_embedding, f = layer.input_layernorm(embedding), model.fused(shifted(states, 1, dim=1))
    known: list[tuple[Tensor, Tensor]] = []
    outputs: list[Tensor] = []
    for _ in range(steps):
        normed = layer.hidden_norm(f)
        u = torch.cat([normed_embedding, normed], -1)
        query, key, value = projected(attention, u, cos[0], sin[0])
        known.append((key, value))
        x = normed if flavour.norm_before_residual else f
        x = x + attention.o_proj(attend(query, known, alone=1).transpose(1, 2).flatten(2))
        x = x + layer.mlp(layer.post_attention_layernorm(x))
        outputs.append(model.norm(x))
        f = shifted(outputs[-1] if flavour.norm_output else x, 1, dim=1)
    return outputs
