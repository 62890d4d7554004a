"""What every test shares. Small tensors only: a second thread costs more than it gives, above all
on a busy machine."""

import os
from itertools import groupby
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # read at import: no test waits for a hub
os.environ["WANDB_MODE"] = "disabled"  # but where a test sets another

import pytest
import torch

from tests.helpers.models.tiny_pair import save_tiny_pair
from tests.helpers.programs.composing import compose_quickly

torch.set_num_threads(1)
compose_quickly()
GOLDEN = 0.618033988749895


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all but `k` of the unmarked cases of a test with the mark ``few(k)`` as full, or with
    ``few(k, rest="slow")`` as slow, the same ones each time.

    Multiples of the golden ratio spread evenly over every stretch, so that no axis of a product
    of parameters is seen at one value only.
    """
    for _, group in groupby(items, key=lambda item: item.nodeid.split("[")[0]):
        cases = list(group)
        if few := cases[0].get_closest_marker("few"):
            marked = ("slow", "full")
            cases = [case for case in cases if not any(map(case.get_closest_marker, marked))]
            order = sorted(range(len(cases)), key=lambda number: number * GOLDEN % 1)
            for number in order[few.args[0] :]:
                cases[number].add_marker(few.kwargs.get("rest", "full"))


@pytest.fixture(scope="session")
def tiny_pair_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a loadable pair of tiny random Llamas: `target` and `draft` (float64:
    pair.dtype=float64)."""
    return save_tiny_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture
def hub_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What makes huggingface_hub speak to an address, with an empty cache."""

    def there(address: str) -> None:
        constants = "huggingface_hub.constants."
        monkeypatch.setattr(f"{constants}ENDPOINT", address)
        template = address + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(f"{constants}HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(f"{constants}HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(f"{constants}HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(f"{constants}HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_TOKEN", "hf_x")

    return there
