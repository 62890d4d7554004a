"""Hydra composes the same configs, in a fraction of the time: most of the tests' programs take
longer to compose than to run."""

from collections.abc import Callable, Hashable
from copy import deepcopy
from functools import lru_cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

from hydra._internal import defaults_list
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra._internal.hydra import Hydra
from omegaconf import DictConfig, OmegaConf, _utils, base, grammar_parser

import runtime.settings.composed  # noqa: F401  (what YAMLs call is registered there)

interpolation_map = defaults_list._create_interpolation_map


def compose_quickly() -> None:
    """From now on, in this process."""
    # It composes a second time, to look for `hydra.mode` in a config. None here sets it.
    Hydra.get_mode = lambda *_, **__: None
    defaults_list._create_interpolation_map = _map_where_it_is_read
    once = lru_cache(maxsize=None)(grammar_parser.parse)
    grammar_parser.parse = base.parse = _utils.parse = once
    FileConfigSource.load_config = _copied(FileConfigSource.load_config, _file)
    composed = _parents_last(ConfigLoaderImpl._compose_config_from_defaults_list)
    ConfigLoaderImpl._compose_config_from_defaults_list = _copied(composed, _files)


def _map_where_it_is_read(overrides: Any, defaults: list[Any], self_added: bool) -> DictConfig:
    """Of all choices so far, made anew for each file of a defaults list: only for those that
    interpolate."""
    if any("${" in str(vars(default)) for default in defaults):
        return interpolation_map(overrides, defaults, self_added)
    return OmegaConf.create({})


def _copied(made: Callable[..., Any], key: Callable[..., Hashable]) -> Callable[..., Any]:
    """Return `made` with copies of what it returned for the same key before."""
    known: dict[Hashable, Any] = {}

    def copied(*args: Any, **kwargs: Any) -> Any:
        if (found := key(*args, **kwargs)) not in known:
            known[found] = made(*args, **kwargs)
        return deepcopy(known[found])

    return copied


def _parents_last(composed: Callable[..., DictConfig]) -> Callable[..., DictConfig]:
    """Return `composed` with parents set once, at its end, and not with each file that is merged,
    in all of the tree so far."""

    def quickly(*args: Any, **kwargs: Any) -> DictConfig:
        with patch.object(base.Container, "_re_parent", lambda _: None):
            config = composed(*args, **kwargs)
        config._re_parent()
        return config

    return quickly


def _file(source: FileConfigSource, config_path: str) -> Hashable:
    path = Path(source.path, source._normalize_file_name(config_path))
    return str(path), path.stat().st_mtime_ns if path.is_file() else None, source.provider


def _files(_: ConfigLoaderImpl, defaults: list[Any], repo: Any) -> Hashable:
    """Where they are, what they are called, where each goes, and when each was written."""
    written = [
        _file(source, default.config_path)
        for source in repo.get_sources()
        if isinstance(source, FileConfigSource)
        for default in defaults
    ]
    return tuple(repr(vars(default)) for default in defaults), tuple(written)
