"""What a predictor learns from, and is measured on: the samples made of a harvest's records."""

from collections.abc import Collection
from pathlib import Path

from omegaconf import DictConfig

from data_gen.shards import FEATURES, read_manifest, read_records
from predictors.base import Predictor, Records
from predictors.errors import UserError

ROLLOUT = ("known", "drafted", "accept_prob", "rollout_features")


def read_samples(folder: str | Path, predictor: Predictor, split: str, pair: DictConfig | None = None) -> Records:
    """The samples of one split ("train", "calibration", "test" or "all").

    pair: config of the pair that was harvested; only needed where the harvest stored no features, to run it again.
    Raises UserError as `read_records`, and where harvested rounds are shorter than those the predictor is about.
    """
    harvested = read_manifest(folder)["gamma"]
    if predictor.gamma is not None and predictor.gamma > harvested:
        raise UserError(
            f"predictor.gamma: {predictor.gamma} is more than the {harvested} tokens per round of {folder}. "
            f"Lower it, or harvest longer rounds: python scripts/gen_data.py gamma={predictor.gamma}"
        )
    return predictor.samples(records_with_features(folder, predictor.kind, split, predictor.columns, pair))


def read_rounds(folder: str | Path, predictor: Predictor, split: str, pair: DictConfig | None = None) -> Records | None:
    """The rounds of one split, for prefix survival; None where `predictor` does not score single tokens."""
    return records_with_features(folder, "rounds", split, ROLLOUT, pair) if len(predictor.classes) == 2 else None


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
