"""What tests of datasets start from."""

from pathlib import Path

import pytest

from decoding.models.loading import ModelPair
from tests.helpers.data.datasets import make_dataset
from tests.helpers.models.tiny_pair import tiny_pair


@pytest.fixture(scope="module")
def pair() -> ModelPair:
    return tiny_pair()


@pytest.fixture(scope="module")
def original(
    pair: ModelPair, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """An undamaged dataset, of as many prompts as the module's PROMPTS says."""
    folder = tmp_path_factory.mktemp("original")
    make_dataset(pair, folder, getattr(request.module, "PROMPTS", 9))
    return folder
