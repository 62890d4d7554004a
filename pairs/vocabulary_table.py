"""Make a draft faster by letting it propose fewer tokens: those its target says most often."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from hydra.utils import instantiate
from torch import Tensor

from data_gen.storage.dataset import Harvest
from decoding.models.draft_vocabulary import FILE as VOCABULARY
from decoding.models.loading import ModelPair, pair_identity
from evaluation.replay.read import refuse_other_pair
from pairs.chats import load_chats, shards
from pairs.vocabulary import (
    Text,
    count,
    draft_seconds,
    fits,
    modelled_speedup,
    shortened,
    target_seconds,
)
from runtime.errors import UserError
from runtime.files import checked_folder, refuse_foreign_file
from runtime.job import command_line

HEADER = [
    "tokens",
    "of what was said",
    "of p",
    "acceptance",
    "agreement",
    "draft forward",
    "modelled speed-up",
]
LEGEND = (
    "of what was said, of p: share of held-out response tokens, mean of the target's distribution,"
    " that the vocabulary holds. Acceptance: sum(min(p, q)). Draft forward: measured here, one row."
    " Speed-up: the best fixed draft length's, modelled from these and the measured target, as if"
    " every token were accepted independently."
)


def places(settings: Any) -> tuple[Path, Path]:
    """The folder that is counted and the file to write."""
    counted = "data" if settings.chats is None else "chats"
    folder = checked_folder(counted, getattr(settings, counted))
    default = str(folder / VOCABULARY)
    out = checked_folder("out", default if settings.out is None else settings.out, "file")
    refuse_foreign_file(out, "draft_vocabulary")
    return folder, out


def harvested(harvest: Harvest) -> tuple[list[Text], list[Text]]:
    """Responses that are counted, and held-out ones."""
    splits = {name: texts(harvest, name) for name in ("train", "calibration", "test")}
    if not splits["train"] or not (held := splits["calibration"] + splits["test"]):
        raise UserError(
            f"data: {harvest.folder} has no responses to count, or none held out. Harvest"
            " more prompts"
        )
    return splits["train"], held


def texts(harvest: Harvest, split: str) -> list[Text]:
    rows = harvest.by_prompt("responses", split, ["prompt_tokens", "response_tokens"])
    return [Text.joined(row["prompt_tokens"], row["response_tokens"]) for row in rows]


def chats(folder: Path, held_out: int) -> tuple[list[Text], list[Text]]:
    """As `harvested`, of the chats a draft was trained on; the first ones are held out."""
    found = [Text.of(chat) for path in shards(folder) for chat in load_chats(path)]
    if len(found) <= held_out:
        raise UserError(
            f"chats: {folder} has {len(found)} chats, held_out={held_out} leaves none. Generate"
            " more"
        )
    return found[held_out:], found[:held_out]


def refuse_other_target(pair: ModelPair, harvest: Harvest) -> None:
    """What another model has said tells nothing; what another draft of the same target was
    harvested for does."""
    sides = harvest.pair.model_dump(include={"name", "target", "tokenizer"})
    refuse_other_pair(pair_identity(pair), sides, "pair.target: it")


def table(
    settings: Any, pair: ModelPair, held: Sequence[Text], vocabularies: Sequence[Tensor]
) -> list[list[str]]:
    """A row for each of `vocabularies`, and one for all tokens."""
    warps = instantiate(settings.warp), instantiate(settings.draft_warp)
    everything = torch.arange(pair.draft.vocab_size)
    found = fits(pair, shortened(held, settings.positions), [*vocabularies, everything], warps)
    target, drafting = (
        target_seconds(pair.target, settings.gammas + 1),
        draft_seconds(pair.draft, vocabularies),
    )
    said = count(held, pair.draft.vocab_size)
    rows = []
    for tokens, fit, seconds in zip([*vocabularies, everything], found, drafting, strict=True):
        speedup, gamma = modelled_speedup(fit.acceptance, seconds, target)
        shares = (
            said[tokens].sum().item() / said.sum().item(),
            fit.mass,
            fit.acceptance,
            fit.agreement,
        )
        rows.append(
            [
                *(f"{share:.4f}" for share in shares),
                f"{seconds * 1e3:.2f} ms",
                f"{speedup:.2f}x at {gamma}",
            ]
        )
    return rows


def said(counts: Tensor, size: int) -> str:
    known = int((counts > 0).sum())
    return (
        f"{size:,} tokens, {min(known, size):,} of them said at least once in {int(counts.sum()):,}"
        " counted"
    )


def provenance(settings: Any, pair: ModelPair, counts: Tensor, responses: int) -> dict[str, Any]:
    return {
        "command": command_line(),
        "pair": {name: part for name, part in pair_identity(pair).items() if name != "draft"},
        "counted_on": "chats of a distillation" if settings.chats is not None else "a harvest",
        "responses": responses,
        "tokens_counted": int(counts.sum()),
        "distinct_tokens": int((counts > 0).sum()),
        "size": settings.size,
    }


if __name__ == "__main__":
    raise SystemExit("error: this is no program. Run: python pairs/draft_vocabulary.py")
