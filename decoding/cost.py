"""Costs of decoding: seconds per forward and per prediction, measured or given, and the price of
counts."""

import pathlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Annotated, Any

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, NonNegativeFloat, PositiveFloat
from torch import Tensor

from decoding.interfaces import LM
from decoding.trace import Trace
from runtime.errors import UserError
from runtime.job import command_of
from runtime.json_files import Form, MeasuredChecksum, read_json, write_checksummed
from runtime.settings.kinds import MOST_NODES, Count, NotNegative, Path, Positive, Says

KIND = "costs"  # in checksums: the file may be renamed
SAMPLES = 3  # least rounds of one size for a measurement
Counts = Mapping[str, NDArray[np.float64]]
"""Counts by column of the table of measurements, [B] each, a number per response. `price` reads
draft_forwards, questions and calls_by_drafted [B, G + 1] (target calls by the length of their
draft), `plain` reads emitted."""


@dataclass(frozen=True)
class MeasuredCost:
    """Measured seconds of a forward by its number of rows. rows: increasing; seconds: medians.

    Linear in between; each row beyond the last costs the mean measured cost of a row, at least 0;
    fewer rows than the first cost as much as the first."""

    rows: Sequence[int]
    seconds: Sequence[float]

    def __call__(self, rows: int) -> float:
        return self.of(np.array(rows)).item()

    def of(self, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the seconds of each number of rows [...]."""
        count, seconds = self.rows[-1] - self.rows[0], self.seconds[-1] - self.seconds[0]
        further = max(0.0, seconds / count) if count else 0.0
        inside = np.interp(rows, self.rows, self.seconds)
        return np.asarray(inside + further * np.maximum(rows - self.rows[-1], 0))


@dataclass(frozen=True)
class CostTable:
    """Seconds, or any other unit, of the parts of a decode.

    draft: one draft forward with the draw that follows; target: a round's target forward by its
    rows (one more than the draft's tokens), with verification and bookkeeping; autoregressive: one
    token without a draft (None: a target forward of one row); calls: one number that a stop rule
    computes, by the rule's name (0 where none is given);
    pair: identity of the pair it was measured with; measured_on: `setup_facts` then; None: not
    measured"""

    draft: float
    target: MeasuredCost
    autoregressive: float
    calls: Mapping[str, float] = field(default_factory=dict)
    pair: Mapping[str, Any] | None = None
    measured_on: Mapping[str, Any] | None = None

    def price(self, counts: Counts, rule: str = "") -> NDArray[np.float64]:
        """Return the seconds of each response, [B]; prefill is left out."""
        rows = self.target.of(np.arange(1, counts["calls_by_drafted"].shape[1] + 1))
        return (
            counts["draft_forwards"] * self.draft
            + counts["calls_by_drafted"] @ rows
            + counts["questions"] * self.calls.get(rule, 0.0)
        )

    def plain(self, counts: Counts) -> NDArray[np.float64]:
        """Return the seconds of each response without a draft, [B]."""
        return counts["emitted"] * self.autoregressive

    def to_dict(self) -> dict[str, Any]:
        """Return the arguments of `cost_table`."""
        target = dict(zip(map(str, self.target.rows), self.target.seconds, strict=True))
        return {
            "draft": self.draft,
            "target": target,
            "autoregressive": self.autoregressive,
            "calls": dict(self.calls),
        }


def cost_table(
    draft: Annotated[Positive, "seconds of a draft forward, or units of any kind"],
    target: Annotated[
        Positive | Annotated[Mapping[Count, Positive], Field(min_length=1)],
        Says("a number above 0, or numbers above 0 by rows, such as {1:0.1,8:0.12}"),
        "of a target forward: for all numbers of rows, or a mapping from rows, in rising order",
    ],
    autoregressive: Annotated[
        Positive | None, "of a token without a draft; null: of a target forward of one row"
    ] = None,
    calls: Annotated[
        Mapping[str, NotNegative] | None,
        Says("numbers from 0 on, by the names of stop rules"),
        "of one number that a stop rule computes",
    ] = None,
    row: Annotated[
        NotNegative, "of each further row, as a share of the first; only where `target` is a number"
    ] = 0.0,
) -> CostTable:
    """Return the table of these numbers. Raises UserError if rows are not in rising order, if none
    gives the cost of a plain token, or if costs of rows are given twice."""
    if not isinstance(target, Mapping):
        further = {MOST_NODES + 1: target * (1 + row * MOST_NODES)} if row else {}
        by_rows = {1: target, **further}
    elif row:
        raise UserError(
            f"cost.row: expected 0 where cost.target says seconds by rows, got {row}. Give one of"
            " the two"
        )
    else:
        by_rows = dict(target)
    if autoregressive is None and 1 not in by_rows:
        raise UserError(
            "cost.autoregressive: without cost.target.1 nothing says what a plain token costs."
            " Give one"
        )
    alone = by_rows[1] if autoregressive is None else autoregressive
    rows = list(by_rows)
    if rows != sorted(rows):
        raise UserError(
            f"cost.target: expected numbers of rows in rising order, got {rows}. Write them so"
        )
    return CostTable(draft, MeasuredCost(rows, list(by_rows.values())), alone, dict(calls or {}))


Rows = Annotated[str, Field(pattern="^[1-9][0-9]{0,8}$")]


class Seconds(Form):
    """The arguments of `cost_table`, in a file."""

    draft: PositiveFloat
    target: PositiveFloat | dict[Rows, PositiveFloat]
    autoregressive: PositiveFloat | None = None
    calls: dict[str, NonNegativeFloat] | None = None


class CostFile(Form):
    """The file of cost=measure, with a command and a checksum; one written by hand needs `seconds`
    alone."""

    seconds: Seconds
    pair: dict[str, Any] | None = None
    measured_on: dict[str, Any] | None = None
    regression: dict[str, Any] | None = None
    command: str | None = None
    checksum: MeasuredChecksum = None


def read_cost(
    file: Annotated[Path, "what cost=measure has saved"], key: str = "cost.file"
) -> CostTable:
    """Return the table of a file written by cost=measure or by hand. Raises UserError naming `key`
    if it is missing."""
    remedy = f"Measure it: {command_of('tune', 'cost=measure')}"
    read = read_json(pathlib.Path(file), CostFile, key, remedy, KIND)
    seconds, target = read.seconds.model_dump(exclude_unset=True), read.seconds.target
    if isinstance(target, dict):
        seconds["target"] = {int(rows): value for rows, value in target.items()}
    try:
        table = cost_table(**seconds)
    except UserError as error:
        raise UserError(f"{key}: {file}: {error}") from error
    return replace(table, pair=read.pair, measured_on=read.measured_on)


def write_cost(file: Path, facts: Mapping[str, Any]) -> None:
    write_checksummed(pathlib.Path(file), facts, KIND, "cost.file")


# From real decodes --------------------------------------------------------------------------------


def observed_cost(speculative: Mapping[str, Iterable[Trace]], plain: Iterable[Trace]) -> CostTable:
    """Return medians over the rounds of real decodes, which contain costs that forwards timed alone
    leave out.

    speculative: stop rule -> traces; plain: autoregressive ones. Raises UserError for too few
    rounds."""
    drafting = list[float]()
    by_rows, by_rule = defaultdict[int, list[float]](list), defaultdict[str, list[float]](list)
    for rule, traces in speculative.items():
        for round_ in (round_ for trace in traces for round_ in trace.rounds):
            seconds = round_.seconds
            rest = seconds["target"] + seconds["verify"] + seconds["other"]
            by_rows[len(round_.draft_tokens) + 1].append(rest)
            if round_.draft_forwards:
                drafting.append((seconds["draft"] + seconds["sample"]) / round_.draft_forwards)
            if round_.predicted:
                by_rule[rule].append(seconds["stop"] / len(round_.predicted))
    enough = sorted(rows for rows, times in by_rows.items() if len(times) >= SAMPLES)
    target = {rows: median(by_rows[rows]) for rows in enough}
    alone = [sum(round_.seconds.values()) for trace in plain for round_ in trace.rounds]
    if not (drafting and target and alone):
        raise UserError(
            "cost.limit: too few rounds to measure costs on. Raise cost.limit or"
            " cost.max_new_tokens"
        )
    calls = {rule: median(times) for rule, times in by_rule.items()}
    return cost_table(median(drafting), target, median(alone), calls)


@dataclass(frozen=True)
class Regression:
    """Seconds of a generation = draft * N_draft + target * N_target, least squares without
    intercept (SpecDec++, 4).

    r2: 1 - residual / total sum of squares about the mean; rows: generations"""

    draft: float
    target: float
    r2: float
    rows: int

    def __str__(self) -> str:
        seconds = f"{self.draft * 1e3:.2f} ms N_draft + {self.target * 1e3:.2f} ms N_target"
        return f"T = {seconds} over {self.rows} generations, R^2 = {self.r2:.4f}"


def regress(forwards: NDArray[np.float64], seconds: NDArray[np.float64]) -> Regression:
    """Fit `seconds` [n] of generations by their forwards [n, 2], N_draft and N_target."""
    weights = np.linalg.lstsq(forwards, seconds, rcond=None)[0]
    residual = float(((seconds - forwards @ weights) ** 2).sum())
    total = float(((seconds - seconds.mean()) ** 2).sum())
    r2 = 1 - residual / total if total else float("nan")
    return Regression(float(weights[0]), float(weights[1]), r2, len(seconds))


def regress_traces(traces: Iterable[Trace]) -> Regression:
    """Fit the seconds of generations, a row each; prefill is left out."""
    rows = [
        (sum(r.draft_forwards for r in t.rounds), len(t.rounds), t.decode_seconds) for t in traces
    ]
    values = np.array(rows, dtype=float)
    return regress(values[:, :2], values[:, 2])


# Forwards timed alone -----------------------------------------------------------------------------


@torch.inference_mode()
def measure_cost(
    lm: LM,
    context: Tensor,
    rows: Sequence[int],
    repeats: int,
    advance: Callable[[], object] = lambda: None,
) -> MeasuredCost:
    """Time tree forwards for each number of `rows` after `context` [n] (all rows are siblings; the
    mask's pattern costs nothing). The row counts take turns, so that drift of the machine affects
    all alike."""
    lm.reset()
    lm.forward(context, logits="none")
    times: dict[int, list[float]] = {count: [] for count in rows}
    for repeat in range(repeats + 1):
        for count in rows:
            before = lm.seconds
            lm.forward(context[-1:].expand(count), torch.full((count,), -1))
            lm.crop(len(context))
            if repeat > 0:  # the first turn warms up
                times[count].append(lm.seconds - before)
            advance()
    return MeasuredCost(list(rows), [median(times[count]) for count in rows])
