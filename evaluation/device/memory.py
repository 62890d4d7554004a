"""How much memory a decode and a harvest take, of models that may be too large to be here.

Both run, from the first forward to the last record, on torch's meta device, whose tensors have
shapes and no values. Whatever the host reads of them is 1: every draw gives token 1 and every draft
is accepted. What is counted is what torch's own operations hold; a fused attention holds its result
alone. Modelled: a GPU's allocator takes more, by what it rounds up and leaves between tensors."""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from data_gen.harvest import Progress, label_chunk, outputs_on
from data_gen.requests import Request
from data_gen.settings import HarvestSettings
from decoding.engines.serial import SerialEngine
from decoding.models.loading import ModelPair
from decoding.models.recurrent import cached
from decoding.sampling import Sampler
from decoding.stopping.never import Never
from decoding.structures.chain import Chain
from decoding.verifiers.token import TokenVerifier

META = torch.device("meta")


@dataclass(frozen=True)
class Peak:
    """Bytes beside the weights, for a prompt of so many tokens. all_states, asked: hidden states of
    the prompt in all layers, and in those that are read; caches: of both models after a decode;
    decode, harvest: most bytes at once."""

    tokens: int
    all_states: int
    asked: int
    caches: int
    decode: int
    harvest: int


def peaks(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    settings: HarvestSettings,
    lengths: Sequence[int],
) -> Iterator[Peak]:
    """Of a decode that reads what H-RAD reads, in drafts of `gamma`, and of a harvest of one
    prompt. target, draft: on the meta device."""
    layers = settings.layers.of("target_hidden")
    config = target.config.get_text_config()
    for length in lengths:
        layer = length * config.hidden_size * target.dtype.itemsize
        pair = ModelPair(cached(target), cached(draft), None, "meta", ())  # type: ignore[arg-type]
        with Account(target, draft) as account, Valueless():
            decode(pair, length, settings)
        caches, decoding = account.alive, account.peak
        pair = replace(pair, target=cached(target), draft=cached(draft))
        with Account(target, draft) as account, Valueless():
            harvest(pair, length, settings)
        states = (config.num_hidden_layers + 1) * layer
        yield Peak(length, states, len(layers) * layer, caches, decoding, account.peak)


def decode(pair: ModelPair, length: int, settings: HarvestSettings) -> None:
    """Two rounds."""
    parts: dict[str, Any] = {
        "structure": Chain(settings.gamma),
        "stop": Never(),
        "verifier": TokenVerifier(),
        "warp": settings.warp,
        "draft_warp": settings.draft_warp,
    }
    parts["stop"].target_layers = settings.layers.of("target_hidden")
    engine = SerialEngine(pair, **parts)
    engine.decode(torch.ones(length), 2 * (settings.gamma + 1), Sampler.seeded(0))


def harvest(pair: ModelPair, length: int, settings: HarvestSettings) -> None:
    request = Request("meta", "meta", torch.ones(length, dtype=torch.long), "train")
    with outputs_on(pair, META):
        label_chunk(pair, [request], settings, Progress())


class Account(TorchDispatchMode):
    """Bytes of the meta tensors that were made inside: alive, and at the peak."""

    def __init__(self, *models: torch.nn.Module) -> None:
        """models: their weights are not counted."""
        super().__init__()
        self.alive = self.peak = 0
        self._known = weakref.WeakSet[torch.UntypedStorage]()
        for model in models:
            for part in (*model.parameters(), *model.buffers()):
                self._known.add(part.untyped_storage())

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        for each in tree_leaves(found):
            if isinstance(each, Tensor) and each.device == META:
                self._note(each.untyped_storage())
        return found

    def _note(self, storage: torch.UntypedStorage) -> None:
        if storage in self._known:
            return
        self._known.add(storage)
        size = storage.nbytes()
        self.alive += size
        self.peak = max(self.peak, self.alive)
        weakref.finalize(storage, self._freed, size)

    def _freed(self, size: int) -> None:
        self.alive -= size


class Valueless(TorchFunctionMode):
    """What the host reads of a meta tensor is 1, or False."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        if func is scaled_dot_product_attention:
            return attended(*args, **options)
        first = args[0] if args else None
        if not isinstance(first, Tensor) or first.device != META:
            return func(*args, **options)
        if func in READS or (func is Tensor.to and to_host(*args[1:], **options)):
            return func(ones(first), *args[1:], **options)
        return func(*args, **options)


READS: Sequence[Callable[..., Any]] = (
    *(Tensor.item, Tensor.tolist, Tensor.cpu),
    *(Tensor.__bool__, Tensor.__int__, Tensor.__index__, Tensor.__float__),
)


def ones(tensor: Tensor) -> Tensor:
    """On the host."""
    return torch.full(tensor.shape, tensor.dtype != torch.bool, dtype=tensor.dtype)


def to_host(*args: Any, copy: bool = False, **kwargs: Any) -> bool:
    """Whether `Tensor.to` moves there."""
    if args and isinstance(args[0], Tensor):
        return args[0].device.type == "cpu"
    device = torch._C._nn._parse_to(*args, **kwargs)[0]
    return device is not None and device.type == "cpu"


def attended(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
    """[..., n, d] of a fused kernel, which makes no scores."""
    return query.new_empty(*query.shape[:-1], value.shape[-1])
