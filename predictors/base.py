"""What a predictor is, and the folder it is saved in.

A checkpoint folder holds `config.json` (what it was trained for), `model.safetensors`, `calibration.json`,
`metrics.json` and `README.md`. Nothing in it is executable.
"""

import importlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from predictors.calibration import Calibration
from predictors.errors import UserError
from predictors.features import FeatureSpec

if TYPE_CHECKING:
    from predictors.trainer import Trainer

FORMAT_VERSION = 2
Records = Mapping[str, torch.Tensor]
"""Columns of one split of a harvest, row-aligned; `group` [n] is the prompt index of each row."""


class Predictor(Protocol):
    """A dataclass whose constructor arguments are its settings; `fit` sets `features` and `head`.

    classes: names of the C columns `head` returns. label: what they mean. caveat: what calibration leaves wrong.
    layers: those it reads of the harvested ones; None for all. Each predictor is a module `predictors.<name>` with its
    class as `PREDICTOR`.
    """

    name: ClassVar[str]
    classes: ClassVar[tuple[str, ...]]
    label: ClassVar[str]
    caveat: ClassVar[str]
    layers: Sequence[int] | None
    features: FeatureSpec
    calibration: Calibration
    head: nn.Module

    @property
    def gamma(self) -> int | None:
        """The draft length its label belongs to; None where the label does not depend on one."""

    @property
    def kind(self) -> str:
        """Which of the harvest's record sets it learns from."""

    @property
    def columns(self) -> tuple[str, ...]:
        """What `samples` needs of them."""

    def samples(self, records: Records) -> Records:
        """The rows to learn from and to be scored on, made of harvested records: `features` [n, D], `group` [n], ..."""

    @property
    def offset(self) -> tuple[float, ...]:
        """[C] constants that undo what training did to the class odds, for the calibrator; () for nothing."""

    def build(self, dim: int) -> nn.Module:
        """An untrained head: float32 [n, dim] -> logits [n, C]."""

    def fit(self, records: Records, features: FeatureSpec, trainer: "Trainer") -> "Predictor":
        """Learn from the training split; returns self."""

    def targets(self, records: Records) -> torch.Tensor:
        """[n, C] distribution over `classes` that each row is scored against."""

    def predict_proba(self, x: torch.Tensor) -> torch.Tensor:
        """Calibrated probabilities of float32 features [n, D]; for two classes [n], that of the second."""


def load_predictor(
    directory: str | Path,
    *,
    expect: Mapping[str, Any] | None = None,
    key: str = "checkpoint",
    device: str | torch.device = "cpu",
) -> Predictor:
    """Load the predictor saved in `directory`, refusing one that was trained for something else.

    expect: what this run has, any of `pair`, `features`, `warp`, `draft_warp` (dicts, compared leaf by leaf) and
    `gamma`; what is left out is not checked. A pair may be renamed: its fingerprints decide. A checkpoint whose label
    does not depend on gamma has gamma null and fits every gamma. key: config key named in errors.
    """
    folder = Path(directory)
    config = read_config(folder, key)
    refuse_mismatch(config, expect or {}, f"{key}: {folder}")
    try:
        predictor = _restore(folder, config)
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise damaged(folder, key, config["predictor"], error) from error
    predictor.head.to(device).eval()
    return predictor


def _restore(folder: Path, config: Mapping[str, Any]) -> Predictor:
    predictor: Predictor = importlib.import_module(f"predictors.{config['predictor']}").PREDICTOR(**config["settings"])
    predictor.features = FeatureSpec.from_dict(config["features"])
    predictor.calibration = Calibration.from_dict(json.loads((folder / "calibration.json").read_text()))
    predictor.head = predictor.build(config["dim"])
    predictor.head.load_state_dict(load_file(folder / "model.safetensors"))
    return predictor


def read_config(folder: Path, key: str) -> dict[str, Any]:
    """`config.json` of a checkpoint folder."""
    path = folder / "config.json"
    if not path.is_file():
        raise UserError(f"{key}: no checkpoint in {folder}. Train one: python train.py predictor=specdecpp (or hrad)")
    try:
        config: dict[str, Any] = json.loads(path.read_text())
        version, name = config["format_version"], config["predictor"]
    except (ValueError, KeyError, TypeError) as error:
        raise damaged(folder, key, "specdecpp (or hrad)", error) from error
    if version != FORMAT_VERSION or importlib.util.find_spec(f"predictors.{name}") is None:
        raise UserError(
            f"{key}: {folder} holds predictor {name!r} in format {version}, this version reads {FORMAT_VERSION}. "
            "Train it again: python train.py"
        )
    return config


def damaged(folder: Path, key: str, name: str, error: Exception) -> UserError:
    reason = (str(error).splitlines() or [""])[0][:120]
    return UserError(
        f"{key}: {folder} is incomplete or damaged ({type(error).__name__}: {reason}). "
        f"Train it again: python train.py predictor={name}"
    )


def refuse_mismatch(config: Mapping[str, Any], expect: Mapping[str, Any], where: str) -> None:
    """Raise `UserError` naming the first key in which the run differs from what the checkpoint was trained for."""
    for name, wanted in _leaves(_plain(expect)).items():
        trained = _leaves({name.split(".")[0]: config.get(name.split(".")[0])})
        if name == "pair.name" or (name == "gamma" and trained.get("gamma") is None):
            continue
        if trained.get(name) != wanted:
            raise UserError(
                f"{where} was trained with {name}={trained.get(name)!r}, but this run has {name}={wanted!r}. Use the "
                f"former, or harvest and train for this run: python scripts/gen_data.py, "
                f"python train.py predictor={config['predictor']}"
            )


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """As it would read back from JSON: tuples become lists, a FeatureSpec its dict."""
    flat = {name: value.to_dict() if isinstance(value, FeatureSpec) else value for name, value in values.items()}
    plain: dict[str, Any] = json.loads(json.dumps(flat))
    return plain


def _leaves(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"warp": {"top_k": 0}} -> {"warp.top_k": 0}."""
    leaves: dict[str, Any] = {}
    for name, value in values.items():
        leaves |= _leaves(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return leaves


def save_predictor(predictor: Predictor, folder: Path, context: Mapping[str, Any]) -> None:
    """Write the three files `load_predictor` needs into `folder`; `context` is merged into `config.json`."""
    config = {
        "format_version": FORMAT_VERSION,
        "predictor": predictor.name,
        "settings": settings(predictor),
        "features": predictor.features.to_dict(),
        "classes": list(predictor.classes),
        "label": predictor.label,
        **context,
    }
    state = {name: tensor.detach().cpu().contiguous() for name, tensor in predictor.head.state_dict().items()}
    save_file(state, folder / "model.safetensors")
    write_json(folder / "config.json", config)
    write_json(folder / "calibration.json", predictor.calibration.to_dict())


def settings(predictor: Any) -> dict[str, Any]:
    """Constructor arguments of a predictor."""
    return {field.name: getattr(predictor, field.name) for field in fields(predictor) if field.init}


def write_json(path: Path, value: Any) -> None:
    """Write `value` as readable JSON, atomically. NaN, which JSON does not have, becomes null."""
    text = json.dumps(_without_nan(value), indent=2) + "\n"
    write_atomically(path, lambda temporary: _write_text(temporary, text))


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def write_atomically(path: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a temporary file, force it to disk, then give it its name. Nothing is left when it fails."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")  # of a killed run: written over
    try:
        write(temporary)
        _sync(temporary)
        temporary.replace(path)
        _sync(path.parent)
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
    finally:
        temporary.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _without_nan(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nan(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(inner) for inner in value]
    return None if isinstance(value, float) and math.isnan(value) else value


def refuse_foreign(folder: Path, marker: str) -> None:
    """Raise UserError when `folder` has content but no file `marker` (replacing it would destroy something else), or
    when it cannot be made."""
    parent = next(above for above in folder.resolve().parents if above.exists())
    if not (parent.is_dir() and os.access(parent, os.W_OK)):
        raise UserError(f"out: {folder} cannot be made, {parent} is no folder to write in. Choose another out=<folder>")
    if folder.exists() and not (folder.is_dir() and ((folder / marker).is_file() or not any(folder.iterdir()))):
        raise UserError(f"out: {folder} holds something else, which would be lost. Choose another out=<folder>")


@contextmanager
def replaced_folder(folder: Path, marker: str) -> Iterator[Path]:
    """Write into a new folder that takes `folder`'s place when the block ends without an error.

    marker: a file by which a folder written earlier is known (`refuse_foreign`).
    """
    refuse_foreign(folder, marker)
    folder = folder.resolve()
    fresh = folder.with_name(f".{folder.name}.writing")
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    try:
        yield fresh
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    fresh.rename(folder)
    shutil.rmtree(old, ignore_errors=True)
