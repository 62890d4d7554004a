"""Many requests at once: each is decoded by a copy of an engine, and their forwards are one."""

from collections.abc import Iterable, Iterator
from copy import copy, deepcopy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from decoding.engines.autoregressive import AutoregressiveEngine
from decoding.engines.request import Ends, Prompt, alone
from decoding.engines.serial import SerialEngine
from decoding.interfaces import Pair
from decoding.sampling import Sampler
from decoding.stopping.shared import Shared
from decoding.together import Together
from decoding.trace import Trace
from runtime.errors import UserError

DRAFT, BUDGET, TARGET = 0, 1, 2  # served in this order: the target when nobody drafts any more
Decoder = SerialEngine | AutoregressiveEngine


@dataclass(frozen=True)
class Asked:
    """A request: the arguments of `Engine.decode`. kept: only for one request at a time."""

    prompt_ids: Prompt
    max_new_tokens: int
    sampler: Sampler
    ends: Ends | None = None
    kept: int = 0


class BatchedEngine:
    """Decodes up to `size` requests at once, each as `engine` would decode it alone: with caches, a
    stop rule and random numbers of its own, a draft as long as its rule says, and a verdict of its
    own.

    Every round the drafts of all requests that still draft advance in one forward, and one call of
    the target verifies them all, ragged. A request that ends makes room for the next. The
    distribution of each output is that of `engine`; where rows are equal to the bit however they
    come (the forward in C++), so are outputs."""

    def __init__(self, engine: Any, size: int) -> None:
        """Raises UserError for an engine whose requests cannot be decoded so."""
        if not isinstance(engine, Decoder):
            raise UserError(
                f"batch: expected an engine that drafts and verifies in turn, got"
                f" {type(engine).__name__}. Use engine=serial, or leave batch away"
            )
        models: Any = engine.pair
        self.size, self._models = size, (models.target, models.draft)
        stop = getattr(engine, "stop", None)
        budget = stop.budget if isinstance(stop, Shared) else None
        if isinstance(getattr(stop, "rule", None), Shared):
            raise UserError(
                "stop.rule: expected a rule of one request, got Shared. Use stop=shared alone"
            )
        if budget is not None:
            budget.refuse_more(size, getattr(engine, "structure", None))
        self._together = Together(models.draft.network, budget, models.target.network)
        self._engines = [self._copied(engine) for _ in range(size)]

    def decode(
        self, requests: Iterable[Asked | None], at_once: int | None = None
    ) -> Iterator[tuple[int, Trace]]:
        """Yield the number of each request and its trace, as they end. None among the requests: by
        this round no other has come yet. at_once: most that run at a time, if fewer than
        `size`."""
        free = list(self._engines)

        def decoded(request: Asked) -> Trace:
            engine = free.pop()
            try:
                return engine.decode(
                    request.prompt_ids, request.max_new_tokens, request.sampler, request.ends
                )
            finally:
                free.append(engine)

        tasks = (None if each is None else partial(decoded, each) for each in requests)
        with alone(self._models):
            yield from self._together.run(tasks, min(self.size, at_once or self.size))

    def _copied(self, engine: Decoder) -> Decoder:
        """Return the engine with models and parts of its own; weights are shared."""
        models: Any = engine.pair
        target = models.target.fresh()
        draft = models.draft.fresh(target)
        draft.network, target.network = map(self._together.joined, (DRAFT, TARGET))
        pair: Pair = copy(models)
        vars(pair).update(target=target, draft=draft)
        if isinstance(engine, AutoregressiveEngine):
            return replace(engine, pair=pair)
        shared = [getattr(part, "predictor", None) for part in (engine.stop, engine.structure)]
        shared += [getattr(engine.stop, "budget", None)]
        known = {id(each): each for each in shared}
        parts = {
            name: deepcopy(getattr(engine, name), known)
            for name in ("structure", "stop", "verifier")
        }
        if isinstance(parts["stop"], Shared):
            parts["stop"].ask = self._together.joined(BUDGET)
        return replace(engine, pair=pair, **parts)
