"""The catalogue of inputs: how each is made from harvested records and while decoding."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from predictors.features.draft_statistics import HISTORY, PATH, Q_STATS, history_numbers, path_row

Facts = Mapping[str, Tensor]
"""Raw numbers by name, [...] or [..., d] each, for the same rows."""


class LiveRound(Protocol):
    """Facts known before a round is drafted: `decoding.draft.RoundContext`. target_hidden:
    [layers, H] of exactly the layers that are read, None while nothing has been verified."""

    @property
    def committed(self) -> Tensor: ...

    @property
    def target_hidden(self) -> Tensor | None: ...

    @property
    def verdicts(self) -> Sequence[bool]: ...

    @property
    def embed(self) -> Callable[[int], Tensor]: ...


class LiveToken(Protocol):
    """A drawn token: `decoding.draft_tree.DrawnToken`. hidden(), hidden_before(): [layers, H] of
    exactly the layers that are read."""

    @property
    def token(self) -> int: ...

    @property
    def depth(self) -> int: ...

    def hidden(self) -> Tensor: ...

    def hidden_before(self) -> Tensor: ...

    def path_q(self) -> list[float]: ...

    def q_stats(self) -> Sequence[float]: ...


Live = Callable[[LiveRound, LiveToken], Tensor | Sequence[float]]


@dataclass(frozen=True)
class Input:
    """One entry of the catalogue.

    columns: columns of the records that give its facts; make: facts -> [..., d]; live: the same
        while decoding, for a round that starts (no token) or for a drawn token: [d], or plain
        numbers, which become tensors only when all of them are known
    drawn: it exists only once a token is drawn; mixed: records of the kind `mixed` hold it
    per_round: one value for all tokens of a round
    width: number of columns; 0: a state of a model, with the model's width"""

    columns: tuple[str, ...]
    live: Live
    make: Callable[[Facts], Tensor]
    drawn: bool = False
    mixed: bool = False
    per_round: bool = False
    width: int = 0


def _rounded(state: Tensor) -> Tensor:
    return state.to(torch.bfloat16)


def _state(name: str, columns: tuple[str, ...], live: Live, **when: bool) -> Input:
    """Return the input that consists of the fact `name`, a hidden state of a model."""
    return Input(columns, live, lambda facts: _rounded(facts[name]), **when)


def _target_hidden(context: LiveRound, drawn: LiveToken) -> Tensor:
    assert context.target_hidden is not None, "nothing has been verified yet"
    return _rounded(context.target_hidden.flatten())


def _token(context: LiveRound, drawn: LiveToken | None) -> Tensor:
    token = int(context.committed[-1]) if drawn is None else drawn.token
    return _rounded(context.embed(token))


CATALOGUE: Mapping[str, Input] = {
    "draft_hidden": _state(
        "draft_hidden",
        ("draft_hidden",),
        lambda context, drawn: _rounded(drawn.hidden().flatten()),
        drawn=True,
        mixed=True,
    ),
    "draft_before": _state(
        "draft_before",
        ("draft_first", "draft_hidden"),
        lambda context, drawn: _rounded(drawn.hidden_before().flatten()),
        drawn=True,
    ),
    "target_hidden": _state("target_hidden", ("target_hidden",), _target_hidden, per_round=True),
    "token": _state("embedding", ("embedding",), _token, mixed=True),
    "q_stats": Input(
        Q_STATS,
        lambda context, drawn: drawn.q_stats(),
        lambda facts: torch.stack([facts[name].float() for name in Q_STATS], dim=-1),
        drawn=True,
        mixed=True,
        width=len(Q_STATS),
    ),
    "depth": Input(
        ("depth",),
        lambda context, drawn: [drawn.depth],
        lambda facts: facts["depth"].float()[..., None],
        drawn=True,
        width=1,
    ),
    "q_path": Input(
        ("q_drawn",),
        lambda context, drawn: path_row(drawn.path_q()),
        lambda facts: facts["q_path"].float(),
        drawn=True,
        width=PATH,
    ),
    "history": Input(
        ("history",),
        lambda context, drawn: history_numbers(context.verdicts),
        lambda facts: facts["history"].float(),
        per_round=True,
        width=HISTORY,
    ),
}
"""The columns of a matrix are in this order: states of the models, numbers of the token, numbers of
the round."""
FIXED = {name: each.width for name, each in CATALOGUE.items() if each.width}
"""Columns of the inputs that are no states of a model."""
COMMITTED = {"embedding": "committed_embedding"}
"""Columns of a drawn token, and those that stand for them before a round."""
