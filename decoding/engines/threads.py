"""Workers that run the models, each in its own thread or in the calling one."""

from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, CancelledError, Future, ThreadPoolExecutor, wait
from threading import Lock
from time import perf_counter
from types import TracebackType
from typing import Any, Literal, TypeVar

import torch

from decoding.interfaces import LM, Pair
from decoding.trace import Span
from runtime.errors import UserError

T = TypeVar("T")


class Worker:
    """Owns one model: its jobs run one after another, in the order they were given.

    threaded: on a thread of its own, with `threads` CPU threads for torch (None: as they are) and,
    on a GPU, a stream of its own; otherwise at once, in the caller's thread. Jobs exchange finished
    values only."""

    def __init__(
        self,
        name: Literal["target", "draft"],
        lm: LM,
        begin: float,
        threaded: bool,
        threads: int | None,
    ) -> None:
        self.name: Literal["target", "draft"] = name
        self.lm, self.begin = lm, begin
        self.spans: list[Span] = []
        self._stream: Any = None
        if threaded and lm.device.type == "cuda":
            self._stream = torch.cuda.Stream(lm.device)
        self._pool = ThreadPoolExecutor(1, name, _divide, (threads,)) if threaded else None
        self._working, self._over = Lock(), False

    def submit(self, job: str, run: Callable[..., T], *arguments: Any) -> Future[T]:
        if self._stream is not None:  # starts after the work queued by this thread
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        if self._pool:
            return self._pool.submit(self._timed, job, run, *arguments)
        done = Future[T]()
        done.set_result(self._timed(job, run, *arguments))
        return done

    def stop(self, wait: bool) -> None:
        if self._pool:
            self._pool.shutdown(wait=wait, cancel_futures=True)
        if wait:  # the pool misses a thread whose start was interrupted
            with self._working:
                self._over = True

    def _timed(self, job: str, run: Callable[..., T], *arguments: Any) -> T:
        before, start = self.lm.length, perf_counter()
        with self._working, torch.inference_mode(), torch.cuda.stream(self._stream):
            if self._over:
                raise CancelledError
            result = run(*arguments)
        if self._stream is not None:  # exchanged values must be finished
            self._stream.synchronize()
        tokens = self.lm.length - before
        if tokens > 0:
            self.spans.append(
                Span(self.name, job, start - self.begin, perf_counter() - self.begin, tokens)
            )
        return result


class Workers:
    """One worker per model for the time of one request; none of their threads outlives it.

    Only an interrupt does not wait for the forwards in progress: `join` does, before the models are
    used again. draft_threads: number of torch's CPU threads for the draft; the target gets the
    others, the calling thread one. None: all threads for each."""

    def __init__(
        self, target: LM, draft: LM, begin: float, overlap: bool, draft_threads: int | None = None
    ) -> None:
        self._threads = torch.get_num_threads()
        ours = None if draft_threads is None else max(1, self._threads - draft_threads)
        self.target = Worker("target", target, begin, overlap, ours)
        self.draft = Worker("draft", draft, begin, overlap, draft_threads)
        self._divided = overlap and draft_threads is not None

    def __enter__(self) -> "Workers":
        if self._divided:  # idle helpers of the asking thread would spin on the workers' cores
            _divide(1)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for worker in (self.target, self.draft):
            worker.stop(wait=kind is None or issubclass(kind, Exception))
        if self._divided:
            torch.set_num_threads(self._threads)

    def spans(self) -> list[Span]:
        """Return the spans of all jobs since the last call, by their start. Call it while both are
        idle."""
        spans = sorted([*self.target.spans, *self.draft.spans], key=lambda span: span.start)
        self.target.spans.clear()
        self.draft.spans.clear()
        return spans

    def join(self) -> None:
        self.target.stop(wait=True)
        self.draft.stop(wait=True)


def both(first: Future[Any], second: Future[T]) -> None:
    """Wait until both are done, or raise the error of one that failed, the first argument's before
    the second's."""
    done, _ = wait((first, second), return_when=FIRST_EXCEPTION)
    for future in (first, second):
        if future in done:
            future.result()


def _divide(threads: int | None) -> None:
    """Give the calling thread `threads` of torch's threads. Reads the number first: otherwise the
    thread takes over the process's number in its first operation, which undoes the setting."""
    if threads is not None:
        torch.get_num_threads()
        torch.set_num_threads(threads)


def threads_of_draft(
    pair: Pair, threads: int | None, key: str = "engine.draft_threads"
) -> int | None:
    """Return the draft's threads if both models are on the CPU, None elsewhere, where there is
    nothing to divide. key: config key named in errors."""
    for side, lm in (("target", pair.target), ("draft", pair.draft)):
        device = lm.device
        if device.type != "cpu" and threads is not None:
            raise UserError(
                f"{key}, pair.{side}_device: threads are divided between models on the CPU, and the"
                f" {side} is on {device}. Set {key}=null"
            )
        if device.type != "cpu":
            return None
    total = torch.get_num_threads()
    if threads is not None and threads >= max(2, total):
        raise UserError(
            f"{key}: {threads} leaves the target none of {total} threads. Lower it, or raise"
            " OMP_NUM_THREADS"
        )
    return threads or max(1, total // 4)
