"""What a predictor learns from: the samples it makes of a harvest's records."""

from pathlib import Path

from data_gen.shards import read_manifest, read_records
from predictors.base import Predictor, Records
from predictors.errors import UserError


def read_samples(folder: str | Path, predictor: Predictor, split: str) -> Records:
    """The samples of one split ("train", "calibration" or "test"). Raises UserError as `read_records`, and where the
    rounds of the harvest are shorter than those the predictor is about."""
    harvested = read_manifest(folder)["gamma"]
    if predictor.gamma is not None and predictor.gamma > harvested:
        raise UserError(
            f"predictor.gamma: {predictor.gamma} is more than the {harvested} tokens per round of {folder}. "
            f"Lower it, or harvest longer rounds: python scripts/gen_data.py gamma={predictor.gamma}"
        )
    return predictor.samples(read_records(folder, predictor.kind, split, predictor.columns))
