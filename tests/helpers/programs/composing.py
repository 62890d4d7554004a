"""Hydra composes the same configs, in a third of the time: most of the tests' programs take longer
to compose than to run."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hydra._internal import defaults_list
from hydra._internal.hydra import Hydra
from omegaconf import DictConfig, OmegaConf

import runtime.settings.composed  # noqa: F401  (what YAMLs call is registered there)

interpolation_map = defaults_list._create_interpolation_map


@contextmanager
def composed_quickly() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        # It composes a second time, to look for `hydra.mode` in a config. None here sets it.
        patch.setattr(Hydra, "get_mode", lambda *_, **__: None)
        patch.setattr(defaults_list, "_create_interpolation_map", _map_where_it_is_read)
        yield


def _map_where_it_is_read(overrides: Any, defaults: list[Any], self_added: bool) -> DictConfig:
    """Of all choices so far, made anew for each file of a defaults list: only for those that
    interpolate."""
    if any("${" in str(vars(default)) for default in defaults):
        return interpolation_map(overrides, defaults, self_added)
    return OmegaConf.create({})
