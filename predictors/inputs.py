"""Inputs that predictors may read, and the one function that makes a predictor's matrix of them.

Harvested records and a live round give the same facts by name; `matrix` joins those that a
predictor reads, so it is served exactly the numbers it was trained on. A new input needs a field of
`Inputs`, an entry of the `CATALOGUE`, and a column of the records if none holds it yet: a recorded
one (`data_gen.storage.shards`), or one worked out of another (`data_gen.samples.WORKED_OUT`).

Hidden states and embeddings are rounded to bfloat16, the precision of the harvested files, also
while decoding. Every other number is float32."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import gcd
from typing import Any, Literal

import torch
from torch import Tensor

from predictors.features.catalogue import CATALOGUE, COMMITTED, FIXED, Facts, LiveRound, LiveToken
from predictors.features.draft_statistics import path_rows
from predictors.features.layers import LAYERS, RecordedLayers, among, checked_layers, narrowed
from runtime.errors import UserError, checked_switch

HOST = torch.device("cpu")
When = Literal["round", "token"]
"""When a predictor is asked: before a round is drafted, or after each drawn token."""


@dataclass(frozen=True)
class Inputs:
    """Inputs of a predictor, a choice from the catalogue.

    draft_hidden: layers of the draft's hidden states at the drawn token; target_hidden: layers of
    the target's at the last verified position. Negative indices (-1: what the output layer reads),
    in the order of the columns; () for none, None for all that were recorded.
    token: the target's input embedding of the drawn token, or of the last committed token if the
        predictor is asked before a round.
    q_stats: statistics of the unwarped q for the drawn token
        (`features.draft_statistics.q_stats`).
    draft_before: layers of the draft's hidden states at the token *before* the drawn one (for the
        first: the last committed one), known without a forward on the drawn token. The same layers
        as draft_hidden if both are read.
    q_path: the draft's confidence in all tokens up to the drawn one
        (`features.draft_statistics.path_rows`).
    depth: 1 for the first token of a draft, 2 for the next, ...
    history: acceptance of the request's last draft tokens
        (`features.draft_statistics.history_row`)."""

    draft_hidden: Sequence[int] | None = ()
    target_hidden: Sequence[int] | None = ()
    token: bool = False
    q_stats: bool = False
    depth: bool = False
    history: bool = False
    draft_before: Sequence[int] | None = ()
    q_path: bool = False

    def __post_init__(self) -> None:
        for name, value in vars(self).copy().items():
            if name in LAYERS:
                object.__setattr__(self, name, checked_layers(value, f"inputs.{name}"))
            else:
                checked_switch(f"inputs.{name}", value)
        at, before = self.draft_hidden, self.draft_before
        if at != () and before != () and at != before:
            raise UserError(
                f"inputs.draft_before: expected the layers of inputs.draft_hidden, {at}, got"
                f" {before}. Give the same"
            )

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the inputs, in the order of the matrix."""
        return tuple(name for name in CATALOGUE if getattr(self, name) not in ((), False))

    @property
    def draft_layers(self) -> tuple[int, ...]:
        """Layers for `StopRule.draft_layers`; the inputs' layers must be spelled out."""
        return tuple(self.draft_hidden or self.draft_before or ())

    @property
    def target_layers(self) -> tuple[int, ...]:
        """Layers for `StopRule.target_layers`; the inputs' layers must be spelled out."""
        return tuple(self.target_hidden or ())

    def columns(self, when: When) -> tuple[str, ...]:
        """The columns of records that `recorded` takes."""
        names = dict.fromkeys(column for name in self.names for column in CATALOGUE[name].columns)
        if when == "round":
            return tuple(COMMITTED.get(name, name) for name in names)
        spread = any(CATALOGUE[name].per_round for name in self.names)
        return (*names, "depth") if spread and "depth" not in names else tuple(names)

    def among(self, layers: RecordedLayers, where: str = "predictor.layers") -> "Inputs":
        """Return the inputs with "all that were recorded" spelled out. Raises UserError if they
        read layers that were not recorded, or in another order. where: config key, and what it
        names."""
        spelled: dict[str, Any] = {
            side: among(getattr(self, side), layers.of(side), side, where) for side in LAYERS
        }
        return replace(self, **spelled)

    def fit(self, dim: int) -> bool:
        """Return whether these inputs can give `dim` columns for some width of the states."""
        rest = dim - sum(FIXED[name] for name in self.names if name in FIXED)
        states = [len(getattr(self, side) or ()) for side in LAYERS] + [int(self.token)]
        return rest == 0 if not any(states) else rest >= sum(states) and rest % gcd(*states) == 0

    def to_dict(self) -> dict[str, Any]:
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in asdict(self).items()
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Inputs":
        return cls(**values)


def named_inputs(names: Sequence[str]) -> Inputs:
    """Return inputs of the catalogue, with all layers that were recorded. Raises UserError for a
    name that it lacks."""
    if not set(names) <= set(CATALOGUE):
        raise UserError(
            f"predictor.inputs: expected some of {', '.join(CATALOGUE)}, got {list(names)}. Write"
            " e.g. predictor.inputs=[q_stats]"
        )
    return Inputs.from_dict({name: None if name in LAYERS else True for name in names})


def refuse_unreadable(inputs: Inputs, when: When, kind: str, name: str) -> None:
    """Raise UserError if the predictor `name` reads nothing, an input that does not exist yet when
    it is asked, or one that its training records do not hold."""
    early = [read for read in inputs.names if when == "round" and CATALOGUE[read].drawn]
    missing = [read for read in inputs.names if kind == "mixed" and not CATALOGUE[read].mixed]
    if not inputs.names:
        raise UserError(f"predictor: expected {name} to read something, got no input. Name one")
    if early:
        raise UserError(
            f"predictor: expected inputs that are there before a round, got {', '.join(early)} of a"
            f" drawn token. Let {name} be asked after each token, or read something else"
        )
    if missing:
        raise UserError(
            f"predictor: expected inputs that mixed records hold, got {', '.join(missing)}. Let"
            f" {name} learn from rounds"
        )


def matrix(inputs: Inputs, facts: Facts) -> Tensor:
    """Return the columns that a predictor reads, [..., D], in the order of the catalogue: float32,
    or bfloat16 where every number is one."""
    parts = [CATALOGUE[name].make(facts) for name in inputs.names]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


def recorded(
    inputs: Inputs, layers: RecordedLayers, records: Mapping[str, Tensor], when: When
) -> Tensor:
    """Return the matrix of harvested records: [N, D] of N rounds before they are drafted (`when`
    "round") or of N mixed records, [N, gamma, D] of the tokens of N rounds ("token").

    inputs: with every layer spelled out; layers: those of the records; records: at least
    `inputs.columns(when)`, as `data_gen.samples.read_columns` gives them."""
    facts = dict(records)
    if "draft_before" in inputs.names:
        first, at = records["draft_first"][:, None], records["draft_hidden"]
        facts["draft_before"] = torch.cat([first, at[:, :-1]], dim=1)
    if "q_path" in inputs.names:
        facts["q_path"] = path_rows(records["q_drawn"])
    for side in LAYERS:
        if side in inputs.names:
            facts[side] = narrowed(facts[side], layers.of(side), getattr(inputs, side))
    if when == "round":
        names = {old: new for new, old in COMMITTED.items()}
        return matrix(inputs, {names.get(name, name): values for name, values in facts.items()})
    once = [name for name in inputs.names if CATALOGUE[name].per_round]
    spread = {
        column: facts[column][:, None].expand(*records["depth"].shape, -1)
        for name in once
        for column in CATALOGUE[name].columns
    }
    return matrix(inputs, {**facts, **spread})


def live(
    inputs: Inputs, context: LiveRound, drawn: LiveToken | None = None, device: torch.device = HOST
) -> Tensor:
    """Return the row that `recorded` would hold for a round that starts now (`drawn` None), or for
    a drawn token of it, [1, D] float32 on `device`. Only inputs that are read are computed."""
    states, numbers = list[Tensor](), list[float]()
    for name in inputs.names:
        assert drawn is not None or not CATALOGUE[name].drawn, "it needs a drawn token"
        part = CATALOGUE[name].live(context, drawn)  # type: ignore[arg-type]
        if isinstance(part, Tensor):  # as bfloat16 where it crosses
            states.append((part if part.device == device else part.to(device)).float())
        else:
            numbers += part
    row = torch.tensor(numbers, dtype=torch.float32)
    if device.type != "cpu":
        row = row.to(device) if numbers else row.new_zeros(0, device=device)
    return (torch.cat([*states, row]) if states else row)[None]


def readable(inputs: Inputs, context: LiveRound) -> bool:
    """Return whether all inputs exist already: the target's states do from the first verified
    position on."""
    return not inputs.target_layers or context.target_hidden is not None
