"""A small harvest with learnable labels, written with the real writer."""

from pathlib import Path
from typing import Any

import torch

from data_gen.storage import chunks, shards
from data_gen.storage.dataset import Harvest
from predictors.features.draft_statistics import Q_STATS, history_rows
from runtime.json_files import write_checksummed

DIM, EMBEDDING = 8, 2
PAIR = {"name": "toy", "target": "aa", "draft": "bb", "tokenizer": "cc"}
WARP = {"temperature": 1.0, "top_k": 0, "top_p": 1.0}
INPUTS = {"draft_layers": [-1], "target_layers": [-1]}
PROMPTS = {"train": 12, "calibration": 4, "test": 4}


def write_harvest(
    folder: Path, rows: int = 30, gamma: int = 4, names: str = "", shared: int = 0
) -> Path:
    """Acceptance follows feature 0; the classes are unbalanced in favour of "none"; responses
    repeat themselves. names: what its prompts begin with, but for the first `shared`."""
    generator = torch.Generator().manual_seed(0)
    lines: dict[str, list[dict[str, Any]]] = {kind: [] for kind in shards.SCHEMAS}
    for split, count in PROMPTS.items():
        for number in range(count):
            name = f"{names if len(lines['rounds']) >= shared else ''}{split}-{number}"
            head = {"prompt_id": f"{split}-{number}", "dataset": "toy", "split": split}
            lines["responses"].append(
                {
                    **head,
                    "prompt_tokens": torch.tensor(list(name.encode())),
                    "response_tokens": repetitive(rows, len(lines["rounds"])),
                    "embedded": torch.tensor([0]),
                    "embedding": shards.pack_features(torch.zeros(1, EMBEDDING)),
                }
            )
            lines["mixed"].append({**head, **_mixed(rows, generator)})
            lines["rounds"].append({**head, **_rounds(rows, gamma, generator)})
    count = sum(PROMPTS.values())
    settings = {"prompts": {"count": count}, "batch_size": count, "splits": PROMPTS}
    chunks.chunk_of(chunks.plan_id(settings), 0, lines).save(folder)
    manifest = {
        **settings,
        "schema_version": shards.SCHEMA_VERSION,
        "pair": PAIR,
        "warp": WARP,
        "draft_warp": WARP,
        "gamma": gamma,
        "max_new_tokens": rows,
        "anchors": {"stride": 1},
        "inputs": INPUTS,
        "features_stored": True,
        **chunks.inventory(folder, settings),
    }
    write_checksummed(folder / "manifest.json", manifest)
    return folder


def described_as(folder: Path, **other: Any) -> Harvest:
    """The harvest in `folder` as if its manifest said something `other`."""
    said = {**Harvest.open(folder).manifest.written, **other, "checksum": ""}
    return Harvest(folder, chunks.Manifest.of(said))


def repetitive(length: int, seed: int) -> torch.Tensor:
    """Six tokens in any order, then in a loop: the longer the match, the surer what follows."""
    generator = torch.Generator().manual_seed(seed)
    loop, noise = torch.arange(6).repeat(length), torch.randint(6, (length,), generator=generator)
    return torch.where(torch.arange(length) < length // 2, noise, loop[:length])


def _mixed(rows: int, generator: torch.Generator) -> dict[str, Any]:
    x = torch.randn(rows, DIM, generator=generator)
    q = torch.rand(rows, generator=generator)
    return {
        "position": torch.arange(rows),
        "token": torch.zeros(rows, dtype=torch.int64),
        "accept_prob": torch.sigmoid(4 * x[:, 0]),
        **dict.fromkeys(("overlap", "q", *Q_STATS), q),
        "draft_hidden": shards.pack_features(x),
    }


def _rounds(rows: int, gamma: int, generator: torch.Generator) -> dict[str, Any]:
    """Token d of a round is accepted with a probability that rises with feature 0 at that token."""
    x = torch.randn(rows, DIM, generator=generator)
    along = torch.randn(rows, gamma, DIM, generator=generator)
    accepted = ((x[:, 0] > 0.3).long() + (x[:, 0] > 1.0).long() * (gamma - 1)).clamp(max=gamma)
    several = torch.rand(rows, gamma, generator=generator)
    return {
        "anchor": torch.arange(rows),
        "committed": torch.zeros(rows, dtype=torch.int64),
        "known": torch.full((rows,), gamma),
        "drafted": torch.full((rows,), gamma),
        "accepted": accepted,
        "history": history_rows(accepted > 0),
        "token": torch.zeros(rows, gamma, dtype=torch.int64),
        **dict.fromkeys(("q", *Q_STATS), several),
        "accept_prob": torch.sigmoid(4 * along[:, :, 0]),
        "target_hidden": shards.pack_features(x),
        "draft_hidden": shards.pack_features(along),
        "draft_first": shards.pack_features(x),
        **{
            name: torch.zeros(rows, gamma, count, dtype=torch.int64)
            if name.endswith("token")
            else torch.rand(rows, gamma, count, generator=generator) / 2
            for name, count in shards.SIBLINGS.items()
        },
    }
