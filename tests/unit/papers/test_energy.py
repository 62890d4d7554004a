"""Energy counters that are files and fakes, and the figure made from what they say."""

import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from decoding.trace import Trace, read_traces, write_traces
from papers.specbranch import energy
from papers.specbranch.energy import JOULES, Counter, Meter, nvml_counters, rapl_counters
from reports.artifacts import Evaluation
from reports.figure import save
from tests.helpers.damage.refusals import refuses
from tests.helpers.evaluation.evaluations import lacks


def domain(root: Path, folder: str, name: str, joules: float) -> Path:
    (root / folder).mkdir()
    (root / folder / "name").write_text(name + "\n")
    (root / folder / "max_energy_range_uj").write_text(f"{1000 * 10**6}\n")
    counter = root / folder / "energy_uj"
    counter.write_text(f"{int(joules * 1e6)}\n")
    return counter


def test_packages_are_counted_and_their_parts_are_not(tmp_path):
    first = domain(tmp_path, "intel-rapl:0", "package-0", 990.0)
    domain(tmp_path, "intel-rapl:0:0", "core", 5.0)
    domain(tmp_path, "intel-rapl:1", "psys", 5.0)
    counters, _ = rapl_counters(tmp_path)
    assert [counter.name for counter in counters] == ["RAPL package-0"]
    meter = Meter(counters)
    before = meter.read()
    first.write_text("996500000")
    assert meter.since(before) == pytest.approx(6.5)
    first.write_text("3000000")  # past 1000 J it starts again
    assert meter.since(before) == pytest.approx(13)


class NVMLError(Exception):
    pass


def test_no_counter_has_a_reason(tmp_path, monkeypatch):
    monkeypatch.setattr(energy, "RAPL", tmp_path)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    refuses(r"energy: .*no RAPL counter in .*no NVML \(pip install", energy.meter)
    domain(tmp_path, "intel-rapl:0", "package-0", 1.0).unlink()
    counters, reason = rapl_counters(tmp_path)
    assert counters == [] and "intel-rapl:0 cannot be read" in reason


def meter_of(*readings: float | Exception, wraps: float = math.inf) -> Meter:
    """Return a meter of a counter that stands still and one that says these."""
    given = iter(readings)

    def read() -> float:
        found = next(given)
        if isinstance(found, Exception):
            raise found
        return found

    return Meter([Counter("one", lambda: 1.0), Counter("two", read, wraps)])


@pytest.mark.parametrize("error", [OSError(19, "No such device"), NVMLError("Lost")])
@pytest.mark.parametrize("good", [0, 1])
def test_a_counter_that_fails_meanwhile_is_no_number_and_has_a_reason(error, good, capsys):
    meter = meter_of(10.0, *[12.0] * good, error)
    before = meter.read()
    assert before == [1.0, 10.0]
    assert meter.since(before) == (2.0 if good else None)
    assert meter.since(before) is None and meter.read() == [] and meter.since([]) is None
    printed = capsys.readouterr().out
    assert str(error) in printed and printed.count("counters that failed, one, two") == 1


@pytest.mark.parametrize("wraps", [1000.0, math.inf])
def test_a_counter_that_is_set_back_is_no_number(wraps, capsys):
    meter = meter_of(10.0, 2.0, wraps=wraps)
    assert meter.since(meter.read()) is None and "went back" in capsys.readouterr().out


def test_gpus_count_in_millijoules(monkeypatch):
    nvml = Mock(NVMLError=NVMLError)
    nvml.nvmlDeviceGetCount.return_value = 2
    nvml.nvmlDeviceGetTotalEnergyConsumption.return_value = 1500
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    counters, _ = nvml_counters()
    assert [counter.read() for counter in counters] == [1.5, 1.5]
    nvml.nvmlDeviceGetTotalEnergyConsumption.side_effect = NVMLError("Not Supported")
    assert nvml_counters() == ([], "NVML cannot be read (Not Supported)")


def test_a_trace_keeps_what_was_counted_meanwhile(tmp_path):
    engine: Any = SimpleNamespace(decode=lambda *_: Trace(1, [1], [], 0.0, 1.0))
    trace = meter_of(10.0, 12.5).around(engine).decode(None, 4, None)
    write_traces(tmp_path / "traces.jsonl", [trace])
    assert trace.joules == 2.5 and read_traces(tmp_path / "traces.jsonl") == [trace]


def decoded(prompt: str, joules: float | None) -> Trace:
    return Trace(3, [0] * 10, [], 0.0, 2.0, prompt_id=prompt, dataset="toy", joules=joules)


def evaluation(joules: float | None = 20.0) -> Evaluation:
    traces = {
        "autoregressive": [decoded("a", 40.0), decoded("b", 60.0)],
        "fixed": [decoded("a", joules), decoded("b", 30.0)],
    }
    return Evaluation(Path("runs/one"), {"run": {}}, traces)


def test_results_say_how_energy_is_counted_again():
    assert energy.main.called == "python papers/specbranch/energy.py"


def test_energy_per_token_is_a_ratio_of_sums(tmp_path):
    figure = energy.energy(evaluation())
    assert figure.column(JOULES) == pytest.approx([5.0, 2.5])
    assert figure.column("of plain decoding") == pytest.approx([1.0, 0.5])
    assert figure.column("of plain decoding low")[1] == pytest.approx(0.5)  # half for each prompt
    assert figure.column(f"{JOULES} low")[1] == pytest.approx(2.0)
    assert figure.column("power (W)") == pytest.approx([25.0, 12.5])
    assert figure.kind == "measured" and figure.n == "2 requests a method"
    assert all(path.stat().st_size > 100 for path in save(figure, tmp_path))
    lacks(r"1 of 4 requests .* without a counter: python papers/", energy.energy, evaluation(None))
