"""On a pretend device every predictor learns what it learns on the host."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.helpers.data.harvests import write_harvest
from tests.helpers.training.pretend_training import NAMES, trained


@pytest.fixture(scope="module")
def harvest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_harvest(tmp_path_factory.mktemp("harvest"))


@pytest.fixture(scope="module")
def there(harvest: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the device learned."""
    out = tmp_path_factory.mktemp("device")
    command = [
        sys.executable,
        "-m",
        "tests.helpers.training.pretend_training",
        str(harvest),
        str(out),
    ]
    subprocess.run(command, check=True)
    return out


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.slow
def test_training_is_the_hosts(name: str, harvest: Path, there: Path) -> None:
    predictor, trainer = trained(name, harvest)
    found = json.loads((there / f"{name}.json").read_text())
    assert found["moved"], "nothing was on the device"
    assert found["waits"] <= 20 * trainer.epochs, "some of every epoch, none of every step"
    assert found["history"] == [pytest.approx(row, rel=1e-5) for row in trainer.history]
    weights = load_file(there / f"{name}.safetensors")
    torch.testing.assert_close(dict(predictor.head.state_dict()), weights)
