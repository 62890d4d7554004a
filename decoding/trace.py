"""Traces of decodes: the events and seconds of each round, enough to replay it under another
policy."""

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any, Literal, NamedTuple

from pydantic import TypeAdapter, with_config

from runtime.errors import UserError
from runtime.files import write_atomically
from runtime.json_files import STRICT
from runtime.json_lines import read_sealed, sealed

Stage = Literal["draft", "target", "sample", "verify", "stop", "other"]
STAGES: tuple[Stage, ...] = ("draft", "target", "sample", "verify", "stop", "other")


class Stopwatch:
    """Gives every moment since it was made to exactly one stage; a stage inside another one pauses
    the outer one."""

    def __init__(self) -> None:
        self._seconds = dict.fromkeys(STAGES, 0.0)
        self._current: Stage = "other"
        self._since = perf_counter()

    def stage(self, stage: Stage) -> "_Staged":
        return _Staged(self._switch, stage)

    def lap(self) -> dict[Stage, float]:
        """Return seconds per stage since the last lap."""
        self._switch(self._current)
        seconds, self._seconds = self._seconds, dict.fromkeys(STAGES, 0.0)
        return seconds

    def _switch(self, stage: Stage) -> Stage:
        now = perf_counter()
        self._seconds[self._current] += now - self._since
        self._since, outer, self._current = now, self._current, stage
        return outer


class _Staged:
    """The context of one stage; as a generator it would take longer than some stages do."""

    def __init__(self, switch: Callable[[Stage], Stage], stage: Stage) -> None:
        self._switch, self._stage = switch, stage

    def __enter__(self) -> None:
        self._outer = self._switch(self._stage)

    def __exit__(self, *error: object) -> None:
        self._switch(self._outer)


class Span(NamedTuple):
    """One job of a model: `tokens` rows run between `start` and `end`, seconds since the request
    began."""

    worker: Literal["target", "draft"]
    job: str
    start: float
    end: float
    tokens: int


@dataclass
class StageTrace:
    """The work of draft and target in a round of an overlapped engine. Draft steps are steps in
    time: branches side by side count once.

    stage: origin of the pending tokens. "draft": a draft stage, with the target idle; "branch":
        the branch that was accepted last; "pre_verify": there were none
    outcome: the class that decided how many tokens were pending; None where none was asked
    pending: the first of the round's draft tokens, the others are candidates
    draft_steps: drawn in this round. Each is accepted, rolled back or wasted, in this round or the
    next
    alone: draft forwards of the draft stage, while the target waited
    branches: tokens of each branch, its candidate first; they grew side by side in the other draft
    forwards
    rollback: lost to a rejection
    waste: drawn after the first token of an accepted branch, and not pending next: dropped by
        posterior selection, drawn for other branches alone, or after the end of the output
    spans: the jobs of both models in time. The target ran on the last committed token and the
        pending ones, the draft on the branches and, in a draft stage before, on the pending tokens
    """

    stage: Literal["draft", "branch", "pre_verify"]
    outcome: int | None
    pending: int
    draft_steps: int
    alone: int
    branches: list[list[int]]
    rollback: int
    waste: int
    spans: list[Span]


@dataclass
class RoundTrace:
    """One target call.

    draft_tokens: proposed; draft_parents: row of each one's parent (row 0 is the last committed
    token, draft token i is row i + 1); draft_q: q of each under the distribution it was drawn from;
    row: where the accepted path ends; accepted: its length, as far as it is committed; tokens:
    committed, i.e. the accepted ones and, unless the response ends with them, usually one more;
    predicted: what the stop rule computed;
    draft_forwards: draft calls; seconds: per stage ("draft" and "target" are the forwards alone,
    "sample" is warping the draft's logits and drawing; where the models run side by side they add
    up to more than the wall time);
    overlap: how the models shared the round; None for engines that run them in turn by design;
    extra_rows: of the target's call, beyond the last committed token and the draft (Lookahead's
    window); draft_p: p of each draft token, None where the verifier did not read the target's
    distribution (empty where p was not recorded); beyond_draft: the text filled the draft's
    context, so none was drawn."""

    draft_tokens: list[int]
    draft_parents: list[int]
    draft_q: list[float]
    row: int
    accepted: int
    tokens: list[int]
    predicted: list[float]
    draft_forwards: int
    seconds: dict[Stage, float]
    overlap: StageTrace | None = None
    extra_rows: int = 0
    draft_p: list[float | None] = field(default_factory=list)
    beyond_draft: bool = False

    @property
    def accepted_path(self) -> list[int]:
        """Return the draft tokens up to `row`."""
        path, row = list[int](), self.row
        while row > 0:
            path.append(self.draft_tokens[row - 1])
            row = self.draft_parents[row - 1]
        return path[::-1]

    @property
    def depth(self) -> int:
        """Return the length of the longest path of draft tokens."""
        depths = [0]
        for parent in self.draft_parents:
            depths.append(depths[parent] + 1)
        return max(depths)

    @property
    def judged(self) -> int:
        """Return how many positions of the draft were accepted or rejected, from its first on."""
        return self.accepted + self.rejected

    @property
    def rejected(self) -> bool:
        """Return whether a draft token was rejected at the end of the accepted path."""
        return len(self.tokens) > self.accepted and self.row in self.draft_parents


@with_config(STRICT)
@dataclass
class Trace:
    """One request decoded by one method. `seconds` is wall time, the prefill included.

    category: of the prompt, "" where it has none
    joules: energy that the machine counted meanwhile; None where nothing was counted
    """

    prompt_tokens: int
    tokens: list[int]
    rounds: list[RoundTrace]
    prefill_seconds: float
    seconds: float
    prompt_id: str = ""
    dataset: str = ""
    method: str = ""
    seed: int = 0
    joules: float | None = None
    category: str = ""
    stages: dict[Stage, float] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.stages = {stage: sum(r.seconds[stage] for r in self.rounds) for stage in STAGES}

    @property
    def decode_seconds(self) -> float:
        return self.seconds - self.prefill_seconds

    def to_dict(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name != "stages"}


def write_traces(path: Path, traces: Iterable[Trace]) -> None:
    """Write one JSON object per line, with a checksum; the file appears whole or not at all."""

    def write(temporary: Path) -> None:
        with temporary.open("wb") as out:
            out.writelines(sealed(trace.to_dict()) + b"\n" for trace in traces)

    write_atomically(path, write)


def read_traces(path: Path) -> list[Trace]:
    """Read traces. Raises UserError naming file and line if a line is not a trace."""
    form, traces = TypeAdapter(Trace), list[Trace]()
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                traces.append(read_sealed(line.removesuffix(b"\n"), form.validate_json))
            except ValueError as error:
                raise UserError(
                    f"{path}:{number}: not a trace ({error}). Run scripts/evaluate.py again"
                ) from error
    return traces
