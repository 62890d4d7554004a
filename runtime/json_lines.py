"""Lines of JSON from elsewhere, prompts and responses: checked before anything is made of them."""

import json
import re
from typing import Any, TypeGuard

from runtime.errors import UserError

SURROGATE = re.compile("[\ud800-\udfff]")  # half of a character


def parse_object(line: bytes, where: str, form: str) -> dict[str, Any]:
    """The JSON object on one line. Raises UserError. where: config key and line; form: what to
    write there instead."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:  # also what is not UTF-8
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise UserError(f"{where} is not JSON ({reason}). Mend or remove that line") from error
    if not isinstance(row, dict):
        raise UserError(f"{where} is not a JSON object. {form}")
    return row


def is_text(value: object) -> TypeGuard[str]:
    """Also whether it can be encoded: JSON may hold halves of characters."""
    return isinstance(value, str) and not SURROGATE.search(value)
