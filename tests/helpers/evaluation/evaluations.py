"""Hand-made evaluations for figures, and what figures hold."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from decoding.trace import STAGES, RoundTrace, StageTrace, Trace
from reports.artifacts import Evaluation
from reports.figure import Figure, Missing, canvas, save
from tests.helpers.damage.refusals import refuses

CONF = Path(__file__).parents[3] / "conf"
SHORT = {"paths": "parallel_paths", "layers": "dyspec_layers", "acceptance": "specdecpp"}


@cache
def target(part: str, name: str) -> str:
    """What the YAML of a part makes."""
    return str(OmegaConf.load(CONF / part / f"{SHORT.get(name, name)}.yaml")["_target_"])


PLAIN = {"engine": {"_target_": target("engine", "autoregressive")}}


def chain(drafted: int, accepted: int, emitted: int | None = None, **seconds: float) -> RoundTrace:
    """A round of one path, drafted in as many forwards; `emitted` is one more than accepted."""
    count = accepted + 1 if emitted is None else emitted
    times = {stage: seconds.get(stage, 0.0) for stage in STAGES}
    parents = list(range(drafted))
    return RoundTrace(
        [5] * drafted, parents, [0.5] * drafted, accepted, accepted, [5] * count, [], drafted, times
    )


def overlapped(pending: int, accepted: int, steps: int, rollback: int) -> RoundTrace:
    """A round of the overlapped engine: `pending` tokens and one candidate after them."""
    found = chain(pending + 1, accepted)
    found.overlap = StageTrace("draft", 1, pending, steps, pending, [[5]], rollback, 0, [])
    return found


def trace(
    rounds: Sequence[RoundTrace], seconds: float = 1.0, prompt: str = "a", dataset: str = "toy"
) -> Trace:
    """The prefill took no time."""
    tokens = [token for round_ in rounds for token in round_.tokens]
    return Trace(5, tokens, list(rounds), 0.0, seconds, prompt_id=prompt, dataset=dataset)


def plain(tokens: int, seconds: float = 1.0, prompt: str = "a", dataset: str = "toy") -> Trace:
    """Decoded without a draft."""
    return trace([chain(0, 0) for _ in range(tokens)], seconds, prompt, dataset)


def drawn(figure: Figure, folder: Path) -> None:
    """Assert that the files of a figure are written."""
    files = save(figure, folder)
    assert len(files) == 1 + (figure.draw is not None)
    assert all(path.stat().st_size > 100 for path in files)


def lacks(match: str, build: Callable[..., Any], *given: Any) -> None:
    """Assert that a figure says so of what it misses."""
    refuses(match, build, *given, kind=Missing)


def records_by(figure: Figure, *columns: str) -> dict[Any, dict[str, Any]]:
    """Records by the values of one column, or of several."""
    keys = (tuple(record[column] for column in columns) for record in figure.records)
    return {
        key if len(columns) > 1 else key[0]: record
        for key, record in zip(keys, figure.records, strict=True)
    }


def interval(record: Mapping[str, Any], column: str) -> list[Any]:
    """A value and the ends of its interval."""
    return [record[name] for name in (column, f"{column} low", f"{column} high")]


def labels(figure: Figure) -> set[tuple[str, str]]:
    """Of the x and y axes of its panels."""
    drawn = canvas(figure)
    assert drawn is not None
    return {(axes.get_xlabel(), axes.get_ylabel()) for axes in drawn.axes}


def method(
    engine: str, structure: str, verifier: str, stop: str, /, **settings: Mapping[str, Any]
) -> dict[str, Any]:
    """settings: of a part, as in a resolved config, where an engine holds a copy of the others."""
    names = {"engine": engine, "structure": structure, "verifier": verifier, "stop": stop}
    parts = {
        part: {"_target_": target(part, name), **settings.get(part, {})}
        for part, name in names.items()
    }
    copies = {part: parts[part] for part in ("structure", "verifier", "stop")}
    return {**parts, "engine": {**parts["engine"], "_partial_": True, **copies}}


def evaluation(
    methods: Mapping[str, Mapping[str, Any]],
    traces: Mapping[str, Sequence[Trace]],
    temperature: float = 1.0,
    **results: Any,
) -> Evaluation:
    """methods: of its config; traces: by name, as in its metrics."""
    config = {
        "method": {"autoregressive": PLAIN, **methods},
        "warp": {"temperature": temperature},
        "repeats": 1,
    }
    return Evaluation(Path("runs/toy"), {"run": {"config": config}, **results}, dict(traces))
