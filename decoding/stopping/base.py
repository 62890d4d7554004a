"""What stop rules that can be tuned share."""

from collections.abc import Callable, Sequence
from operator import attrgetter

import numpy as np
import torch
from torch import Tensor

from decoding.draft import RoundContext, Verdict
from decoding.draft_tree import DraftStep
from decoding.stopping.policy import Policy
from decoding.stopping.rollout_table import RolloutTable
from predictors.base import Predictor, Records
from predictors.features.layers import RecordedLayers
from predictors.inputs import recorded
from runtime.errors import UserError

CHUNK = 65536  # rows a predictor is asked about at once


class TunableRule:
    """A stop rule, and how long a draft it makes wherever a harvest has a rollout. `should_stop`
    and `policy` must say the same. A rule overrides what differs from this.

    A rule that asks the predictor `<name>` is `RULE` of its module `decoding.stopping.<name>`, and
    `RULE.of(checkpoint, setting)` makes one (`serving.generate`).

    draft_layers, target_layers: of the two models, whose hidden states it reads
    setting: key of its YAML that tuning sets, dotted where it is a part's
    calls_cost: whether a number it computes takes time worth measuring
    stops_never: whether it leaves the length to the structure
    columns: of a harvest's round records, that `predictions` reads
    training: the command that trains its predictor, without data and folder; "" for none
    caution: what to know where its setting was not tuned; "" for nothing
    value_says: what the n-th number it computes says of the n-th draft token; picks_class: the
        first one is the class of the round instead
    predicted: what it computed this round, one number per decision, for the trace
    """

    draft_layers: Sequence[int] = ()
    target_layers: Sequence[int] = ()
    setting: str = "threshold"
    calls_cost: bool = True
    stops_never: bool = False
    training: str = ""
    caution: str = ""
    columns: Sequence[str] = ()
    value_says: str = ""
    picks_class: bool = False

    def __init__(self) -> None:
        self.predicted: list[float] = []

    def begin_round(self, context: RoundContext) -> None:
        self.predicted = []

    def should_stop(self, step: DraftStep) -> bool:
        """Asked before each draw, the first included."""
        raise NotImplementedError

    def end_round(self, verdict: Verdict) -> None:
        pass

    def policy(self, table: RolloutTable) -> Policy:
        """The rule without its `setting`. Raises UserError for what the table lacks."""
        raise NotImplementedError

    def grid(self, points: int, gamma_max: int) -> Sequence[float]:
        """Values of `setting` to try. points: steps from 0 to 1; gamma_max: longest draft."""
        return np.linspace(0, 1, points + 1).tolist()

    def predictions(self, records: Records, layers: RecordedLayers) -> dict[str, Tensor]:
        """Columns for `RolloutTable.predicted`, a row per round: what its predictor says there.
        records: `columns` of a harvest that recorded `layers`."""
        return {}


def in_chunks(ask: Callable[[Tensor], Tensor], matrix: Tensor) -> Tensor:
    """`ask` of the rows of a matrix [..., D], in float32."""
    found = torch.cat([ask(part.float()) for part in matrix.flatten(0, -2).split(CHUNK)])
    return found.view(*matrix.shape[:-1], *found.shape[1:])


def matrix_of(predictor: Predictor, records: Records, layers: RecordedLayers) -> Tensor:
    """What `predictor` reads of the rounds of a harvest that recorded `layers`
    (`predictors.inputs.recorded`)."""
    return recorded(predictor.inputs, layers, records, predictor.when)


def setting_of(rule: TunableRule) -> float:
    """The value its `setting` has."""
    value: float = attrgetter(rule.setting)(rule)
    return value


def refuse_older(trained: int, asked: int = 0) -> None:
    """Raise UserError for a predictor that was trained on states more rounds old than it is asked
    with."""
    if trained > asked:
        raise UserError(
            f"stop.checkpoint: expected predictor.age={asked}, the rounds that states are old where"
            f" it is asked here, got a checkpoint of {trained}. Train it so, or use one of 1 with"
            " engine.a_priori=true"
        )
