import gzip
import json
from pathlib import Path

import pytest

from runtime.errors import UserError
from runtime.json_files import OpenForm, read_json, write_checksummed
from tests.helpers.damage.refusals import refuses

SHARDS = [{"name": "é\n", "rows": 3}]
VALUE = {"plan": "ab12", "shards": SHARDS, "mean": 0.1 + 0.2, "none": None, "on": True}


class Plan(OpenForm):
    version = ("schema_version", 4)
    plan: str
    mean: float
    checksum: str


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_checksummed(tmp_path / "plan.json", VALUE)
    return tmp_path / "plan.json"


def test_it_comes_back(path):
    assert read_json(path, Plan, "data", "").written == VALUE
    assert json.loads(path.read_text()).keys() - VALUE.keys() == {"checksum"}


def test_every_bit_and_every_length_counts(path):
    content = path.read_bytes()
    damaged = [content[:length] for length in range(len(content))]
    for place in range(len(content)):
        for bit in range(8):
            byte = bytes([content[place] ^ 1 << bit])
            damaged.append(content[:place] + byte + content[place + 1 :])
    for other in damaged:
        path.write_bytes(other)
        with pytest.raises(UserError, match=r"^data: .*plan\.json is damaged .*\. Mend it$"):
            read_json(path, Plan, "data", "Mend it")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (gzip.compress(b"{}"), r"^data: .*plan\.json is damaged \(it is gzip, .*Mend it$"),
        (b"[" * 100_000, "is damaged"),
        (b'{"schema_version": 2}', "has schema version 2, this version reads 4. Mend it"),
    ],
    ids=["gzip", "nested", "other version"],
)
def test_what_it_is_instead_is_named(path, content, says):
    path.write_bytes(content)
    refuses(says, read_json, path, Plan, "data", "Mend it")


def test_the_name_counts(path):
    read_json(path, Plan, "data", "")
    with pytest.raises(UserError, match=r"other\.json is damaged"):
        read_json(path.rename(path.with_name("other.json")), Plan, "data", "")


def test_a_file_that_another_process_removes_is_read_or_missing(path, monkeypatch):
    read = Path.read_bytes

    def read_and_removed(self: Path) -> bytes:
        content = read(self)
        self.unlink()
        return content

    monkeypatch.setattr(Path, "read_bytes", read_and_removed)
    assert read_json(path, Plan, "data", "").written == VALUE
    refuses("is missing", read_json, path, Plan, "data", "")
