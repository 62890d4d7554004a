"""One damage after another, for as long as is asked, and no case longer than it may take."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import pytest

LONGEST = 60.0  # seconds of one case: more is taken for a hang


def for_as_long_as_asked(
    what: str, reads: Callable[[int], bool], capsys: pytest.CaptureFixture[str]
) -> None:
    """Try damage -1, -2, ... until FUZZ_SECONDS are over. reads: whether something came out after
    that damage; some of it has to, and not all. An error says which damage led to it."""
    ends, seed, read = time.monotonic() + float(os.environ.get("FUZZ_SECONDS", "20")), 0, 0
    while time.monotonic() < ends:
        seed -= 1
        try:
            with no_hang():
                read += reads(seed)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
    with capsys.disabled():
        print(f"\n{-seed} damaged {what}, {read} of them read")
    assert 0 < read < -seed


@contextmanager
def no_hang() -> Iterator[None]:
    before = signal.signal(signal.SIGALRM, _stop)
    signal.setitimer(signal.ITIMER_REAL, LONGEST)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _stop(number: int, frame: FrameType | None) -> None:
    raise AssertionError(f"still at work after {LONGEST:.0f} s")
