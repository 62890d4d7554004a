"""A value predictor whose answers depend on everything that it may see, and grown drafts that ask
it."""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch
from zlib import crc32

import torch
from torch import Tensor

from decoding.cost import CostTable, cost_table
from decoding.structures.grown import Grown
from decoding.structures.lookup import Copies
from predictors.calibration import Calibration
from predictors.inputs import Inputs
from predictors.outcomes import OUTCOMES, Chances
from predictors.survival import Survival

EVERYTHING = Inputs(
    target_hidden=[-1], token=True, q_stats=True, depth=True, history=True, draft_before=[-1],
    q_path=True,
)  # fmt: skip


class Nosy:
    """Says something else for whatever else it reads."""

    name, when, classes = "nosy", "token", OUTCOMES
    calibration = Calibration(survival=Survival(0.9, -0.1, 0.2))

    def __init__(self, inputs: Inputs = EVERYTHING) -> None:
        self.inputs, self.asked = inputs, 0

    def predict_proba(self, x: Tensor) -> Tensor:
        self.asked += 1
        seed = crc32((1000 * x).round().int().numpy().tobytes())
        generator = torch.Generator().manual_seed(seed)
        mean = torch.tensor([0.2, 0.2, 0.5, 0.6, 1.5], dtype=torch.float64)
        return torch._sample_dirichlet(mean, generator)[None]


class Saying:
    """What a function of the depth says: first, following, second, third."""

    name, when, classes, inputs = "saying", "token", OUTCOMES, Inputs(depth=True)
    calibration = Calibration()

    def __init__(self, says: Callable[[int], tuple[float, float, float, float]]) -> None:
        self.says = says

    def predict_proba(self, x: Tensor) -> Tensor:
        return Chances(*torch.tensor(self.says(int(x[0, 0])))[:, None]).outcomes()


COST = cost_table(1.0, {1: 5.0, 100: 14.9})


def grown(
    predictor: Any = None,
    cost: CostTable = COST,
    rate: float | None = None,
    budget: int = 4,
    siblings: int = 2,
    kind: type[Grown] = Grown,
    copies: Copies | None = None,
) -> Grown:
    with patch("decoding.structures.grown.load_value", lambda folder, key: predictor or Nosy()):
        return kind("no folder", cost, rate, budget, siblings, copies)
