"""Decode the same requests with several methods, interleaved so that drift of the machine hits all
of them alike."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from torch import Tensor

from data_gen.requests import Request
from decoding.sampling import Sampler
from decoding.trace import Trace
from evaluation import energy
from evaluation.journal import Journal

WARM_UP_TOKENS = 12


class Engine(Protocol):
    def decode(self, prompt_ids: Tensor, max_new_tokens: int, sampler: Sampler) -> Trace: ...


Traces = dict[str, list[list[Trace]]]
"""method -> repeat -> one trace per request, in the order of the requests."""


def warm_up(engines: Mapping[str, Engine], request: Request) -> None:
    """A few unmeasured tokens per method: first calls allocate buffers and start threads."""
    for engine in engines.values():
        engine.decode(request.tokens, WARM_UP_TOKENS, Sampler.seeded(0))


def run(
    engines: Mapping[str, Engine],
    requests: Sequence[Request],
    *,
    repeats: int,
    max_new_tokens: int,
    seed: int,
    advance: Callable[[Trace], None],
    journal: Journal,
    stage: str,
) -> Traces:
    """Every method decodes a request before the next one's turn; who goes first rotates. `advance`
    sees each trace.

    A request's seed depends on `seed`, its prompt and the repeat, not on the method. Turns that
    `journal` has from an earlier run of this `stage` are taken from there."""
    traces: Traces = {name: [[] for _ in range(repeats)] for name in engines}
    names = list(engines)
    for repeat in range(repeats):
        for index, request in enumerate(requests):
            key = f"{stage}/{repeat}/{index}"
            if key not in journal.turns:
                first = (repeat + index) % len(names)
                turn = {}
                for name in names[first:] + names[:first]:
                    turn[name] = _decode(
                        engines[name],
                        name,
                        request,
                        request_seed(seed, request, repeat),
                        max_new_tokens,
                    )
                    advance(turn[name])
                journal.add(key, turn)
            for name, trace in journal.turns[key].items():
                traces[name][repeat].append(trace)
    return traces


def request_seed(seed: int, request: Request, repeat: int) -> int:
    digest = hashlib.sha256(
        f"{seed}/{repeat}/{request.dataset}/{request.prompt_id}".encode()
    ).digest()
    return int.from_bytes(digest[:4], "big")


def _decode(engine: Engine, name: str, request: Request, seed: int, max_new_tokens: int) -> Trace:
    meter = energy.meter()
    before = meter.read()
    trace = engine.decode(request.tokens, max_new_tokens, Sampler.seeded(seed))
    trace.joules = meter.since(before)
    trace.prompt_id, trace.dataset, trace.method, trace.seed = (
        request.prompt_id,
        request.dataset,
        name,
        seed,
    )
    return trace


def of_dataset(traces: Sequence[Sequence[Trace]], dataset: str) -> list[list[Trace]]:
    return [[trace for trace in repeat if trace.dataset == dataset] for repeat in traces]
