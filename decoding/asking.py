"""Asking a predictor while a draft is drawn: it runs where the draft's outputs are."""

from copy import copy, deepcopy
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from decoding.draft import RoundContext
from decoding.draft_tree import DrawnToken
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

    Its head runs on the draft's device if it reads states of a model; those of another device
    cross, and what comes to the host are its few logits. One that reads numbers alone, which are on
    the host, stays there, as one without weights does."""
    if context.device.type == "cpu":
        return predictor.predict_proba(live(predictor.inputs, context, drawn))
    there = _on(predictor, context.device)
    if there is None:
        return predictor.predict_proba(live(predictor.inputs, context, drawn))
    return there.predict_proba(live(there.inputs, context, drawn, context.device))


def load_value(checkpoint: str | Path, key: str) -> Predictor:
    """Return a predictor of `OUTCOMES` that is asked after each drawn token. Raises UserError
    naming `key` for any other."""
    predictor = load_predictor(checkpoint, key=key)
    if predictor.classes != OUTCOMES or predictor.when != "token":
        raise UserError(
            f"{key}: {checkpoint} holds {predictor.name!r}, which does not say what a token is"
            " worth. Train one that does: python train.py predictor=value"
        )
    return predictor


def ask_value(predictor: Predictor, context: RoundContext, drawn: DrawnToken) -> Chances[float]:
    """Ask a value predictor about one drawn token."""
    return Chances.of_numbers(ask(predictor, context, drawn)[0].tolist())


def _on(predictor: Predictor, device: torch.device) -> Predictor | None:
    """Return the same with its head on `device`; None where that stays on the host."""
    head: nn.Module | None = getattr(predictor, "head", None)
    states = any(name not in FIXED for name in predictor.inputs.names)
    if head is None or not states or next(head.parameters(), None) is None:
        return None
    copies, now = _ELSEWHERE.setdefault(head, {}), _written(head)
    if device not in copies or copies[device][0] != now:
        with torch.inference_mode(False):
            copies[device] = now, deepcopy(head).to(device)
    there = copy(predictor)
    there.head = copies[device][1]
    return there


def _written(head: nn.Module) -> Written:
    """Another one once its weights are."""
    weights = (*head.parameters(), *head.buffers())
    return [(one.data_ptr(), 0 if one.is_inference() else one._version) for one in weights]
