"""The protocol of predictors, and the folder one is saved in.

A checkpoint folder holds `config.json` (what it was trained for), `model.safetensors`,
`calibration.json`, `metrics.json` and `README.md`. Nothing in it is executable."""

import importlib
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch
from pydantic import NonNegativeFloat, TypeAdapter
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import nn

from predictors.calibration import Calibration, balanced
from predictors.inputs import Inputs, When
from predictors.training.batches import hold_out_prompts
from runtime.compatibility import incompatible
from runtime.errors import UserError
from runtime.files import file_hash, write_atomically, write_json
from runtime.json_files import Length, OpenForm, fitting, read_json, write_checksummed
from runtime.settings.check import part

if TYPE_CHECKING:
    from predictors.training.trainer import Trainer

FORMAT_VERSION = 5
FILES = ("model.safetensors", "calibration.json", "metrics.json")
CARD = "README.md"
UNREADABLE = (
    *(SafetensorError, UserError, OSError, ValueError, TypeError, AttributeError, LookupError),
    *(ArithmeticError, RuntimeError, ImportError, MemoryError),
)
"""What reading a damaged file may end in."""
Records = Mapping[str, torch.Tensor]
"""Columns of one split of a harvest, row-aligned; `group` [n] is the prompt index of each row."""


class CheckpointConfig(OpenForm):
    """The form of `config.json`. sha256: hashes of the other files."""

    version = ("format_version", FORMAT_VERSION)
    format_version: int
    predictor: str
    settings: dict[str, Any]
    inputs: dict[str, Any]
    dim: Length
    sha256: dict[str, str]
    checksum: str


class MetricsFile(OpenForm):
    """The form of `metrics.json`. test: predictor -> its scores; reliability: harvest ->
    calibration on it"""

    seconds: NonNegativeFloat
    test: dict[str, dict[str, Any]]
    reliability: dict[str, dict[str, Any]]


class Predictor(Protocol):
    """A dataclass whose constructor arguments are its settings; `fit` sets `inputs` and `head`.

    classes: names of the C columns that `head` returns. label: what they mean. caveat: what
    calibration leaves wrong. when: it is asked before a round is drafted ("round") or after each
    drawn token ("token"). inputs: what it reads, every layer spelled out, stored in the checkpoint.

    A predictor is one module `predictors.<name>` with its class as `PREDICTOR`, and one YAML in
    `conf/predictor`; nothing else names it. The module may lie outside of this tree, in a folder
    `predictors` on PYTHONPATH. A class may derive from this one to inherit the methods that have a
    body here, but need not."""

    name: ClassVar[str]
    label: ClassVar[str]
    caveat: ClassVar[str]
    when: ClassVar[When]
    inputs: Inputs
    calibration: Calibration = Calibration()
    head: nn.Module

    @property
    def classes(self) -> tuple[str, ...]: ...

    @property
    def gamma(self) -> int | None:
        """The draft length that the label depends on; None if it depends on none."""
        return None

    @property
    def reads(self) -> Inputs:
        """The inputs, in which layers may be None for "all that were recorded"."""

    @property
    def kind(self) -> str:
        """The records it learns from, "rounds" or "mixed"."""
        return "rounds"

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of these records that `samples` needs besides the inputs."""

    @property
    def offset(self) -> tuple[float, ...]:
        """Constants [C] with which the calibrator undoes what training did to the class odds; ()
        for none."""
        return ()

    def samples(self, records: Records) -> Records:
        """Return the rows to learn from and to be scored on: `inputs` [n, D], `group` [n], ...

        records: the predictor's `columns`, and `inputs` [n, D], or [n, gamma, D] of rounds if
        `when` is "token" (`data_gen.samples.read_inputs`). If only some of the returned rows are
        scored, `reached` [n] bool marks them. Raises TooFewRows if there are no rows."""

    def build(self, dim: int) -> nn.Module:
        """Return an untrained head: float32 [n, dim] -> logits [n, C]."""

    def fit(self, records: Records, inputs: Inputs, trainer: "Trainer") -> "Predictor":
        """Learn from the training split; return self."""

    def begin(self, records: Records, inputs: Inputs, trainer: "Trainer") -> torch.Tensor:
        """Set `inputs` and an untrained `head` at the start of a `fit`; return the mask [n] of the
        rows held out for early stopping."""
        held = hold_out_prompts(records["group"], trainer.validation_fraction, trainer.seed)
        torch.manual_seed(trainer.seed)
        self.inputs, self.head = inputs, self.build(records["inputs"].shape[1])
        return held

    def targets(self, records: Records) -> torch.Tensor:
        """Return the distribution over `classes` that each row is scored against, [n, C]."""

    @torch.inference_mode()
    def predict_proba(self, x: torch.Tensor) -> torch.Tensor:
        """Return calibrated probabilities [n, C] of float32 inputs [n, D]; with two classes only
        that of the second, [n]."""
        probs = self.calibration.apply(self.head(x))
        return probs[:, 1] if probs.shape[1] == 2 else probs


def load_predictor(
    directory: str | Path,
    *,
    expect: Mapping[str, Any] | None = None,
    key: str = "checkpoint",
    device: str | torch.device = "cpu",
) -> Predictor:
    """Load the predictor saved in `directory`. Raises UserError if it was trained for something
    other than `expect`.

    expect: any of this run's `pair`, `inputs`, `warp`, `draft_warp` (dicts, compared leaf by leaf)
    and `gamma`; keys that are left out are not checked. A pair may be renamed: its fingerprints
    decide. A checkpoint whose label does not depend on gamma has gamma null and fits every gamma.
    key: config key named in errors."""
    folder = Path(directory)
    config = read_config(folder, key)
    refuse_mismatch(config, expect or {}, f"{key}: {folder}")
    refuse_changed(folder, config, key)
    try:
        predictor = _restore(folder, config)
    except UNREADABLE as error:
        raise damaged(folder, key, config["predictor"], error) from error
    predictor.head.to(device)
    return predictor


def _restore(folder: Path, config: Mapping[str, Any]) -> Predictor:
    kind = importlib.import_module(f"predictors.{config['predictor']}").PREDICTOR
    made = {"_target_": f"{kind.__module__}.{kind.__qualname__}", **config["settings"]}
    for fault in part(made, "settings"):
        raise ValueError(str(fault))
    predictor: Predictor = kind(**config["settings"])
    predictor.inputs = Inputs.from_dict(config["inputs"])
    if not predictor.inputs.fit(config["dim"]):
        raise ValueError(f"its inputs make no {config['dim']} columns")
    text = (folder / "calibration.json").read_bytes()
    predictor.calibration = fitting(lambda: TypeAdapter(Calibration).validate_json(text))
    weights = load_file(folder / "model.safetensors")
    if not all(w.dtype == torch.float32 and torch.isfinite(w).all() for w in weights.values()):
        raise ValueError("model.safetensors holds NaN, infinite or other than float32 values")
    with torch.device("meta"):  # detects a wrong shape before anything is allocated
        predictor.head = predictor.build(config["dim"])
    predictor.head.load_state_dict({n: w.clone() for n, w in weights.items()}, assign=True)
    predictor.head.eval()  # the check below shall use every weight
    x = torch.tensor([[-1.0], [0.0], [1.0]]).expand(-1, config["dim"])
    if not torch.isfinite(predictor.predict_proba(x)).all():
        raise ValueError("model.safetensors gives no probabilities")
    calibration, first = predictor.calibration, torch.zeros(1, len(predictor.classes))
    first[0, 0] = 100
    probs = calibration.apply(torch.cat([first, 0 * first, -first]))
    survival = calibration.survival(torch.tensor([[1.0, 0.5, 0.1], [0.0, 0.0, 0.0]]))
    balanced(probs, calibration.log_prior)
    knots = all(0 < y <= 1 for _, curve in calibration.curves for y in curve)
    if not (knots and torch.isfinite(probs).all() and torch.isfinite(survival).all()):
        raise ValueError("calibration.json gives no probabilities")
    return predictor


def read_config(folder: Path, key: str, made_by: str = "") -> dict[str, Any]:
    """Return `config.json` of a checkpoint folder. made_by: the commands that make one, "" for
    train.py."""
    path = folder / "config.json"
    if not path.is_file():
        train = made_by or f"python train.py predictor=... out={folder}"
        raise UserError(f"{key}: no checkpoint in {folder}. Train one: {train}")
    config = read_json(path, CheckpointConfig, key, "Train it again: python train.py").written
    name = config["predictor"]
    if not name.isidentifier() or importlib.util.find_spec(f"predictors.{name}") is None:
        raise UserError(
            f"{key}: {folder} holds predictor {name!r}, of which there is no module. Put its folder"
            " on PYTHONPATH, or train it again: python train.py"
        )
    return config


def damaged(folder: Path, key: str, name: str, error: Exception) -> UserError:
    reason = (str(error).splitlines() or [""])[0][:120]
    return UserError(
        f"{key}: {folder} is incomplete or damaged ({type(error).__name__}: {reason}). "
        f"Train it again: python train.py predictor={name}"
    )


def refuse_mismatch(config: Mapping[str, Any], expect: Mapping[str, Any], where: str) -> None:
    """Raise `UserError` naming the first key in which the run differs from what the checkpoint was
    trained for."""
    if differences := incompatible(config, expect):
        name, trained, here = differences[0]
        raise UserError(
            f"{where} was trained with {name}={trained!r}, but this run"
            f" has {name}={here!r}. Use the former, or harvest and train for this run:"
            f" python scripts/gen_data.py, python train.py predictor={config['predictor']}"
        )


def described(predictor: Predictor, context: Mapping[str, Any]) -> dict[str, Any]:
    """Return `config.json` without the checksums. context: entries that the predictor does not
    know."""
    return {
        "format_version": FORMAT_VERSION,
        "predictor": predictor.name,
        "settings": settings(predictor),
        "inputs": predictor.inputs.to_dict(),
        "classes": list(predictor.classes),
        "label": predictor.label,
        **context,
    }


def save_predictor(
    predictor: Predictor,
    folder: Path,
    context: Mapping[str, Any],
    metrics: Mapping[str, Any] | None = None,
    card: str = "",
) -> None:
    """Write a checkpoint into `folder`. context: as in `described`; card: its README.md."""
    weights = predictor.head.state_dict().items()
    state = {name: tensor.detach().cpu().contiguous() for name, tensor in weights}
    write_atomically(folder / FILES[0], lambda temporary: temporary.write_bytes(save(state)))
    write_json(folder / FILES[1], predictor.calibration.to_dict())
    write_json(folder / FILES[2], metrics or {})
    (folder / CARD).write_text(card, encoding="utf-8")
    sums = {name: file_hash(folder / name) for name in (*FILES, CARD)}
    write_checksummed(folder / "config.json", {**described(predictor, context), "sha256": sums})


def refuse_changed(folder: Path, config: Mapping[str, Any], key: str) -> None:
    """Raise `UserError` naming the file that is missing or was changed since it was written."""
    try:
        for name in FILES:
            if config["sha256"].get(name) != file_hash(folder / name):
                raise ValueError(f"{name} is not as it was written")
    except UNREADABLE as error:
        raise damaged(folder, key, config["predictor"], error) from error


def read_metrics(folder: Path, key: str) -> dict[str, Any]:
    """Return `metrics.json` of an unchanged checkpoint; print a line if its model card, which may
    be edited, was changed."""
    config = read_config(folder, key)
    refuse_changed(folder, config, key)
    card = folder / CARD
    if not card.is_file() or config["sha256"].get(CARD) != file_hash(card):
        print(f"warning: {card} is not as it was written. The numbers are those of {FILES[2]}")
    return read_json(folder / FILES[2], MetricsFile, key, "Train it again: python train.py").written


def settings(predictor: Any) -> dict[str, Any]:
    """Return the constructor arguments of a predictor; inputs by their names."""
    values = {part.name: getattr(predictor, part.name) for part in fields(predictor) if part.init}
    return {k: list(v.names) if isinstance(v, Inputs) else v for k, v in values.items()}
