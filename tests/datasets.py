"""A finished harvest of the tiny pair, as scripts/gen_data.py leaves it."""

from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

from data_gen.harvest import Progress, Recipe, harvest
from data_gen.requests import Request
from data_gen.shards import SPLITS
from data_gen.workers import ALONE, Place
from decoding.models import ModelPair
from decoding.sampling import Warp
from predictors.features import FeatureSpec
from scripts.gen_data import finish
from tests.tiny_pair import VOCAB

SETTINGS = OmegaConf.create({"splits": {"calibration": 0.1, "test": 0.1}, "responses": {"name": "generate"}})
RECIPE = Recipe(
    gamma=3,
    seed=3,
    max_new_tokens=10,
    batch_size=3,
    mixing=0.15,
    stride=2,
    warp=Warp(0.9),
    draft_warp=Warp(),
    specdecpp=FeatureSpec("draft", [-1]),
    hrad=FeatureSpec("target", [-2, -1], embedding=True),
)


def some_requests(count: int) -> list[Request]:
    generator = torch.Generator().manual_seed(5)
    lengths = torch.randint(2, 9, (count,), generator=generator).tolist()
    tokens = [torch.randint(1, VOCAB, (length,), generator=generator) for length in lengths]
    return [Request(f"p{n}", "toy", prompt, SPLITS[n % 3]) for n, prompt in enumerate(tokens)]


def make_dataset(
    pair: ModelPair,
    folder: Path,
    count: int = 9,
    recipe: Recipe = RECIPE,
    progress: Progress | None = None,
    place: Place = ALONE,
) -> dict[str, Any]:
    """Harvest `count` prompts and write the manifest, which is returned."""
    requests = some_requests(count)
    harvest(pair, requests, recipe, folder, progress or Progress(), place)
    return finish(pair, requests, recipe, folder, SETTINGS) if place.rank == 0 else {}
