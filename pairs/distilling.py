"""Make a draft for a target: the target writes chats, a few transformer layers learn to predict
them."""

import shutil
from functools import partial
from pathlib import Path
from typing import Any

from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from transformers import LlamaForCausalLM, PreTrainedTokenizerBase

from decoding.models.loading import load_llama, load_tokenizer
from decoding.settings import Pair
from pairs.generation import ChatWriter
from pairs.run import alternate, provenance, resume, save, scores, train
from pairs.self_chat import chat_headers
from pairs.training import DraftTraining
from runtime.errors import UserError


def load_target(cfg: DictConfig, kind: Any) -> tuple[LlamaForCausalLM, PreTrainedTokenizerBase]:
    """The pair's target and its tokenizer. Raises UserError where it has not the layers that are
    asked for, or is to write chats and cannot."""
    settings, writes = Pair.of(cfg.pair).model("target"), cfg.stage in ("all", "generate")
    tokenizer = load_tokenizer(settings)
    if writes:
        chat_headers(tokenizer)  # before the weights are loaded
    model = load_llama(settings)
    kind.check(model)
    depth = model.config.num_hidden_layers
    if writes and not all(layer in range(depth + 1) for layer in cfg.chats.feature_layers):
        raise UserError(
            f"chats.feature_layers: expected layers from 0 to {depth}, got"
            f" {[*cfg.chats.feature_layers]}. Choose among them"
        )
    return model, tokenizer


def chat_writer(
    cfg: DictConfig, target: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase
) -> ChatWriter:
    return ChatWriter(cfg.chats, Path(cfg.chats.folder), cfg.seed, target, tokenizer)


def finish(
    cfg: DictConfig, kind: Any, run: DraftTraining, writer: ChatWriter | None, out: Path
) -> None:
    """Train as far as ``stage`` says, score the draft on the held-out chats, and write it to
    `out`."""
    logger: Any = instantiate(cfg.logger)
    logger.start("distill_draft", OmegaConf.to_container(cfg, resolve=True))
    try:
        resume(cfg, kind, run)
        training = partial(train, run, save_seconds=cfg.save_seconds, logger=logger)
        if writer is not None:
            alternate(run, writer, training)
        elif cfg.stage == "train":
            training(run.config.tokens)
        measured = scores(run)
        logger.log({f"test/{name}": value for name, value in measured.items()})
        save(cfg, run, out, provenance(cfg, kind, run, measured))
        shutil.rmtree(run.folder)
        logger.artifact(f"{kind.name}_draft", "draft", out)
    finally:
        logger.finish()
    print("\n".join(f"{name}: {value:.3f}" for name, value in measured.items()))
    print(f"saved {out}. Decode with it: python scripts/evaluate.py pair.draft={out}")
