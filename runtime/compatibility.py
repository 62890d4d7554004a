"""Whether two things belong together: made for the same pair, distributions, inputs and gamma; and
which settings of two runs differ."""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

FREE = {"pair.name"}  # what tables call a pair: the fingerprints say whether it is the same


class Difference(NamedTuple):
    """name: dotted, as ``warp.top_k``."""

    name: str
    made: Any
    here: Any


def incompatible(made: Mapping[str, Any], here: Mapping[str, Any]) -> list[Difference]:
    """Where what was `made` (a harvest, a checkpoint, a cost table) does not fit what is `here`.

    Only what `here` names is compared, leaf by leaf: pair, warp, draft_warp, inputs, gamma. The
    pair's name may be another, and what was made for no gamma fits every one."""
    found = differing({name: made.get(name) for name in here}, here)
    return [
        one
        for one in found
        if one.name in leaves(_plain(here))
        and one.name not in FREE
        and not (one.name == "gamma" and one.made is None)
    ]


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """The leaves in which they differ, ``warp.top_k=50, here 0``, in one line; empty where none
    does."""
    return ", ".join(f"{name}={old}, here {new}" for name, old, new in differing(before, now))


def differing(made: Mapping[str, Any], here: Mapping[str, Any]) -> list[Difference]:
    """The leaves in which they differ, by name; None for one that is not there. Compared as JSON
    has them: a tuple is a list."""
    old, new = leaves(_plain(made)), leaves(_plain(here))
    return [
        Difference(name, old.get(name), new.get(name))
        for name in sorted(old.keys() | new.keys())
        if old.get(name) != new.get(name)
    ]


def leaves(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"warp": {"top_k": 0}} -> {"warp.top_k": 0}. A mapping of nothing is a value."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        found |= (
            leaves(value, f"{prefix}{name}.")
            if isinstance(value, Mapping) and value
            else {f"{prefix}{name}": value}
        )
    return found


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return facts as JSON has them; what knows its own dict (`to_dict`) is that dict."""
    plain: dict[str, Any] = json.loads(json.dumps(values, default=lambda value: value.to_dict()))
    return plain
