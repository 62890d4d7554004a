"""The one exception a user is meant to read, and the checks behind most of them."""


class UserError(Exception):
    """Wrong input, said in one line that names the config key and the remedy.

    Write it as ``UserError("pair.draft: no such folder 'x'. Run: python pairs/build_pair.py")``.
    Scripts print it after ``error:`` and exit with code 2 (`runtime.cli`)."""


class TooFewRows(UserError):
    """A harvest that is whole holds nothing of what is asked for."""


def checked_switch(key: str, value: object) -> bool:
    """`value`, if it is a boolean; else a UserError naming `key`."""
    if not isinstance(value, bool):
        raise UserError(f"{key}: {value} is neither true nor false. Give one of them")
    return value


def shown(value: object) -> str:
    """A value of a setting as an error line shows it: short, and nothing a terminal would obey."""
    words = {"None": "null", "True": "true", "False": "false"}
    text = words.get(repr(value), repr(value))
    return text if len(text) <= 80 else f"{text[:77]}..."
