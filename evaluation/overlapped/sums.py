"""What a method counts, prompt by prompt, whichever engine it has, and its price at a speed ratio
c: a target call takes c draft forwards, however many rows it has."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from decoding.trace import Trace
from evaluation.metrics import accepted_lengths, draft_steps
from evaluation.replay.simulate import Counts
from evaluation.timeline import Devices, modelled_seconds
from runtime.intervals import Estimate, bootstrap

Array = NDArray[np.float64]


NAMES = ("tokens", "calls", "steps", "lost", "accepted", "runs")


@dataclass(frozen=True)
class Sums:
    """Per prompt; times are in draft forwards.

    counts: [B] each, by `NAMES`: tokens committed; calls of the target; steps of the draft, in
        time, and those a rejection took (RB is their ratio); accepted and runs: M is their ratio
    seconds: [B] each, by speed ratio"""

    counts: Mapping[str, Array]
    seconds: Mapping[float, Array]

    @classmethod
    def serial(cls, counts: Counts, ratios: Sequence[float]) -> "Sums":
        """Of a replay of drafts and target calls in turn."""
        rounds, runs = counts.rounds, counts.by_length[:, 1:].sum(1)
        values = (counts.tokens, rounds, counts.drafted, counts.discarded, counts.accepted, runs)
        seconds = {c: counts.forwards + c * rounds for c in ratios}
        return cls(dict(zip(NAMES, values, strict=True)), seconds)

    @classmethod
    def overlapped(cls, traces: Sequence[Trace], ratios: Sequence[float]) -> "Sums":
        """Of one trace per prompt, or of several, whose sums are taken."""
        by_prompt: dict[str, list[Trace]] = {}
        for trace in traces:
            by_prompt.setdefault(trace.prompt_id, []).append(trace)
        rows = [np.sum([_counted(trace) for trace in of], 0) for of in by_prompt.values()]
        seconds = {}
        for c in ratios:
            devices = Devices.of_ratio(c)
            spent = [sum(modelled_seconds(t, devices) for t in of) for of in by_prompt.values()]
            seconds[c] = np.array(spent)
        return cls(dict(zip(NAMES, np.array(rows, np.float64).T, strict=True)), seconds)

    def joined(self, other: "Sums") -> "Sums":
        """Of the prompts of both."""
        return Sums(
            {n: np.concatenate([of, other.counts[n]]) for n, of in self.counts.items()},
            {c: np.concatenate([of, other.seconds[c]]) for c, of in self.seconds.items()},
        )

    def facts(self, c: float) -> dict[str, Estimate]:
        """Tokens per target call, M, RB and the speed-up over plain decoding."""
        of = self.counts
        return {
            "tokens_per_call": ratio(of["tokens"], of["calls"]),
            "accepted_length": ratio(of["accepted"], of["runs"]),
            "rollback": ratio(of["lost"], of["steps"]),
            "speedup": ratio(c * of["tokens"], self.seconds[c]),
        }

    def over(self, other: "Sums", c: float) -> dict[str, Estimate]:
        """Against another method on the same prompts: speed, and RB over its own."""

        def speed(times: Any) -> Any:
            return _divided(self._speed(times, c), other._speed(times, c))

        def rollback(times: Any) -> Any:
            return _divided(self._rollback(times), other._rollback(times))

        return {
            "speed": bootstrap(speed, self.prompts),
            "rollback": bootstrap(rollback, self.prompts),
        }

    @property
    def prompts(self) -> int:
        return len(self.counts["tokens"])

    def _speed(self, times: Any, c: float) -> Any:
        return _divided(times @ self.counts["tokens"], times @ self.seconds[c])

    def _rollback(self, times: Any) -> Any:
        return _divided(times @ self.counts["lost"], times @ self.counts["steps"])


def ratio(above: Array, below: Array) -> Estimate:
    """Of sums over prompts, with its 95 % interval; 0 where there is nothing below."""
    return bootstrap(lambda times: _divided(times @ above, times @ below), len(above))


def _divided(above: Any, below: Any) -> Any:
    above, below = np.asarray(above, dtype=np.float64), np.asarray(below, dtype=np.float64)
    return np.divide(above, below, out=np.zeros_like(above), where=below != 0)


def _counted(trace: Trace) -> list[float]:
    steps = [draft_steps(round_) for round_ in trace.rounds]
    lengths = accepted_lengths(trace)
    return [
        len(trace.tokens),
        len(trace.rounds),
        sum(drawn for drawn, _ in steps),
        sum(lost for _, lost in steps),
        sum(lengths),
        len(lengths),
    ]
