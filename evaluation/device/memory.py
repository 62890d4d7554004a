"""Memory of a decode and of a harvest, also for models that are too large for this machine.

Both run, from the first forward to the last record, on torch's meta device, whose tensors have
shapes and no values. The host reads 1 for all values: every draw gives token 1 and every draft is
accepted. Counted are the tensors of torch's own operations; a fused attention holds only its
result. The numbers are modelled: a GPU's allocator takes more, by rounding and fragmentation."""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from omegaconf import DictConfig
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from tqdm import tqdm
from transformers import PreTrainedModel

from data_gen.harvest import Progress, label_chunk, outputs_on
from data_gen.requests import Request
from data_gen.settings import HarvestSettings
from decoding.engines.serial import SerialEngine
from decoding.models.context import context_limit
from decoding.models.draft_model import beside
from decoding.models.eagle.checkpoint import find_checkpoint
from decoding.models.eagle.draft import FILE as MAPS
from decoding.models.loading import ModelPair
from decoding.models.options import load_config, resolve_dtype, source_of
from decoding.models.recurrent import cached, refuse_recurrent
from decoding.models.support import auto_class, text_part
from decoding.sampling import Sampler
from decoding.settings import ModelSettings, Pair
from decoding.stopping.never import Never
from decoding.structures.chain import Chain
from decoding.verifiers.token import TokenVerifier
from evaluation.table import markdown
from runtime.errors import UserError

META = torch.device("meta")


class Peak(NamedTuple):
    """Bytes besides the weights, for one length of prompt. all_states, asked: hidden states of the
    prompt in all layers, and in those that are read; caches: of both models after a decode; decode,
    harvest: peak bytes."""

    tokens: int
    all_states: int
    asked: int
    caches: int
    decode: int
    harvest: int


def needed(cfg: DictConfig) -> str:
    """Return a table of the memory of a decode and a harvest by the length of a prompt, from the
    configurations of two models: nothing is loaded. Raises UserError for a draft that reads its
    target's states, and for prompts that do not fit."""
    models = [Pair.of(cfg.pair).model(side) for side in ("target", "draft")]
    if find_checkpoint(models[1]) or beside(Path(source_of(models[1])), MAPS):
        raise UserError(
            "memory: this draft reads its target's states, which is not modelled. Give pair=smollm2"
            " or another ordinary draft"
        )
    settings = HarvestSettings.of(cfg.harvest, cfg, stride=1)
    target, draft = map(without_weights, models)
    for side, model in (("target", target), ("draft", draft)):
        refuse_recurrent(f"pair.{side}", cached(model), "harvests. Give pair=smollm2")
    if min(cfg.memory) < 2:
        raise UserError("memory: expected prompts of at least 2 tokens, got 1. Give longer ones")
    longest = max(cfg.memory) + settings.max_new_tokens + settings.gamma
    if longest > (limit := min(context_limit(each, None) for each in (target, draft))):
        raise UserError(f"memory: {longest} tokens with the response, of {limit}. Give fewer")
    lengths = tqdm(cfg.memory, desc="memory", unit=" lengths")
    by_length = list(peaks(target, draft, settings, lengths))
    sizes = [sum(part.nbytes for part in model.parameters()) for model in (target, draft)]
    return memory_page(by_length, sizes)


def without_weights(settings: ModelSettings) -> PreTrainedModel:
    """Return a model made from its config, without weights, on the meta device."""
    config, trusted = load_config(settings), settings.trust_remote_code
    dtype = resolve_dtype(settings.dtype, "meta", config.get_text_config().dtype)
    with META:
        whole = auto_class(config).from_config(config, dtype=dtype, trust_remote_code=trusted)
    return text_part(f"pair.{settings.side}", whole).eval().requires_grad_(False)


def memory_page(found: Sequence[Peak], weights: Sequence[int]) -> str:
    """Return a table. found: by length; weights: bytes of target and draft."""
    rows = [[f"{peak.tokens:,}", *(f"{size / 1e9:.2f}" for size in peak[1:])] for peak in found]
    names = [
        *("prompt, tokens", "hidden states, all layers", "hidden states, layers read", "caches"),
        *("decode, peak", "harvest of a prompt, peak"),
    ]
    sizes = " and ".join(f"{size / 1e9:.1f}" for size in weights)
    return f"GB beside the weights ({sizes} GB), modelled:\n\n{markdown(names, rows)}"


def peaks(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    settings: HarvestSettings,
    lengths: Iterable[int],
) -> Iterator[Peak]:
    """Yield the peaks of a decode of two rounds with drafts of `gamma` tokens, reading the states
    that H-RAD reads, and of a harvest of one prompt. target, draft: on the meta device."""
    layers, config = settings.layers.of("target_hidden"), target.config.get_text_config()
    for length in lengths:
        with Account(target, draft) as decoding, Valueless():
            stop = Never()
            stop.target_layers = layers
            parts: dict[str, Any] = {
                "structure": Chain(settings.gamma),
                "stop": stop,
                "verifier": TokenVerifier(),
                "warp": settings.warp,
                "draft_warp": settings.draft_warp,
            }
            engine = SerialEngine(_pair(target, draft), **parts)
            engine.decode(torch.ones(length), 2 * (settings.gamma + 1), Sampler.seeded(0))
            caches = decoding.alive
        with Account(target, draft) as harvesting, Valueless():
            pair = _pair(target, draft)
            request = Request("meta", "meta", torch.ones(length, dtype=torch.long), "train")
            with outputs_on(pair, META):
                label_chunk(pair, [request], settings, Progress())
        layer = length * config.hidden_size * target.dtype.itemsize
        states = (config.num_hidden_layers + 1) * layer
        asked = len(layers) * layer
        yield Peak(length, states, asked, caches, decoding.peak, harvesting.peak)


def _pair(target: PreTrainedModel, draft: PreTrainedModel) -> ModelPair:
    return ModelPair(cached(target), cached(draft), None, "meta", ())  # type: ignore[arg-type]


class Account(TorchDispatchMode):
    """Counts the bytes of the meta tensors made inside: those alive, and the peak."""

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
        made = func(*args, **(kwargs or {}))
        for each in tree_leaves(made):
            if isinstance(each, Tensor) and each.device == META:
                self._note(each.untyped_storage())
        return made

    def _note(self, storage: torch.UntypedStorage) -> None:
        if storage not in self._known:
            self._known.add(storage)
            self.alive += storage.nbytes()
            self.peak = max(self.peak, self.alive)
            weakref.finalize(storage, self._freed, storage.nbytes())

    def _freed(self, size: int) -> None:
        self.alive -= size


class Valueless(TorchFunctionMode):
    """Lets the host read 1, or False, for every value of a meta tensor."""

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
            first = torch.full(first.shape, first.dtype != torch.bool, dtype=first.dtype)
        return func(first, *args[1:], **options)


READS: Sequence[Callable[..., Any]] = (
    *(Tensor.item, Tensor.tolist, Tensor.cpu),
    *(Tensor.__bool__, Tensor.__int__, Tensor.__index__, Tensor.__float__),
)


def to_host(*args: Any, copy: bool = False, **kwargs: Any) -> bool:
    """Return whether `Tensor.to` moves to the host."""
    if args and isinstance(args[0], Tensor):
        return args[0].device.type == "cpu"
    device = torch._C._nn._parse_to(*args, **kwargs)[0]
    return device is not None and device.type == "cpu"


def attended(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
    """Return [..., n, d] as a fused kernel does, which materialises no scores."""
    return query.new_empty(*query.shape[:-1], value.shape[-1])
