"""A pair opened from Python: the settings of `conf/pair`, with the same defaults."""

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from decoding.pair import SETTINGS, open_pair
from runtime.errors import UserError
from tests.helpers.models.tiny_pair import EOS, save_tiny_pair

CONF = Path(__file__).parents[3] / "conf" / "pair" / "smollm2.yaml"


def test_settings_are_those_of_the_config_files():
    written = OmegaConf.to_container(OmegaConf.load(CONF), resolve=False)
    assert isinstance(written, dict)
    shared = {
        key: value for key, value in written.items() if key not in ("target", "draft", "weights")
    }
    assert {**shared, "name": "pair"} == SETTINGS


def test_opens_two_folders(tmp_path, monkeypatch):
    save_tiny_pair(tmp_path / "tiny")
    monkeypatch.setenv("HOME", str(tmp_path))
    pair = open_pair("~/tiny/target", "~/tiny/draft", max_length=32)
    assert pair.eos_ids == (EOS,) and pair.target.max_length == pair.draft.max_length == 32


def test_an_unknown_setting_is_named():
    with pytest.raises(UserError, match="dtypes: expected one of name, dtype, .* Leave it away"):
        open_pair("target", "draft", dtypes="float32")
