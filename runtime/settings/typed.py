"""Checked settings as an object of the class that describes them."""

from typing import Any, TypeVar

from omegaconf import DictConfig, OmegaConf

from runtime.settings.check import alternatives, described, each_of, group_among
from runtime.settings.kinds import Group, Part

GroupT = TypeVar("GroupT", bound=Group)


def typed(group: type[GroupT], cfg: DictConfig) -> GroupT:
    """Return `cfg`, which the class `group` describes, as one of it: an attribute for each setting,
    None where an optional one is not given. Groups are such objects themselves; a `Part` stays the
    node that hydra instantiates."""
    settings = group(cfg)
    for name, setting in described(group).items():
        setattr(settings, name, _value(setting.annotation, cfg[name] if name in cfg else None))
    return settings


def _value(kind: Any, value: Any) -> Any:
    kinds = alternatives(kind)
    inner, each = group_among(kinds), each_of(kinds)
    if isinstance(value, DictConfig) and inner is not None and "_target_" not in value:
        return typed(inner, value)
    if isinstance(value, DictConfig) and each is not None:
        return {str(name): _value(each, part) for name, part in value.items()}
    if Part in kinds or not OmegaConf.is_config(value):
        return value
    return OmegaConf.to_container(value, resolve=True)
