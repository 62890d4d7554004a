"""Energy per token by method (SpecBranch, tables 10 and 11), counted around every request.

    python papers/specbranch/energy.py methods=[fixed,confidence]

Takes the settings of scripts/evaluate.py and does the same. Counters cover whole processors,
whatever runs on them: RAPL for processors, which needs permission to read `energy_uj` (on Linux
often only root has it), NVML for GPUs, which needs the extra `energy`. scripts/report.py
draws the figure."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.figure import Figure as Canvas

from evaluation.table import compare, ratio
from reports.artifacts import Evaluation
from reports.drawing import bars, legend, panels
from reports.figure import Entry, Figure, Missing, Record, each, estimated
from runtime.cli import program
from runtime.errors import UserError
from scripts import evaluate

RAPL = Path("/sys/class/powercap")
JOULES = "energy per token (J)"
COMMAND = "python papers/specbranch/energy.py"

# Counting -----------------------------------------------------------------------------------------


class Counter(NamedTuple):
    """A counter of energy. read: returns joules since some moment; wraps: joules after which it
    starts again at 0."""

    name: str
    read: Callable[[], float]
    wraps: float = math.inf


class Meter:
    """All counters of a machine. If one fails in use, this is printed and energy is unknown from
    then on."""

    def __init__(self, counters: Sequence[Counter]) -> None:
        self.counters = counters

    def around(self, engine: Any) -> Any:
        """Return the engine, changed so that its traces have the joules of their request, None
        where unknown."""
        decode = engine.decode

        def counted(*request: Any) -> Any:
            before = self.read()
            trace = decode(*request)
            trace.joules = self.since(before)
            return trace

        engine.decode = counted
        return engine

    def read(self) -> list[float]:
        """Return the joules of each counter; nothing if one cannot be read any more."""
        try:
            return [counter.read() for counter in self.counters]
        except Exception as error:  # NVML has its own; decoding goes on, whatever it is
            return self._fail(f"they cannot be read ({error or type(error).__name__})")

    def since(self, before: Sequence[float]) -> float | None:
        """Return joules since `read` gave `before`; None if unknown. A counter that went back by
        less than half of its range has not wrapped: it was reset."""
        now = self.read()
        if not before or not now:
            return None
        joules = 0.0
        for first, last, counter in zip(before, now, self.counters, strict=True):
            back = first - last
            if back > 0 and not counter.wraps / 2 < back < math.inf:
                self._fail("they went back")
                return None
            joules += counter.wraps - back if back > 0 else -back
        return joules

    def _fail(self, why: str) -> list[float]:
        names = ", ".join(counter.name for counter in self.counters)
        self.counters = ()
        print(f"warning: energy counters that failed, {names}: {why}. Decoding goes on without")
        return []


def meter() -> Meter:
    """Return the counters of this machine. Raises UserError if there are none."""
    (processors, no_rapl), (gpus, no_nvml) = rapl_counters(RAPL), nvml_counters()
    if not processors and not gpus:
        raise UserError(
            f"energy: this machine has no counter that can be read: {no_rapl}; {no_nvml}. Decode"
            " on another one"
        )
    return Meter([*processors, *gpus])


def rapl_counters(root: Path) -> tuple[list[Counter], str]:
    """Return a counter for each processor package, or why there is none."""
    counters, reason = list[Counter](), f"no RAPL counter in {root}"
    for folder in sorted(root.glob("intel-rapl:*")):
        try:
            name = (folder / "name").read_text().strip()
            if name.startswith("package"):  # other domains are parts of a package, or contain it
                read = partial(_joules, folder / "energy_uj")
                read()
                wraps = _joules(folder / "max_energy_range_uj")
                counters.append(Counter(f"RAPL {name}", read, wraps))
        except (OSError, ValueError) as error:
            reason = f"RAPL counter {folder.name} cannot be read ({error})"
    return counters, reason


def _joules(path: Path) -> float:
    return int(path.read_text()) / 1e6


def nvml_counters() -> tuple[list[Counter], str]:
    """Return a counter for each GPU, or why there is none."""
    try:
        import pynvml
    except ImportError:
        return [], "no NVML (pip install 'draftpredict[energy]')"

    def read(handle: object) -> float:
        return float(pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)) / 1e3

    counters = []
    try:
        pynvml.nvmlInit()
        for index in range(pynvml.nvmlDeviceGetCount()):
            gpu = partial(read, pynvml.nvmlDeviceGetHandleByIndex(index))
            gpu()
            counters.append(Counter(f"NVML GPU {index}", gpu))
    except pynvml.NVMLError as error:
        return [], f"NVML cannot be read ({error})"
    return counters, "NVML finds no GPU"


@program(evaluate.__file__, evaluate.Evaluate)
def main(settings: evaluate.Evaluate) -> None:
    from evaluation.evaluate import evaluate as run

    run(settings.composed, meter().around)


main.called = COMMAND  # the command that its results record


# The figure ---------------------------------------------------------------------------------------


def energy(evaluation: Evaluation) -> Figure:
    """Return joules per token of every method and dataset, prefill included, and their share of
    plain decoding's."""
    table = evaluation.measurements
    if uncounted := int(table["joules"].isna().sum()):
        raise Missing(
            f"needs energy: {uncounted} of {len(table)} requests of {evaluation.folder} were"
            f" decoded without a counter: {COMMAND}"
        )
    records = []
    for dataset in evaluation.datasets:
        part = table[table["dataset"] == dataset]
        shares = compare(part, above="joules", below="emitted")
        for name, rows in part.groupby("policy", sort=False):
            records.append(
                {
                    **{"prompts of": dataset, "method": str(name)},
                    **estimated(JOULES, ratio(rows, "joules", "emitted")),
                    **estimated("of plain decoding", shares[str(name)]),
                    "power (W)": ratio(rows, "joules", "seconds").value,
                }
            )
    return Figure(
        name=f"energy-{evaluation.folder.name}",
        title=f"Energy per token: {evaluation.folder.name}",
        source="SpecBranch, tables 10 and 11",
        kind="measured",
        n=f"{max(map(len, evaluation.traces.values()))} requests a method",
        records=records,
        draw=_draw,
    )


def _draw(records: Sequence[Record], canvas: Canvas) -> None:
    axes = panels(canvas, [""])[0]
    bars(axes, records, "prompts of", JOULES, "method")
    axes.set_xlabel("prompts of")
    axes.set_ylim(bottom=0)
    legend(canvas, axes)


FIGURES = (
    Entry(
        "Energy per token",
        "Counted around each request, whatever else runs there. Fewer joules than plain decoding"
        " where the share is below 1.",
        lambda artifacts: each(artifacts.evaluations, energy, f"needs an evaluation: {COMMAND}"),
    ),
)

if __name__ == "__main__":
    main()
