"""Distil a draft for a target: the target writes chats, a few transformer layers learn to predict
them.

    python scripts/distill_draft.py              # generate and train in turn, then write the layers
    python scripts/distill_draft.py stage=generate  # only write chats (several processes may:
    seed=1, 2, ...) python scripts/distill_draft.py stage=train     # only train, on the chats there
    are and those that come python scripts/distill_draft.py stage=ship      # only write `output`
    from the last saved state

Interrupt it at any time and run the same command to go on. To train the shipped layers further:
``start=pairs/smollm2/draft_layers.safetensors folder=data/distill/more``.
"""

import runtime.openmp  # noqa: F401  (before torch loads)

import json
import os
import platform
import sys
from collections.abc import Iterator
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
import transformers
from omegaconf import DictConfig, OmegaConf
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from tqdm import tqdm
from transformers import LlamaForCausalLM, PreTrainedTokenizerBase

from data_gen.prompts.jsonl import load_jsonl
from decoding.models.draft_model import copied_layers, draft_from_layers, own_layers
from decoding.models.loading import load_llama, load_tokenizer
from drafts.chats import Chat, ChatPool, layers_of, save_chats, shards
from drafts.distillation import Distillation, draft_states, measure_overlap, training_config
from drafts.self_chat import SelfChat, SelfChatConfig
from runtime.cli import hydra_script
from runtime.errors import UserError

ROUNDS = 20  # of training, with generation in between
GENERATED_BY = 1.5  # all chats are written when 1 / 1.5 of the training is done
STAGES = ("all", "generate", "train", "ship")


@hydra_script("distill_draft")
def main(cfg: DictConfig) -> None:
    """Run ``stage`` of the distillation configured by conf/distill_draft.yaml."""
    check(cfg)
    if cfg.threads is not None:
        torch.set_num_threads(cfg.threads)
    torch.manual_seed(cfg.seed)
    target, tokenizer = load_target(cfg)
    chats = Path(cfg.folder) / "chats"
    chats.mkdir(parents=True, exist_ok=True)
    stream = chat_stream(cfg, target, tokenizer, chats)
    if cfg.stage == "generate":
        generate(cfg, stream, chats, cfg.chats.tokens)
        return
    if cfg.stage == "all":
        generate(cfg, stream, chats, first_round(cfg))
    run = start_training(cfg, target, chats)
    if cfg.stage == "train":
        train(cfg, run, cfg.training.tokens)
    if cfg.stage == "all":
        alternate(cfg, run, stream, chats)
    ship(cfg, run)


def check(cfg: DictConfig) -> None:
    """Refuse settings that cannot work."""
    if cfg.stage not in STAGES:
        raise UserError(f"stage: {cfg.stage} is unknown. Use one of {', '.join(STAGES)}")
    if cfg.chats.tokens <= cfg.chats.shard_tokens:
        raise UserError(
            "chats.tokens: must exceed chats.shard_tokens. Raise it, or lower chats.shard_tokens"
        )
    training_config(cfg.training, "training")
    if not cfg.chats.temperatures or min(cfg.chats.temperatures) <= 0:
        raise UserError(
            "chats.temperatures: must be one or more numbers above 0. The default is [1.0, 0.6]"
        )
    if cfg.chats.openings is not None and cfg.chats.prompt_tokens < 2:
        raise UserError(
            "chats.prompt_tokens, chats.openings: 1 token is no room for an opening. Raise the"
            " former"
        )
    if cfg.chats.prompt_temperature <= 0:
        raise UserError("chats.prompt_temperature: must be above 0. The default is 1.0")
    for key in (
        "slots",
        "prompt_tokens",
        "response_tokens",
        "responses",
        "shard_tokens",
        "held_out",
    ):
        if cfg.chats[key] < 1:
            raise UserError(f"chats.{key}: {cfg.chats[key]} is too small. Use 1 or more")
    for key, value in (("layers", cfg.layers), ("chats.feature_layers", cfg.chats.feature_layers)):
        if not OmegaConf.is_list(value):
            raise UserError(f"{key}: {value} is no list of layers. Write e.g. {key}=[10,20]")


def load_target(cfg: DictConfig) -> tuple[LlamaForCausalLM, PreTrainedTokenizerBase]:
    """The pair's target and its tokenizer. Raises UserError where it has not the ``layers`` that
    are asked for."""
    model = load_llama("target", cfg.pair)
    tokenizer = load_tokenizer("target", cfg.pair)
    depth = model.config.num_hidden_layers
    if not cfg.layers or not all(0 <= layer < depth for layer in cfg.layers):
        raise UserError(
            f"layers: {list(cfg.layers)} must be one or more of the target's layers 0 to"
            f" {depth - 1}"
        )
    if not all(layer in range(depth + 1) for layer in cfg.chats.feature_layers):
        raise UserError(
            f"chats.feature_layers: {list(cfg.chats.feature_layers)} must be layers from 0 to"
            f" {depth}"
        )
    return model, tokenizer


def chat_stream(
    cfg: DictConfig, target: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, folder: Path
) -> Iterator[Chat]:
    """The endless chats of this process. One stream for the whole run: a new one would drop the
    chats that are not finished, long ones above all, and begin again with the first of
    ``chats.prompts``."""
    settings = {f.name: cfg.chats[f.name] for f in fields(SelfChatConfig)}
    settings |= {key: tuple(settings[key]) for key in ("temperatures", "feature_layers")}
    seed = cfg.seed * 1_000_003 + shard_count(folder)  # never the same chats again after a restart
    prompts, openings = (read_texts(cfg, key, tokenizer) for key in ("prompts", "openings"))
    config = SelfChatConfig(**settings)
    return iter(SelfChat(target, tokenizer, config, seed, prompts, openings or [[]]))


def shard_count(folder: Path) -> int:
    return len(shards(folder))


def generate(cfg: DictConfig, stream: Iterator[Chat], folder: Path, tokens: int) -> None:
    """Write shards of chats until `folder` holds `tokens` response tokens (of every process that
    writes there)."""
    for path in shards(folder):
        if (known := layers_of(path)) != tuple(cfg.chats.feature_layers):
            raise UserError(
                f"chats.feature_layers: chats in {folder} keep hidden states of layers {[*known]},"
                f" not of {[*cfg.chats.feature_layers]}. Choose another folder=..."
            )
    have = written_tokens(folder)
    if have >= tokens:
        return
    number = shard_count(folder)
    with tqdm(total=tokens, initial=have, unit="tok", desc="chats", smoothing=0.1) as bar:
        while have < tokens:
            shard = next_shard(stream, cfg.chats.shard_tokens, bar)
            path = folder / f"chats-{cfg.seed:03d}-{number:05d}-{os.getpid()}.safetensors"
            save_chats(path, shard, cfg.chats.feature_layers)
            number += 1
            have = written_tokens(folder)


def next_shard(stream: Iterator[Chat], tokens: int, bar: tqdm) -> list[Chat]:
    shard: list[Chat] = []
    count = 0
    while count < tokens:
        shard.append(next(stream))
        count += len(shard[-1].hidden)
        bar.update(len(shard[-1].hidden))
    return shard


def written_tokens(folder: Path) -> int:
    """Response tokens in all shards. Hidden states are not read."""
    total = 0
    for path in shards(folder):
        with safe_open(path, "pt") as file:
            total += int((file.get_tensor("lengths") - file.get_tensor("starts")).sum())
    return total


def read_texts(cfg: DictConfig, key: str, tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Token ids of the ``prompt`` field of each row of the JSONL file ``chats.<key>``; none where
    it is null."""
    if cfg.chats[key] is None:
        return []
    try:
        prompts = load_jsonl(key, cfg.chats[key], "prompt", None, True)
    except UserError as error:
        named = (
            str(error)
            .replace("dataset.path", f"chats.{key}")
            .replace("dataset.field", f"chats.{key}")
        )
        raise UserError(named) from error
    return [tokenizer(prompt.text, add_special_tokens=False)["input_ids"] for prompt in prompts]


def start_training(cfg: DictConfig, target: LlamaForCausalLM, chats: Path) -> Distillation:
    """The run as its folder has it, or a new one from ``start`` or from the target's own layers."""
    pool = ChatPool(chats, cfg.chats.held_out)
    if len(pool.chats) <= cfg.chats.held_out:
        raise UserError(
            f"folder: {chats} holds no chats to train on. Run with stage=generate or stage=all"
            " first"
        )
    layers = (
        copied_layers(target, list(cfg.layers))
        if cfg.start is None
        else load_layers(Path(cfg.start))
    )
    draft = draft_from_layers(target, layers).float()
    run = Distillation(
        draft, pool, training_config(cfg.training, "training"), Path(cfg.folder), cfg.seed
    )
    if run.resume():
        print(f"resuming after {run.progress['tokens']:,} tokens ({run.folder})")
    elif cfg.stage == "ship":
        raise UserError(
            f"folder: {run.folder} holds no trained state to ship. Run with stage=train or"
            " stage=all first"
        )
    return run


def load_layers(path: Path) -> dict[str, torch.Tensor]:
    if not path.is_file():
        raise UserError(f"start: {path} not found. Give a file of trained layers, or start=null")
    try:
        return load_file(path)
    except SafetensorError as error:
        raise UserError(
            f"start: {path} is damaged ({error}). Give another file, or start=null"
        ) from error


def first_round(cfg: DictConfig) -> int:
    """Response tokens needed before training can begin: the held-out chats and one shard more."""
    return min(
        cfg.chats.tokens,
        2 * cfg.chats.shard_tokens + cfg.chats.held_out * cfg.chats.response_tokens,
    )


def alternate(cfg: DictConfig, run: Distillation, stream: Iterator[Chat], chats: Path) -> None:
    """Train on what there is, write more, and so on: both budgets are used up in step."""
    start = written_tokens(chats)
    while run.progress["tokens"] < cfg.training.tokens:
        train(
            cfg,
            run,
            min(cfg.training.tokens, run.progress["tokens"] + cfg.training.tokens // ROUNDS + 1),
        )
        share = run.progress["tokens"] / cfg.training.tokens
        wanted = int(start + share * GENERATED_BY * (cfg.chats.tokens - start))
        generate(cfg, stream, chats, min(wanted, cfg.chats.tokens))


def train(cfg: DictConfig, run: Distillation, tokens: int) -> None:
    """Train until `tokens` response tokens were seen, with a bar that shows the batch
    acceptance."""
    smooth = None
    with tqdm(
        total=tokens, initial=run.progress["tokens"], unit="tok", desc="train", smoothing=0.1
    ) as bar:
        for record in run.run(tokens, cfg.save_seconds):
            smooth = (
                record["acceptance"]
                if smooth is None
                else 0.95 * smooth + 0.05 * record["acceptance"]
            )
            bar.set_postfix(acceptance=f"{smooth:.3f}", lr=f"{record['lr']:.1e}", refresh=False)
            bar.update(record["tokens"] - bar.n)


def ship(cfg: DictConfig, run: Distillation) -> None:
    """Write the trained layers in bfloat16, and provenance.json with what was measured on the
    held-out chats."""
    overlap = measure_overlap(
        lambda chats: draft_states(run.draft, chats), run.pool.validation, run.head, stride=2
    )
    output = Path(cfg.output)
    output.parent.mkdir(parents=True, exist_ok=True)
    partial = output.with_suffix(".partial")
    save_file(
        {n: t.to(torch.bfloat16).contiguous() for n, t in own_layers(run.draft).items()}, partial
    )
    partial.rename(output)
    record = provenance(cfg, run) | {
        "held_out_chats": asdict(overlap),
        "earlier_runs": earlier_runs(cfg.start),
    }
    partial.write_text(json.dumps(record, indent=2) + "\n")
    partial.rename(output.parent / "provenance.json")
    print(
        f"held-out chats, {overlap.positions} positions: acceptance {overlap.acceptance:.4f},"
        f" {overlap.kl:.3f} nats"
    )
    print(f"layers: {output}. Rebuild the pair with: python scripts/build_pair.py")


def earlier_runs(start: str | None) -> list[dict[str, Any]]:
    """The runs that made the layers this one started from, in order, as the provenance beside them
    has it."""
    path = None if start is None else Path(start).parent / "provenance.json"
    if path is None or not path.is_file():
        return []
    record = json.loads(path.read_text())
    return [*record.pop("earlier_runs", []), record]


def provenance(cfg: DictConfig, run: Distillation) -> dict[str, Any]:
    """What made the layers: settings, data and time spent, versions."""
    return {
        "command": " ".join(["python", "scripts/distill_draft.py", *sys.argv[1:]]),
        "seed": cfg.seed,
        "chats_config": OmegaConf.to_container(cfg.chats),
        "training_config": asdict(run.config),
        "started_from": cfg.start or f"target layers {list(cfg.layers)}",
        "chats": len(run.pool.training),
        "response_tokens": run.pool.response_tokens(),
        "progress": run.progress,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "threads": torch.get_num_threads(),
    }


if __name__ == "__main__":
    main()
