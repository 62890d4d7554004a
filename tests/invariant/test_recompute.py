"""A harvest that stores no hidden states teaches what one that stores them teaches."""

from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

from data_gen.samples import read_samples
from data_gen.storage import shards
from data_gen.storage.dataset import Harvest
from decoding.models.loading import load_pair
from decoding.pair import pair_settings
from decoding.settings import Pair
from predictors.base import Predictor
from predictors.hrad import HRAD
from predictors.specdecpp import SpecDecPP
from runtime.errors import UserError
from tests.helpers.data.datasets import RECIPE, make_dataset

PREDICTORS = (SpecDecPP(), SpecDecPP(context="rollout"), HRAD(gamma=2))


@pytest.fixture(scope="module")
def settings(tiny_pair_dir: Path) -> Pair:
    folders = {side: str(tiny_pair_dir / side) for side in ("target", "draft")}
    return pair_settings(**folders, name="tiny")


@pytest.fixture(scope="module")
def folders(settings: Pair, tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """By whether features are stored."""
    pair, made = load_pair(settings), {}
    for stored in (True, False):
        made[stored] = tmp_path_factory.mktemp("harvest")
        recipe = replace(RECIPE, gamma=5, max_new_tokens=16, mixing=0.3, features_stored=stored)
        make_dataset(pair, made[stored], recipe=recipe)
    return made


@pytest.mark.parametrize("predictor", PREDICTORS)
def test_recomputed_features_equal_stored_ones(
    folders: dict[bool, Path], settings: Pair, predictor: Predictor
) -> None:
    for split in shards.SPLITS:
        stored = read_samples(Harvest.open(folders[True]), predictor, split)
        again = read_samples(Harvest.open(folders[False]), predictor, split, settings)
        assert stored.keys() == again.keys()
        for name, values in stored.items():
            assert values.dtype == again[name].dtype
            torch.testing.assert_close(again[name], values, atol=1e-5, rtol=0.01)


def test_nothing_of_them_is_on_disk(folders: dict[bool, Path]) -> None:
    for kind in shards.SCHEMAS:
        for row in pq.read_table(folders[False] / shards.shard_name(kind, 0)).to_pylist():
            assert not any(row[name] for name in shards.FEATURES if name in row)


def test_another_pair_is_refused(folders: dict[bool, Path], settings: Pair) -> None:
    harvest = Harvest.open(folders[False])
    other = pair_settings(target=settings.target, draft=settings.target, name="tiny")
    with pytest.raises(UserError, match=r"^pair\.draft: it is not the one of the harvest, tiny"):
        read_samples(harvest, HRAD(), "test", other)
    with pytest.raises(UserError, match=r"^pair: .* stores no hidden states"):
        read_samples(harvest, HRAD(), "test")
