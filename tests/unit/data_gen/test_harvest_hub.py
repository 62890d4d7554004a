"""A harvest goes to the hub and comes back; a folder server stands in for it."""

from pathlib import Path
from typing import Any

import pytest

from data_gen.hub import card, cleaned, push
from data_gen.storage.dataset import Harvest
from runtime.json_files import write_checksummed
from tests.helpers.damage.refusals import refuses
from tests.helpers.data.harvests import write_harvest
from tests.helpers.data.hub_stub import hub

STATISTICS = {
    **{"response_tokens": 9, "records": {"mixed": 9, "rounds": 9}},
    **{"overlap": 0.5, "accept_prob": 0.5, "accepted_lengths": [4, 5]},
}


@pytest.mark.slow
def test_a_harvest_goes_to_the_hub_and_comes_back_the_same(tmp_path: Path, hub_at: Any) -> None:
    made = Harvest.open(write_harvest(tmp_path / "made"))
    path = made.folder / "manifest.json"
    changed = {"command": "python x.py out=/home/me/secret", "statistics": STATISTICS}
    write_checksummed(path, {**made.manifest.written, **changed})
    made = Harvest.open(made.folder)
    with hub(tmp_path / "hub") as address:
        hub_at(address)
        (tmp_path / "hub" / "me" / "other").mkdir(parents=True)
        (tmp_path / "hub" / "me" / "other" / "x.txt").write_text("x")
        refuses("push: me/other holds something else", push, made, "me/other")
        push(made, "me/harvest")
        (tmp_path / "hub" / "me" / "harvest" / "rounds-00099.parquet").write_bytes(b"old")
        push(made, "me/harvest")
        assert not (tmp_path / "hub" / "me" / "harvest" / "rounds-00099.parquet").exists()
        theirs = Harvest.open("hub:me/harvest")
        refuses("data: no dataset me/none could be fetched", Harvest.open, "hub:me/none")
    assert theirs.identity == made.identity and theirs.name == "me--harvest"
    assert theirs.manifest.written["command"] == "python x.py out=secret"
    assert len(theirs.rounds("train")["group"]) == len(made.rounds("train")["group"])
    text = (theirs.folder / "README.md").read_text()
    assert text == card(made) and "  data_files: rounds-*.parquet" in text


def test_what_is_no_repository_or_does_not_answer_is_one_line(tmp_path: Path, hub_at: Any) -> None:
    made = Harvest.open(write_harvest(tmp_path / "made"))
    refuses("push: expected owner/name, got 'x'", push, made, "x")
    refuses("data: expected owner/name, got 'a b'", Harvest.open, "hub:a b")
    hub_at("http://127.0.0.1:9")
    refuses("push: me/harvest was not written", push, made, "me/harvest")


def test_tags_of_a_chat_template_are_no_paths_of_this_machine() -> None:
    template = {"chat_template": {"text": "{{ c.split('</think>')[-1] }} </s>", "arguments": {}}}
    assert cleaned(template) == template
