"""A harvest on disk: what is read of it, what is refused, and what predictors make of its
rounds."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from data_gen.samples import read_samples
from data_gen.storage import claim, shards
from data_gen.storage.dataset import Harvest
from predictors.hrad import HRAD
from predictors.specdecpp import SpecDecPP, kept_depths
from runtime.errors import UserError
from runtime.files import file_hash
from runtime.json_files import write_checksummed
from tests.helpers.damage.refusals import refuses
from tests.helpers.data.harvests import DIM, PROMPTS, write_harvest

SHARD, MANIFEST = "rounds-00000.parquet", "manifest.json"
ENTRY = {"name": SHARD, "kind": "rounds", "rows": 1, "bytes": 1, "sha256": ""}
WARP = {"top_k": 0, "top_p": 1.0}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_harvest(tmp_path / "toy", rows=5, gamma=3)


@pytest.fixture
def harvest(folder: Path) -> Harvest:
    return Harvest.open(folder)


def change_manifest(folder: Path, **changed: Any) -> None:
    write_checksummed(folder / MANIFEST, {**Harvest.open(folder).manifest.written, **changed})


def test_records_by_split(harvest, tmp_path):
    records, rows = harvest.rounds("train"), 5 * PROMPTS["train"]
    shapes = {"target_hidden": (DIM,), "q": (3,), "draft_hidden": (3, DIM), "accepted": ()}
    assert {name: tuple(records[name].shape) for name in shapes} == {
        name: (rows, *shape) for name, shape in shapes.items()
    }
    types = [records[name].dtype for name in ("target_hidden", "q", "accepted")]
    assert types == [torch.bfloat16, torch.float32, torch.int64]
    assert records["group"].tolist() == [n for n in range(PROMPTS["train"]) for _ in range(5)]
    short = Harvest.open(write_harvest(tmp_path / "short", rows=2, gamma=1))
    assert short.rounds("test")["accept_prob"].shape == (2 * PROMPTS["test"], 1), "an axis of 1"


def test_all_splits_together_number_their_prompts_and_columns_are_read_on_demand(harvest):
    records = harvest.rounds("all", ["accepted"])
    assert torch.bincount(records["group"]).tolist() == [5] * sum(PROMPTS.values())
    parts = [harvest.rounds(split, ["accepted"])["accepted"] for split in shards.SPLITS]
    assert torch.equal(records["accepted"], torch.cat(parts))
    assert harvest.rounds("test", ["accepted"]).keys() == {"accepted", "group"}
    everything, some = harvest.rounds("test"), harvest.rounds("test", ["q", "draft_hidden"])
    assert all(torch.equal(everything[name], values) for name, values in some.items())


def test_a_harvest_without_features_reads_the_rest(folder):
    change_manifest(folder, features_stored=False)
    records = Harvest.open(folder).records("rounds", "test")
    assert not records.keys() & set(shards.FEATURES)
    assert len(records["group"]) == 5 * PROMPTS["test"]


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (("round", "test", None), "kind 'round' is unknown. Use one of mixed, rounds"),
        (("responses", "test", None), "kind 'responses' is unknown. Use one of mixed, rounds"),
        (("rounds", "tset", None), "split 'tset' is unknown. Use one of train, calibration, test"),
        (("rounds", "test", ["q", "accept"]), "column 'accept' is unknown. Use one of anchor"),
        (("mixed", "test", ["history"]), "column 'history' is unknown. Use one of position"),
    ],
)
def test_names_of_nothing_are_refused_in_a_line(harvest, asked, says):
    refuses(rf"^data: {says}", harvest.records, *asked)
    if asked[0] != "responses":
        with pytest.raises(UserError, match=rf"^data: {says.partition(' is')[0]}"):
            list(harvest.by_prompt(asked[0], asked[1], asked[2] or []))


def test_the_datasets_package_reads_shards(folder, tmp_path):
    files = {"data_files": str(folder / "rounds-*.parquet"), "cache_dir": str(tmp_path / "cache")}
    loaded = datasets.load_dataset("parquet", split="train", **files)
    assert len(loaded) == sum(PROMPTS.values()) and len(loaded[0]["target_hidden"]) == 5 * DIM


def test_nan_is_not_written(folder):
    rows = pq.read_table(folder / SHARD).to_pylist()
    rows[0]["target_hidden"][0] = 0x7FC0  # NaN in bfloat16
    with pytest.raises(UserError, match="^pair: NaN or infinite values in column target_hidden"):
        shards.encoded_shard("rounds", 1, rows)
    assert not (folder / "rounds-00001.parquet").exists()


def test_unfinished_and_absent_harvests(tmp_path, folder):
    says = r"is no harvested dataset\. Run: python scripts/gen_data\.py out="
    refuses(says, Harvest.open, tmp_path / "none")
    for path in folder.glob("*.parquet"):
        path.unlink()  # its manifest is forgotten, then
    for half in (tmp_path / "half", folder):
        claim.claim(half, {"gamma": 4})
        refuses("is only half harvested", Harvest.open, half)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("[]", "is damaged .it holds a list"),
        ("{", "is damaged"),
        ('{"schema_version": 2}', "has schema version 2, this version reads 5. Run: python"),
        ('{"pair": {}}', "is damaged or of an earlier version .it has no checksum"),
    ],
)
def test_a_manifest_that_is_none_is_refused_in_one_line(folder, content, says):
    (folder / MANIFEST).write_text(content)
    refuses(f"^data: .*manifest.json {says}", Harvest.open, folder)


@pytest.mark.parametrize(
    ("changed", "names"),
    [
        ({"gamma": "4", "prompts": None}, "prompts, gamma"),
        ({"warp": {"top_p": 2}}, "warp.temperature, warp.top_k, warp.top_p"),
        ({"inputs": {"draft_layers": [1]}}, "inputs.draft_layers.0, inputs.target_layers"),
        ({"shards": [{**ENTRY, "name": f"/{SHARD}"}]}, "shards.0"),
        ({"shards": [ENTRY, ENTRY]}, "shards"),
        ({"splits": {"train": 1, "calibration": 1, "test": 1}}, "splits"),
        ({"max_new_tokens": 10**30}, "max_new_tokens"),
        ({"warp": WARP}, "warp.temperature"),
    ],
)
def test_a_manifest_of_other_values_is_refused(folder, changed, names):
    change_manifest(folder, **changed)
    says = rf"^data: .*manifest.json is damaged \(no valid {names}\)\. Run: "
    refuses(says, Harvest.open, folder)


def accepted_is(column: Any) -> Callable[[pa.Table], pa.Table]:
    """Another column in the place of `accepted`: that of a name, or the same list in every row."""

    def change(table: pa.Table) -> pa.Table:
        lists = isinstance(column, list)
        other = pa.array([column] * 20, shards.INTEGERS) if lists else table[column]
        return table.set_column(table.column_names.index("accepted"), "accepted", other)

    return change


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda table: table.drop_columns(["accepted"]), "column accepted is missing"),
        (lambda table: table.slice(1), "19 rows instead of 20"),
        (accepted_is("q"), "column accepted is of type list<.*float"),
        (accepted_is([1, None]), "accepted has holes"),
        (accepted_is([1]), "accepted has not 1 values for"),
    ],
)
def test_a_shard_of_other_columns_is_refused_though_its_hash_is_right(folder, change, says):
    path, entries = folder / SHARD, Harvest.open(folder).manifest.written["shards"]
    pq.write_table(change(pq.read_table(path)), path)
    entry = next(entry for entry in entries if entry["name"] == path.name)
    entry |= {"bytes": path.stat().st_size, "sha256": file_hash(path)}
    change_manifest(folder, shards=entries)
    refuses(f"^data: .*{says}", Harvest.open(folder).records, "rounds", "all", ["accepted"])


def test_a_folder_belongs_to_one_plan(tmp_path):
    claim.claim(tmp_path, {"gamma": 3})  # no shard was made: may be changed
    plan = {"gamma": 4, "warp": {"temperature": 1.0}, "layers": (1, 2)}
    claim.claim(tmp_path, plan)
    write_harvest(tmp_path, rows=1)
    claim.claim(tmp_path, plan)
    with pytest.raises(UserError, match=r"was made with warp\.temperature=1\.0, here 0\.5"):
        claim.claim(tmp_path, {**plan, "warp": {"temperature": 0.5}})


def test_rollouts_end_with_the_first_rejected_token():
    gamma, values = 4, torch.arange(20.0).view(5, 4)
    records = {
        "accepted": torch.tensor([0, 2, 4, 1, 2]),
        # the fourth round ended with an end token, accepted
        "drafted": torch.tensor([4, 4, 4, 1, 4]),
        # nothing is known of the fifth after two accepted tokens
        "known": torch.tensor([4, 4, 4, 4, 2]),
        "group": torch.tensor([0, 0, 1, 1, 2]),
        **dict.fromkeys(("accept_prob", "q", "q_max"), values),
        "inputs": values[..., None].expand(5, gamma, 3),
    }
    rows = kept_depths(records)
    assert rows["accept_prob"].tolist() == [0, 4, 5, 6, 8, 9, 10, 11, 12, 16, 17]
    assert rows["depth"].tolist() == [0, 0, 1, 2, 0, 1, 2, 3, 0, 0, 1]
    assert rows["group"].tolist() == [0, 0, 0, 0, 1, 1, 1, 1, 1, 2, 2]
    assert torch.equal(rows["inputs"], rows["accept_prob"][:, None].expand(11, 3))


def test_a_depth_occurs_as_often_as_it_is_reached():
    """The product of mean labels by depth is the probability that a whole round is accepted."""
    n, accept = 200_000, torch.tensor([0.9, 0.5, 0.8])
    coins = torch.rand(n, 3, generator=torch.Generator().manual_seed(0))
    records = {
        "accepted": (coins < accept).int().cumprod(1).sum(1),
        **dict.fromkeys(("drafted", "known"), torch.full((n,), 3)),
        **dict.fromkeys(("accept_prob", "q", "q_max"), accept.expand(n, 3)),
        "group": torch.zeros(n),
    }
    reached = torch.bincount(kept_depths(records)["depth"]) / n
    torch.testing.assert_close(reached, torch.tensor([1.0, 0.9, 0.45]), atol=4e-3, rtol=0)


def test_both_contexts_and_hrad_read_one_harvest(harvest):
    predictors = SpecDecPP(), SpecDecPP(context="rollout"), HRAD(2)
    mixed, rollouts, classes = (read_samples(harvest, each, "test") for each in predictors)
    assert len(mixed["inputs"]) == len(classes["label"]) == 5 * PROMPTS["test"]
    assert rollouts["inputs"].shape == (len(rollouts["accept_prob"]), DIM)
    assert rollouts["q"].shape == rollouts["group"].shape == rollouts["accept_prob"].shape


def test_rounds_of_unknown_length_are_left_out():
    records = {
        "known": torch.tensor([3, 1, 2]),
        "accepted": torch.tensor([2, 1, 0]),
        "drafted": torch.tensor([3, 3, 3]),
        "q_max": torch.rand(3, 3),
        "group": torch.tensor([0, 0, 1]),
    }
    rows = HRAD(gamma=2).samples(records)
    assert rows["label"].tolist() == [2, 0] and rows["group"].tolist() == [0, 1]
    assert torch.equal(rows["q_max"], records["q_max"][[0, 2], 0])
    refuses(r"^predictor\.gamma: no harvested round of 4 tokens", HRAD(gamma=4).samples, records)
