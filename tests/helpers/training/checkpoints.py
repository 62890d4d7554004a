"""Small predictor checkpoints, written with the real writer."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from predictors.base import CARD, FILES, Predictor, save_predictor
from predictors.calibration import Calibration
from predictors.features.catalogue import FIXED
from predictors.hrad import HRAD
from predictors.inputs import Inputs
from predictors.specdecpp import SpecDecPP
from predictors.value import Value
from runtime.files import file_hash
from runtime.json_files import write_checksummed

ONE_STATE = {
    "specdecpp": Inputs([-1]),
    "hrad": Inputs((), [-1], token=True),
    "hrad-lengths": Inputs((), [-1], token=True),
    "value": Inputs(q_stats=True, q_path=True, depth=True),
}

METRICS = {"seconds": 3.5, "test": {"hrad": {"brier": 0.25}}, "reliability": {"x": {}}}
AS_TRAINED = Calibration()


def write_checkpoint(
    folder: Path,
    name: str,
    dim: int,
    *,
    gamma: int = 4,
    inputs: Inputs | None = None,
    calibration: Calibration = AS_TRAINED,
    context: Mapping[str, Any] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> Path:
    """An untrained but deterministic predictor `name` on `dim` inputs; gamma and settings only bind
    H-RAD."""
    torch.manual_seed(0)
    reads = inputs or ONE_STATE[name]
    made = {
        "hrad": lambda: HRAD(gamma, **settings or {}),
        "hrad-lengths": lambda: HRAD(gamma, "lengths", **settings or {}),
        "value": lambda: Value(list(reads.names)),
    }
    predictor: Predictor = made.get(name, lambda: SpecDecPP(depth=0))()
    predictor.inputs, predictor.calibration = reads, calibration
    predictor.head = predictor.build(dim)
    return save(predictor, folder, dim, context)


def columns(name: str, width: int) -> int:
    """Of the matrix of `ONE_STATE`, with states and embeddings of `width` numbers."""
    return sum(FIXED.get(read, width) for read in ONE_STATE[name].names)


def write_logistic(folder: Path, calibration: Calibration = AS_TRAINED) -> Path:
    """SpecDec++ head on one feature x whose logits have the log-odds x."""
    predictor = SpecDecPP(depth=0)
    predictor.inputs, predictor.head = ONE_STATE["specdecpp"], predictor.build(1)
    predictor.calibration = calibration
    predictor.head.load_state_dict(
        {"out.weight": torch.tensor([[0.0], [1.0]]), "out.bias": torch.zeros(2)}
    )
    return save(predictor, folder, 1)


def save(
    predictor: Predictor, folder: Path, dim: int, context: Mapping[str, Any] | None = None
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    known = {"dim": dim, "gamma": predictor.gamma} | dict(context or {})
    save_predictor(predictor, folder, known, METRICS)
    return folder


def rewrite_checksum(folder: Path) -> None:
    """Make the checksums fit what lies in the folder, so that what comes after them is tested."""
    config = json.loads((folder / "config.json").read_text())
    if isinstance(config, dict):
        sums = {name: file_hash(folder / name) for name in (*FILES, CARD)}
        write_checksummed(folder / "config.json", {**config, "sha256": sums})
