"""scripts/gen_data.py from its command line: prompts and a pair in, a dataset folder out."""

import json
import re
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from data_gen.storage.dataset import Harvest
from data_gen.storage.shards import SPLITS
from scripts import gen_data
from tests.helpers.data.answer_stub import stub_server
from tests.helpers.models.tiny_pair import save_tiny_pair
from tests.helpers.programs import programs

SMALL = (
    "max_new_tokens=12",
    "gamma=3",
    "batch_size=4",
    "anchors.stride=2",
    "dataset=jsonl",
    "dataset.chat=false",
)


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    lines = [json.dumps({"id": f"p{n}", "prompt": f"w{n + 1} w{n + 2} w{n + 3}"}) for n in range(9)]
    Path("prompts.jsonl").write_text("\n".join(lines))


def run(*arguments: str) -> None:
    pair = (
        "pair.name=tiny",
        "pair.target=pair/target",
        "pair.draft=pair/draft",
        "dataset.path=prompts.jsonl",
    )
    programs.run(gen_data, *SMALL, *pair, *arguments)


def test_dataset_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_tiny_pair(tmp_path / "pair")
    run("estimate=true")
    expected = re.search(
        r"time: about .*disk: about ([\d.]+) MB", capsys.readouterr().out, re.DOTALL
    )
    assert expected
    assert not (tmp_path / "data" / "jsonl").exists()

    run()
    manifest = Harvest.open("data/jsonl").manifest.written
    found = manifest["statistics"]
    assert sum(manifest["splits"].values()) == manifest["prompts"]["count"] == 9 and all(
        manifest["splits"].values()
    )
    assert manifest["bytes"] == sum(
        path.stat().st_size for path in Path("data/jsonl").glob("*.parquet")
    )
    for kind, column, width in (("mixed", "draft_hidden", 24), ("rounds", "target_hidden", 4 * 24)):
        read = [Harvest.open("data/jsonl").records(kind, split) for split in SPLITS]
        assert sum(len(records["group"]) for records in read) == found["records"][kind]
        assert {records[column].shape[1] for records in read} == {width}
    assert {records["draft_hidden"].shape[1:] for records in read} == {(3, 24)}
    assert {records["history"].shape[1:] for records in read} == {(3,)}
    ids, vectors = Harvest.open("data/jsonl").embeddings
    assert {int(token) for records in read for token in records["token"].flatten()} <= set(
        ids.tolist()
    )
    assert vectors.shape == (len(ids), 24)
    assert sum(found["accepted_lengths"]) == found["records"]["rounds"]
    assert float(expected[1]) * 1e6 == pytest.approx(manifest["bytes"], rel=0.2)
    printed = capsys.readouterr().out
    assert "mean sum(min(p, q))" in printed and "accepted lengths" in printed

    before = {path.name: path.stat().st_mtime_ns for path in Path("data/jsonl").glob("*.parquet")}
    run()
    assert {
        path.name: path.stat().st_mtime_ns for path in Path("data/jsonl").glob("*.parquet")
    } == before
    assert Harvest.open("data/jsonl").manifest.written == manifest


@pytest.mark.parametrize(
    ("folder", "holds"),
    [
        ("runs/x", "results.json"),
        ("checkpoints/hrad", "config.json"),
        ("pair", "draft"),
        ("pair/draft", "config.json"),
        ("data", "other"),
        (".", None),
        ("..", None),
    ],
)
def test_a_harvest_goes_into_no_folder_of_something_else(
    folder: str, holds: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The next evaluation or training there would delete it."""
    for name in (
        "runs/x/results.json",
        "checkpoints/hrad/config.json",
        "checkpoints/hrad/metrics.json",
        "pair/draft/config.json",
        "data/other/plan.json",
    ):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).touch()
    before = sorted(tmp_path.rglob("*"))
    for more in ("estimate=false", "estimate=true"):
        with pytest.raises(SystemExit) as ending:
            run(f"out={folder}", more)
        said = capsys.readouterr().err
        assert ending.value.code == 2 and f"error: out: {folder} " in said
        assert "is the current folder" in said if holds is None else f"lost: {holds}." in said
    left = {path for path in tmp_path.rglob("*") if "outputs" not in path.parts}
    assert sorted(left) == before


def test_what_was_begun_in_one_dtype_does_not_go_on_in_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever the config says: on another machine, auto may be another one."""
    save_tiny_pair(tmp_path / "pair")
    run("pair.dtype=auto")
    assert Harvest.open("data/jsonl").manifest.written["dtypes"] == {
        "target": "torch.float32",
        "draft": "torch.float32",
    }
    run("pair.dtype=float32")
    with pytest.raises(SystemExit):
        run("pair.draft_dtype=float64")
    assert "was made with dtypes.draft=torch.float32, here torch.float64" in capsys.readouterr().err


def test_a_process_that_is_not_the_first_says_who_writes_the_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nobody else is there: it makes every chunk."""
    save_tiny_pair(tmp_path / "pair")
    with monkeypatch.context() as patch:
        patch.setenv("RANK", "1")
        patch.setenv("WORLD_SIZE", "2")
        patch.setattr("sys.stdout", sys.stdout)  # which it replaces
        run()
    assert (
        "process 2 of 2 is done. The first one (RANK=0) writes manifest.json"
        in capsys.readouterr().err
    )
    assert (
        len(list(Path("data/jsonl").glob("chunk-*.json"))) == 3
        and not Path("data/jsonl/manifest.json").exists()
    )
    monkeypatch.setenv("RANK", "1")  # without a size it means nothing
    run()
    assert Harvest.open("data/jsonl").manifest.written["prompts"]["count"] == 9


def test_verify_names_every_bad_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_tiny_pair(tmp_path / "pair")
    run()
    manifest, folder = Harvest.open("data/jsonl").manifest.written, Path("data/jsonl")
    run("verify=true")
    printed = capsys.readouterr().out
    assert "data/jsonl is whole: 9 shards, 9 prompts" in printed and manifest["content"] in printed

    (folder / "rounds-00000.parquet").write_bytes(b"")
    (folder / "chunk-00002.json").unlink()
    with pytest.raises(SystemExit) as exit_code:
        run("verify=true", "pair.target=not/loaded/at/all")
    said = capsys.readouterr()
    assert exit_code.value.code == 2
    assert said.out.splitlines() == [
        (
            "data/jsonl/rounds-00000.parquet is damaged: 0 bytes instead of"
            f" {manifest['shards'][6]['bytes']}"
        ),
        "data/jsonl/chunk-00002.json is missing",
    ]
    assert (
        said.err.strip()
        .splitlines()[-1]
        .startswith("error: out: 2 bad files in data/jsonl. Run the command that")
    )
    run()
    run("verify=true")
    assert Harvest.open("data/jsonl").manifest.written["content"] == manifest["content"]


@pytest.mark.smoke
def test_responses_from_a_file_and_from_a_server(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_tiny_pair(tmp_path / "pair")
    with stub_server() as stub:
        ask = (
            "responses=server",
            f"responses.url={stub.url}",
            "responses.model=tiny",
            "+responses.extra.min_p=0",
        )
        run(*ask, "out=data/server")
        run(*ask, "out=data/server")
        assert len(stub.bodies) == 9
    run("responses=file", "responses.path=data/server/answers.jsonl", "out=data/file")
    asked, read = (Harvest.open(f"data/{name}").manifest.written for name in ("server", "file"))
    assert asked["responses"] == read["responses"] != "generated"
    assert asked["responses_from"]["model"] == "tiny"
    taken, given = read["statistics"]["response_tokens"], read["given_tokens"]
    printed = capsys.readouterr().out
    assert taken == given and f"{taken:,} of {given:,} given" in printed
    assert asked["surprisal"] == read["surprisal"] and read["surprisal"]["prompts"] == 9
    assert f"-log p(token) - H(p)    {read['surprisal']['mean']:+.3f} nats a token (" in printed
    assert read["responses_from"]["path"] == "data/server/answers.jsonl"
    for kind in ("responses", "rounds", "mixed"):
        ours, theirs = (read_shard_rows(f"data/{name}", kind) for name in ("file", "server"))
        assert ours == theirs and len(ours) == 9
    assert all(row["response_tokens"][0] == 5 for row in read_shard_rows("data/file", "responses"))
    run(
        "responses=file",
        "responses.path=data/server/answers.jsonl",
        "out=data/greedy",
        "warp=greedy",
    )
    greedy = Harvest.open("data/greedy").manifest.written
    assert greedy["statistics"]["response_tokens"] < greedy["given_tokens"] == given, (
        "as far as the target says it"
    )
    assert "given = argmax" in capsys.readouterr().out


def test_a_changed_answer_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_tiny_pair(tmp_path / "pair")
    with stub_server() as stub:
        run("responses=server", f"responses.url={stub.url}", "responses.model=tiny", "out=data/d")
    run("out=data/d", "verify=true")
    path = Path("data/d/answers.jsonl")
    path.write_text(path.read_text().replace('"response": "w5', '"response": "w6', 1))
    with pytest.raises(SystemExit):
        run("out=data/d", "verify=true")
    printed = capsys.readouterr()
    assert "data/d/answers.jsonl line 1 is damaged (its checksum does not fit)" in printed.out
    assert "error: out: 1 bad files in data/d" in printed.err


def test_nothing_is_asked_before_the_settings_are_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_tiny_pair(tmp_path / "pair")
    run("out=data/d")
    with stub_server() as stub:
        ask = ("responses=server", f"responses.url={stub.url}", "responses.model=tiny")
        for arguments, message in (
            (
                ["splits.calibration=3"],
                "error: splits.calibration: expected a number above 0, below 1, got 3",
            ),
            (
                ["out=data/d"],
                "error: out: data/d was made with responses=generated, here external.",
            ),
            (
                ["out=data/d", "seed=9"],
                "made with responses=generated, here external, seed=0, here 9",
            ),
            (["out=data/d", "pair.name=large"], "made with pair.name=tiny, "),
            (["out=data/d", "gamma=4"], "made with gamma=3, "),
            (["out=data/d", "max_new_tokens=9"], "made with max_new_tokens=12, "),
            (["out=data/d", "warp.temperature=0.5"], ", warp.temperature="),
            (["out=data/d", "splits.test=0.4"], ", splits.test="),
        ):
            with pytest.raises(SystemExit):
                run(*ask, *arguments)
            assert message in capsys.readouterr().err
    assert not stub.bodies and not list(Path("data").rglob("answers.jsonl"))


def read_shard_rows(folder: str, kind: str) -> list[dict]:
    return [
        row
        for path in sorted(Path(folder).glob(f"{kind}-*.parquet"))
        for row in pq.read_table(path).to_pylist()
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gamma=0"], "error: gamma: expected a whole number from 1 to 1000, got 0"),
        (["gamma=abc"], "error: gamma: expected a whole number from 1 to 1000, got 'abc'"),
        (["batch_size=true"], "error: batch_size: expected a whole number from 1 on, got true"),
        (["verify=maybe"], "error: verify: expected true or false, got 'maybe'"),
        (["verify=true"], "error: out: data/jsonl is no harvested dataset"),
        (["seed=false"], "error: seed: expected a whole number from 0 to 4294967295, got false"),
        (
            ["anchors.stride=1.5"],
            "error: anchors.stride: expected a whole number from 1 on, got 1.5",
        ),
        (["dataset.path=none.jsonl"], "error: dataset.path: there is no file"),
        (["pair.target=nowhere/at/all"], "error: pair.target: "),
        (["gama=3"], "gama"),
        (["responses=file"], "error: responses.path: no value given"),
        (
            ["responses=file", "responses.path=none.jsonl"],
            "error: responses.path: there is no file none.jsonl",
        ),
        (
            ["responses=server", "responses.url=x", "responses.model=y"],
            "error: responses.url: expected an address such as http://",
        ),
    ],
)
@pytest.mark.few(2)
def test_bad_input_is_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_code:
        run(*arguments)
    assert exit_code.value.code == 2
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith("error: ") and message in last
    assert not Path("data").exists()
