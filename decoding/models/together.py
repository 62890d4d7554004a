"""Requests side by side: what they ask of a model is run in one call.

Each request is decoded by the code that decodes one alone, in a greenlet of its own, all in one
thread. What it asks of a network waits until every request waits; then the first network that
anybody waits for, in the order given, runs all that it was asked in one call: weights are read
once. With the draft before the target, requests that still draft do so together, and one call of
the target verifies them all."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from greenlet import getcurrent, greenlet

T = TypeVar("T")


class Together:
    """Runs tasks side by side. networks: functions that their calls meet in, first served first;
    one with a method `together` gets the arguments of all calls at once."""

    def __init__(self, *networks: Any) -> None:
        self._networks = networks
        self._asking = dict[greenlet, tuple[int, int, Sequence[Any]]]()  # task, network, call

    def joined(self, which: int) -> Any:
        """Return one of the networks, whose calls by running tasks meet."""
        return lambda *call: self._ask(which, call)

    def _ask(self, which: int, call: Sequence[Any]) -> Any:
        """Return what a network makes of a call."""
        here = getcurrent()
        if here not in self._asking:
            return self._networks[which](*call)
        return here.parent.switch((which, call))

    def run(self, tasks: Iterable[Callable[[], T]], most: int) -> Iterator[tuple[int, T]]:
        """Yield the number of each task and what it returns, as they end; at most `most` run at
        once, and the next begins where one ends. Raises what one of them raises, and ends them
        all."""
        assert not self._asking, "one run at a time"
        waiting = enumerate(tasks)
        try:
            while True:
                ended = list[tuple[int, T]]()
                with torch.inference_mode():  # which the tasks are in, whoever of them ends first
                    while len(self._asking) < most and (new := next(waiting, None)):
                        self._resume(greenlet(new[1]), new[0], ended)
                    if self._asking:
                        self._answer(ended)
                yield from ended
                if not self._asking and not ended:
                    return
        finally:
            left, self._asking = self._asking, {}
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
        network, calls = self._networks[first], [call for *_, call in turn]
        at_once: Any = getattr(network, "together", None)
        results = at_once(calls) if at_once else [network(*call) for call in calls]
        for (each, number, _), result in zip(turn, results, strict=True):
            self._resume(each, number, ended, result)
