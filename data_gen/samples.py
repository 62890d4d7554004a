"""What a predictor learns from, and is measured on: the samples made of a harvest's records."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from torch import Tensor

from data_gen.storage.dataset import read_manifest, read_records
from data_gen.storage.shards import FEATURES
from predictors.base import Predictor, Records
from predictors.inputs import FeatureSpec, narrowed, refuse_unharvested
from runtime.errors import UserError

ROLLOUT = ("known", "drafted", "accept_prob", "rollout_features")


def read_samples(
    folder: str | Path, predictor: Predictor, split: str, pair: DictConfig | None = None
) -> Records:
    """The samples of one split ("train", "calibration", "test" or "all").

    pair: config of the pair that was harvested; only needed where the harvest stored no features,
    to run it again. Raises UserError as `read_records`, and where harvested rounds are shorter than
    those the predictor is about."""
    refuse_short_rounds(folder, predictor)
    return predictor.samples(
        records_of(folder, predictor, predictor.kind, split, predictor.columns, pair)
    )


def refuse_short_rounds(folder: str | Path, predictor: Predictor) -> None:
    """Raise UserError where harvested rounds are shorter than those `predictor` is about."""
    harvested = read_manifest(folder)["gamma"]
    if predictor.gamma is not None and predictor.gamma > harvested:
        raise UserError(
            f"predictor.gamma: {predictor.gamma} is more than the {harvested} tokens per round of"
            f" {folder}. Lower it, or harvest longer rounds: python scripts/gen_data.py"
            f" gamma={predictor.gamma}"
        )


def read_rounds(
    folder: str | Path, predictor: Predictor, split: str, pair: DictConfig | None = None
) -> Records | None:
    """The rounds of one split, for prefix survival; None where `predictor` does not score single
    draft tokens."""
    if len(predictor.classes) > 2:
        return None
    return records_of(folder, predictor, "rounds", split, ROLLOUT, pair)


def of_prompts(records: Records, prompts: Tensor) -> Records:
    """Rows of some prompts. prompts: [n] bool, by `group`."""
    kept = prompts[records["group"]]
    return {name: values[kept] for name, values in records.items()}


def features_of(manifest: Mapping[str, Any], predictor: Predictor) -> FeatureSpec:
    """What `predictor` reads of a harvest: all that was harvested for it, or its own choice of
    layers."""
    harvested = FeatureSpec.from_dict(manifest["features"][predictor.name])
    wanted = harvested if predictor.layers is None else replace(harvested, layers=predictor.layers)
    refuse_unharvested(harvested, wanted)
    return wanted


def records_of(
    folder: str | Path,
    predictor: Predictor,
    kind: str,
    split: str,
    columns: Collection[str],
    pair: DictConfig | None,
) -> Records:
    """`records_with_features`, of the layers that `predictor` reads."""
    manifest = read_manifest(folder)
    harvested, wanted = (
        FeatureSpec.from_dict(manifest["features"][predictor.name]),
        features_of(manifest, predictor),
    )
    records = records_with_features(folder, kind, split, columns, pair)
    return {
        name: narrowed(values, harvested, wanted) if name in FEATURES else values
        for name, values in records.items()
    }


def records_with_features(
    folder: str | Path, kind: str, split: str, columns: Collection[str], pair: DictConfig | None
) -> Records:
    """`read_records`, with the feature columns computed again where none are stored."""
    records = read_records(folder, kind, split, columns)
    if not read_manifest(folder)["features_stored"] and set(FEATURES) & set(columns):
        from data_gen.recompute import recompute  # imports the models

        if pair is None:
            raise UserError(f"pair: {folder} stores no features. Give the pair that was harvested")
        records |= recompute(folder, kind, split, columns, pair)
    return records
