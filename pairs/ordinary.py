"""Training of an ordinary draft: a few transformer layers of its own between the target's
embeddings and its output layer (`decoding.models.draft_model`)."""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from decoding.models.draft_model import (
    copied_layers,
    draft_from_layers,
    is_own,
    own_layers,
    to_write_beside,
)
from decoding.models.draft_vocabulary import FILE as VOCABULARY
from decoding.settings import Pair
from pairs.chats import Chat, ChatPool
from runtime.errors import UserError
from runtime.settings.kinds import Distinct, Field, Says, Size, Text


@dataclass(frozen=True)
class Ordinary:
    """The kind `draft=ordinary`."""

    name = "ordinary"
    layers: Annotated[
        list[Size],
        Field(min_length=1),
        Distinct,
        Says("a list of different layers from 0 on, such as [0,29]"),
        "target layers the draft starts from",
    ]
    start: Annotated[
        Text | None,
        "folder of a draft, or a file of its layers (pairs/smollm2/draft_layers.safetensors), to"
        " start from instead",
    ] = None

    def check(self, target: LlamaForCausalLM) -> None:
        """Raise UserError if the target does not have the layers that are asked for."""
        depth = target.config.num_hidden_layers
        if not self.layers or not all(layer in range(depth) for layer in self.layers):
            raise UserError(
                f"draft.layers: expected one or more of the target's layers 0 to {depth - 1}, got"
                f" {[*self.layers]}. Choose among them"
            )

    def load(self, pair: Pair, target: LlamaForCausalLM, pool: ChatPool) -> "OrdinaryInTraining":
        """Return the draft that training starts with."""
        if self.start is None:
            layers = copied_layers(target, self.layers)
        else:
            layers = read_layers(Path(self.start).expanduser())
        return OrdinaryInTraining(draft_from_layers(target, layers).float())

    def origin(self, pair: Any) -> tuple[str, Path | None]:
        """Return the start of the training in words, and the folder with its provenance."""
        if self.start is None:
            return f"target layers {[*self.layers]}", None
        path = Path(self.start).expanduser()
        return self.start, path if path.is_dir() else path.parent


class OrdinaryInTraining:
    """A `DraftInTraining` of one step: an ordinary draft reads tokens only, so that every position
    is like the first of a draft."""

    weights, factors = (1.0,), dict[str, float]()

    def __init__(self, model: LlamaForCausalLM) -> None:
        self.model = model

    def trained(self) -> dict[str, nn.Parameter]:
        """Return the parameters of the draft's own layers."""
        own = own_layers(self.model)
        return {name: parameter for name, parameter in self.model.named_parameters() if name in own}

    def states(
        self, chats: list[Chat], dtype: torch.dtype = torch.float32
    ) -> list[tuple[Tensor, Tensor]]:
        """Return states as `DraftInTraining` does, at every position that predicts a response
        token."""
        width = max(len(chat.tokens) for chat in chats)
        ids = torch.zeros(len(chats), width, dtype=torch.long)
        for row, chat in enumerate(chats):
            ids[row, : len(chat.tokens)] = chat.tokens
        device = self.model.device
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            out = self.model.model(input_ids=ids.to(device), use_cache=False)
        hidden = out.last_hidden_state.float()
        own = [hidden[row, chat.start - 1 : len(chat.tokens) - 1] for row, chat in enumerate(chats)]
        return [(torch.cat(own), torch.cat([chat.hidden for chat in chats]).to(hidden))]

    def write(self, folder: Path, vocabulary: Path | None) -> None:
        """See `DraftInTraining`."""
        write_model(self.model, folder, vocabulary)


def write_model(model: LlamaForCausalLM, folder: Path, vocabulary: Path | None) -> None:
    """Write a model in bfloat16, and a copy of its vocabulary file, if it has one."""
    model.bfloat16().save_pretrained(folder)
    if vocabulary is not None:
        shutil.copyfile(vocabulary, to_write_beside(folder, VOCABULARY))


def read_layers(path: Path) -> dict[str, Tensor]:
    """Read the layers in the folder of a draft, or in a file of layers. Raises UserError if there
    are none, or if they are damaged."""
    file = path / "model.safetensors" if path.is_dir() else path
    if not file.is_file():
        raise UserError(
            f"draft.start: expected the folder of a draft or a file of layers, got {path}. Give"
            " one, or draft.start=null"
        )
    try:
        return {name: tensor for name, tensor in load_file(file).items() if is_own(name)}
    except SafetensorError as error:
        raise UserError(
            f"draft.start: {file} is damaged ({error}). Give another one, or draft.start=null"
        ) from error
