"""vLLM in an environment of its own, as a process that answers (`runtime.vllm_worker`)."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from runtime.errors import UserError

ROOT = Path(__file__).parents[1]
ENVIRONMENT = ".vllm/bin/python"  # of `make vllm`
EXTENSION = {"worker_extension_cls": "runtime.vllm_kernels.Extension"}


class Worker:
    """A running vLLM, which ends with this object."""

    def __init__(self, python: str | Path, key: str, threads: int, **arguments: Any) -> None:
        """key: of the config, for errors; threads: at most, on a CPU; arguments: of `vllm.LLM`.
        Raises UserError with vLLM's own words where it does not start."""
        program, self._key = Path(python).expanduser().absolute(), key
        if not program.is_file():
            raise UserError(f"{key}.python: {python} is not there. Bring it: make vllm")
        self._log = tempfile.NamedTemporaryFile(mode="w+b")
        processors = sorted(os.sched_getaffinity(0))[:threads]
        self._process = subprocess.Popen(
            [program, "-m", "runtime.vllm_worker", json.dumps(EXTENSION | arguments)],
            cwd=ROOT,
            env={
                "VLLM_CPU_KVCACHE_SPACE": "2",
                "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, processors)),
                "VLLM_LOGGING_LEVEL": "WARNING",
                "HF_HUB_OFFLINE": "1",
                **os.environ,
                "PYTHONPATH": str(ROOT),
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            process_group=0,  # in our session: if we are killed, a stopped one is ended by SIGHUP
        )
        self.end = weakref.finalize(self, _ended, self._process, self._log)
        print("note: vLLM starts, which takes a minute or two", file=sys.stderr)
        self._read()

    def ask(
        self,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        at_once: int | None = None,
        **sampling: Any,
    ) -> dict[str, Any]:
        """Return what became of these prompts. at_once: most that are decoded at a time, the next
        as one ends; None: what vLLM decides. sampling: of `SamplingParams`."""
        assert self._process.stdin is not None
        asked: dict[str, Any] = {"prompts": [list(prompt) for prompt in prompts], **sampling}
        asked |= {"seeds": list(seeds), "at_once": at_once}
        with suppress(ProcessLookupError, BrokenPipeError):  # it has ended: `_read` says so
            os.killpg(self._process.pid, signal.SIGCONT)
            print(json.dumps(asked), file=self._process.stdin, flush=True)
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        answer: dict[str, Any] = json.loads(line) if line else {"error": self._last_words()}
        if self._process.poll() is None:  # an idle one would take the time of others
            os.killpg(self._process.pid, signal.SIGSTOP)
        if "error" in answer:
            said = " ".join(answer["error"].split())[:300]  # on one line
            raise UserError(f"{self._key}: vLLM failed ({said}). Mend what it names")
        return answer

    def _last_words(self) -> str:
        lines = Path(self._log.name).read_text(errors="replace").splitlines()
        errors = [line for line in lines if "Error: " in line and "root cause" not in line]
        return (errors or lines or ["without a word"])[-1].strip()


def _ended(process: subprocess.Popen[str], log: IO[bytes]) -> None:
    """End a worker and what it has started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for stream in (process.stdin, process.stdout, log):
        if stream is not None:
            with suppress(BrokenPipeError):  # a question that it has not read
                stream.close()
