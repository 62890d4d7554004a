"""One training of a draft, from its configuration (conf/distill_draft.yaml) to the folder of a
draft, `pair.draft` of any command: the target writes chats, a few transformer layers learn to
predict them."""

import platform
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from tqdm import tqdm
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerBase

from decoding.models.draft_vocabulary import own_vocabulary, read_vocabulary
from decoding.models.loading import load_llama, load_tokenizer
from decoding.settings import Pair
from pairs.chats import ChatPool
from pairs.embedded import earlier_runs
from pairs.self_chat import ChatWriter, chat_headers, written_tokens
from pairs.training import STATE, DraftTraining
from runtime.compatibility import differences
from runtime.errors import UserError
from runtime.files import checked_folder, replaced_folder, write_json
from runtime.job import as_called, command_line
from runtime.json_files import OpenForm, read_json, write_checksummed
from runtime.tracking import tracked

MARKER = "training.json"  # marks the folder of a trained draft
SETTINGS = "settings.json"  # of a run that is not finished
LOGGED = 20  # steps between two records of the logger
TURNS = 20  # of training, between which chats are written
WRITTEN_BY = 1.5  # all chats are written when 1 / 1.5 of the training is done


class Note(OpenForm):
    """The settings of a run that is not finished."""

    checksum: str


def load_target(cfg: DictConfig, kind: Any) -> tuple[LlamaForCausalLM, PreTrainedTokenizerBase]:
    """Return the pair's target and its tokenizer. Raises UserError if it does not have the layers
    that are asked for, or cannot write chats although it has to."""
    settings, writes = Pair.of(cfg.pair).model("target"), cfg.stage in ("all", "generate")
    tokenizer = load_tokenizer(settings)
    if writes:
        chat_headers(tokenizer)  # raises before the weights are loaded
    model = load_llama(settings)
    kind.check(model)
    depth = model.config.num_hidden_layers
    if writes and not all(layer in range(depth + 1) for layer in cfg.chats.feature_layers):
        raise UserError(
            f"chats.feature_layers: expected layers from 0 to {depth}, got"
            f" {[*cfg.chats.feature_layers]}. Choose among them"
        )
    return model, tokenizer


def start(cfg: DictConfig, kind: Any, target: LlamaForCausalLM, out: Path) -> DraftTraining:
    """Return a new run; its state will be kept beside `out`.

    Raises UserError for settings, chats or models that do not fit together."""
    folder = Path(cfg.chats.folder)
    pool = ChatPool(folder, cfg.chats.held_out)
    if len(pool.chats) <= cfg.chats.held_out:
        raise UserError(
            f"chats.folder: {folder} holds no chats to train on. Write some: python"
            f" pairs/distill_draft.py draft={kind.name} stage=generate"
        )
    size, stored = target.config.hidden_size, pool.chats[0].states.shape[-1]
    if size != stored:
        raise UserError(
            f"chats.folder: expected hidden states of size {size}, as of pair.target, got {stored}"
            f" in {folder}. Write chats with this target"
        )
    file = vocabulary_file(cfg)
    vocabulary = (
        None if file is None else read_vocabulary(file, len(target.lm_head.weight), "vocabulary")
    )
    draft, config = kind.load(Pair.of(cfg.pair), target, pool), instantiate(cfg.training)
    return DraftTraining(
        draft, pool, config, out.with_name(out.name + ".run"), cfg.seed, vocabulary
    )


def vocabulary_file(cfg: DictConfig) -> Path | None:
    """Return the file of the tokens that the draft is trained to propose; None: all."""
    if cfg.vocabulary == "auto":
        return own_vocabulary(cfg.pair.draft)
    if cfg.vocabulary is None:
        return None
    return checked_folder("vocabulary", cfg.vocabulary, "file")


def resume(cfg: DictConfig, kind: Any, run: DraftTraining) -> None:
    """Continue from the state of an interrupted run, if there is one, and record the settings of
    this run.

    Raises UserError if the state is another run's."""
    origin = {"target": cfg.pair.target, "draft": kind.origin(cfg.pair)[0]}
    now = {**settings_of(cfg), "pair": origin, "seed": cfg.seed}
    note = run.folder / SETTINGS
    if (run.folder / STATE).is_file() and note.is_file():
        before = read_json(note, Note, "out", f"Delete {run.folder}, or choose another out")
        if reason := differences(before.written, now):
            raise UserError(
                f"out: {run.folder} holds a run that was interrupted with {reason}. Delete it, or"
                " choose another out"
            )
    if run.resume():
        print(f"resuming after {run.progress['tokens']:,} tokens ({run.folder})")
    elif cfg.stage == "finish":
        raise UserError(
            f"out: {run.folder} holds no trained state. Run with stage=train or stage=all first"
        )
    write_checksummed(note, now)


def settings_of(cfg: DictConfig) -> dict[str, Any]:
    """Return the settings that decide the result of the training."""
    settings: Any = OmegaConf.to_container(cfg, resolve=True)
    chats = {key: settings["chats"][key] for key in ("folder", "held_out")}
    kept = {key: settings[key] for key in ("draft", "vocabulary", "training")}
    return {**kept, "chats": chats}


def finish(
    cfg: DictConfig, kind: Any, run: DraftTraining, writer: ChatWriter | None, out: Path
) -> None:
    """Train as ``stage`` says, score the draft on the held-out chats, and write it to `out`: all
    files or none."""
    config: Any = OmegaConf.to_container(cfg, resolve=True)
    with tracked(cfg.logger, "distill", config, [], [kind.name]) as logger:
        resume(cfg, kind, run)
        training = partial(train, run, save_seconds=cfg.save_seconds, logger=logger)
        if writer is not None:
            alternate(run, writer, training)
        elif cfg.stage == "train":
            training(run.config.tokens)
        measured = scores(run)
        logger.log({f"test/{name}": value for name, value in measured.items()})
        with replaced_folder(out, MARKER) as folder:
            run.draft.write(folder, vocabulary_file(cfg))
            tokenizer = AutoTokenizer.from_pretrained(Path(cfg.pair.target).expanduser())
            tokenizer.save_pretrained(folder)
            write_json(folder / MARKER, provenance(cfg, kind, run, measured))
        shutil.rmtree(run.folder)
        logger.artifact(f"{kind.name}_draft", "draft", out)
    print("\n".join(f"{name}: {value:.3f}" for name, value in measured.items()))
    print(as_called(f"saved {out}. Decode with it: python scripts/evaluate.py pair.draft={out}"))


def alternate(run: DraftTraining, writer: ChatWriter, train: Callable[[int], None]) -> None:
    """Alternate between training on the existing chats and writing more, so that both budgets are
    used up in step. train: trains until a number of response tokens was seen."""
    total, wanted, there = run.config.tokens, writer.settings.tokens, written_tokens(writer.folder)
    while run.progress["tokens"] < total:
        train(min(total, run.progress["tokens"] + total // TURNS + 1))
        share = min(1.0, WRITTEN_BY * run.progress["tokens"] / total)
        writer.write(int(there + share * (wanted - there)))


def train(run: DraftTraining, tokens: int, save_seconds: float, logger: Any) -> None:
    """Train until `tokens` response tokens were seen, with a bar that shows the batch
    acceptance."""
    smooth = None
    done = run.progress["tokens"]
    with tqdm(total=tokens, initial=done, unit="tok", desc="train", smoothing=0.1) as bar:
        for record in run.run(tokens, save_seconds):
            acceptance = record["acceptance"]
            smooth = acceptance if smooth is None else 0.95 * smooth + 0.05 * acceptance
            bar.set_postfix(acceptance=f"{smooth:.3f}", lr=f"{record['lr']:.1e}", refresh=False)
            bar.update(record["tokens"] - bar.n)
            if record["step"] % LOGGED == 0:
                shown = {f"train/{key}": record[key] for key in ("acceptance", "regression", "lr")}
                logger.log(shown, record["step"])


def scores(run: DraftTraining) -> dict[str, float]:
    """Return, on the held-out chats, by the number of tokens drafted before: acceptance sum(min(p,
    q)), greedy agreement, and KL(p || q) in nats."""
    scores_by_name = {}
    for step, overlap in enumerate(run.held_out_scores()):
        scores_by_name[f"acceptance after {step} drafted"] = overlap.acceptance
        scores_by_name[f"agreement after {step} drafted"] = overlap.agreement
        scores_by_name[f"kl after {step} drafted"] = overlap.kl
    return scores_by_name


def provenance(
    cfg: DictConfig, kind: Any, run: DraftTraining, measured: dict[str, float]
) -> dict[str, Any]:
    """Return the provenance of the draft: command, settings, data and time spent, versions, scores,
    and the runs that made its start."""
    origin, made_in = kind.origin(cfg.pair)
    return {
        "command": command_line(),
        "seed": cfg.seed,
        "config": settings_of(cfg),
        "chats_config": OmegaConf.to_container(cfg.chats, resolve=True),
        "notes": OmegaConf.to_container(cfg.notes, resolve=True),
        "started_from": origin,
        "chats": len(run.pool.training),
        "response_tokens": run.pool.response_tokens(),
        "progress": run.progress,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "held_out_chats": measured,
        "earlier_runs": [] if made_in is None else earlier_runs(made_in),
    }
