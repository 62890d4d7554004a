"""What a harvest does with its prompts: chat templates with arguments and a clock, repeated texts,
splits by text."""

import json
from datetime import date
from pathlib import Path

import pytest

from data_gen.requests import refuse_other_shares
from data_gen.storage.dataset import Harvest
from runtime.errors import UserError
from runtime.files import file_hash
from runtime.json_files import CHECKSUM, write_checksummed
from scripts import gen_data
from tests.helpers.data.answer_stub import stub_server
from tests.helpers.models.tiny_pair import save_tiny_pair
from tests.helpers.programs.programs import run

SMALL = ("max_new_tokens=6", "gamma=2", "batch_size=4", "anchors.stride=2", "out=data/d")
TEMPLATE = "{% if thinking %}w9 {% endif %}{{ messages[0]['content'] }} w2"
CLOCK = TEMPLATE + " w{{ strftime_now('%d') | int }}"


@pytest.fixture
def harvest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest):
    """Run the program on six chat prompts; the parameter is the chat template."""
    monkeypatch.chdir(tmp_path)
    save_tiny_pair(tmp_path / "pair")
    for side in ("target", "draft"):
        (Path("pair") / side / "chat_template.jinja").write_text(request.param)
    lines = [json.dumps({"prompt": f"w{n % 5 + 1} w3"}) for n in range(6)]
    Path("prompts.jsonl").write_text("\n".join(lines))
    pair = ("pair.target=pair/target", "pair.draft=pair/draft", "pair.name=tiny")
    rows = ("dataset=jsonl", "dataset.path=prompts.jsonl")
    return lambda *more: run(gen_data, *SMALL, *pair, *rows, *more)


def prompts() -> dict[str, list[int]]:
    return {each.prompt_id: each.prompt_tokens for each in Harvest.open("data/d").prompts("all")}


class Later(date):
    @classmethod
    def today(cls) -> date:
        return date(2031, 1, 31)


class Earlier(date):
    @classmethod
    def today(cls) -> date:
        return date(2031, 1, 30)


@pytest.mark.parametrize("harvest", [CLOCK + "{{ strftime_now('%f') }}"], indirect=True)
def test_a_harvest_goes_on_another_day_with_the_date_it_began_with(
    harvest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scripts.gen_data.date", Earlier)
    harvest()
    before = Harvest.open("data/d").manifest.written
    assert before["dates"] == ["2031-01-30"]
    for name in ("manifest.json", "chunk-00001.json"):
        (Path("data/d") / name).unlink()
    monkeypatch.setattr("scripts.gen_data.date", Later)
    harvest()
    assert Harvest.open("data/d").manifest.written["content"] == before["content"]


@pytest.mark.parametrize("harvest", [CLOCK], indirect=True)
def test_answers_of_a_server_belong_to_their_day(harvest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scripts.gen_data.date", Later)
    monkeypatch.setattr("data_gen.responses.server.today", lambda: "2031-01-30")
    with stub_server() as stub:
        harvest("responses=server", f"responses.url={stub.url}", "responses.model=m")
    assert {ids[-1] for ids in prompts().values()} == {30}, "as the server saw them"
    assert Harvest.open("data/d").manifest.written["dates"] == ["2031-01-30"]


@pytest.mark.parametrize("harvest", [TEMPLATE], indirect=True)
@pytest.mark.parametrize(
    "how", ["dataset.template={thinking: true}", "+dataset.template.thinking=true"]
)
def test_template_arguments_reach_both_renderings(harvest, how: str) -> None:
    with stub_server() as stub:
        ask = ("responses=server", f"responses.url={stub.url}", "responses.model=m")
        harvest(*ask, how)
        assert all(body["chat_template_kwargs"] == {"thinking": True} for body in stub.bodies)
    assert all(ids[0] == 9 for ids in prompts().values())
    assert "dates" not in Harvest.open("data/d").manifest.written


@pytest.mark.parametrize("harvest", [TEMPLATE], indirect=True)
def test_repeated_texts_are_counted_and_splits_of_ids_are_not_gone_on_with(
    harvest, capsys: pytest.CaptureFixture[str]
) -> None:
    harvest()
    assert "; 1 repeat the text of another, in its split" in capsys.readouterr().out
    manifest = Harvest.open("data/d").manifest.written
    assert manifest["repeated_texts"] == 1
    splits = {each.prompt_id: each.split for each in Harvest.open("data/d").prompts("all")}
    assert splits["jsonl-1"] == splits["jsonl-6"] and len(set(splits.values())) == 3
    for name in ("plan.json", "manifest.json"):
        path = Path("data/d") / name
        old = json.loads(path.read_text())
        write_checksummed(path, {k: v for k, v in old.items() if k not in ("split_by", CHECKSUM)})
    with pytest.raises(SystemExit):
        harvest()
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert "data/d was made with split_by=None, here text. Choose another out=" in error
    data = {"folder": "data/d", "sha256": file_hash(Path("data/d/manifest.json"))}
    with pytest.raises(UserError, match=r"^splits: data/d, on which x was tuned, was split by the"):
        refuse_other_shares(data, manifest["shares"], "x was tuned")
