"""The exception whose message users read, and checks that raise it."""


class UserError(Exception):
    """Wrong input. The message is one line that names the config key and the remedy.

    Write it as ``UserError("pair.draft: no such folder 'x'. Run: python pairs/build_pair.py")``.
    Scripts print it after ``error:`` and exit with code 2 (`runtime.cli`)."""


class TooFewRows(UserError):
    """A complete harvest holds no rows of the kind that was asked for."""


def checked_switch(key: str, value: object) -> bool:
    """Return `value` if it is a boolean. Raises UserError naming `key` otherwise."""
    if not isinstance(value, bool):
        raise UserError(f"{key}: {value} is neither true nor false. Give one of them")
    return value


def shown(value: object) -> str:
    """Return a value as error lines show it: short, without control characters."""
    words = {"None": "null", "True": "true", "False": "false"}
    text = words.get(repr(value), repr(value))
    return text if len(text) <= 80 else f"{text[:77]}..."
