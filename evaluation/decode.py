"""Decoding the same requests with several methods, in turns, so that drift of the machine affects
all alike; finished turns are on disk, and an interrupted run continues after them."""

import fcntl
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product, zip_longest
from pathlib import Path
from time import perf_counter
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor
from tqdm import tqdm

from data_gen.requests import Request
from decoding.engines.batched import Asked, BatchedEngine, Decoder
from decoding.engines.request import Engine as OwnEngine
from decoding.sampling import Sampler
from decoding.trace import Trace
from runtime.errors import UserError
from runtime.files import file_hash
from runtime.json_files import Form, digest
from runtime.json_lines import read_sealed, sealed
from runtime.workers import LOCAL, Workers

WARM_UP_TOKENS = 12
Decode = Callable[[Sequence[Asked]], list[Trace]]


@runtime_checkable
class Engine(Protocol):
    """Decodes a request. If it has `make_ready(prompts, max_new_tokens)`, that is called before
    anything is timed and returns None, or in a line why the engine cannot run here.

    records_drafts: whether traces say what was drafted; caution: warning for use without tuning,
    "" for none"""

    @property
    def records_drafts(self) -> bool: ...

    @property
    def caution(self) -> str: ...

    def decode(self, prompt_ids: Tensor, max_new_tokens: int, sampler: Sampler) -> Trace: ...


@dataclass(frozen=True)
class Plan:
    """Plan of a decode: repeats of each request, longest output, and seed."""

    repeats: int
    max_new_tokens: int
    seed: int


Traces = dict[str, list[Trace]]
"""method -> one trace per request, in the order of the requests, of one repeat after the other."""


# The journal --------------------------------------------------------------------------------------


class Recorded(Protocol):
    """A dataclass that JSON can hold."""

    def to_dict(self) -> dict[str, Any]: ...


T = TypeVar("T", bound=Recorded)
Held = TypeVar("Held")


class Turn(Form, Generic[Held]):
    """A line of a journal."""

    key: str
    found: dict[str, Held]


class Journal(Generic[T]):
    """A file with one line per turn: the results of every method for one item, such as a request of
    one repeat. Turns are the unit, so that methods that are compared on an item always ran next to
    each other, in one process.

    An unfinished last line, of a run that was killed, is dropped. The path must depend on
    everything that the traces depend on (`journal_path`). A journal without turns leaves no file.

    turns: key -> method -> an object of the class `holds`; resumed: number of turns of earlier runs
    Raises UserError when the file is damaged, or when another process writes to it.
    """

    def __init__(self, path: Path, holds: type[T]) -> None:
        self.path = path
        self._form = Turn[holds]  # type: ignore[valid-type]
        self.turns: dict[str, dict[str, T]] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a+b")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._file.truncate(self._read())
        except BlockingIOError as error:
            self._file.close()
            raise UserError(
                f"out: another run with these settings writes {path}. Wait, or set out=..."
            ) from error
        except UserError:
            self._file.close()
            raise
        self.resumed = len(self.turns)

    def add(self, key: str, turn: dict[str, T]) -> None:
        self.turns[key] = turn
        line = {"key": key, "found": {name: one.to_dict() for name, one in turn.items()}}
        self._file.write(sealed(line) + b"\n")
        self._file.flush()

    def remove(self) -> None:
        """Remove the file, whose content is saved elsewhere."""
        self.turns.clear()

    def __enter__(self) -> "Journal[T]":
        return self

    def __exit__(self, *_: object) -> None:
        if not self.turns:
            self.path.unlink(missing_ok=True)
        self._file.close()

    def _read(self) -> int:
        """Read every complete line; return their length in bytes."""
        whole = 0
        self._file.seek(0)
        for number, line in enumerate(self._file, 1):
            if line.endswith(b"\n"):
                try:
                    turn = read_sealed(line[:-1], self._form.model_validate_json)
                except ValueError as error:
                    raise UserError(
                        f"out: {self.path} is damaged in line {number} ({error}). Remove that line"
                        " to decode its turn again, or delete the file to start over"
                    ) from error
                self.turns[turn.key] = turn.found
                whole += len(line)
        return whole


def journal_path(out: Path, facts: Any) -> Path:
    """Return a path beside `out`, named after `facts` (JSON), for a run of exactly these."""
    out = out.resolve()
    return out.with_name(f".{out.name}-{digest(facts)[:12]}.resume")


def file_hashes(settings: Any) -> list[str]:
    """Return the hash of every file that `settings` names, those in folders it names (checkpoints)
    included."""
    if isinstance(settings, str):
        named = [Path(settings), *Path(settings).glob("*")] if settings else []
        return [file_hash(path) for path in sorted(named) if path.is_file()]
    inner = settings.values() if isinstance(settings, Mapping) else settings
    if not isinstance(inner, Iterable):
        return []
    return [each for one in inner for each in file_hashes(one)]


# Decoding -----------------------------------------------------------------------------------------


def make_ready(
    engines: Mapping[str, Engine], requests: Sequence[Request], max_new_tokens: int
) -> dict[str, str]:
    """Prepare every engine that needs it. Return those that cannot run here, and why."""
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


@dataclass(frozen=True)
class Stage:
    """Requests that methods decode in turns, as a plan says.

    make: returns the engines by name, in each process of `workers` once
    batch: requests that engines which can decode several decode at once"""

    name: str
    make: Callable[[], Mapping[str, Engine]]
    requests: Sequence[Request]
    plan: Plan
    workers: Workers = LOCAL
    batch: int = 1

    @cached_property
    def turns(self) -> list[range]:
        """Return the requests of each turn: `batch` of one dataset, or what is left of it."""
        turns = list[range]()
        for number, request in enumerate(self.requests):
            last = turns[-1] if turns else range(0)
            if 0 < len(last) < self.batch and request.dataset == self.requests[last[0]].dataset:
                turns[-1] = range(last.start, number + 1)
            else:
                turns.append(range(number, number + 1))
        return turns

    def warm(self) -> Mapping[str, Decode]:
        """Return what decodes, by method, each of which has decoded something: first calls allocate
        buffers and start threads."""
        decode = {name: decoding(engine, self.batch) for name, engine in self.make().items()}
        for each in decode.values():
            each([Asked(self.requests[0].tokens, WARM_UP_TOKENS, Sampler.seeded(0))])
        return decode

    def turn(self, decode: Mapping[str, Decode], place: tuple[int, int]) -> list[dict[str, Trace]]:
        """Let every method decode the requests of a turn, (repeat, number); the order of methods
        rotates. Return the traces of each.

        A request's seed depends on the plan's, its prompt and the repeat, not on the method."""
        (repeat, number), names = place, alternating(list(decode))
        group = [self.requests[each] for each in self.turns[number]]
        found = dict[str, list[Trace]]()
        first = (repeat + number) % len(names)
        seeds = [request_seed(self.plan.seed, request, repeat) for request in group]
        for name in names[first:] + names[:first]:
            found[name] = decode[name](
                [
                    Asked(
                        request.tokens,
                        self.plan.max_new_tokens,
                        Sampler.seeded(seed),
                        kept=request.kept,
                    )
                    for request, seed in zip(group, seeds, strict=True)
                ]
            )
            for trace, request, seed in zip(found[name], group, seeds, strict=True):
                trace.method, trace.seed = name, seed
                trace.prompt_id, trace.dataset = request.prompt_id, request.dataset
                trace.category = request.category
        return [{name: found[name][each] for name in decode} for each in range(len(group))]


def decoding(engine: Engine, batch: int) -> Decode:
    """Return a function that decodes requests with an engine, `batch` at once if it can.

    Of several at once a trace has a share of their seconds, by its tokens, none of which is told to
    be of the prefill or of a stage: they wait for each other."""
    if batch == 1 or not isinstance(engine, Decoder):
        own = isinstance(engine, OwnEngine)
        return lambda requests: [
            engine.decode(
                torch.as_tensor(each.prompt_ids),
                each.max_new_tokens,
                each.sampler,
                **({"kept": each.kept} if own and each.kept else {}),
            )
            for each in requests
        ]
    batched = BatchedEngine(engine, batch)

    def at_once(requests: Sequence[Asked]) -> list[Trace]:
        start = perf_counter()
        ended = dict(batched.decode(requests))
        seconds, traces = perf_counter() - start, [ended[each] for each in range(len(requests))]
        tokens = sum(len(trace.tokens) for trace in traces)
        for trace in traces:
            trace.seconds = trace.prefill_seconds = seconds * len(trace.tokens) / tokens
            trace.stages = dict.fromkeys(trace.stages, 0.0)
            for round_ in trace.rounds:
                round_.seconds = dict(trace.stages)
        return traces

    return at_once


def decode(stage: Stage, journal: Journal[Trace]) -> Traces:
    """Decode all requests of a stage, every method a request before the next request. Turns that
    `journal` has from an earlier run are taken from there."""
    places = list(product(range(stage.plan.repeats), range(len(stage.requests))))
    keys = {place: f"{stage.name}/{place[0]}/{place[1]}" for place in places}
    groups = [
        (repeat, number)
        for repeat, number in product(range(stage.plan.repeats), range(len(stage.turns)))
        if any(keys[repeat, each] not in journal.turns for each in stage.turns[number])
    ]
    label, tokens = stage.name.split(":")[0], 0
    done = sum(key in journal.turns for key in keys.values())
    with tqdm(total=len(places), initial=done, desc=label, unit=" prompts") as bar:
        for (repeat, number), turns in stage.workers.all(stage.warm, stage.turn, groups):
            for index, turn in zip(stage.turns[number], turns, strict=True):
                bar.update(keys[repeat, index] not in journal.turns)
                journal.add(keys[repeat, index], turn)
                tokens += sum(len(trace.tokens) for trace in turn.values())
            elapsed = bar.format_dict["elapsed"]  # 0 where TQDM_DISABLE is set
            bar.set_postfix_str(f"{tokens / elapsed:.0f} tokens/s" if elapsed else "")
    turns = [journal.turns[key] for key in keys.values()]
    return {name: [turn[name] for turn in turns] for name in turns[0]}


def alternating(names: Sequence[str]) -> list[str]:
    """Return names of the first and the second half in alternation, so that a disturbance of the
    machine does not hit neighbours of the list, which are often variants of one method."""
    half = -(-len(names) // 2)
    pairs = zip_longest(names[:half], names[half:])
    return [name for pair in pairs for name in pair if name is not None]


def request_seed(seed: int, request: Request, repeat: int) -> int:
    named = f"{seed}/{repeat}/{request.dataset}/{request.prompt_id}"
    return int.from_bytes(hashlib.sha256(named.encode()).digest()[:4], "big")
