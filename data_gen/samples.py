"""What a predictor learns from: the samples it makes of a harvest's records."""

from pathlib import Path

from omegaconf import DictConfig

from data_gen.shards import FEATURES, read_manifest, read_records
from predictors.base import Predictor, Records
from predictors.errors import UserError


def read_samples(folder: str | Path, predictor: Predictor, split: str, pair: DictConfig | None = None) -> Records:
    """The samples of one split ("train", "calibration" or "test").

    pair: config of the pair that was harvested; only needed where the harvest stored no features, to run it again.
    Raises UserError as `read_records`, and where harvested rounds are shorter than those the predictor is about.
    """
    manifest = read_manifest(folder)
    harvested = manifest["gamma"]
    if predictor.gamma is not None and predictor.gamma > harvested:
        raise UserError(
            f"predictor.gamma: {predictor.gamma} is more than the {harvested} tokens per round of {folder}. "
            f"Lower it, or harvest longer rounds: python scripts/gen_data.py gamma={predictor.gamma}"
        )
    records = read_records(folder, predictor.kind, split, predictor.columns)
    if not manifest["features_stored"] and set(FEATURES) & set(predictor.columns):
        from data_gen.recompute import recompute  # imports the models

        if pair is None:
            raise UserError(f"pair: {folder} stores no features. Give the pair that was harvested")
        records |= recompute(folder, predictor.kind, split, predictor.columns, pair)
    return predictor.samples(records)
