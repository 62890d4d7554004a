"""Which settings of two runs differ."""

import json
from collections.abc import Mapping
from typing import Any


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """The leaves in which they differ, ``warp.top_k=50, here 0``, in one line; empty where none
    does. Compared as JSON has them: a tuple is a list."""
    old, new = leaves(_plain(before)), leaves(_plain(now))
    names = [name for name in sorted(old.keys() | new.keys()) if old.get(name) != new.get(name)]
    return ", ".join(f"{name}={old.get(name)}, here {new.get(name)}" for name in names)


def leaves(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"warp": {"top_k": 0}} -> {"warp.top_k": 0}."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        found |= (
            leaves(value, f"{prefix}{name}.")
            if isinstance(value, Mapping)
            else {f"{prefix}{name}": value}
        )
    return found


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    plain: dict[str, Any] = json.loads(json.dumps(values))
    return plain
