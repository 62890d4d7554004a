"""Heads as the released program of SpecDec++ saves them (github.com/Kaffaljidhmah2/SpecDec_pp):
config.json and model.safetensors in a folder."""

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file

from predictors.base import UNREADABLE
from runtime.errors import UserError
from runtime.json_files import Length, OpenForm, Size, read_json

if TYPE_CHECKING:
    from predictors.specdecpp import AcceptanceHead

KEY, PARTS = "predictor.released", ("weight", "bias")


class HeadConfig(OpenForm):
    """The form of its `config.json`."""

    hidden_size: Length
    num_layers: Size


def read_head(folder: Path, head: "AcceptanceHead") -> None:
    """Give `head` the weights in `folder`. Raises UserError if they do not fit.

    The D = num_layers blocks are `model.0.linear` to `model.<D-1>.linear`, the map to the logits
    (reject, accept) is `model.<D>`. Released heads repeat one block D times: their file may hold it
    once."""
    config = read_json(folder / "config.json", HeadConfig, KEY, "Fetch it again")
    depth, dim = head.repeats * len(head.blocks), head.out.in_features
    if config.num_layers != depth:
        raise UserError(
            f"predictor.depth: expected {config.num_layers}, the blocks of the head in {folder},"
            f" got {depth}. Set it so"
        )
    if config.hidden_size != dim:
        raise UserError(
            f"data: expected states of {config.hidden_size} numbers, which the head in {folder}"
            f" reads, got {dim}. Harvest its own draft, with predictor.layers=[-1]"
        )
    path = folder / "model.safetensors"
    try:
        blocks, out = _layers(path, depth)
        same = all(map(torch.equal, sum(blocks, []), blocks[0] * depth)) if blocks else True
        if head.repeats < 2 or same:
            names = [*(f"blocks.{number}" for number in range(len(head.blocks))), "out"]
            kept = zip(names, [*blocks[: len(head.blocks)], out], strict=True)
            head.load_state_dict(
                {f"{n}.{part}": t for n, ts in kept for part, t in zip(PARTS, ts, strict=True)}
            )
            return
    except UNREADABLE as error:
        reason = (str(error).splitlines() or [""])[0][:120]
        raise UserError(
            f"{KEY}: {path} is no head that SpecDec++'s program saved ({type(error).__name__}:"
            f" {reason}). Fetch it again, or convert it to safetensors"
        ) from error
    raise UserError(
        f"predictor.tie_blocks: expected false, as the blocks of the head in {folder} differ, got"
        " true. Set it so"
    )


def _layers(path: Path, depth: int) -> tuple[list[list[torch.Tensor]], list[torch.Tensor]]:
    """Return weight and bias of each block, and those of the map to the logits."""
    found = load_file(path)
    names = [f"model.{number}.linear" for number in range(depth)]
    names = [name if f"{name}.weight" in found else names[0] for name in names]
    *blocks, out = (
        [found[f"{name}.{part}"].float() for part in PARTS] for name in [*names, f"model.{depth}"]
    )
    return blocks, out
