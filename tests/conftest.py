"""Small tensors only: a second thread costs more than it gives, above all on a busy machine."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.helpers.models.tiny_pair import save_tiny_pair
from tests.helpers.programs.composing import composed_quickly

torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def _composed_quickly() -> Iterator[None]:
    with composed_quickly():
        yield


@pytest.fixture(scope="session")
def tiny_pair_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a loadable pair of tiny random Llamas: `target` and `draft` (float64:
    pair.dtype=float64)."""
    return save_tiny_pair(tmp_path_factory.mktemp("pair"))
