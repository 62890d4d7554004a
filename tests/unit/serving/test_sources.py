import gzip
import json
import pickle
import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from data_gen.storage import dataset
from runtime.errors import UserError
from runtime.json_files import write_checksummed
from serving.sources.deepspec import DeepspecRecords
from serving.sources.harvest import Harvest
from serving.sources.sglang import SglangRecords, SglangShards
from tests.helpers.damage.refusals import refuses
from tests.helpers.data.harvests import DIM, PAIR, WARP, write_harvest
from tests.helpers.training.checkpoints import columns, write_checkpoint
from tests.helpers.training.confidences import logged

CONTEXT = {"pair": PAIR, "warp": WARP, "draft_warp": WARP}


said = partial(refuses, r"^source\.")


def shard(path: Path, **changed: Any) -> None:
    rows = logged(100)
    torch.save({"logits": rows.logits.float(), "prefix_mask": rows.labels.float(), **changed}, path)


def test_shards_are_read_in_order(tmp_path):
    for number in (0, 2, 10):
        shard(tmp_path / f"sts.{number}.pt", logits=torch.full((100, 3), float(number)))
    found = SglangShards(str(tmp_path / "sts.*.pt"), "chat").read()
    assert found.logits[:, 0].tolist() == [0.0] * 100 + [2.0] * 100 + [10.0] * 100
    assert torch.equal(found.labels, logged(100).labels.repeat(3, 1))
    assert found.domains == ("chat",) and len(found.group.unique()) == 6
    shard(tmp_path / "sts.1.pt", logits=torch.zeros(9, 2), prefix_mask=torch.zeros(9, 2))
    line = said(SglangShards(str(tmp_path / "sts.*.pt"), "chat").read)
    assert "expected proposals of 3 tokens, got 2" in line


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"logits": torch.zeros(100, 4)}, "same shape"),
        ({"logits": torch.zeros(100, 3) + float("nan")}, "finite logits"),
        ({"prefix_mask": logged(100).labels.flip(1)}, "one that rises"),
        ({"prefix_mask": None}, "expected a dict of the dense tensors"),
        ({"logits": torch.tensor(1.0), "prefix_mask": torch.tensor(1.0)}, "dense tensors"),
        ({"logits": torch.zeros(100, 3).to_sparse()}, "dense tensors"),
        ({"logits": torch.zeros(100, 3, dtype=torch.complex64)}, "dense tensors"),
        ({"prefix_mask": torch.full((100, 3), 0.5)}, "labels of 0 and 1"),
        ({"prefix_mask": torch.zeros(3), "logits": torch.zeros(3)}, "same shape"),
    ],
)
def test_other_shards_are_refused(changed, says, tmp_path):
    shard(tmp_path / "sts.0.pt", **changed)
    assert says in said(SglangShards(str(tmp_path / "sts.*.pt"), "chat").read)


class Harmful:
    def __reduce__(self) -> Any:
        return Path.touch, (Path("harmed"),)


def test_foreign_files_are_refused_and_nothing_of_them_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shard(Path("cut.pt"))
    whole = Path("cut.pt").read_bytes()
    contents = {"cut": whole[:300], "empty": b"", "text": b"hello", "nul": b"\0" * 99}
    for name, content in contents.items():
        Path(f"{name}.pt").write_bytes(content)
        assert "cannot be read" in said(SglangShards(f"{name}.pt", "chat").read), name
    Path("harmful.pt").write_bytes(pickle.dumps(Harmful()))
    torch.save({"logits": Harmful()}, "zipped.pt")
    torch.save([1], "list.pt")
    for name in ("harmful", "zipped"):
        assert "cannot be read" in said(SglangShards(f"{name}.pt", "chat").read), name
    assert "got list" in said(SglangShards("list.pt", "chat").read)
    assert not Path("harmed").exists()
    assert "no file matches" in said(SglangShards("nothing.*.pt", "chat").read)


@pytest.mark.parametrize("zipped", [True, False])
def test_changed_bytes_are_read_or_refused(zipped, tmp_path):
    rows, path, choose = logged(20), tmp_path / "sts.0.pt", random.Random(0)
    shard = {"logits": rows.logits.float(), "prefix_mask": rows.labels.float()}
    torch.save(shard, path, _use_new_zipfile_serialization=zipped)
    whole = path.read_bytes()
    for _ in range(300):
        changed = bytearray(whole)
        for _ in range(choose.choice([1, 2, 8])):
            changed[choose.randrange(len(changed))] = choose.randrange(256)
        path.write_bytes(changed)
        try:
            SglangShards(str(path), "chat").read()
        except UserError as error:
            assert "\n" not in str(error)


def records(folder: Path, *lines: str) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / "confidence_records.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_a_file_of_that_very_name_is_meant(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    records(tmp_path / "a[1]", '{"logits": [1], "labels": [1]}')
    for name in (tmp_path / "a[1]/confidence_records.jsonl", "~/a[[]1]/*.jsonl"):
        assert DeepspecRecords(str(name), None).read().domains == ("a[1]",)
    monkeypatch.chdir(tmp_path / "a[1]")
    assert DeepspecRecords("confidence_records.jsonl", None).read().domains == ("a[1]",)


def test_records_may_be_shorter_than_gamma(tmp_path):
    records(tmp_path / "gsm8k", '{"logits": [1.5, -2], "labels": [1, 0]}')
    line = '{"logits": [0.5, 1, 2], "labels": [1, 1, 0], "extra": 3}'
    records(tmp_path / "code", line, '{"logits": [0.25], "labels": [0]}', "")
    found = DeepspecRecords(str(tmp_path / "*/confidence_records.jsonl"), None).read()
    assert found.domains == ("code", "gsm8k") and found.gamma == 3
    assert sorted(found.length.tolist()) == [1, 2, 3]
    row = found.rows(found.length == 2)
    assert row.logits.tolist() == [[1.5, -2, 0]] and row.labels.tolist() == [[1, 0, 0]]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("nonsense", "line 2 is not JSON"),
        ("[]", "line 2 is not a JSON object"),
        ('{"logits": [1]}', "line 2 is no confidence record"),
        ('{"logits": [NaN], "labels": [1]}', "line 2 is no confidence record"),
        ('{"logits": [1e300], "labels": [1]}', "finite logits"),
        ('{"logits": ["1"], "labels": [1]}', "line 2 is no confidence record"),
        ('{"logits": [1], "labels": [2]}', "line 2 is no confidence record"),
        ('{"logits": [1, 2], "labels": [1]}', "as many labels as logits"),
        ('{"logits": [1, 2], "labels": [0, 1]}', "one that rises"),
    ],
)
def test_other_lines_are_refused(line, says, tmp_path):
    path = records(tmp_path / "x", '{"logits": [1], "labels": [1]}', line)
    assert says in said(DeepspecRecords(str(path), None).read)


def test_logs_of_other_formats_and_empty_ones_are_named(tmp_path):
    line = '{"logits": [1.5, -2], "labels": [1, 0]}'
    path = records(tmp_path / "x", line)
    expected = DeepspecRecords(str(path), None).read().logits.tolist()
    path.write_bytes(gzip.compress(line.encode()))
    assert DeepspecRecords(str(path), None).read().logits.tolist() == expected
    path.write_bytes(line.encode("utf-16"))
    faults = {"": "is empty", '{"logits": [], "labels": []}': "got none"}
    assert "is UTF-16, expected JSON" in said(DeepspecRecords(str(path), None).read)
    for content, fault in faults.items():
        assert fault in said(DeepspecRecords(str(records(tmp_path / "x", content)), None).read)


def step(*requests: dict[str, Any]) -> dict[str, Any]:
    return {"forward_ct": 1, "bs": len(requests), "reqs": list(requests)}


def request(verify_len: int, correct: int, rid: str | None = "a", **more: Any) -> dict[str, Any]:
    said = {"verify_len": verify_len, "correct_drafts": correct, "cap_trim": 0, "acc_len": 1}
    return {**said, "rid": rid, "confidence": [0.9, 0.5, 0.0], "draft_tokens": [1, 2, 3], **more}


def dumped(path: Path, *steps: dict[str, Any]) -> Path:
    path.write_text(json.dumps({"dspark_info_record": {"records": steps}, "version": "x"}))
    return path


def test_what_server_info_says_is_read_of_every_rank(tmp_path):
    told = [[step(request(4, n)), {"forward_ct": 3}] for n in (0, 2)]
    states = [{"dspark_info_record": {"records": records}} for records in told]
    path = tmp_path / "info.json"
    path.write_text(json.dumps({"internal_states": states, "version": "0.5.23"}))
    found = SglangRecords(str(path), "chat").read()
    assert found.labels.tolist() == [[0, 0, 0], [1, 1, 0]]
    for damaged in ([], [{}], 3):
        path.write_text(json.dumps({"internal_states": damaged}))
        assert "holds no debug records" in said(SglangRecords(str(path), "chat").read)


def test_only_verified_tokens_of_debug_records_count(tmp_path):
    path = dumped(
        tmp_path / "info.json",
        step(request(4, 1), request(2, 1, "b")),
        step(request(4, 2, "b", cap_trim=1), request(4, 3, confidence=None), request(1, 0)),
        {"forward_ct": 3},
    )
    found = SglangRecords(str(path), "chat").read()
    assert found.length.tolist() == [3, 1, 2, 0]
    assert found.labels.tolist() == [[1, 0, 0], [1, 0, 0], [1, 1, 0], [0, 0, 0]]
    assert found.group.tolist() == [0, 1, 1, 0]
    p = torch.sigmoid(found.logits[0])
    assert p.tolist() == pytest.approx([0.9, 0.5, 5e-5])


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("x", "is damaged"),
        ('{"version": 1}', "holds no debug records"),
        ('{"records": [{"reqs": [{"rid": "a"}]}]}', "holds no debug records"),
        ('{"records": []}', "got none"),
    ],
)
def test_other_json_is_refused(content, says, tmp_path):
    (tmp_path / "x.json").write_text(content)
    assert says in said(SglangRecords(str(tmp_path / "x.json"), "chat").read)


def test_a_harvest_says_what_its_draft_thought(tmp_path):
    folder = write_harvest(tmp_path / "data")
    found, rounds = Harvest(str(folder), None).read(), dataset.Harvest.open(folder).rounds("all")
    assert torch.allclose(torch.sigmoid(found.logits), rounds["q_drawn"].double(), atol=1e-6)
    inside = torch.arange(found.gamma) < found.length[:, None]
    expected = rounds["accept_prob"].double().cumprod(1)
    assert torch.allclose(found.labels, expected.where(inside, torch.zeros(()).double()))
    assert torch.equal(found.group, rounds["group"]) and found.domains == ("toy",)


@pytest.mark.parametrize("name", ["specdecpp", "value"])
def test_a_checkpoint_says_what_it_predicts(name, tmp_path):
    folder = write_harvest(tmp_path / "data")
    width = columns(name, DIM)
    checkpoint = write_checkpoint(tmp_path / name, name, width, context=CONTEXT)
    found = Harvest(str(folder), str(checkpoint)).read()
    assert found.gamma == 4 and torch.isfinite(found.logits).all()
    assert not torch.equal(found.logits, Harvest(str(folder), None).read().logits)


def test_other_checkpoints_are_refused(tmp_path):
    folder = write_harvest(tmp_path / "data")
    other = write_checkpoint(tmp_path / "x", "specdecpp", DIM, context={**CONTEXT, "pair": {}})
    assert said(Harvest(str(folder), str(other)).read).startswith("source.checkpoint:")
    hrad = write_checkpoint(tmp_path / "hrad", "hrad", 2 * DIM, context=CONTEXT)
    assert "of single draft tokens" in said(Harvest(str(folder), str(hrad)).read)
    assert said(Harvest(str(tmp_path / "none"), None).read).startswith("source.data:")
    manifest = json.loads((folder / "manifest.json").read_text())
    write_checksummed(folder / "manifest.json", {**manifest, "features_stored": False})
    checkpoint = write_checkpoint(tmp_path / "y", "specdecpp", DIM, context=CONTEXT)
    line = said(Harvest(str(folder), str(checkpoint)).read)
    assert line.startswith("source.checkpoint:") and "stores none" in line
    assert Harvest(str(folder), None).read().facts == CONTEXT
