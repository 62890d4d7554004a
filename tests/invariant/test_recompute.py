"""A harvest that stores no hidden states teaches what one that stores them teaches."""

from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from data_gen.harvest import Progress, harvest, plan
from data_gen.requests import Request
from data_gen.samples import read_samples
from data_gen.settings import HarvestSettings
from data_gen.storage import shards
from data_gen.storage.chunks import inventory
from data_gen.storage.dataset import Harvest
from decoding.models.loading import load_pair
from decoding.sampling import Warp
from decoding.settings import Pair
from predictors.base import Predictor
from predictors.features.layers import RecordedLayers
from predictors.hrad import HRAD
from predictors.specdecpp import SpecDecPP
from runtime.errors import UserError
from runtime.json_files import write_checksummed
from tests.helpers.models.tiny_pair import VOCAB

ROOT = Path(__file__).resolve().parents[2]
RECIPE = HarvestSettings(
    gamma=5,
    seed=3,
    max_new_tokens=16,
    batch_size=4,
    mixing=0.3,
    stride=2,
    warp=Warp(0.9),
    draft_warp=Warp(),
    layers=RecordedLayers([-1], [-2, -1]),
)


@pytest.fixture(scope="module")
def pair_cfg(tiny_pair_dir: Path) -> Pair:
    folders = [f"pair.{side}={tiny_pair_dir / side}" for side in ("target", "draft")]
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return Pair.of(compose("train", [*folders, "pair.name=tiny"]).pair)


@pytest.fixture(scope="module")
def folders(pair_cfg: Pair, tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """By whether features are stored."""
    pair, made = load_pair(pair_cfg), {}
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(1, VOCAB, (n + 2,), generator=generator) for n in range(9)]
    requests = [
        Request(f"p{n}", "toy", prompt, shards.SPLITS[n % 3]) for n, prompt in enumerate(prompts)
    ]
    for stored in (True, False):
        recipe, folder = replace(RECIPE, features_stored=stored), tmp_path_factory.mktemp("harvest")
        harvest(pair, requests, recipe, folder, Progress())
        settings = plan(pair, requests, recipe)
        write_checksummed(folder / "manifest.json", {**settings, **inventory(folder, settings)})
        made[stored] = folder
    return made


@pytest.mark.parametrize("predictor", [SpecDecPP(), SpecDecPP(context="rollout"), HRAD(gamma=2)])
def test_recomputed_features_equal_stored_ones(
    folders: dict[bool, Path], pair_cfg: Pair, predictor: Predictor
) -> None:
    for split in shards.SPLITS:
        stored = read_samples(Harvest.open(folders[True]), predictor, split)
        again = read_samples(Harvest.open(folders[False]), predictor, split, pair_cfg)
        assert stored.keys() == again.keys()
        for name, values in stored.items():
            assert values.dtype == again[name].dtype
            torch.testing.assert_close(again[name], values, atol=1e-5, rtol=0.01)


def test_nothing_of_them_is_on_disk(folders: dict[bool, Path]) -> None:
    for kind in ("rounds", "mixed", "responses"):
        for row in pq.read_table(folders[False] / shards.shard_name(kind, 0)).to_pylist():
            assert not any(row[name] for name in shards.FEATURES if name in row)


def test_another_pair_is_refused(folders: dict[bool, Path], pair_cfg: Pair) -> None:
    other = Pair.of(OmegaConf.merge(pair_cfg.composed, {"draft": pair_cfg.target}))
    with pytest.raises(UserError, match=r"^pair\.draft: it is not the one of the harvest, tiny"):
        read_samples(Harvest.open(folders[False]), HRAD(), "test", other)
    with pytest.raises(UserError, match=r"^pair: .* stores no hidden states"):
        read_samples(Harvest.open(folders[False]), HRAD(), "test")
