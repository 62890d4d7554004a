"""What a machine is called."""

from pathlib import Path

import pytest
import torch

from decoding.models import machine


def test_a_cpu_is_named_as_linux_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cpuinfo").write_text(
        "processor\t: 0\nmodel name\t: Fast CPU @ 3 GHz\nmodel name\t: Another\n"
    )
    monkeypatch.setattr(machine, "CPUINFO", tmp_path / "cpuinfo")
    assert machine.hardware(torch.device("cpu")) == "Fast CPU @ 3 GHz"
    monkeypatch.setattr(machine, "CPUINFO", tmp_path / "nowhere")
    assert machine.processor()


def test_a_gpu_is_named_by_its_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU {device.index}")
    assert machine.hardware(torch.device("cuda:1")) == "GPU 1"
