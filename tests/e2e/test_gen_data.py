"""scripts/gen_data.py from its command line: prompts and a pair in, a dataset folder out; chat
templates with arguments and a clock, repeated texts, splits by text."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date
from functools import partial
from pathlib import Path

import pytest

import train
from data_gen.requests import refuse_other_shares
from data_gen.storage.dataset import Harvest
from data_gen.storage.shards import SPLITS
from runtime.errors import UserError
from runtime.json_files import CHECKSUM, write_checksummed
from scripts import evaluate, gen_data
from tests.helpers.data.answer_stub import Stub, stub_server
from tests.helpers.data.datasets import rows
from tests.helpers.models.tiny_pair import save_tiny_pair
from tests.helpers.programs import programs
from tests.helpers.programs.programs import JSONL, models, write_prompts

SMALL = ("max_new_tokens=12", "gamma=3", "batch_size=4", "anchors.stride=2", "pair.name=tiny")
ARGUMENTS = (*SMALL, *models(Path("pair")), *JSONL)
DATA = Path("data/jsonl")
Said = pytest.CaptureFixture[str]
run = partial(programs.run, gen_data, *ARGUMENTS)
refused = partial(programs.refused, gen_data, *ARGUMENTS)


@pytest.fixture(autouse=True)
def workplace(here: Path) -> None:
    write_prompts(9)


@pytest.fixture
def pair(here: Path) -> None:
    save_tiny_pair(here / "pair")


def manifest_of(folder: Path | str = DATA) -> dict:
    return Harvest.open(folder).manifest.written


@contextmanager
def asking() -> Iterator[tuple[Stub, tuple[str, ...]]]:
    """A server that answers, and the settings that ask it."""
    with stub_server() as stub:
        yield stub, ("responses=server", f"responses.url={stub.url}", "responses.model=tiny")


def test_dataset_folder(pair: None) -> None:
    estimate = r"time: about .*disk: about ([\d.]+) MB"
    expected = re.search(estimate, run("estimate=true"), re.DOTALL)
    assert expected and not DATA.exists()
    printed = run()
    manifest, harvest = manifest_of(), Harvest.open(DATA)
    found = manifest["statistics"]
    assert sum(manifest["splits"].values()) == manifest["prompts"]["count"] == 9
    assert all(manifest["splits"].values())
    assert manifest["bytes"] == sum(path.stat().st_size for path in DATA.glob("*.parquet"))
    for kind, column, width in (("mixed", "draft_hidden", 24), ("rounds", "target_hidden", 4 * 24)):
        read = [harvest.records(kind, split) for split in SPLITS]
        assert sum(len(records["group"]) for records in read) == found["records"][kind]
        assert {records[column].shape[1] for records in read} == {width}
    assert {records["draft_hidden"].shape[1:] for records in read} == {(3, 24)}
    assert {records["history"].shape[1:] for records in read} == {(3,)}
    ids, vectors = harvest.embeddings
    tokens = {int(token) for records in read for token in records["token"].flatten()}
    assert tokens <= set(ids.tolist()) and vectors.shape == (len(ids), 24)
    assert sum(found["accepted_lengths"]) == found["records"]["rounds"]
    assert float(expected[1]) * 1e6 == pytest.approx(manifest["bytes"], rel=0.2)
    assert "mean sum(min(p, q))" in printed and "accepted lengths" in printed
    before = {path: path.stat().st_mtime_ns for path in DATA.glob("*.parquet")}
    run()
    assert {path: path.stat().st_mtime_ns for path in DATA.glob("*.parquet")} == before
    assert manifest_of() == manifest


OTHERS = ("runs/x/results.json", "checkpoints/hrad/config.json", "checkpoints/hrad/metrics.json")
OTHERS += ("pair/draft/config.json", "data/other/plan.json")


@pytest.mark.parametrize(
    ("folder", "holds"),
    [
        *(("runs/x", "results.json"), ("checkpoints/hrad", "config.json"), ("pair", "draft")),
        *(("pair/draft", "config.json"), ("data", "other"), (".", None), ("..", None)),
    ],
)
def test_a_harvest_goes_into_no_folder_of_something_else(
    folder: str, holds: str | None, tmp_path: Path
) -> None:
    """The next evaluation or training there would delete it."""
    for name in OTHERS:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).touch()
    before = sorted(tmp_path.rglob("*"))
    for more in ("estimate=false", "estimate=true"):
        line = refused(f"out={folder}", more)
        assert line.startswith(f"error: out: {folder} ")
        assert "is the current folder" in line if holds is None else f"lost: {holds}." in line
    assert sorted(p for p in tmp_path.rglob("*") if "outputs" not in p.parts) == before


def test_what_was_begun_in_one_dtype_does_not_go_on_in_another(pair: None) -> None:
    """Whatever the config says: on another machine, auto may be another one."""
    run("pair.dtype=auto")
    assert manifest_of()["dtypes"] == dict.fromkeys(("target", "draft"), "torch.float32")
    run("pair.dtype=float32")
    says = "was made with dtypes.draft=torch.float32, here torch.float64"
    assert says in refused("pair.draft_dtype=float64")


def test_other_launchers_are_refused_with_the_one_that_harvests(
    pair: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "workers=ray workers.count=8" in refused()
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("RANK", "1")  # without a size, it means nothing
    run()
    assert manifest_of()["prompts"]["count"] == 9


def test_verify_names_every_bad_file(pair: None, capsys: Said) -> None:
    run()
    manifest, printed = manifest_of(), run("verify=true")
    assert f"{DATA} is whole: 9 shards, 9 prompts" in printed and manifest["content"] in printed
    (DATA / "rounds-00000.parquet").write_bytes(b"")
    (DATA / "chunk-00002.json").unlink()
    capsys.readouterr()
    with pytest.raises(SystemExit) as exit_code:
        run("verify=true", "pair.target=not/loaded/at/all")
    said = capsys.readouterr()
    assert exit_code.value.code == 2
    size = manifest["shards"][6]["bytes"]
    assert said.out.splitlines() == [
        f"{DATA}/rounds-00000.parquet is damaged: 0 bytes instead of {size}",
        f"{DATA}/chunk-00002.json is missing",
    ]
    last = said.err.strip().splitlines()[-1]
    assert last.startswith(f"error: out: 2 bad files in {DATA}. Run the command that")
    run()
    run("verify=true")
    assert manifest_of()["content"] == manifest["content"]


@pytest.mark.smoke
def test_responses_from_a_file_and_from_a_server(pair: None, capsys: Said) -> None:
    with asking() as (stub, ask):
        for _ in range(2):
            run(*ask, "+responses.extra.min_p=0", "out=data/server")
        assert len(stub.bodies) == 9
    from_file = ("responses=file", "responses.path=data/server/answers.jsonl")
    printed = run(*from_file, "out=data/file")
    asked, read = manifest_of("data/server"), manifest_of("data/file")
    assert asked["responses"] == read["responses"] != "generated"
    assert asked["responses_from"]["model"] == "tiny"
    taken, given = read["statistics"]["response_tokens"], read["given_tokens"]
    assert taken == given and f"{taken:,} of {given:,} given" in printed
    assert asked["surprisal"] == read["surprisal"] and read["surprisal"]["prompts"] == 9
    assert f"-log p(token) - H(p)    {read['surprisal']['mean']:+.3f} nats a token (" in printed
    assert read["responses_from"]["path"] == "data/server/answers.jsonl"
    for kind in ("responses", "rounds", "mixed"):
        assert rows(Path("data/file"), kind) == rows(Path("data/server"), kind)
    responses = rows(Path("data/file"), "responses")
    assert len(responses) == 9 and all(row["response_tokens"][0] == 5 for row in responses)
    assert "given = argmax" in run(*from_file, "out=data/greedy", "warp=greedy")
    greedy = manifest_of("data/greedy")
    taken = greedy["statistics"]["response_tokens"]
    assert taken < greedy["given_tokens"] == given, "as far as the target says it"
    capsys.readouterr()
    path = Path("data/server/answers.jsonl")
    path.write_text(path.read_text().replace('"response": "w5', '"response": "w6', 1))
    with pytest.raises(SystemExit):
        run("out=data/server", "verify=true")
    said = capsys.readouterr()
    assert f"{path} line 1 is damaged (its checksum does not fit)" in said.out
    assert "error: out: 1 bad file in data/server" in said.err


def test_nothing_is_asked_before_the_settings_are_checked(pair: None) -> None:
    run("out=data/d")
    with asking() as (stub, ask):
        for arguments, message in (
            ("splits.calibration=3", "expected a number above 0, below 1, got 3"),
            ("out=data/d", "out: data/d was made with responses=generated, here external."),
            ("out=data/d seed=9", "responses=generated, here external, seed=0, here 9"),
            ("out=data/d pair.name=large", "made with pair.name=tiny, "),
            ("out=data/d gamma=4", "made with gamma=3, "),
            ("out=data/d max_new_tokens=9", "made with max_new_tokens=12, "),
            ("out=data/d warp.temperature=0.5", ", warp.temperature="),
            ("out=data/d splits.test=0.4", ", splits.test="),
        ):
            assert message in refused(*ask, *arguments.split())
    assert not stub.bodies and not list(Path("data").rglob("answers.jsonl"))


WHOLE = "expected a whole number from"
ADDRESS = "error: responses.url: expected an address such as http://"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("gamma=0", f"error: gamma: {WHOLE} 1 to 1000, got 0"),
        ("gamma=abc", f"error: gamma: {WHOLE} 1 to 1000, got 'abc'"),
        ("batch_size=true", f"error: batch_size: {WHOLE} 1 on, got true"),
        ("verify=maybe", "error: verify: expected true or false, got 'maybe'"),
        ("verify=true", "error: out: data/jsonl is no harvested dataset"),
        ("seed=false", f"error: seed: {WHOLE} 0 to 4294967295, got false"),
        ("anchors.stride=1.5", f"error: anchors.stride: {WHOLE} 1 on, got 1.5"),
        ("dataset.path=none.jsonl", "error: dataset.path: there is no file"),
        ("pair.target=nowhere/at/all", "error: pair.target: "),
        ("gama=3", "gama"),
        ("responses=file", "error: responses.path: no value given"),
        ("responses=file responses.path=no.jsonl", "responses.path: there is no file no.jsonl"),
        ("responses=server responses.url=x responses.model=y", ADDRESS),
        ("dataset.cut=4 dataset.chat=true", "error: dataset.cut: the end of a chat prompt is the"),
        ("dataset.cut=4 responses=file responses.path=no.jsonl", "dataset.cut: responses made"),
    ],
)
@pytest.mark.few(2, rest="slow")
def test_bad_input_is_one_line(arguments: str, message: str) -> None:
    assert message in refused(*arguments.split())
    assert not Path("data").exists()


# Prompts ------------------------------------------------------------------------------------------

TEMPLATE = "{% if thinking %}w9 {% endif %}{{ messages[0]['content'] }} w2"
CLOCK = TEMPLATE + " w{{ strftime_now('%d') | int }}"


@pytest.fixture
def chats(pair: None, request: pytest.FixtureRequest) -> None:
    """Six chat prompts; the parameter is the chat template."""
    for side in ("target", "draft"):
        (Path("pair") / side / "chat_template.jinja").write_text(request.param)
    write_prompts({"prompt": f"w{n % 5 + 1} w3"} for n in range(6))


harvest_chats = partial(run, "dataset.chat=true", "max_new_tokens=6", "gamma=2")


def prompts() -> dict[str, list[int]]:
    return {each.prompt_id: each.prompt_tokens for each in Harvest.open(DATA).prompts("all")}


def on_day(number: int) -> type[date]:
    class Day(date):
        @classmethod
        def today(cls) -> date:
            return date(2031, 1, number)

    return Day


@pytest.mark.parametrize("chats", [CLOCK + "{{ strftime_now('%f') }}"], indirect=True)
def test_a_harvest_goes_on_another_day_with_the_date_it_began_with(
    chats: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scripts.gen_data.date", on_day(30))
    harvest_chats()
    before = manifest_of()
    assert before["dates"] == ["2031-01-30"]
    for name in ("manifest.json", "chunk-00001.json"):
        (DATA / name).unlink()
    monkeypatch.setattr("scripts.gen_data.date", on_day(31))
    harvest_chats()
    assert manifest_of()["content"] == before["content"]


@pytest.mark.parametrize("chats", [CLOCK], indirect=True)
def test_answers_of_a_server_belong_to_their_day(
    chats: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scripts.gen_data.date", on_day(31))
    monkeypatch.setattr("data_gen.responses.server.today", lambda: "2031-01-30")
    with asking() as (_, ask):
        harvest_chats(*ask)
    assert {ids[-1] for ids in prompts().values()} == {30}, "as the server saw them"
    assert manifest_of()["dates"] == ["2031-01-30"]


@pytest.mark.parametrize("chats", [TEMPLATE], indirect=True)
@pytest.mark.parametrize(
    "how", ["dataset.template={thinking: true}", "+dataset.template.thinking=true"]
)
def test_template_arguments_reach_both_renderings(chats: None, how: str) -> None:
    with asking() as (stub, ask):
        harvest_chats(*ask, how)
        assert all(body["chat_template_kwargs"] == {"thinking": True} for body in stub.bodies)
    assert all(ids[0] == 9 for ids in prompts().values())
    assert "dates" not in manifest_of()


@pytest.mark.parametrize("chats", [TEMPLATE], indirect=True)
def test_repeated_texts_are_counted_and_splits_of_ids_are_not_gone_on_with(chats: None) -> None:
    assert "; 1 repeat the text of another, in its split" in harvest_chats()
    manifest = manifest_of()
    assert manifest["repeated_texts"] == 1
    splits = {each.prompt_id: each.split for each in Harvest.open(DATA).prompts("all")}
    assert splits["jsonl-1"] == splits["jsonl-6"] and len(set(splits.values())) == 3
    for path in (DATA / "plan.json", DATA / "manifest.json"):
        old = json.loads(path.read_text())
        write_checksummed(path, {k: v for k, v in old.items() if k not in ("split_by", CHECKSUM)})
    line = refused("dataset.chat=true", "max_new_tokens=6", "gamma=2")
    assert f"{DATA} was made with split_by=None, here text. Choose another out=" in line
    data = {"folder": str(DATA), **Harvest.open(DATA).origin}
    says = rf"^splits: {DATA}, on which x was tuned, was split by the"
    with pytest.raises(UserError, match=says):
        refuse_other_shares(data, manifest["shares"], "x was tuned")


# Processors ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_what_is_made_under_penalties_is_used_under_them(pair: None) -> None:
    def penalised(penalty: float) -> list[str]:
        chosen = ["warp=processed", "warp@draft_warp=processed"]
        return chosen + [f"{name}.repetition_penalty={penalty}" for name in ("warp", "draft_warp")]

    run(*penalised(1.3))
    harvest = Harvest.open(DATA)
    assert harvest.warps.target == harvest.warps.draft
    assert manifest_of()["warp"]["processors"][0][0] == "RepetitionPenaltyLogitsProcessor"
    assert "warp.processors" in refused(*penalised(1.2))
    learn = ("predictor=specdecpp", f"data={DATA}", "trainer.epochs=1", "logger=none")
    programs.run(train, *learn)
    asked = (*programs.base(Path("pair")), "split=all", "limit=2", "max_new_tokens=6", "repeats=1")
    asked = (*asked, "logger=none", "out=runs/x", "methods=[autoregressive,specdecpp]")
    programs.run(evaluate, *asked, *penalised(1.3))
    assert "warp.processors" in programs.refused(evaluate, *asked, *penalised(1.2))
