"""The methods of a comparison: which are asked for, and what each of them is made of."""

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from decoding.models.loading import ModelPair
from evaluation.decode import Engine
from evaluation.table import BASELINE
from runtime.errors import UserError

CUSTOM = "custom"  # what the command line chooses


@dataclass(frozen=True)
class Method:
    """One row of a comparison, called what the config calls it.

    settings: as it is decoded, resolved: a copy, in which a tuned or tried setting has its value;
    note: what was decided for it, or ""; speculates: False where tuning found no draft worth it
    here, so that `settings` are those of plain decoding"""

    name: str
    settings: DictConfig
    note: str = ""
    speculates: bool = True

    def to_dict(self) -> dict[str, Any]:
        settings = OmegaConf.to_container(self.settings)
        return {"settings": settings, "note": self.note, "speculates": self.speculates}


def configured(cfg: DictConfig, name: str, changes: Mapping[str, Any] | None = None) -> DictConfig:
    """The resolved settings of `cfg.method[name]` with some changed, by key; `cfg` stays as it is.

    Raises UserError for a draft length beyond what the structure allows."""
    cfg = copy.deepcopy(cfg)
    for key, value in (changes or {}).items():
        OmegaConf.update(cfg, f"method.{name}.{key}", value)
    found: Any = OmegaConf.to_container(cfg.method[name], resolve=True)
    settings: DictConfig = DictConfig({"method": {name: found}}).method[name]  # errors name the key
    gamma = OmegaConf.select(settings, "stop.gamma")
    longest = OmegaConf.select(settings, "structure.gamma_max")
    if isinstance(gamma, int) and isinstance(longest, int) and gamma > longest:
        raise UserError(
            f"method.{name}.stop.gamma: expected at most structure.gamma_max={longest}, got"
            f" {gamma}. Raise structure.gamma_max, or draft less"
        )
    return settings


def engine(method: Method, pair: ModelPair) -> Engine:
    built: Engine = instantiate(method.settings.engine)(pair=pair, eos_ids=frozenset(pair.eos_ids))
    if not hasattr(built, "decode"):
        raise UserError(
            f"method.{method.name}.engine: expected something that can `decode`, got"
            f" {type(built).__name__}. Choose another engine"
        )
    return built


def is_lossless(method: Method) -> bool:
    """Whether the method's verifier claims to be; an engine without one to choose is."""
    settings = method.settings
    return "verifier" not in settings or bool(instantiate(settings.verifier).lossless)


# What is asked for --------------------------------------------------------------------------------


def method_names(cfg: DictConfig, overrides: Sequence[str]) -> list[str]:
    """`cfg.methods`, the baseline first. overrides: of the command line. Raises UserError for what
    cannot work."""
    if CUSTOM in cfg.methods:
        refuse_other_parts(cfg)
        refuse_idle(cfg, overrides)
    return list(dict.fromkeys([BASELINE, *cfg.methods]))


def refuse_other_parts(cfg: DictConfig) -> None:
    """The custom method takes the top-level parts, so nothing else may be written there."""
    for part in cfg.method.custom:
        if cfg.method.custom[part] != cfg[part]:
            raise UserError(
                f"method.custom.{part}: the custom method takes the top-level {part}. Write"
                f" {part}=... instead"
            )


def refuse_idle(cfg: DictConfig, overrides: Sequence[str]) -> None:
    """A part that is asked for on the command line and that no method takes: the custom engine has
    none."""
    asked = set_keys(overrides)
    others = [cfg.method[name] for name in cfg.methods if name != CUSTOM]
    for part in ("structure", "verifier", "stop"):
        taken = part in cfg.method.custom.engine or any(
            method.get(part) == cfg[part] for method in others
        )
        if any(key == part or key.startswith(f"{part}.") for key in asked) and not taken:
            kind = cfg.method.custom.engine._target_.rpartition(".")[2]
            raise UserError(
                f"{part}, engine: {kind} takes no {part}. Leave {part}=... away, or choose another"
                " engine"
            )


def set_keys(overrides: Iterable[str]) -> list[str]:
    """The keys that overrides of the command line set."""
    return [override.split("=")[0].lstrip("+~").split("@")[-1] for override in overrides]


def is_given(key: str, overrides: Iterable[str]) -> bool:
    """Whether the command line sets `key`, or something that holds it."""
    return any(key == other or key.startswith(f"{other}.") for other in set_keys(overrides))
