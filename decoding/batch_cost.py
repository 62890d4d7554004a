"""What a step costs when many requests are decoded together."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Protocol

from decoding.cost import CostTable, MeasuredCost
from runtime.settings.kinds import Count, NotNegative, Positive


class BatchCost(Protocol):
    """Seconds of forwards. made: where they come from, "modelled" or "given"."""

    made: str

    def target(self, requests: int, rows: int) -> float:
        """Of one target forward with `rows` rows of all requests together."""

    def draft(self, requests: int) -> float:
        """Of one draft forward with a row of each request."""


def share(cost: BatchCost, requests: int, gamma: int) -> CostTable:
    """Costs of one of `requests` requests which all verify as much: its share of every forward.
    Tokens over its seconds are those of the whole batch."""
    rows = range(1, gamma + 2)
    seconds = [cost.target(requests, requests * each) / requests for each in rows]
    return CostTable(cost.draft(requests) / requests, MeasuredCost(list(rows), seconds), seconds[0])


@dataclass(frozen=True)
class Roofline:
    """A forward takes as long as its bytes or its operations do, whichever is longer (Williams et
    al. 2009): weights and the states of every request are read once, every row takes two
    operations per weight. Attention's operations, kernels' efficiency, communication and
    verification are left out, so that it is a least time. Nothing is measured."""

    made: ClassVar[str] = "modelled"
    bandwidth: Annotated[Positive, "of the device, GB/s"]
    compute: Annotated[Positive, "of the device, TFLOP/s"]
    target_weights: Annotated[Positive, "billions of weights that a target forward reads"]
    draft_weights: Annotated[Positive, "the same of a draft forward"]
    weight_bytes: Annotated[Positive, "bytes of a weight"]
    target_state: Annotated[NotNegative, "bytes of keys and values of a token, of the target"]
    draft_state: Annotated[NotNegative, "the same of the draft"]
    context: Annotated[Count, "tokens of each request's text"]
    overhead: Annotated[NotNegative, "seconds of every forward besides"]

    def target(self, requests: int, rows: int) -> float:
        return self._seconds(self.target_weights, self.target_state, requests, rows)

    def draft(self, requests: int) -> float:
        return self._seconds(self.draft_weights, self.draft_state, requests, requests)

    def _seconds(self, weights: float, state: float, requests: int, rows: int) -> float:
        read = weights * 1e9 * self.weight_bytes + requests * self.context * state
        operations = 2 * weights * 1e9 * rows
        return max(read / (self.bandwidth * 1e9), operations / (self.compute * 1e12)) + (
            self.overhead
        )


@dataclass(frozen=True)
class PerRow:
    """So many seconds for a forward of one row, and for each further one."""

    made: ClassVar[str] = "given"
    first_target: Annotated[Positive, "seconds of a target forward of one row"]
    target_row: Annotated[NotNegative, "of each further row"]
    first_draft: Annotated[Positive, "of a draft forward for one request"]
    draft_row: Annotated[NotNegative, "of each further request"]

    def target(self, requests: int, rows: int) -> float:
        return self.first_target + self.target_row * (rows - 1)

    def draft(self, requests: int) -> float:
        return self.first_draft + self.draft_row * (requests - 1)
