"""Whatever happens to the bytes of a checkpoint, loading it works or ends in one line."""

import random
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from predictors.base import load_predictor
from predictors.calibration import Calibration
from predictors.survival import Survival
from runtime.errors import UserError
from tests.helpers.damage.damage import damage_one_file
from tests.helpers.damage.fuzz import for_as_long_as_asked
from tests.helpers.training.checkpoints import rewrite_checksum, write_checkpoint

DIM = 6
ISOTONIC = Calibration(
    "isotonic", curves=(((-1.0, 0.0, 1.0), (0.1, 0.4, 0.9)),), survival=Survival(0.9, 0.2, -0.1)
)
VECTOR = Calibration(
    "platt", (0.1, 0.0, -0.1), (1.0, 1.1, 0.9), (0.0, 0.1, -0.2), rows=9, nll_after=0.5
)


@pytest.fixture(scope="module", params=["specdecpp", "hrad"])
def whole(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("checkpoint")
    calibration = ISOTONIC if request.param == "specdecpp" else VECTOR
    write_checkpoint(folder, request.param, DIM, calibration=calibration)
    return Whole({path.name: path.read_bytes() for path in folder.iterdir()})


def loads(folder: Path, whole: dict[str, bytes], seed: int) -> bool:
    """Whether the checkpoint loads after damage number `seed`; anything but a UserError of one line
    is raised. In three cases of four the checksums are made to fit, so that it gets as far as the
    parsers."""
    chance = random.Random(seed)
    for name, content in whole.items():
        (folder / name).write_bytes(content)
    for _ in range(chance.choice([1, 1, 2])):
        damage_one_file(folder, chance)
    if chance.random() < 0.75:
        with suppress(ValueError):  # no JSON any more
            rewrite_checksum(folder)
    try:
        predictor = load_predictor(folder)
    except UserError as error:
        assert "\n" not in str(error) and str(error).startswith("checkpoint: ")
        return False
    assert torch.isfinite(predictor.predict_proba(torch.ones(3, DIM))).all()
    assert torch.isfinite(predictor.calibration.survival(torch.rand(2, 4))).all()
    return True


class Whole(dict[str, bytes]):
    """Files of a checkpoint; what a failing example prints of them is short."""

    __repr__ = object.__repr__


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(seed=st.integers(0, 2**32))
@pytest.mark.slow
def test_a_damaged_checkpoint_loads_or_is_refused(
    tmp_path: Path, whole: dict[str, bytes], seed: int
) -> None:
    assert loads(tmp_path, whole, seed) in (True, False), "and nothing is raised"


def test_what_dropout_may_leave_out_is_looked_at(tmp_path: Path, whole: dict[str, bytes]) -> None:
    """Weights of which a hidden unit of H-RAD overflows."""
    assert len({loads(tmp_path, whole, -25328) for _ in range(20)}) == 1


@pytest.mark.slow
def test_for_as_long_as_asked(
    tmp_path: Path, whole: dict[str, bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    """FUZZ_SECONDS=600 pytest -m slow tests/unit/predictors/test_checkpoint_fuzz.py"""
    for_as_long_as_asked("checkpoints", lambda seed: loads(tmp_path, whole, seed), capsys)


def test_the_undamaged_one_loads_and_damage_under_checksums_never_does(
    tmp_path: Path, whole: dict[str, bytes]
) -> None:
    for name, content in whole.items():
        (tmp_path / name).write_bytes(content)
    load_predictor(tmp_path)
    for name in ("model.safetensors", "calibration.json", "metrics.json", "config.json"):
        for seed in range(30):
            at = random.Random(seed).randrange(len(whole[name]))
            content = bytearray(whole[name])
            content[at] ^= 1
            (tmp_path / name).write_bytes(content)
            with pytest.raises(UserError, match="^checkpoint: "):
                load_predictor(tmp_path)
        (tmp_path / name).write_bytes(whole[name])
