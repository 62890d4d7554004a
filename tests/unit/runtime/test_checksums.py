import json
from pathlib import Path

import pytest

from runtime.checksums import read_checksummed, write_checksummed
from runtime.errors import UserError

VALUE = {
    "plan": "ab12",
    "shards": [{"name": "é\n", "rows": 3}],
    "mean": 0.1 + 0.2,
    "none": None,
    "on": True,
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_checksummed(tmp_path / "plan.json", VALUE)
    return tmp_path / "plan.json"


def test_it_comes_back(path: Path) -> None:
    assert read_checksummed(path, "data", "") == VALUE
    assert json.loads(path.read_text()).keys() - VALUE.keys() == {"checksum"}


def test_every_bit_counts(path: Path) -> None:
    content = path.read_bytes()
    for place in range(len(content)):
        for bit in range(8):
            path.write_bytes(
                content[:place] + bytes([content[place] ^ 1 << bit]) + content[place + 1 :]
            )
            with pytest.raises(UserError, match=r"^data: .*plan\.json is damaged .*\. Mend it$"):
                read_checksummed(path, "data", "Mend it")


def test_every_length_counts(path: Path) -> None:
    content = path.read_bytes()
    for length in range(len(content)):
        path.write_bytes(content[:length])
        with pytest.raises(UserError, match=r"plan\.json is damaged"):
            read_checksummed(path, "data", "")


def test_the_name_counts(path: Path) -> None:
    read_checksummed(path, "data", "")
    with pytest.raises(UserError, match=r"other\.json is damaged"):
        read_checksummed(path.rename(path.with_name("other.json")), "data", "")


def test_deep_nesting_is_no_crash(path: Path) -> None:
    path.write_text("[" * 100_000)
    with pytest.raises(UserError, match="is damaged"):
        read_checksummed(path, "data", "")


def test_what_older_versions_wrote_is_told_apart(path: Path) -> None:
    path.write_text(json.dumps({"schema_version": 2}))
    with pytest.raises(UserError, match="has the older schema version 2. Harvest it again"):
        read_checksummed(path, "data", "")
