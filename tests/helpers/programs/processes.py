"""Processes for tests: forked, so that none of them has to import anything, and killed for real."""

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

LIMIT = 120.0  # seconds


@dataclass
class Child:
    """A forked process."""

    pid: int

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        """Its exit code; minus the signal that ended it. Raises AssertionError after two
        minutes."""
        end = time.monotonic() + LIMIT
        while time.monotonic() < end:
            done, status = os.waitpid(self.pid, os.WNOHANG)
            if done:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.005)
        self.kill()
        os.waitpid(self.pid, 0)
        raise AssertionError("the process did not end")


def forked(work: Callable[[], object]) -> Child:
    """Do `work` in a copy of this process: exit code 0, or 1 and a traceback."""
    sys.stdout.flush()
    sys.stderr.flush()
    if pid := os.fork():
        return Child(pid)
    code = 1
    try:
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def die() -> None:
    """As `kill -9` would end this process."""
    os.kill(os.getpid(), signal.SIGKILL)


def wait_for(folder: Path, pattern: str) -> None:
    """Until a file of that name is there."""
    while not list(folder.glob(pattern)):
        time.sleep(0.005)


def end(child: Child) -> None:
    child.kill()
    assert child.wait() == -signal.SIGKILL
