"""The content hash stands for the records, and for nothing else."""

from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_gen.storage.chunks import content_hash
from data_gen.storage.dataset import verify
from data_gen.storage.shards import SCHEMAS, record_digests
from decoding.models.loading import ModelPair
from tests.helpers.data.datasets import RECIPE, make_dataset


@pytest.fixture(scope="module")
def content(pair: ModelPair, tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_dataset(pair, tmp_path_factory.mktemp("data"))["content"]


@pytest.mark.parametrize("size", [1, 2, 9])
def test_chunks_do_not_matter(pair: ModelPair, content: str, tmp_path: Path, size: int) -> None:
    made = make_dataset(pair, tmp_path, recipe=replace(RECIPE, batch_size=size))
    assert len(made["shards"]) == 3 * -(-9 // size) and made["content"] == content


@pytest.mark.parametrize(
    "change", [{"seed": 4}, {"gamma": 2}, {"mixing": 0.5}, {"features_stored": False}]
)
def test_records_matter(pair: ModelPair, content: str, tmp_path: Path, change: dict) -> None:
    assert make_dataset(pair, tmp_path, recipe=replace(RECIPE, **change))["content"] != content


def test_tables_do_not_matter(
    pair: ModelPair, content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("data_gen.storage.shards.ROWS_AT_ONCE", 2)
    made = make_dataset(pair, tmp_path)
    assert made["content"] == content and verify(tmp_path) == []
    file = pq.ParquetFile(tmp_path / "rounds-00000.parquet")
    assert [file.metadata.row_group(n).num_rows for n in range(file.num_row_groups)] == [2, 1]


def test_the_encoding_does_not_matter(pair: ModelPair, content: str, tmp_path: Path) -> None:
    """It can be computed from the files alone, whatever wrote them."""
    make_dataset(pair, tmp_path)
    digests = []
    for kind in SCHEMAS:
        table = pq.read_table(sorted(tmp_path.glob(f"{kind}-*")))
        pq.write_table(
            table, tmp_path / "again", compression="gzip", row_group_size=2, data_page_version="2.0"
        )
        digests += record_digests(pq.read_table(tmp_path / "again"), kind)
    assert content_hash(digests) == content


def test_every_column_counts(pair: ModelPair, tmp_path: Path) -> None:
    make_dataset(pair, tmp_path)
    for kind, schema in SCHEMAS.items():
        table = pq.read_table(tmp_path / f"{kind}-00000.parquet")
        found = record_digests(table, kind)
        assert len(set(found)) == len(found) == RECIPE.batch_size
        for place, name in enumerate(schema.names):
            other = table[name].to_pylist()
            other[1] = "other" if isinstance(other[1], str) else [*other[1][:-1], other[1][-1] + 1]
            column = pa.array(other, schema.field(place).type)
            changed = record_digests(table.set_column(place, schema.field(place), column), kind)
            assert [a == b for a, b in zip(found, changed, strict=True)] == [True, False, True], (
                name
            )
