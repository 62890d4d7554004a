"""A model of plain transformers code and a draft for it, made ready for our engines."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from os.path import expanduser
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from decoding.models.cached_lm import CachedLM
from decoding.models.draft_vocabulary import with_ends
from decoding.models.ends import end_ids
from decoding.models.identity import draft_fingerprint, model_fingerprint
from decoding.models.kv_cache import ATTENTION
from decoding.models.layers.recurrent import cached
from decoding.models.layers.rotations import steady_length
from decoding.models.layers.support import refuse_other_layers
from decoding.models.layers.text_part import text_part
from decoding.models.loading import ModelPair, draft_tokens, load_draft, load_tokenizer
from decoding.pair import SETTINGS
from runtime.errors import UserError

SLOT = "_speculative_pair"  # of the target, which keeps what was made ready for it
Draft = PreTrainedModel | str | Path | ModelPair


@dataclass
class SpeculativePair:
    """Target and draft as engines have them. source: the draft as it was given; weights: of both
    models, as they were when this was made; plain: the models that plain code has, too."""

    target: CachedLM
    draft: CachedLM
    source: Draft
    plain: Sequence[PreTrainedModel] = ()
    weights: tuple[tuple[int, int], ...] = ()

    @cached_property
    def identity(self) -> dict[str, str]:
        """What a predictor that belongs to them was trained for."""
        return {
            "target": model_fingerprint(self.target.model),
            "draft": draft_fingerprint(self.draft),
        }


def opened(model: PreTrainedModel, draft: Draft) -> SpeculativePair:
    """Make them ready, or take what an earlier call made ready, where the weights are as they were.

    The models' layers stay as they are: those of `decoding.pair.open_pair` are packed, which is
    faster on a CPU.

    Raises UserError for models that do not go together or that our engines cannot run."""
    if isinstance(draft, ModelPair):
        if draft.target.model is not model:
            raise UserError(
                "draft: this pair has another target than the model that generates. Write"
                " pair.target.model.generate(..., draft=pair)"
            )
        return SpeculativePair(draft.target, draft.draft, draft)
    known: SpeculativePair | None = vars(model).get(SLOT)
    if known is not None and _same(known.source, draft) and known.weights == _weights(known):
        return known
    plain = [model, draft] if isinstance(draft, PreTrainedModel) else [model]
    with our_attention(plain):
        made = _made(model, draft)
    made.plain = plain
    vars(model)[SLOT] = made
    return made


def _same(one: Draft, other: Draft) -> bool:
    return one is other or (isinstance(one, str | Path) and one == other)


def _made(model: PreTrainedModel, draft: Any) -> SpeculativePair:
    target = _cached("model", model)
    if isinstance(draft, PreTrainedModel):
        size, drafted = (one.config.get_text_config().vocab_size for one in (model, draft))
        if size != drafted:
            raise UserError(
                f"draft: expected a vocabulary of {size} tokens, as the target has, got {drafted}."
                " Where both have the same tokenizer, give draft=decoding.pair.open_pair(target,"
                " draft) and its target"
            )
        theirs = _cached("draft", draft)
    else:
        theirs = _loaded(draft, target)
    made = SpeculativePair(target, theirs, draft)
    made.weights = _weights(made)
    return made


def _cached(key: str, model: PreTrainedModel) -> CachedLM:
    if not hasattr(model, "hf_device_map") and any(part.is_meta for part in model.parameters()):
        raise UserError(
            f"{key}: expected weights, got {type(model).__name__} on the meta device, where there"
            " are none. Load it with from_pretrained"
        )
    model = text_part(key, model)
    refuse_other_layers(key, model)
    return cached(model, max_length=steady_length(model))


def _loaded(source: Any, target: CachedLM) -> CachedLM:
    """A draft from its folder or hub id, of whatever kind it is."""
    settings = {
        **SETTINGS,
        "draft": expanduser(source),
        "target": target.model.name_or_path,
        "draft_device": str(target.device),
        "max_length": target.max_length,
    }
    cfg = OmegaConf.create(settings)
    tokens = draft_tokens(cfg, target.vocab_size)
    if tokens is not None:
        tokens = with_ends(tokens, end_ids(target.model, _tokenizer(cfg)))
    return load_draft(cfg, target, tokens)


def _tokenizer(cfg: DictConfig) -> PreTrainedTokenizerBase | None:
    """Return the tokenizer that the two models share, from the target's files or the draft's; None
    where neither has one."""
    for side in ("target", "draft"):
        try:
            return load_tokenizer(side, cfg)
        except UserError:
            continue
    return None


@contextmanager
def our_attention(models: Sequence[PreTrainedModel]) -> Iterator[None]:
    """Inside, the models attend as `CachedLM` needs it, and nothing is dropped out; afterwards, and
    if anything fails, they are as before."""
    before = [(model, str(model.config._attn_implementation)) for model in models]
    trained = [part for model in models for part in model.modules() if part.training]
    for model in models:
        model.set_attn_implementation(ATTENTION)
        model.eval()
    try:
        yield
    finally:
        for model, name in before:
            model.set_attn_implementation(name)
        for part in trained:
            part.training = True


def _weights(pair: SpeculativePair) -> tuple[tuple[int, int], ...]:
    """Changes with the weights of either model, but for writes behind the back of autograd."""
    return tuple(
        (tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version)
        for lm in (pair.target, pair.draft)
        for tensor in lm.model.parameters()
    )
