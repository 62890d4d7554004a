"""Costs of a step in which many requests are decoded together."""

import pathlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Protocol, cast

import numpy as np
from pydantic import PositiveFloat, with_config

from decoding.cost import CostTable, MeasuredCost
from runtime.errors import UserError
from runtime.job import command_of
from runtime.json_files import STRICT, Form, Length, MeasuredChecksum, read_json, write_checksummed
from runtime.settings.kinds import Count, NotNegative, Path, Positive

KIND = "batch costs"  # in checksums: the file may be renamed


class BatchCost(Protocol):
    """Seconds of forwards. made: where they come from, "modelled", "given" or "measured"."""

    @property
    def made(self) -> str: ...

    def target(self, requests: int, rows: int) -> float:
        """Return the seconds of one target forward with `rows` rows of all requests together."""

    def draft(self, requests: int) -> float:
        """Return the seconds of one draft forward with a row of each request."""


def share(cost: BatchCost, requests: int, gamma: int) -> CostTable:
    """Return the costs of one of `requests` requests that all verify the same number of rows: its
    share of every forward. Tokens per second of such a share are those of the whole batch."""
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
        seconds = read / (self.bandwidth * 1e9), 2 * weights * 1e9 * rows / (self.compute * 1e12)
        return max(seconds) + self.overhead


@dataclass(frozen=True)
class PerRow:
    """Fixed seconds for a forward of one row, and for each further one."""

    made: ClassVar[str] = "given"
    first_target: Annotated[Positive, "seconds of a target forward of one row"]
    target_row: Annotated[NotNegative, "of each further row"]
    first_draft: Annotated[Positive, "of a draft forward for one request"]
    draft_row: Annotated[NotNegative, "of each further request"]

    def target(self, requests: int, rows: int) -> float:
        return self.first_target + self.target_row * (rows - 1)

    def draft(self, requests: int) -> float:
        return self.first_draft + self.draft_row * (requests - 1)


@with_config(STRICT)
@dataclass(frozen=True)
class BatchTable:
    """Table of seconds of forwards, interpolated linearly, not extrapolated.

    requests: rising; rows: of each request, rising from 1; target_seconds: by requests, then rows;
    draft_seconds: by requests"""

    made: Literal["measured", "modelled", "given"]
    requests: list[Length]
    rows: list[Length]
    target_seconds: list[list[PositiveFloat]]
    draft_seconds: list[PositiveFloat]

    def __post_init__(self) -> None:
        sizes, widths = {len(self.requests)}, {len(line) for line in self.target_seconds}
        rising = all(axis == sorted(set(axis)) for axis in (self.requests, self.rows))
        fits = {len(self.target_seconds), len(self.draft_seconds)} == sizes
        fits = fits and widths == {len(self.rows)} and self.rows[:1] == [1]
        if not (rising and self.requests and fits):
            raise ValueError("no table of rising requests and rows from 1 on")

    def target(self, requests: int, rows: int) -> float:
        self._refuse_more("batch", requests, self.requests[-1])
        each = -(-rows // requests)
        self._refuse_more("gamma_max", each - 1, self.rows[-1] - 1)
        by_size = [np.interp(rows / requests, self.rows, line) for line in self.target_seconds]
        return float(np.interp(requests, self.requests, by_size))

    def draft(self, requests: int) -> float:
        self._refuse_more("batch", requests, self.requests[-1])
        return float(np.interp(requests, self.requests, self.draft_seconds))

    def _refuse_more(self, key: str, wanted: int, most: int) -> None:
        if wanted > most:
            raise UserError(
                f"{key}: expected at most {most}, which is as far as batch_cost goes, got"
                f" {wanted}. Lower it, or measure more"
            )


@with_config(STRICT)
@dataclass(frozen=True)
class MeasuredBatches(BatchTable):
    """A table that was measured. pair: identity of the pair; measured_on: `setup_facts` then; None:
    not recorded."""

    pair: Mapping[str, Any] | None = None
    measured_on: Mapping[str, Any] | None = None


def tabled(cost: BatchCost, sizes: Sequence[int], gamma: int) -> BatchTable:
    """Return any costs as a table for these `sizes` (requests) with 1 to gamma + 1 rows each."""
    rows, made = list(range(1, gamma + 2)), cast(Any, cost.made)
    target = [[cost.target(size, size * each) for each in rows] for size in sizes]
    return BatchTable(made, list(sizes), rows, target, [cost.draft(size) for size in sizes])


class BatchCostFile(Form):
    """The file of batch_cost=measure, with details of the measurement; one written by hand needs
    `seconds` alone."""

    seconds: BatchTable
    context: Length | None = None
    pair: dict[str, Any] | None = None
    measured_on: dict[str, Any] | None = None
    command: str | None = None
    checksum: MeasuredChecksum = None


def read_batch_cost(
    file: Annotated[Path, "what batch_cost=measure has saved"], key: str = "batch_cost.file"
) -> MeasuredBatches:
    """Return the table of a file. Raises UserError naming `key` if it is missing."""
    remedy = f"Measure it: {command_of('tune', 'batch=[1,2,4]', 'batch_cost=measure')}"
    read = read_json(pathlib.Path(file), BatchCostFile, key, remedy, KIND)
    return MeasuredBatches(**vars(read.seconds), pair=read.pair, measured_on=read.measured_on)


def write_batch_cost(file: pathlib.Path, facts: Mapping[str, Any]) -> None:
    write_checksummed(file, facts, KIND, "batch_cost.file")
