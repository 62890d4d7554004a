"""Checks that two things were made for the same pair, distributions, inputs and gamma; and the
settings in which two runs differ."""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

FREE = {"pair.name"}  # a label for tables: fingerprints decide whether it is the same pair


class Difference(NamedTuple):
    """A leaf in which two sets of settings differ. name: dotted, as ``warp.top_k``."""

    name: str
    made: Any
    here: Any


def incompatible(made: Mapping[str, Any], here: Mapping[str, Any]) -> list[Difference]:
    """Return the leaves in which the facts of a harvest, checkpoint or cost table (`made`) do not
    fit those of this run (`here`).

    Only keys of `here` are compared: pair, warp, draft_warp, inputs, gamma. The pair's name may
    differ, and a gamma of None in `made` fits every gamma."""
    pairs = differing({name: made.get(name) for name in here}, here)
    return [
        one
        for one in pairs
        if one.name in leaves(_plain(here))
        and one.name not in FREE
        and not (one.name == "gamma" and one.made is None)
    ]


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return the leaves that differ in one line, ``warp.top_k=50, here 0``; "" if none does."""
    return ", ".join(f"{name}={old}, here {new}" for name, old, new in differing(before, now))


def differing(made: Mapping[str, Any], here: Mapping[str, Any]) -> list[Difference]:
    """Return the leaves that differ, sorted by name, with None for a missing one. Values are
    compared as JSON: a tuple equals a list."""
    old, new = leaves(_plain(made)), leaves(_plain(here))
    return [
        Difference(name, old.get(name), new.get(name))
        for name in sorted(old.keys() | new.keys())
        if old.get(name) != new.get(name)
    ]


def leaves(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten {"warp": {"top_k": 0}} to {"warp.top_k": 0}. An empty mapping is a value."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= (
            leaves(value, f"{prefix}{name}.")
            if isinstance(value, Mapping) and value
            else {f"{prefix}{name}": value}
        )
    return flat


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return facts as JSON values; an object with `to_dict` becomes that dict."""
    plain: dict[str, Any] = json.loads(json.dumps(values, default=lambda value: value.to_dict()))
    return plain
