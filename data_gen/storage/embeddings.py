"""The target's input embeddings of the tokens that a harvest's records name."""

from pathlib import Path

import torch
from torch import Tensor

from data_gen.storage.dataset import read_manifest
from data_gen.storage.shards import read_shard


def read_embeddings(folder: str | Path) -> tuple[Tensor, Tensor]:
    """Ids [U], ascending, of all tokens that the records name, and their input embeddings [U, E],
    bfloat16. The harvest must have stored them."""
    folder = Path(folder)
    found: dict[int, Tensor] = {}
    for entry in read_manifest(folder)["shards"]:
        if entry["kind"] == "responses":
            table = read_shard(folder, entry, ["embedded", "embedding"])
            ids, bits = (
                table[name].combine_chunks().flatten().to_numpy(zero_copy_only=False)
                for name in ("embedded", "embedding")
            )
            vectors = torch.from_numpy(bits.copy()).view(torch.bfloat16).view(len(ids), -1)
            found |= dict(zip(ids.tolist(), vectors, strict=True))
    ids = sorted(found)
    return torch.tensor(ids), torch.stack([found[token] for token in ids])
