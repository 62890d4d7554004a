"""The base of stop rules that can be tuned."""

from abc import abstractmethod
from collections.abc import Sequence
from operator import attrgetter

import numpy as np
import torch
from torch import Tensor

from decoding.interfaces import StopRule
from decoding.stopping.policy import Policy
from decoding.stopping.rollout_table import RolloutTable
from predictors.base import Predictor, Records
from predictors.features.layers import RecordedLayers
from predictors.inputs import recorded
from runtime.errors import UserError

CHUNK = 65536  # rows a predictor is asked about at once


class TunableRule(StopRule):
    """A stop rule with a `policy` for replay, which gives its draft lengths on recorded rollouts.
    `should_stop` and `policy` must agree.

    A rule that asks the predictor `<name>` is `RULE` of its module `decoding.stopping.<name>`, and
    `RULE.of(checkpoint, setting)` makes one (`serving.generate`).

    setting: key of its YAML that tuning sets, dotted if it belongs to a part
    calls_cost: whether computing its numbers takes noticeable time
    columns: those of a harvest's round records that `predictions` reads
    training: the command that trains its predictor, without data and folder; "" for none
    value_says: what the n-th number it computes says of the n-th draft token; picks_class: the
        first one is the class of the round instead
    """

    setting: str = "threshold"
    calls_cost: bool = True
    training: str = ""
    columns: Sequence[str] = ()
    value_says: str = ""
    picks_class: bool = False

    def __init__(self) -> None:
        self.predicted: list[float] = []

    @abstractmethod
    def policy(self, table: RolloutTable) -> Policy:
        """Return the rule without its `setting`. Raises UserError if the table lacks a column."""

    def grid(self, points: int, gamma_max: int) -> Sequence[float]:
        """Return values of `setting` to try. points: steps from 0 to 1; gamma_max: of the draft."""
        return np.linspace(0, 1, points + 1).tolist()

    def predictions(self, records: Records, layers: RecordedLayers) -> dict[str, Tensor]:
        """Return its predictor's outputs as columns for `RolloutTable.predicted`, a row per round.
        records: `columns` of a harvest that recorded `layers`."""
        return {}


def probabilities(predictor: Predictor, records: Records, layers: RecordedLayers) -> Tensor:
    """Return the predictor's probabilities for the rounds of a harvest that recorded `layers`,
    [n, ...]."""
    matrix = recorded(predictor.inputs, layers, records, predictor.when)
    parts = matrix.flatten(0, -2).split(CHUNK)
    probs = torch.cat([predictor.predict_proba(part.float()) for part in parts])
    return probs.view(*matrix.shape[:-1], *probs.shape[1:])


def setting_of(rule: TunableRule) -> float:
    """Return the value of the rule's `setting`."""
    value: float = attrgetter(rule.setting)(rule)
    return value


def refuse_older(trained: int, asked: int = 0) -> None:
    """Raise UserError for a predictor trained on states that are more rounds old (`trained`) than
    those it would be asked with (`asked`)."""
    if trained > asked:
        raise UserError(
            f"stop.checkpoint: expected predictor.age={asked}, the rounds that states are old where"
            f" it is asked here, got a checkpoint of {trained}. Train it so, or use one of 1 with"
            " engine.a_priori=true"
        )
