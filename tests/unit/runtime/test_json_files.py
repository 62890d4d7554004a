import gzip
import json
from pathlib import Path

import pytest

from runtime.errors import UserError
from runtime.json_files import OpenForm, read_json, write_checksummed

VALUE = {
    "plan": "ab12",
    "shards": [{"name": "é\n", "rows": 3}],
    "mean": 0.1 + 0.2,
    "none": None,
    "on": True,
}


class Plan(OpenForm):
    version = ("schema_version", 4)
    plan: str
    mean: float
    checksum: str


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_checksummed(tmp_path / "plan.json", VALUE)
    return tmp_path / "plan.json"


def test_it_comes_back(path: Path) -> None:
    assert read_json(path, Plan, "data", "").written == VALUE
    assert json.loads(path.read_text()).keys() - VALUE.keys() == {"checksum"}


def test_other_formats_are_named(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(gzip.compress(content))
    with pytest.raises(UserError, match=r"^data: .*plan\.json is damaged \(it is gzip, .*Mend it$"):
        read_json(path, Plan, "data", "Mend it")


def test_every_bit_counts(path: Path) -> None:
    content = path.read_bytes()
    for place in range(len(content)):
        for bit in range(8):
            path.write_bytes(
                content[:place] + bytes([content[place] ^ 1 << bit]) + content[place + 1 :]
            )
            with pytest.raises(UserError, match=r"^data: .*plan\.json is damaged .*\. Mend it$"):
                read_json(path, Plan, "data", "Mend it")


def test_every_length_counts(path: Path) -> None:
    content = path.read_bytes()
    for length in range(len(content)):
        path.write_bytes(content[:length])
        with pytest.raises(UserError, match=r"plan\.json is damaged"):
            read_json(path, Plan, "data", "")


def test_the_name_counts(path: Path) -> None:
    read_json(path, Plan, "data", "")
    with pytest.raises(UserError, match=r"other\.json is damaged"):
        read_json(path.rename(path.with_name("other.json")), Plan, "data", "")


def test_deep_nesting_is_no_crash(path: Path) -> None:
    path.write_text("[" * 100_000)
    with pytest.raises(UserError, match="is damaged"):
        read_json(path, Plan, "data", "")


def test_what_older_versions_wrote_is_told_apart(path: Path) -> None:
    path.write_text(json.dumps({"schema_version": 2}))
    with pytest.raises(UserError, match="has schema version 2, this version reads 4. Make it"):
        read_json(path, Plan, "data", "")


def test_a_file_that_another_process_removes_is_read_or_missing(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = Path.read_bytes

    def read_and_removed(self: Path) -> bytes:
        content = read(self)
        self.unlink()
        return content

    monkeypatch.setattr(Path, "read_bytes", read_and_removed)
    assert read_json(path, Plan, "data", "").written == VALUE
    with pytest.raises(UserError, match="is missing"):
        read_json(path, Plan, "data", "")
