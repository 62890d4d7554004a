"""Decode the same requests with several methods, in turns, so that drift of the machine hits all of
them alike."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Protocol, runtime_checkable

from torch import Tensor
from tqdm import tqdm

from data_gen.requests import Request
from decoding.sampling import Sampler
from decoding.trace import Trace
from evaluation import energy
from evaluation.journal import Journal

WARM_UP_TOKENS = 12


@runtime_checkable
class Engine(Protocol):
    """Decodes a request. Two attributes are optional: `records_drafts` is False where traces do not
    say what was drafted; `make_ready(prompts, max_new_tokens)` is called before anything is timed
    and returns None, or in a line why the engine cannot run here."""

    def decode(self, prompt_ids: Tensor, max_new_tokens: int, sampler: Sampler) -> Trace: ...


@dataclass(frozen=True)
class Plan:
    """How often each request is decoded, how far, and from which seed."""

    repeats: int
    max_new_tokens: int
    seed: int


Traces = dict[str, list[Trace]]
"""method -> one trace per request, in the order of the requests, of one repeat after the other."""


def warm_up(engines: Mapping[str, Engine], request: Request) -> None:
    """Decode a few unmeasured tokens with each method: first calls allocate buffers and start
    threads."""
    for engine in engines.values():
        engine.decode(request.tokens, WARM_UP_TOKENS, Sampler.seeded(0))


def make_ready(
    engines: Mapping[str, Engine], requests: Sequence[Request], max_new_tokens: int
) -> dict[str, str]:
    """Let every engine that has to be made ready be so. Returns those that cannot run here, and
    why."""
    left_out, prompts = {}, [request.tokens for request in requests]
    for name, engine in engines.items():
        if (ready := getattr(engine, "make_ready", None)) is None:
            continue
        print(f"{name}: compiling, which takes a minute or so and is not timed", flush=True)
        if why := ready(prompts, max_new_tokens):
            left_out[name] = why
            print(
                f"{name}: left out, it does not compile here ({why}). Install a C++ compiler such"
                " as g++"
            )
    return left_out


def run(
    engines: Mapping[str, Engine],
    requests: Sequence[Request],
    plan: Plan,
    journal: Journal[Trace],
    stage: str,
    advance: Callable[[Trace], None],
) -> Traces:
    """Let every method decode a request before the next one's turn; who goes first rotates.
    `advance` sees each trace.

    A request's seed depends on the plan's, its prompt and the repeat, not on the method. Turns that
    `journal` has from an earlier run of this `stage` are taken from there."""
    traces: Traces = {name: [] for name in engines}
    names = alternating(list(engines))
    for repeat in range(plan.repeats):
        for index, request in enumerate(requests):
            key = f"{stage}/{repeat}/{index}"
            if key not in journal.turns:
                first = (repeat + index) % len(names)
                turn = {}
                for name in names[first:] + names[:first]:
                    turn[name] = _decode(engines[name], request, repeat, plan)
                    turn[name].method = name
                    advance(turn[name])
                journal.add(key, turn)
            for name, trace in journal.turns[key].items():
                traces[name].append(trace)
    return traces


def alternating(names: Sequence[str]) -> list[str]:
    """Return one of the first half, one of the second, and so on: what disturbs the machine for a
    while does not hit neighbours of the list, which are often variants of one method."""
    half = -(-len(names) // 2)
    pairs = zip_longest(names[:half], names[half:])
    return [name for pair in pairs for name in pair if name is not None]


def request_seed(seed: int, request: Request, repeat: int) -> int:
    digest = hashlib.sha256(
        f"{seed}/{repeat}/{request.dataset}/{request.prompt_id}".encode()
    ).digest()
    return int.from_bytes(digest[:4], "big")


def _decode(engine: Engine, request: Request, repeat: int, plan: Plan) -> Trace:
    seed, meter = request_seed(plan.seed, request, repeat), energy.meter()
    before = meter.read()
    trace = engine.decode(request.tokens, plan.max_new_tokens, Sampler.seeded(seed))
    trace.joules = meter.since(before)
    trace.prompt_id, trace.dataset, trace.seed = request.prompt_id, request.dataset, seed
    return trace


def decode(
    engines: Mapping[str, Engine],
    requests: Sequence[Request],
    plan: Plan,
    journal: Journal[Trace],
    stage: str,
) -> Traces:
    """Decode every request with every method, after a warm-up, with a progress bar that counts
    tokens."""
    turns = [turn for key, turn in journal.turns.items() if key.startswith(f"{stage}/")]
    tokens, done = 0, sum(map(len, turns))
    total = len(engines) * len(requests) * plan.repeats
    if done < total:
        warm_up(engines, requests[0])
    with tqdm(total=total, initial=done, desc=stage.split(":")[0], unit="request") as bar:

        def advance(trace: Trace) -> None:
            nonlocal tokens
            tokens += len(trace.tokens)
            bar.update()
            elapsed = bar.format_dict["elapsed"]  # 0 where TQDM_DISABLE is set
            bar.set_postfix_str(f"{tokens / elapsed:.0f} tokens/s" if elapsed else "")

        return run(engines, requests, plan, journal, stage, advance)
