"""Heads in the layout in which SpecDec++'s program saves them."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from predictors.released_head import read_head
from predictors.specdecpp import AcceptanceHead
from tests.helpers.damage.refusals import refuses

DIM, DEPTH = 6, 3


def layer(name: str, rows: int) -> dict[str, Tensor]:
    return {f"{name}.weight": torch.randn(rows, DIM), f"{name}.bias": torch.randn(rows)}


def saved(folder: Path, tensors: Mapping[str, Tensor], **config: int) -> Path:
    folder.mkdir(exist_ok=True)
    known = {"hidden_size": DIM, "num_layers": DEPTH} | config
    (folder / "config.json").write_text(json.dumps(known))
    save_file(dict(tensors), folder / "model.safetensors")
    return folder


def one_block(number: int = 0) -> dict[str, Tensor]:
    torch.manual_seed(number)
    return layer(f"model.{number}.linear", DIM)


OUT = layer(f"model.{DEPTH}", 2)


def literal(x: Tensor, blocks: list[dict[str, Tensor]]) -> Tensor:
    for number, block in enumerate(blocks):
        weight, bias = block[f"model.{number}.linear.weight"], block[f"model.{number}.linear.bias"]
        x = x + nn.functional.silu(x @ weight.T + bias)
    return x @ OUT[f"model.{DEPTH}.weight"].T + OUT[f"model.{DEPTH}.bias"]


def renamed(number: int) -> dict[str, Tensor]:
    return {name.replace("model.0", f"model.{number}"): t for name, t in one_block().items()}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("copies", [1, DEPTH])
def test_a_shared_block_is_read_once_or_many_times(tmp_path: Path, tied: bool, copies: int) -> None:
    blocks = [renamed(number) for number in range(DEPTH)]
    tensors = {name: t.clone() for block in blocks[:copies] for name, t in block.items()} | OUT
    head = AcceptanceHead(DIM, DEPTH, tie_blocks=tied)
    read_head(saved(tmp_path / "head", tensors), head)
    x = torch.randn(5, DIM)
    torch.testing.assert_close(head(x), literal(x, blocks))


def test_blocks_that_differ_and_what_does_not_fit(tmp_path: Path) -> None:
    blocks = [one_block(number) for number in range(DEPTH)]
    tensors = {name: t for block in blocks for name, t in block.items()} | OUT
    folder = saved(tmp_path / "head", tensors)
    head, x = AcceptanceHead(DIM, DEPTH, False), torch.randn(5, DIM)
    read_head(folder, head)
    torch.testing.assert_close(head(x), literal(x, blocks))
    for says, other in (
        (r"^predictor\.tie_blocks: expected false", AcceptanceHead(DIM, DEPTH, True)),
        (r"^predictor\.depth: expected 3", AcceptanceHead(DIM, 2, False)),
        (r"^data: expected states of 6 numbers", AcceptanceHead(DIM + 1, DEPTH, False)),
    ):
        refuses(says, read_head, folder, other)
    for wrong in (OUT, tensors | {"model.0.linear.bias": torch.zeros(DIM + 1)}):
        saved(folder, wrong)
        refuses(r"^predictor\.released: .*is no head", read_head, folder, head)
    (folder / "model.safetensors").unlink()
    refuses(r"^predictor\.released: .*is no head", read_head, folder, head)
