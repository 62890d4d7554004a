"""`python train.py draft=eagle`: from chats and an ordinary draft to an EAGLE-style draft that
reads its target."""

import json
import platform
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm
from transformers import AutoTokenizer

from decoding.models.draft_vocabulary import FILE as VOCABULARY
from decoding.models.draft_vocabulary import own_vocabulary, read_vocabulary
from decoding.models.eagle import FILE, read_maps
from decoding.models.loading import load_llama
from drafts.chats import Chat, ChatPool
from drafts.distillation import measure_overlap, training_config
from drafts.eagle_training import FeatureDistillation, Maps
from drafts.shipping import earlier_runs, ship
from runtime.compatibility import differences
from runtime.errors import UserError, checked_count, checked_seed
from runtime.files import checked_folder, only_writer, refuse_foreign, replaced_folder, write_json
from runtime.sweep import is_job, job_folder

MARKER = "training.json"  # what the folder of a trained draft is known by
SETTINGS = "settings.json"  # of a run that is not finished
LOGGED = 20  # steps between two records of the logger


def train_feature_draft(cfg: DictConfig) -> None:
    """Chats with the target's hidden states in, the folder of a draft out (`pair.draft` of any
    command). With `draft.ship`, only that folder in, the files to build it from out.

    Raises UserError for settings, chats or models that do not fit together. Interrupted, it goes on
    when run again."""
    settings, notes = cfg.draft, notes_of(cfg)
    torch.manual_seed(checked_seed(cfg.seed))
    checked_count("draft.steps", settings.steps)
    if type(settings.save_seconds) not in (int, float):
        raise UserError(
            f"draft.save_seconds: {settings.save_seconds} is no number. Give one, e.g. 120"
        )
    default = f"checkpoints/eagle_draft{'-sweep' if is_job() else ''}"
    out = checked_folder("out", default if cfg.out is None else cfg.out)
    out = job_folder(out, MARKER) if is_job() else out
    if settings.ship is not None:
        return ship(
            out.expanduser(), checked_folder("draft.ship", settings.ship).expanduser(), notes
        )
    refuse_foreign(out, MARKER)
    run = start(cfg, out)
    with only_writer(out):
        logger: Any = instantiate(cfg.logger)
        logger.start("train", OmegaConf.to_container(cfg, resolve=True))
        try:
            refuse_other_run(cfg, run.folder)
            if run.resume():
                print(f"resuming after {run.progress['tokens']:,} tokens ({run.folder})")
            train(run, settings.save_seconds, logger)
            measured = measure(run)
            logger.log({f"test/{name}": value for name, value in measured.items()})
            save(cfg, run, out, measured)
            shutil.rmtree(run.folder)
            logger.artifact("eagle_draft", "draft", out)
        finally:
            logger.finish()
    print("\n".join(f"{name}: {value:.3f}" for name, value in measured.items()))
    print(f"saved {out}. Decode with it: python scripts/evaluate.py pair.draft={out}")


def notes_of(cfg: DictConfig) -> dict[str, Any]:
    """`draft.notes` as JSON has it."""
    notes: Any = (
        OmegaConf.to_container(cfg.draft.notes, resolve=True)
        if OmegaConf.is_dict(cfg.draft.notes)
        else None
    )
    if notes is None:
        raise UserError(
            f"draft.notes: {cfg.draft.notes} has no names. Write e.g. +draft.notes.prompts='from a"
            " file'"
        )
    return dict(notes)


def start(cfg: DictConfig, out: Path) -> FeatureDistillation:
    """A new run, from `pair.draft` and maps of zeros, or from its own where it reads along
    already."""
    settings = cfg.draft
    folder = checked_folder("draft.chats", settings.chats)
    pool = ChatPool(folder, checked_count("draft.held_out", settings.held_out))
    make = "python scripts/distill_draft.py stage=generate chats.feature_layers=[10,20]"
    if len(pool.chats) <= settings.held_out:
        raise UserError(f"draft.chats: {folder} holds no chats to train on. Write some: {make}")
    config = training_config(settings.training, "draft.training")
    target, draft = load_llama("target", cfg.pair), load_llama("draft", cfg.pair).float()
    hidden, read = target.config.hidden_size, pool.chats[0].states.shape[-1]
    if not hidden == draft.config.hidden_size == read:
        raise UserError(
            f"draft.chats, pair: hidden sizes differ: {read} in {folder}, {hidden} of the target,"
            f" {draft.config.hidden_size} of the draft. Make the chats with this target, the draft"
            " with scripts/distill_draft.py"
        )
    maps = Maps(pool.layers, hidden, hidden).to(draft.device)
    known = read_maps(Path(cfg.pair.draft).expanduser(), draft, target)
    if known is not None and known.layers == maps.layers:
        maps.from_states.weight.data.copy_(known.from_states)
        maps.from_own.weight.data.copy_(known.from_own)
    head: Tensor = target.lm_head.weight
    if draft.lm_head.weight.shape != head.shape:
        raise UserError(
            f"pair.draft: its output layer has {len(draft.lm_head.weight)} tokens, that of"
            f" pair.target {len(head)}. Make a draft with scripts/distill_draft.py"
        )
    draft.lm_head.weight.data.copy_(head.data)
    file = vocabulary_file(cfg)
    tokens = None if file is None else read_vocabulary(file, len(head), "draft.vocabulary")
    state = out.with_name(out.name + ".run")
    return FeatureDistillation(draft, maps, settings.steps, tokens, pool, config, state, cfg.seed)


def vocabulary_file(cfg: DictConfig) -> Path | None:
    """Of the tokens the draft is trained to say; None: all."""
    given = cfg.draft.vocabulary
    if given == "auto":
        return own_vocabulary(cfg.pair.draft)
    return None if given is None else checked_folder("draft.vocabulary", given, "file")


def refuse_other_run(cfg: DictConfig, folder: Path) -> None:
    """Note what this run is in `folder`; raise UserError where an interrupted one is there that is
    another."""
    settings = {key: value for key, value in recipe(cfg).items() if key != "save_seconds"}
    now = {
        "draft": settings,
        "pair": {"target": cfg.pair.target, "draft": cfg.pair.draft},
        "seed": cfg.seed,
    }
    note = folder / SETTINGS
    if (folder / "state.safetensors").is_file() and note.is_file():
        if reason := differences(json.loads(note.read_text()), now):
            other = "Delete it, or choose another out"
            raise UserError(
                f"out: {folder} holds a run that was interrupted with {reason}. {other}"
            )
    write_json(note, now)


def recipe(cfg: DictConfig) -> dict[str, Any]:
    """The settings of the training."""
    settings: Any = OmegaConf.to_container(cfg.draft, resolve=True)
    return {key: value for key, value in settings.items() if key not in ("ship", "notes")}


def train(run: FeatureDistillation, save_seconds: float, logger: Any) -> None:
    """Until as many response tokens were seen as the recipe says, with a bar that shows the batch
    acceptance."""
    smooth = None
    with tqdm(
        total=run.config.tokens,
        initial=run.progress["tokens"],
        unit="tok",
        desc="train",
        smoothing=0.1,
    ) as bar:
        for record in run.run(run.config.tokens, save_seconds):
            smooth = (
                record["acceptance"]
                if smooth is None
                else 0.95 * smooth + 0.05 * record["acceptance"]
            )
            bar.set_postfix(acceptance=f"{smooth:.3f}", lr=f"{record['lr']:.1e}", refresh=False)
            bar.update(record["tokens"] - bar.n)
            if record["step"] % LOGGED == 0:
                logger.log(
                    {f"train/{key}": record[key] for key in ("acceptance", "regression", "lr")},
                    record["step"],
                )


@torch.no_grad()
def measure(run: FeatureDistillation) -> dict[str, float]:
    """Acceptance sum(min(p, q)) and greedy agreement on the held-out chats, by tokens drafted
    before; q is over the whole vocabulary."""
    found = {}
    for step in range(run.steps):

        def states(chats: list[Chat], step: int = step) -> tuple[Tensor, Tensor]:
            return run.states(chats)[step]

        overlap = measure_overlap(states, run.pool.validation, run.head, stride=2)
        found[f"acceptance after {step} drafted"] = overlap.acceptance
        found[f"agreement after {step} drafted"] = overlap.agreement
    return found


def save(cfg: DictConfig, run: FeatureDistillation, out: Path, measured: dict[str, float]) -> None:
    """All files of a draft or none."""
    maps = run.maps.finished(torch.bfloat16)
    facts = {
        "command": shlex.join(["python", "train.py", *sys.argv[1:]]),
        "seed": cfg.seed,
        "config": recipe(cfg),
        "notes": notes_of(cfg),
        "started_from": str(cfg.pair.draft),
        "chats": len(run.pool.training),
        "response_tokens": run.pool.response_tokens(),
        "progress": run.progress,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "held_out_chats": measured,
        "earlier_runs": earlier_runs(Path(cfg.pair.draft).expanduser()),
    }
    with replaced_folder(out, MARKER) as folder:
        run.draft.bfloat16().save_pretrained(folder)
        AutoTokenizer.from_pretrained(Path(cfg.pair.target).expanduser()).save_pretrained(folder)
        tensors = {
            "from_states": maps.from_states.contiguous(),
            "from_own": maps.from_own.contiguous(),
        }
        save_file(tensors, folder / FILE, {"layers": json.dumps(maps.layers)})
        if (vocabulary := vocabulary_file(cfg)) is not None:
            shutil.copyfile(vocabulary, folder / VOCABULARY)
        write_json(folder / MARKER, facts)
