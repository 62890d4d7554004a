"""Servers are asked again at once."""

import pytest


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("data_gen.responses.server.PAUSE", 0.01)
