"""Plain decoding with the target alone: what every speed-up is measured against."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Annotated

from decoding.engines.request import Engine, RequestState, prefill
from decoding.interfaces import LM, Pair
from decoding.sampling import Sampler, Warp
from decoding.trace import RoundTrace


@dataclass(eq=False)
class AutoregressiveEngine(Engine):
    """One target call, one token."""

    pair: Pair
    warp: Annotated[Warp, "of the target"]
    eos_ids: frozenset[int] = frozenset()

    @contextmanager
    def session(
        self, request: RequestState, sampler: Sampler
    ) -> Iterator[Callable[[], RoundTrace]]:
        prefill(self.pair.target, request.committed)
        warp = self.warp.within(request.prompt, self.eos_ids)
        yield partial(plain_round, request, self.pair.target, warp, sampler)


def plain_round(request: RequestState, target: LM, warp: Warp, sampler: Sampler) -> RoundTrace:
    """Commit the next token of the target alone. warp: within the request."""
    watch = request.watch
    with watch.stage("target"):
        logits = target.forward(request.committed[-1:]).logits[-1]
    with watch.stage("sample"):
        after = warp.after(lambda: request.committed)
        token = sampler.draw(after.probs(logits)).token
    return RoundTrace([], [], [], 0, 0, request.commit([token]), [], 0, watch.lap())
