"""Settings in whose place a secret may stand."""

from typing import Annotated

import pytest

from runtime.settings.check import faults
from runtime.settings.kinds import Address, Group, Variable

SECRET = "S3CR3T"


class Server(Group):
    url: Annotated[Address, "of a server"]
    key_variable: Annotated[Variable | None, "holds its key"]


def said(**values: object) -> list[str]:
    right = {"url": "http://[::1]:8000/v1", "key_variable": None}
    return [str(fault) for fault in faults(Server, {**right, **values})]


def test_what_is_right() -> None:
    assert said() == said(key_variable="API_KEY", url="https://host/a/v1") == []


@pytest.mark.parametrize(
    "url",
    [
        *(f"http://me:{SECRET}@host/v1", f"HTTPS://{SECRET}@host/v1", f"me:{SECRET}@host/v1"),
        *(f"http://host/v1?api_key={SECRET}", f"http://host/v1#{SECRET}", f"host:80/v1?k={SECRET}"),
        *("http://host/v1?", "http://host/v1#", f"http://host:{SECRET}/v1", f"http://[{SECRET}/v1"),
        *("127.0.0.1:8000", "ftp://x/v1", "http://", "http://x:abc/v1", "", 5, None, [SECRET]),
    ],
)
def test_no_other_address_is_taken_and_none_is_shown(url: object) -> None:
    (line,) = said(url=url)
    assert line.startswith("url: expected an address such as http://127.0.0.1:8000/v1, without")
    assert SECRET not in line


@pytest.mark.parametrize("value", [f"sk-{SECRET.lower()}", f"{SECRET} ", "api_key", "", 5, ["A"]])
def test_a_key_in_place_of_the_name_of_its_variable_is_not_shown(value: object) -> None:
    (line,) = said(key_variable=value)
    assert line.startswith("key_variable: expected the name of an environment variable, such as")
    assert SECRET.lower() not in line.lower()
