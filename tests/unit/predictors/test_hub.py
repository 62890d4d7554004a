"""A folder server stands in for the hub."""

from pathlib import Path

import pytest
import torch

from predictors.base import load_predictor
from predictors.hub import from_pretrained, local_folder, push_to_hub
from runtime.errors import UserError
from tests.helpers.damage.refusals import refuses
from tests.helpers.data.hub_stub import hub, no_hub
from tests.helpers.training.checkpoints import write_checkpoint


@pytest.mark.slow
def test_a_checkpoint_goes_to_the_hub_and_comes_back_the_same(tmp_path, hub_at):
    folder = write_checkpoint(tmp_path / "made", "specdecpp", 4)
    (folder / "notes.txt").write_text("private")
    with hub(tmp_path / "hub") as address:
        hub_at(address)
        push_to_hub(folder, "me/value")
        ours, theirs, x = load_predictor(folder), from_pretrained("me/value"), torch.randn(5, 4)
        refuses("predictor: no folder me/x", local_folder, "me/x")
    assert torch.equal(ours.predict_proba(x), theirs.predict_proba(x))
    sent = {path.name for path in (tmp_path / "hub" / "me" / "value").iterdir()}
    assert sent == {path.name for path in folder.iterdir()} - {"notes.txt"}


@pytest.mark.slow
def test_a_hub_that_does_not_answer_is_one_line(tmp_path, hub_at):
    hub_at("http://127.0.0.1:9")
    with pytest.raises(UserError, match="repository: me/value was not written"):
        push_to_hub(write_checkpoint(tmp_path / "made", "specdecpp", 4), "me/value")


@pytest.mark.parametrize("body", [b"<html>log in</html>", b"{}", b"null"])
@pytest.mark.slow
def test_what_is_no_hub_is_one_line(body, tmp_path, hub_at):
    folder = write_checkpoint(tmp_path / "made", "specdecpp", 4)
    with no_hub(body) as address:
        hub_at(address)
        says = r"^repository: me/value was not written \(what answers there is no"
        refuses(says, push_to_hub, folder, "me/value")
        refuses("^predictor: no folder me/x, and no such repository", local_folder, "me/x")


def test_a_folder_is_what_it_is_and_a_changed_checkpoint_is_not_pushed(tmp_path):
    assert local_folder(tmp_path) == tmp_path
    assert local_folder("/nowhere/at/all") == Path("/nowhere/at/all")
    folder = write_checkpoint(tmp_path / "made", "specdecpp", 4)
    (folder / "metrics.json").write_text("{}")
    refuses("folder: .*metrics.json is not as it was written", push_to_hub, folder, "me/value")


@pytest.mark.parametrize("source", ["", " ", None, 3])
def test_what_is_no_folder_is_refused(source):
    refuses("predictor: expected a folder or owner/name", local_folder, source)
