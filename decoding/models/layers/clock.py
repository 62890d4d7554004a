"""How long forwards take, without waiting for them."""

import functools
import time
from typing import Any

import torch


class Clock:
    """Seconds spent inside `with clock:`. On a GPU the host goes on meanwhile: it waits when the
    seconds are read, and not before."""

    def __init__(self, device: torch.device) -> None:
        self._stream = (
            functools.partial(torch.cuda.current_stream, device) if device.type == "cuda" else None
        )
        self.reset()

    def reset(self) -> None:
        self._seconds = 0.0
        self._open: list[Any] = []  # pairs of events that the GPU may not have come to

    def __enter__(self) -> None:
        self._start = self._mark()

    def __exit__(self, *_: object) -> None:
        if self._stream is None:
            self._seconds += self._mark() - self._start
        else:
            self._open.append((self._start, self._mark()))

    @property
    def seconds(self) -> float:
        for start, end in self._open:
            end.synchronize()
            self._seconds += start.elapsed_time(end) / 1000
        self._open.clear()
        return self._seconds

    def _mark(self) -> Any:
        """Now: seconds on the host, an event in the stream of a GPU."""
        if self._stream is None:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._stream())
        return event
