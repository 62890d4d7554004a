"""Calls that end in one line for whoever made them."""

from collections.abc import Callable
from typing import Any

import pytest

from runtime.errors import UserError


def refuses(
    match: str, call: Callable[..., Any], /, *given: Any, kind: Any = UserError, **named: Any
) -> str:
    """The line of the error that the call raises, in which `match` is found."""
    with pytest.raises(kind, match=match) as error:
        call(*given, **named)
    assert "\n" not in str(error.value)
    return str(error.value)
