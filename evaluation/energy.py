"""Energy the machine counts while something runs: RAPL of the processors, NVML of the GPUs.

Counters are of whole processors, whatever runs on them. RAPL takes the right to read `energy_uj`
(on Linux often root alone has it), NVML the package nvidia-ml-py."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

RAPL = Path("/sys/class/powercap")


@dataclass(frozen=True)
class Counter:
    """read: joules since some moment; wraps: it starts again at 0 after so many."""

    name: str
    read: Callable[[], float]
    wraps: float = math.inf


@dataclass
class Meter:
    """All counters of a machine. about: their names, or why there is none; one that failed counts
    no more, and it says so."""

    counters: Sequence[Counter]
    about: str

    def read(self) -> list[float]:
        """What each counter says; empty where there is none, or one cannot be read any more."""
        try:
            return [counter.read() for counter in self.counters]
        except Exception as error:  # NVML has its own; decoding goes on, whatever it is
            self._fail(f"they cannot be read ({error or type(error).__name__})")
            return []

    def since(self, before: Sequence[float]) -> float | None:
        """Joules since `read` gave `before`; None where that is not known."""
        now = self.read()
        if not before or not now:
            return None
        joules = [
            spent(*each) for each in zip(before, now, (c.wraps for c in self.counters), strict=True)
        ]
        if not all(0 <= each < math.inf for each in joules):
            self._fail("they went back")
            return None
        return sum(joules)

    def _fail(self, why: str) -> None:
        self.about = f"energy counters that failed while it was decoded, {self.about}: {why}"
        self.counters = ()
        print(f"warning: {self.about}. Decoding goes on without")


def spent(before: float, now: float, wraps: float) -> float:
    """Joules between two readings; infinite for a counter that went back by so little that it has
    not started again: it was set back."""
    if now >= before:
        return now - before
    return now - before + wraps if before - now > wraps / 2 else math.inf


@cache
def meter() -> Meter:
    """Of this machine."""
    (processors, no_rapl), (gpus, no_nvml) = rapl_counters(RAPL), nvml_counters()
    counters = [*processors, *gpus]
    return Meter(
        counters, ", ".join(counter.name for counter in counters) or f"{no_rapl}; {no_nvml}"
    )


def rapl_counters(root: Path) -> tuple[list[Counter], str]:
    """One for each processor package, or why there is none."""
    found, reason = list[Counter](), f"no RAPL counter in {root}"
    for folder in sorted(root.glob("intel-rapl:*")):
        try:
            name = (folder / "name").read_text().strip()
            if name.startswith("package"):  # other domains are parts of one, or hold it
                read = partial(_joules, folder / "energy_uj")
                read()
                found.append(Counter(f"RAPL {name}", read, _joules(folder / "max_energy_range_uj")))
        except (OSError, ValueError) as error:
            reason = f"RAPL counter {folder.name} cannot be read ({error})"
    return found, reason


def _joules(path: Path) -> float:
    return int(path.read_text()) / 1e6


def nvml_counters() -> tuple[list[Counter], str]:
    """One for each GPU, or why there is none."""
    try:
        import pynvml

        pynvml.nvmlInit()
        handles = [
            pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())
        ]
        found = [
            Counter(f"NVML GPU {n}", partial(_gpu_joules, handle))
            for n, handle in enumerate(handles)
        ]
        _ = [counter.read() for counter in found]
    except ImportError:
        return [], "no NVML (pip install nvidia-ml-py)"
    except pynvml.NVMLError as error:
        return [], f"NVML cannot be read ({error})"
    return found, "NVML finds no GPU"


def _gpu_joules(handle: object) -> float:
    import pynvml

    return float(pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)) / 1e3
