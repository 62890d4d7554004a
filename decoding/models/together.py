"""Forwards of several requests as one.

Each request is decoded by a thread of its own, with the code that decodes one alone. What they ask
of a model meets in a `Together`, which runs it in one call as soon as every thread that takes part
has asked for something or has ended: weights are read once for all of them."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from threading import Condition
from typing import Any, TypeVar

import torch

from decoding.interfaces import RowsWanted
from decoding.models.cpu_llama import LlamaForward
from decoding.models.forward import Call, Forward, Result, Rows
from decoding.models.kv_cache import BufferCache

T = TypeVar("T")


class Together:
    """A `Forward` for the threads of a `run`; outside of one, that of the model."""

    def __init__(self, network: Forward) -> None:
        self.network = network
        self._turn = Condition()
        self._running = 0  # threads that have not ended
        self._threads: ThreadPoolExecutor | None = None
        self._most = 0  # threads of it
        self._asked: list[tuple[Call, list[Any]]] = []

    def __call__(
        self, rows: Rows, cache: BufferCache, hidden: Sequence[int] = (), logits: RowsWanted = "all"
    ) -> Result:
        """See `Forward`."""
        call, answer = Call(rows, cache, hidden, logits), list[Any]()
        if not self._running:
            return self.network(*call)
        with self._turn:
            self._asked.append((call, answer))
            self._answer()
            self._turn.wait_for(lambda: answer)
        if isinstance(answer[0], BaseException):
            raise answer[0]
        result: Result = answer[0]
        return result

    def run(self, tasks: Sequence[Callable[[], T]]) -> list[T]:
        """Return what the tasks return, each done by a thread of its own. Raises what the first
        of them raises, when all have ended."""
        if len(tasks) < 2:
            return [task() for task in tasks]
        assert not self._running, "one run at a time"
        if self._threads is None or len(tasks) > self._most:  # kept: to start them takes time
            self._most = len(tasks)
            self._threads = ThreadPoolExecutor(self._most)
        self._running = len(tasks)
        done = [self._threads.submit(self._ended_by, task) for task in tasks]
        wait(done)
        return [each.result() for each in done]

    def _ended_by(self, task: Callable[[], T]) -> T:
        try:
            return task()
        finally:
            with self._turn:
                self._running -= 1
                self._answer()

    def _answer(self) -> None:
        """Run what was asked, once everybody waits."""
        if not self._asked or len(self._asked) < self._running:
            return
        asked, self._asked = self._asked, []
        calls = [call for call, _ in asked]
        try:
            with torch.no_grad():  # a thread that ended has left its own
                if isinstance(self.network, LlamaForward):
                    results: Sequence[Any] = self.network.together(calls)
                else:
                    results = [self.network(*call) for call in calls]
        except BaseException as error:
            results = [error] * len(calls)
        for (_, answer), result in zip(asked, results, strict=True):
            answer.append(result)
        self._turn.notify_all()
