"""Requests side by side: what they ask of a model is run in one call.

Each request is decoded by the code that decodes one alone, in a greenlet of its own, all in one
thread. What it asks of a network waits until every request waits; then the first network that
anybody waits for, in the order given, runs all that it was asked in one call: weights are read
once. With the draft before the target, requests that still draft do so together, and one call of
the target verifies them all. What they send to a device, or want from one, crosses before that in
one copy (`sent`, `brought`), so the host waits as often as for one of them."""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from greenlet import getcurrent, greenlet
from torch import Tensor

T = TypeVar("T")
ROWS = -1  # served before any network


class _Task(greenlet):
    asking: dict[Any, Any]  # those that run side by side with it


def at_once(rows: Tensor, key: Hashable, run: Callable[[Tensor], Any]) -> Any:
    """Return what `run` makes of rows [n, ...]: for each something, in order. Of tasks side by
    side, rows of one key go through the `run` of one of them."""
    here = getcurrent()
    if isinstance(here, _Task) and here in here.asking:
        return here.parent.switch((ROWS, (rows, key, run)))
    return run(rows)


def brought(x: Tensor) -> list[Any]:
    """Return the numbers of x [n]."""
    if x.device.type == "cpu":
        return x.tolist()
    return at_once(x, ("brought", x.dtype, x.device), Tensor.tolist)


def sent(x: Tensor, device: torch.device) -> Tensor:
    """Return x on a device."""
    if x.device == device or x.device.type != "cpu":
        return x.to(device)
    return at_once(x.flatten(), ("sent", x.dtype, device), lambda all_: all_.to(device)).view(
        x.shape
    )


def _run_at_once(calls: Sequence[tuple[Tensor, Hashable, Callable[[Tensor], Any]]]) -> list[Any]:
    """Do several calls of `at_once`."""
    alike = defaultdict[Hashable, list[int]](list)
    for number, (_, key, _) in enumerate(calls):
        alike[key].append(number)
    results: list[Any] = [None] * len(calls)
    for numbers in alike.values():
        parts, end = [calls[number][0] for number in numbers], 0
        found = calls[numbers[0]][2](torch.cat(parts))
        for number, part in zip(numbers, parts, strict=True):
            first, end = end, end + len(part)
            results[number] = found[first:end]
    return results


class _Joined:
    """One of the networks, whose calls by running tasks meet. exact: as the network has it."""

    def __init__(self, together: "Together", which: int) -> None:
        self._together, self._which = together, which

    def __call__(self, *call: Any) -> Any:
        return self._together.ask(self._which, call)

    @property
    def exact(self) -> bool:
        return getattr(self._together.networks[self._which], "exact", False)


class Together:
    """Runs tasks side by side. networks: functions that their calls meet in, first served first;
    one with a method `together` gets the arguments of all calls at once."""

    def __init__(self, *networks: Any) -> None:
        self.networks = networks
        self._asking = dict[greenlet, tuple[int, int, Sequence[Any]]]()  # task, network, call

    def joined(self, which: int) -> Any:
        """Return one of the networks, whose calls by running tasks meet."""
        return _Joined(self, which)

    def ask(self, which: int, call: Sequence[Any]) -> Any:
        """Return what a network makes of a call."""
        here = getcurrent()
        if here not in self._asking:
            return self.networks[which](*call)
        return here.parent.switch((which, call))

    def run(self, tasks: Iterable[Callable[[], T] | None], most: int) -> Iterator[tuple[int, T]]:
        """Yield the number of each task and what it returns, as they end; at most `most` run at
        once, and the next begins where one ends. None among them: at this step no other task is
        there yet. Raises what one of them raises, and ends them all."""
        assert not self._asking, "one run at a time"
        waiting, number, more, done = iter(tasks), 0, most > 0, object()
        try:
            while True:
                ended = list[tuple[int, T]]()
                with torch.inference_mode():  # which the tasks are in, whoever of them ends first
                    while more and len(self._asking) < most:
                        task = next(waiting, done)
                        more = task is not done
                        if task is None or task is done:
                            break
                        each = _Task(task)
                        each.asking = self._asking
                        self._resume(each, number, ended)
                        number += 1
                    if self._asking:
                        self._answer(ended)
                yield from ended
                if not (self._asking or more):
                    return
        finally:
            left = list(self._asking)
            self._asking.clear()
            with torch.inference_mode():  # as above, for they leave theirs
                for each in left:
                    each.parent = getcurrent()
                    each.throw()

    def _resume(self, each: greenlet, number: int, ended: list[Any], *given: Any) -> None:
        """Let a task go on until it asks, or ends."""
        self._asking[each] = number, 0, ()
        each.parent = getcurrent()
        try:
            asked = each.switch(*given)
        finally:
            if each.dead:
                del self._asking[each]
        if each.dead:
            ended.append((number, asked))
        else:
            self._asking[each] = number, *asked

    def _answer(self, ended: list[Any]) -> None:
        """Run what the first network was asked, and let those who asked go on."""
        first = min(which for _, which, _ in self._asking.values())
        turn = [
            (each, n, call) for each, (n, which, call) in self._asking.items() if which == first
        ]
        calls: list[Any] = [call for *_, call in turn]
        if first < 0:
            results = _run_at_once(calls)
        else:
            network = self.networks[first]
            at_once: Any = getattr(network, "together", None)
            results = at_once(calls) if at_once else [network(*call) for call in calls]
        for (each, number, _), result in zip(turn, results, strict=True):
            self._resume(each, number, ended, result)
