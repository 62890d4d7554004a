"""Processes that do the tasks of a job: this one, or actors of Ray on this machine or on a cluster.

A job is a state that every process makes for itself once (its models) and tasks that are done with
it. What a task returns depends on the task alone, so it does not matter who does it."""

import logging
import os
import socket
import sys
from abc import abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol, TypeVar

from runtime.errors import UserError
from runtime.settings.kinds import Count, Size, Text

ROOT = Path(__file__).parents[1]
MEMORY_TRIES = 2  # of a task for which memory has not sufficed
PATIENCE = 60.0  # seconds until a worker that does not start is named

Task = TypeVar("Task")
Result = TypeVar("Result")


class Team(Protocol):
    """The processes of a job, each with its state. remote: whether they are others."""

    remote: bool

    def map(
        self, do: Callable[[Any, Task], Result], tasks: Iterable[Task]
    ) -> Iterator[tuple[Task, Result | None]]:
        """Yield each task with what `do(state, task)` has returned, in the order of their ends;
        None for a task that was left out. Raises UserError where one fails."""
        ...


class Workers(Protocol):
    """Processes that can be started. remote: whether they are others; count: of them."""

    remote: bool
    count: int

    @abstractmethod
    def team(self, make: Callable[[], Any]) -> AbstractContextManager[Team]:
        """Start them, let each make its state, and end them with the block. Raises UserError where
        that cannot be."""

    def all(
        self, make: Callable[[], Any], do: Callable[[Any, Task], Result], tasks: Sequence[Task]
    ) -> Iterator[tuple[Task, Result]]:
        """Yield what a team makes of all tasks; start none where there are none. Raises UserError
        where one was left out."""
        if not tasks:
            return
        with self.team(make) as team:
            yield from whole(team.map(do, tasks))


def whole(results: Iterable[tuple[Task, Result | None]]) -> Iterator[tuple[Task, Result]]:
    """Yield the results of a team. Raises UserError where a task was left out."""
    for task, result in results:
        if result is None:
            raise UserError(
                "workers.lost: a task was left out, and the results want all. Run the same command"
                " again, with workers.lost=stop"
            )
        yield task, result


class Local(Workers):
    """One process: this one, which does tasks in their order."""

    remote, count = False, 1

    @contextmanager
    def team(self, make: Callable[[], Any]) -> Iterator[Team]:
        """See `Workers`."""
        yield _Alone(make())


class _Alone:
    remote = False

    def __init__(self, state: Any) -> None:
        self._state = state

    def map(
        self, do: Callable[[Any, Task], Result], tasks: Iterable[Task]
    ) -> Iterator[tuple[Task, Result]]:
        return ((task, do(self._state, task)) for task in tasks)


LOCAL = Local()


class Ray(Workers):
    """Actors of Ray. One that dies is started again, its task is done by another."""

    remote = True

    def __init__(
        self,
        count: Annotated[Count, "processes"],
        gpus: Annotated[Size, "GPUs of each; it sees no others"],
        cpus: Annotated[
            Count | None,
            "cores of each, which are its threads (another number of threads may round otherwise);"
            " null: an equal share of all",
        ],
        address: Annotated[
            Text | None,
            "of a cluster that is there: auto, or the head's host:port; null: one on this machine",
        ],
        retries: Annotated[Count, "of a task whose process has died"],
        lost: Annotated[
            Literal["stop", "skip"],
            "what happens with a task that fails again for want of memory, or after all retries:"
            " the job ends, or goes on without it",
        ],
    ) -> None:
        self.count, self.gpus, self.cpus, self.address = count, gpus, cpus, address
        self.retries, self.lost = retries, lost

    @contextmanager
    def team(self, make: Callable[[], Any]) -> Iterator[Team]:
        """See `Workers`: where there is no Ray, no cluster, or not what was asked for."""
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is sent to anybody
        try:
            import ray
        except ImportError as error:
            raise UserError(
                "workers: Ray is not installed. Install it: pip install 'draftpredict[ray]'"
            ) from error
        cores = os.cpu_count() or 1
        options: dict[str, Any] = {"address": self.address}
        if self.address is None:
            most = max(cores, round(self.count * (self.cpus or 1)))
            options = {"address": "local", "num_cpus": most, "include_dashboard": False}
        elif self.address != "auto":
            _refuse_silent(self.address)
        paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        try:
            ray.init(
                **options,
                runtime_env={"env_vars": {"PYTHONPATH": paths}},
                logging_level=logging.ERROR,
                log_to_driver=False,
            )
        except (ConnectionError, RuntimeError, ValueError) as error:
            if self.address is None:
                raise UserError(
                    f"workers: Ray does not start here ({_first_line(error)}). Mend what it names"
                ) from error
            raise _silent(self.address, error) from error
        try:
            yield _Actors(ray, self, make)
        finally:
            ray.shutdown()


class _Actors:
    """Running actors. Those whose state is not made yet have no task."""

    remote = True

    def __init__(self, ray: Any, workers: Ray, make: Callable[[], Any]) -> None:
        self._ray, self._workers, self._make = ray, workers, ray.put(make)
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        gpus, cpus = ([node.get(name, 0.0) for node in nodes] for name in ("GPU", "CPU"))
        sizes = range(1, int(max(cpus)) + 1)
        share = max(sizes, key=lambda each: (self._fits(cpus, each), each), default=1)
        self._needs = {"num_gpus": workers.gpus, "num_cpus": workers.cpus or share}
        for key, there in (("gpus", gpus), ("cpus", cpus)):
            self._refuse_more(key, there)
        self._class = ray.remote(**self._needs)(_Actor)
        self._starting, self._idle, self._unmade = dict[Any, Any](), list[Any](), 0
        for _ in range(workers.count):
            self._start()

    def _fits(self, there: list[float], each: float) -> bool:
        """Return whether nodes that have so much each have room for all workers."""
        return not each or sum(int(have // each) for have in there) >= self._workers.count

    def _refuse_more(self, key: str, there: list[float]) -> None:
        each = self._needs[f"num_{key}"]
        if not self._fits(there, each):
            raise UserError(
                f"workers.{key}: expected {key.upper()[:-1]}s that there are, got"
                f" {self._workers.count} processes with {each:g} each, on nodes with"
                f" {', '.join(f'{have:g}' for have in there)}. Lower workers.count or workers.{key}"
            )

    def _start(self) -> None:
        actor = self._class.remote()
        self._starting[actor.make.remote(self._make)] = actor

    def map(
        self, do: Callable[[Any, Task], Result], tasks: Iterable[Task]
    ) -> Iterator[tuple[Task, Result | None]]:
        """See `Team`."""
        waiting, busy, tries = deque(tasks), dict[Any, tuple[Any, Task]](), Counter[Task]()
        sent = self._ray.put(do)
        while waiting or busy:
            while waiting and self._idle:
                actor, task = self._idle.pop(), waiting.popleft()
                busy[actor.do.remote(sent, task)] = actor, task
            done, _ = self._ray.wait([*busy, *self._starting], timeout=PATIENCE)
            if not (done or busy):
                print(
                    "note: no worker has started yet. Ray waits for"
                    f" {self._needs['num_gpus']:g} GPUs and {self._needs['num_cpus']:g} cores",
                    file=sys.stderr,
                )
            for reference in done:
                if reference in self._starting:
                    self._idle += self._started(reference)
                    continue
                actor, task = busy.pop(reference)
                result, why, dead = self._result(reference)
                self._idle += [] if dead else [actor]
                if dead:
                    self._start()
                if why is None:
                    yield task, result
                elif self._again(task, why, tries):
                    waiting.append(task)
                else:
                    yield task, None

    def _started(self, reference: Any) -> list[Any]:
        """Return the actor whose state is made, if it is. Raises UserError for one that cannot
        make it, again and again."""
        actor = self._starting.pop(reference)
        _, why, dead = self._result(reference)
        if why is None:
            return [actor]
        self._unmade += 1
        if not dead or self._unmade > self._workers.retries:
            raise UserError(f"workers: none could load its models ({why}). Mend what it names")
        self._start()
        return []

    def _result(self, reference: Any) -> tuple[Any, str | None, bool]:
        """Return what a task has returned, else why it was lost, and whether its process was."""
        errors = self._ray.exceptions
        try:
            return self._ray.get(reference), None, False
        except errors.RayTaskError as error:
            if isinstance(error.cause, UserError):
                raise error.cause from None
            if type(error.cause).__name__ not in ("MemoryError", "OutOfMemoryError"):
                raise
            return None, f"out of memory: {_first_line(error.cause)}", False
        except errors.OutOfDiskError as error:
            raise UserError(
                f"workers: a disk is full ({_first_line(error)}). Make room, and run the same"
                " command again"
            ) from error
        except errors.OutOfMemoryError as error:
            return None, f"out of memory: {_first_line(error)}", True
        except (errors.RayActorError, errors.ObjectLostError, errors.NodeDiedError) as error:
            text = str(error)
            memory = "out of memory: " if "low on memory" in text else ""  # Ray's own monitor
            return None, f"{memory}{_first_line(error)}", True

    def _again(self, task: Any, why: str, tries: Counter[Any]) -> bool:
        """Return whether a lost task is tried again. Raises UserError where it ends the job."""
        tries[task] += 1
        most = MEMORY_TRIES if why.startswith("out of memory") else self._workers.retries + 1
        if tries[task] < most:
            print(f"note: a worker was lost ({why}); its task is done again", file=sys.stderr)
            return True
        count = f"{tries[task]} tries"
        if self._workers.lost == "skip":
            print(f"warning: task {task} is left out after {count} ({why})", file=sys.stderr)
            return False
        raise UserError(
            f"workers: task {task} was lost after {count} ({why}). Lower batch_size or label_gb, or"
            " leave out such tasks: workers.lost=skip"
        )


class _Actor:
    """What Ray runs in a process of its own."""

    def make(self, make: Callable[[], Any]) -> None:
        self._state = make()

    def do(self, do: Callable[[Any, Any], Any], task: Any) -> Any:
        return do(self._state, task)


def _refuse_silent(address: str) -> None:
    """Raise UserError for an address at which nobody listens: Ray would wait for minutes."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except (OSError, ValueError) as error:
        raise _silent(address, error) from error


def _silent(address: str, error: Exception) -> UserError:
    return UserError(
        f"workers.address: no cluster of Ray answers at {address} ({_first_line(error)}). Start"
        " one, or leave it away; what `ray start` has begun may want RAY_AUTH_MODE=token here"
    )


def _first_line(error: BaseException) -> str:
    """Return what an error says, short; of an actor that died, where and why."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    where = [line for line in lines if line.startswith(("ip:", "pid:"))]
    return " ".join([lines[0] if lines else type(error).__name__, *where])[:200]
