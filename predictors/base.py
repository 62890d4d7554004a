"""What a predictor is, and the folder it is saved in.

A checkpoint folder holds `config.json` (what it was trained for), `model.safetensors`, `calibration.json`,
`metrics.json` and `README.md`. Nothing in it is executable.
"""

import hashlib
import importlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from predictors.calibration import Calibration, balanced
from predictors.errors import UserError
from predictors.features import FeatureSpec

if TYPE_CHECKING:
    from predictors.trainer import Trainer

FORMAT_VERSION = 2
UNREADABLE = (
    *(SafetensorError, UserError, OSError, ValueError, TypeError, AttributeError, LookupError, ArithmeticError),
    *(RuntimeError, ImportError, MemoryError),
)
"""What reading a damaged file may end in."""
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
        refuse_changed(folder, config)
        predictor = _restore(folder, config)
    except UNREADABLE as error:
        raise damaged(folder, key, config["predictor"], error) from error
    predictor.head.to(device).eval()
    return predictor


def _restore(folder: Path, config: Mapping[str, Any]) -> Predictor:
    predictor: Predictor = importlib.import_module(f"predictors.{config['predictor']}").PREDICTOR(**config["settings"])
    predictor.features = FeatureSpec.from_dict(config["features"])
    predictor.calibration = Calibration.from_dict(json.loads((folder / "calibration.json").read_text()))
    weights = load_file(folder / "model.safetensors")
    if not all(tensor.dtype == torch.float32 and torch.isfinite(tensor).all() for tensor in weights.values()):
        raise ValueError("model.safetensors holds NaN, infinite or other than float32 values")
    with torch.device("meta"):  # a wrong shape is found before anything is allocated
        predictor.head = predictor.build(config["dim"])
    predictor.head.load_state_dict({name: tensor.clone() for name, tensor in weights.items()}, assign=True)
    ones = torch.ones(1, config["dim"])
    if not torch.isfinite(predictor.predict_proba(torch.cat([-ones, 0 * ones, ones]))).all():
        raise ValueError("model.safetensors gives no probabilities")
    if not _gives_probabilities(predictor.calibration, len(predictor.classes)):
        raise ValueError("calibration.json gives no probabilities")
    return predictor


def _gives_probabilities(calibration: Calibration, classes: int) -> bool:
    """Tried at logits far out and in the middle, for `classes` classes and for a draft of three tokens."""
    one = torch.nn.functional.one_hot(torch.tensor(0), classes).float()
    probs = calibration.apply(torch.stack([100 * one, 0 * one, -100 * one]))
    survival = calibration.survival(torch.tensor([[1.0, 0.5, 0.1], [0.0, 0.0, 0.0]]))
    if calibration.offset:
        balanced(probs, calibration.log_prior)
    knots = all(0 < y <= 1 for _, curve in calibration.curves for y in curve)
    return knots and bool(torch.isfinite(probs).all() and torch.isfinite(survival).all())


def read_config(folder: Path, key: str) -> dict[str, Any]:
    """`config.json` of a checkpoint folder."""
    path = folder / "config.json"
    if not path.is_file():
        raise UserError(f"{key}: no checkpoint in {folder}. Train one: python train.py predictor=specdecpp (or hrad)")
    try:
        config: dict[str, Any] = json.loads(path.read_text())
        version, name = config["format_version"], config["predictor"]
    except UNREADABLE as error:
        raise damaged(folder, key, "specdecpp (or hrad)", error) from error
    if version != FORMAT_VERSION or not _is_predictor(name):
        raise UserError(
            f"{key}: {folder} holds predictor {name!r} in format {version}, this version reads {FORMAT_VERSION}. "
            "Train it again: python train.py"
        )
    return config


def _is_predictor(name: Any) -> bool:
    return isinstance(name, str) and name.isidentifier() and importlib.util.find_spec(f"predictors.{name}") is not None


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


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """The leaves in which they differ, ``warp.top_k=50, here 0``, in one line."""
    old, new = _leaves(before), _leaves(now)
    names = [name for name in sorted(old.keys() | new.keys()) if old.get(name) != new.get(name)]
    return ", ".join(f"{name}={old.get(name)}, here {new.get(name)}" for name in names)


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
    write_atomically(folder / "model.safetensors", lambda temporary: save_file(state, temporary))
    write_json(folder / "calibration.json", predictor.calibration.to_dict())
    write_json(folder / "config.json", {**config, "sha256": _checksums(folder, _plain(_without_nan(config)))})


def _checksums(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """SHA-256 of the files of a checkpoint; of `config.json`, which keeps them, without them."""
    contents = {name: (folder / name).read_bytes() for name in ("model.safetensors", "calibration.json")}
    rest = {name: value for name, value in config.items() if name != "sha256"}
    contents["config.json"] = json.dumps(rest, sort_keys=True).encode()
    return {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}


def refuse_changed(folder: Path, config: Mapping[str, Any]) -> None:
    """Raise ValueError naming the file that is not as it was written. Older checkpoints have no checksums."""
    written = config.get("sha256")
    for name, found in _checksums(folder, config).items():
        if written is not None and written.get(name) != found:
            raise ValueError(f"{name} is not as it was written")


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
    temporary = path.with_name(f".{path.name}.tmp")  # of a killed run: written over
    with _said(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            write(temporary)
            _sync(temporary)
            temporary.replace(path)
            _sync(path.parent)
        finally:
            temporary.unlink(missing_ok=True)


@contextmanager
def _said(path: Path) -> Iterator[None]:
    """What keeps `path` from being written, in one line."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"out: {path} cannot be written ({error}). Free some space, or choose another out=<folder>, and run the "
            "same command again"
        ) from error


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
    _put_back(folder.resolve())
    if folder.exists() and not (folder.is_dir() and ((folder / marker).is_file() or not any(folder.iterdir()))):
        raise UserError(f"out: {folder} holds something else, which would be lost. Choose another out=<folder>")
    if folder.exists() and not os.access(folder, os.W_OK):
        raise UserError(f"out: {folder} is read-only. Make it writable or choose another out=<folder>")


@contextmanager
def replaced_folder(folder: Path, marker: str) -> Iterator[Path]:
    """Write into a new folder that takes `folder`'s place when the block ends without an error, and is on disk.

    marker: a file by which a folder written earlier is known (`refuse_foreign`). Killed at the worst moment, between
    the two renames, it leaves the earlier folder as ``.<name>.old``, and the next call puts it back.
    """
    refuse_foreign(folder, marker)
    folder = folder.resolve()
    fresh, old = folder.with_name(f".{folder.name}.writing"), _old(folder)
    with _said(folder):
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(parents=True)
    try:
        yield fresh
        with _said(folder):
            for path in (*fresh.iterdir(), fresh):
                _sync(path)
            shutil.rmtree(old, ignore_errors=True)
            if folder.exists():
                folder.rename(old)
            fresh.rename(folder)
            _sync(folder.parent)
    except BaseException:
        _put_back(folder)
        shutil.rmtree(fresh, ignore_errors=True)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _old(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.old")


def _put_back(folder: Path) -> None:
    if _old(folder).is_dir() and not folder.exists():
        with suppress(FileNotFoundError):  # another process has done it
            _old(folder).rename(folder)
