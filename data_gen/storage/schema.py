"""What the JSON files of a dataset hold: a value of another kind is found where it is read, not
where it is used."""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from data_gen.storage.shards import SCHEMAS, SPLITS, shard_name
from decoding.sampling import Warp
from predictors.base import UNREADABLE
from predictors.inputs import FeatureSpec
from runtime.errors import UserError

Form = Mapping[str, Any]
"""Key -> a form, or what tells right values. Further keys are left alone."""


def refuse_misfits(found: Mapping[str, Any], form: Form, where: str, remedy: str) -> None:
    """Raise UserError naming the keys whose values are missing, of another kind, or do not add up.
    where: config key and file."""
    names = list(misfits(found, form))
    if (
        "splits" in form
        and not names
        and sum(found["splits"].values()) != found["prompts"]["count"]
    ):
        names = ["splits"]
    if names:
        raise UserError(f"{where} is damaged (no valid {', '.join(names)}). {remedy}")


def misfits(found: Any, form: Form, prefix: str = "") -> Iterator[str]:
    for key, kind in form.items():
        value = found.get(key) if isinstance(found, dict) else None
        if isinstance(kind, Mapping):
            yield from misfits(value, kind, f"{prefix}{key}.")
        elif not kind(value):
            yield f"{prefix}{key}"


def is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def is_length(value: Any) -> bool:
    return type(value) is int and 1 <= value < 2**31


def is_text(value: Any) -> bool:
    return isinstance(value, str)


def spells_out(kind: Any) -> Callable[[Any], bool]:
    """Whether a dict gives all settings of the dataclass `kind`, and right ones."""

    def right(value: Any) -> bool:
        try:
            return bool(kind.from_dict(value).to_dict().keys() == value.keys())
        except UNREADABLE:
            return False

    return right


def are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(map(is_text, value))


def are_entries(value: Any) -> bool:
    """Of shards, as a manifest lists them."""
    return isinstance(value, list) and all(map(_is_entry, value))


def _is_entry(entry: Any) -> bool:
    return not any(misfits(entry, _ENTRY)) and bool(
        re.fullmatch(rf"{entry['kind']}-[0-9]{{5,}}\.parquet", entry["name"])
    )


def marker(index: int) -> Form:
    """Of the marker of chunk `index`."""
    names = [shard_name(kind, index) for kind in SCHEMAS]

    def its_entries(value: Any) -> bool:
        return (
            are_entries(value)
            and names == [entry["name"] for entry in value]
            and all(are_texts(entry.get("records")) for entry in value)
        )

    return {"plan": is_text, "prompts": is_size, "tokens": is_size, "shards": its_entries}


_ENTRY = {
    "name": is_text,
    "kind": lambda value: is_text(value) and value in SCHEMAS,
    "rows": is_size,
    "bytes": is_size,
    "sha256": is_text,
}
_WARP = spells_out(Warp)
_SPEC = spells_out(FeatureSpec)
PLAN: Form = {
    "prompts": {"count": is_length},
    "batch_size": is_length,
    "splits": dict.fromkeys(SPLITS, is_size),
}
MANIFEST: Form = {
    **PLAN,
    "pair": dict.fromkeys(("name", "target", "draft", "tokenizer"), is_text),
    "warp": _WARP,
    "draft_warp": _WARP,
    "gamma": is_length,
    "max_new_tokens": is_length,
    "anchors": {"stride": is_length},
    "features": {"specdecpp": _SPEC, "hrad": _SPEC},
    "features_stored": lambda value: isinstance(value, bool),
    "responses_from": lambda value: value is None or isinstance(value, dict),
    "shards": are_entries,
}
