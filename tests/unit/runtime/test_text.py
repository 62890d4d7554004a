"""What is taken out of text: of all text what drives a terminal, of a checkpoint that is published
paths and keys."""

import sys
import unicodedata
from typing import Any

import pytest

from runtime.private import Cleaner
from runtime.text import printable

KEY = "hf_" + 20 * "a"


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("train.py data=/home/me/rounds out=~/x/value", "train.py data=rounds out=value"),
        ("python train.py 'drift=[/a/b,/c/b,/a/b]'", "python train.py 'drift=[b,b-2,b]'"),
        (f"train.py +target_options.token={KEY}", "train.py +target_options.token=(hidden)"),
        ("train.py +api_key=abc +password=p", "train.py +api_key=(hidden) +password=(hidden)"),
        (f"my key is {KEY}.", "my key is (hidden)."),
        ("`/etc/hosts` and file:///home/me/y, in /home/me/", "`hosts` and y, in me"),
    ],
)
def test_paths_are_their_last_name_and_keys_are_hidden(text, clean):
    assert Cleaner().text(text) == clean
    assert Cleaner().text(clean) == clean


@pytest.mark.parametrize(
    "text",
    [
        "base_model: me/large, see https://huggingface.co/me/large and docs/guides/generate.md",
        "accept_prob = min(1, p(Y)/q(Y)), predicted / observed .31 / .29, ~5 of 7",
        "data=data/rounds inputs.token=true monkey=5 max_new_tokens=40 keys: value | tokens: 3",
    ],
)
def test_the_rest_stays(text):
    assert Cleaner().text(text) == text


def test_values_and_the_names_of_harvests():
    """A path that is a value as a whole may have spaces in it."""
    folder = "/home/my name/rounds"
    config: dict[str, Any] = {
        "data": folder,
        "command": f"python train.py data='{folder}'",
        "options": {"token": "abc", "use_auth_token": "d", "token_count": "3"},
        "inputs": {"token": False, "key": None},
        "drift": ["/other/rounds", 1, None],
    }
    clean = Cleaner(config)
    split, scores = "(test split)", {"ece": [0.1]}
    assert clean.value({f"{folder} {split}": scores}) == {f"rounds {split}": scores}
    assert clean.value(config) == {
        "data": "rounds",
        "command": "python train.py data='rounds'",
        "options": {"token": "(hidden)", "use_auth_token": "(hidden)", "token_count": "3"},
        "inputs": {"token": False, "key": None},
        "drift": ["rounds-2", 1, None],
    }


def test_nothing_that_drives_a_terminal_is_left():
    every = "".join(map(chr, range(sys.maxunicode + 1)))
    kinds = {unicodedata.category(c) for c in printable(every)}
    assert not kinds & {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
    assert printable("a\x1b[2J\u2028\u202eb") == "a�[2J��b"


def test_text_stays_as_it_is():
    assert printable("Grüße, 世界 🙂 a_b") == "Grüße, 世界 🙂 a_b"
    assert printable("a\n\tb", "\n\t") == "a\n\tb" and printable("a\nb") == "a�b"
