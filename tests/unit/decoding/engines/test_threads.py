"""Streams of workers: what a job gives is finished, and it begins after what was asked for; and
threads of theirs that an interrupt leaves behind."""

from contextlib import nullcontext
from threading import Event, Thread
from types import SimpleNamespace

import pytest
import torch

from decoding.engines.threads import Workers


class Stream:
    """Writes down what is asked of it."""

    def __init__(self, device: torch.device, said: list[str]) -> None:
        self.device, self.said = device, said

    def wait_stream(self, other: str) -> None:
        self.said.append(f"waits for {other}")

    def synchronize(self) -> None:
        self.said.append("is finished")


def test_jobs_exchange_finished_values_only(monkeypatch: pytest.MonkeyPatch) -> None:
    said = list[str]()
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream(device, said))
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"the asking one of {device}")
    lm = SimpleNamespace(device=torch.device("cuda:0"), length=0)
    host = SimpleNamespace(device=torch.device("cpu"), length=0)
    with Workers(lm, host, 0.0, overlap=True) as workers:
        workers.target.submit("job", lambda: said.append("runs")).result()
        workers.draft.submit("job", lambda: said.append("runs on the host")).result()
    assert said == [
        "waits for the asking one of cuda:0", "runs", "is finished", "runs on the host"
    ]  # fmt: skip


def test_a_thread_whose_start_was_interrupted_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The pool forgets it."""
    start, begun, goes_on = Thread.start, Event(), Event()

    def interrupted(thread: Thread) -> None:
        start(thread)
        assert begun.wait(5)
        raise KeyboardInterrupt

    def job() -> None:
        begun.set()
        assert goes_on.wait(5)

    lm = SimpleNamespace(device=torch.device("cpu"), length=0)
    workers = Workers(lm, lm, 0.0, overlap=True)
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt), workers:
        patched.setattr(Thread, "start", interrupted)
        workers.draft.submit("job", job)
    joining = Thread(target=workers.join)
    joining.start()
    joining.join(0.2)
    assert joining.is_alive(), "the job still runs"
    goes_on.set()
    joining.join(5)
    assert not joining.is_alive()
