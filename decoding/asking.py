"""Asking a predictor while a draft is drawn: it runs where the draft's outputs are."""

from copy import copy, deepcopy
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from decoding.draft import RoundContext
from decoding.draft_tree import DrawnToken
from decoding.together import at_once
from predictors.base import Predictor, load_predictor
from predictors.features.catalogue import FIXED
from predictors.inputs import live
from predictors.outcomes import OUTCOMES, Chances
from runtime.errors import UserError

Written = list[tuple[int, int]]
_ELSEWHERE: WeakKeyDictionary[nn.Module, dict[torch.device, tuple[Written, nn.Module]]]
_ELSEWHERE = WeakKeyDictionary()
"""Heads on the host, their copies on devices, and what they were copies of."""


def ask(predictor: Predictor, context: RoundContext, drawn: DrawnToken | None = None) -> Tensor:
    """Ask `predictor` about a drawn token, or before a round: return `predict_proba` of one row, on
    the host.

    Its head runs on the draft's device if it reads hidden states; states on another device are
    moved there, and only its logits are sent to the host; requests that are decoded at once ask
    together. A predictor that reads numbers alone, or has no weights, runs on the host."""
    head: nn.Module | None = getattr(predictor, "head", None)
    states = any(name not in FIXED for name in predictor.inputs.names)
    here = context.device.type == "cpu" or not states or head is None
    weights = [] if here or head is None else [*head.parameters(), *head.buffers()]
    if head is None or not weights:
        return predictor.predict_proba(live(predictor.inputs, context, drawn))
    copies, device = _ELSEWHERE.setdefault(head, {}), context.device
    # Tensors that autograd tracks change their version when they are written to
    now = [(each.data_ptr(), 0 if each.is_inference() else each._version) for each in weights]
    if device not in copies or copies[device][0] != now:
        with torch.inference_mode(False):
            copies[device] = now, deepcopy(head).to(device)
    moved = copy(predictor)
    moved.head = copies[device][1]
    row = live(moved.inputs, context, drawn, device)
    return at_once(row, (id(moved.head), device), moved.predict_proba)


def load_asked(
    checkpoint: str | Path, key: str, when: str, classes: int, does: str, training: str
) -> Predictor:
    """Load a predictor of `classes` classes that is asked at `when`. Raises UserError naming `key`
    for any other. does: what a fitting one predicts; training: the command that makes one."""
    predictor = load_predictor(checkpoint, key=key)
    if len(predictor.classes) != classes or predictor.when != when:
        raise UserError(
            f"{key}: {checkpoint} holds {predictor.name!r}, which does not {does}. Train one that"
            f" does: {training}"
        )
    return predictor


def load_value(checkpoint: str | Path, key: str) -> Predictor:
    """Return a predictor of `OUTCOMES` that is asked after each drawn token, or raise UserError."""
    wanted = "say what a token is worth", "python train.py predictor=value"
    return load_asked(checkpoint, key, "token", len(OUTCOMES), *wanted)


def ask_value(predictor: Predictor, context: RoundContext, drawn: DrawnToken) -> Chances[float]:
    """Ask a value predictor about one drawn token."""
    return Chances.of_numbers(ask(predictor, context, drawn)[0].tolist())
