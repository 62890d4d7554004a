"""Logs of confidences: made up, with known temperatures."""

from pathlib import Path

import torch

from predictors.confidences.table import Confidences, blocks, table, write_confidences

TEMPERATURES = (2.0, 0.5, 1.0)


def logged(count: int = 4000, seed: int = 0, domain: str = "toy") -> Confidences:
    """Proposals of three tokens whose logits are too large or too small by `TEMPERATURES`."""
    generator = torch.Generator().manual_seed(seed)
    true = torch.randn(count, len(TEMPERATURES), generator=generator).double() + 1
    coins = torch.rand(true.shape, generator=generator)
    labels = (coins < torch.sigmoid(true)).double().cumprod(1)
    logits = (true * torch.tensor(TEMPERATURES)).float().double()
    length = torch.full((count,), len(TEMPERATURES))
    return table("toy", domain, logits, labels, length, blocks(count))


def write_logged(folder: Path, count: int = 1000, seed: int = 0, domain: str = "toy") -> Path:
    write_confidences(folder, logged(count, seed, domain), "realised", "python made_up.py")
    return folder
