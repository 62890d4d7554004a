from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from data_gen.storage import shards, sharing
from data_gen.storage.dataset import Harvest
from runtime.errors import UserError
from runtime.files import file_hash
from runtime.json_files import write_checksummed
from tests.helpers.data.harvests import DIM, PROMPTS, write_harvest

SHARD = "rounds-00000.parquet"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_harvest(tmp_path / "toy", rows=5, gamma=3)


@pytest.fixture
def harvest(folder: Path) -> Harvest:
    return Harvest.open(folder)


def test_records_by_split(harvest: Harvest) -> None:
    records = harvest.rounds("train")
    rows = 5 * PROMPTS["train"]
    assert (
        records["target_hidden"].shape == (rows, DIM)
        and records["target_hidden"].dtype == torch.bfloat16
    )
    assert records["q"].shape == (rows, 3) and records["q"].dtype == torch.float32
    assert records["draft_hidden"].shape == (rows, 3, DIM)
    assert records["accepted"].shape == (rows,) and records["accepted"].dtype == torch.int64
    assert records["group"].tolist() == [
        group for group in range(PROMPTS["train"]) for _ in range(5)
    ]


def test_all_splits_together_number_their_prompts(harvest: Harvest) -> None:
    records = harvest.rounds("all", ["accepted"])
    assert torch.bincount(records["group"]).tolist() == [5] * sum(PROMPTS.values())
    parts = [harvest.rounds(split, ["accepted"])["accepted"] for split in shards.SPLITS]
    assert torch.equal(records["accepted"], torch.cat(parts))


def test_one_value_per_round_keeps_its_axis(tmp_path: Path) -> None:
    short = Harvest.open(write_harvest(tmp_path / "short", rows=2, gamma=1))
    assert short.rounds("test")["accept_prob"].shape == (2 * PROMPTS["test"], 1)


def test_columns_are_read_on_demand(harvest: Harvest) -> None:
    assert harvest.rounds("test", ["accepted"]).keys() == {"accepted", "group"}
    everything, some = harvest.rounds("test"), harvest.rounds("test", ["q", "draft_hidden"])
    assert all(torch.equal(everything[name], values) for name, values in some.items())


def test_a_harvest_without_features_reads_the_rest(folder: Path) -> None:
    manifest = Harvest.open(folder).manifest.written
    write_checksummed(folder / "manifest.json", {**manifest, "features_stored": False})
    records = Harvest.open(folder).records("rounds", "test")
    assert (
        not records.keys() & set(shards.FEATURES) and len(records["group"]) == 5 * PROMPTS["test"]
    )


def test_features_survive_as_bfloat16(folder: Path) -> None:
    values = torch.tensor([[1.0, -2.5], [3.14159, 1e30]])
    row = {
        "prompt_id": "a",
        "dataset": "d",
        "split": "test",
        "draft_hidden": shards.pack_features(values),
    }
    row |= {name: torch.zeros(2) for name in shards.SCHEMAS["mixed"].names if name not in row}
    shards.write_shard(folder, "mixed", 7, [row])
    stored = pq.read_table(folder / "mixed-00007.parquet")["draft_hidden"][0].as_py()
    assert torch.equal(
        torch.tensor(stored, dtype=torch.int16).view(torch.bfloat16).view(2, 2), values.bfloat16()
    )


def test_the_datasets_package_reads_shards(folder: Path, tmp_path: Path) -> None:
    loaded = datasets.load_dataset(
        "parquet",
        data_files=str(folder / "rounds-*.parquet"),
        split="train",
        cache_dir=str(tmp_path / "cache"),
    )
    assert len(loaded) == sum(PROMPTS.values()) and len(loaded[0]["target_hidden"]) == 5 * DIM


def test_nan_is_not_written(folder: Path) -> None:
    rows = pq.read_table(folder / SHARD).to_pylist()
    rows[0]["target_hidden"][0] = 0x7FC0  # NaN in bfloat16
    with pytest.raises(UserError, match="^pair: NaN or infinite values in column target_hidden"):
        shards.write_shard(folder, "rounds", 1, rows)
    assert not (folder / "rounds-00001.parquet").exists()


def test_unfinished_and_absent_harvests(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"is no harvested dataset\. Run: python scripts/gen_data\.py out="
    ):
        Harvest.open(tmp_path / "none")
    sharing.claim(tmp_path / "half", {"gamma": 4}, others=False)
    with pytest.raises(UserError, match="is only half harvested"):
        Harvest.open(tmp_path / "half")


def test_a_manifest_whose_shards_were_deleted_is_forgotten(folder: Path) -> None:
    for path in folder.glob("*.parquet"):
        path.unlink()
    sharing.claim(folder, {"gamma": 4}, others=False)
    with pytest.raises(UserError, match="is only half harvested"):
        Harvest.open(folder)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("[]", "is damaged .it holds a list"),
        ("{", "is damaged"),
        ('{"schema_version": 2}', "has schema version 2, this version reads 5. Run: python"),
        ('{"pair": {}}', "is damaged or of an earlier version .it has no checksum"),
    ],
)
def test_a_manifest_that_is_none_is_refused_in_one_line(
    folder: Path, content: str, says: str
) -> None:
    (folder / "manifest.json").write_text(content)
    with pytest.raises(UserError, match=f"^data: .*manifest.json {says}"):
        Harvest.open(folder)


@pytest.mark.parametrize(
    ("changed", "names"),
    [
        ({"gamma": "4", "prompts": None}, "prompts, gamma"),
        (
            {"warp": {"top_p": 2}, "inputs": {"draft_layers": [1]}},
            "warp.temperature, warp.top_k, warp.top_p, inputs.draft_layers.0",
        ),
        (
            {
                "shards": [
                    {
                        "name": "/rounds-00000.parquet",
                        "kind": "rounds",
                        "rows": 1,
                        "bytes": 1,
                        "sha256": "",
                    }
                ]
            },
            "shards.0",
        ),
        ({"splits": {"train": 1, "calibration": 1, "test": 1}}, "splits"),
        ({"max_new_tokens": 10**30}, "max_new_tokens"),
        ({"warp": {"top_k": 0, "top_p": 1.0}}, "warp.temperature"),
    ],
)
def test_a_manifest_of_other_values_is_refused(
    folder: Path, changed: dict[str, Any], names: str
) -> None:
    write_checksummed(
        folder / "manifest.json", {**Harvest.open(folder).manifest.written, **changed}
    )
    with pytest.raises(
        UserError, match=rf"^data: .*manifest.json is damaged \(no valid {names}\)\. Run: "
    ):
        Harvest.open(folder)


def at(table: pa.Table) -> int:
    return int(table.column_names.index("accepted"))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda table: table.drop_columns(["accepted"]), "column accepted is missing"),
        (lambda table: table.slice(1), "19 rows instead of 20"),
        (
            lambda table: table.set_column(at(table), "accepted", table["q"]),
            "column accepted is of type list<.*float",
        ),
        (
            lambda table: table.set_column(
                at(table), "accepted", pa.array([[1, None]] * 20, shards.INTEGERS)
            ),
            "accepted has holes",
        ),
        (
            lambda table: table.set_column(
                at(table), "accepted", pa.array([[1]] * 20, shards.INTEGERS)
            ),
            "accepted has not 1 values for",
        ),
    ],
)
def test_a_shard_of_other_columns_is_refused_though_its_hash_is_right(
    folder: Path, change: Callable[[pa.Table], pa.Table], says: str
) -> None:
    path, manifest = folder / "rounds-00000.parquet", Harvest.open(folder).manifest.written
    pq.write_table(change(pq.read_table(path)), path)
    entry = next(entry for entry in manifest["shards"] if entry["name"] == path.name)
    entry["bytes"], entry["sha256"] = path.stat().st_size, file_hash(path)
    write_checksummed(folder / "manifest.json", manifest)
    with pytest.raises(UserError, match=f"^data: .*{says}"):
        Harvest.open(folder).records("rounds", "all", ["accepted"])


def test_a_folder_belongs_to_one_plan(tmp_path: Path) -> None:
    sharing.claim(tmp_path, {"gamma": 3}, others=False)  # no shard was made: may be changed
    plan = {"gamma": 4, "warp": {"temperature": 1.0}, "layers": (1, 2)}
    sharing.claim(tmp_path, plan, others=False)
    write_harvest(tmp_path, rows=1)
    sharing.claim(tmp_path, plan, others=False)
    with pytest.raises(UserError, match=r"was made with warp\.temperature=1\.0, here 0\.5"):
        sharing.claim(tmp_path, {**plan, "warp": {"temperature": 0.5}}, others=False)
