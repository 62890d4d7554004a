"""Which tokens end a response, and which of them closes an answer given as text."""

from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from decoding.models.ends import closing_id, end_ids
from runtime.errors import UserError

TURN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}END{% endfor %}"
PARTS = "{% for m in messages %}{% for p in m.content %}{{ p.text }}END{% endfor %}{% endfor %}"
SILENT = "{% for m in messages %}{{ m.content }}{% endfor %}"
STRICT = "{{ raise_exception('no assistant') }}"


def tokenizer(template: str | None = None, eos: str | None = "<eos>") -> PreTrainedTokenizerFast:
    """Bytes, and the special tokens <user> 256, <pad> 257, <end> 258, <eos> 259."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({each: place for place, each in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.add_special_tokens(["<user>", "<pad>", "<end>", "<eos>"])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=eos, chat_template=template)


def model(generation: Any = None, config: Any = None, text: Any = None) -> Any:
    part = SimpleNamespace(eos_token_id=text)
    whole = SimpleNamespace(eos_token_id=config, get_text_config=lambda: part)
    return SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=generation), config=whole)


@pytest.mark.parametrize(
    ("given", "eos", "expected"),
    [
        ({}, None, ()),
        ({}, "<eos>", (259,)),
        ({"generation": 0}, None, (0,)),
        ({"generation": [0, 7], "config": 0, "text": [3]}, "<end>", (0, 3, 7, 258)),
        ({"config": -1, "text": 5}, None, (5,)),
    ],
)
def test_every_source_says_which_tokens_end(
    given: dict[str, Any], eos: str | None, expected: tuple[int, ...]
) -> None:
    assert end_ids(model(**given), tokenizer(eos=eos)) == expected
    assert set(end_ids(model(**given), None)) <= set(expected)


@pytest.mark.parametrize(
    ("template", "eos", "ends", "expected"),
    [
        (TURN.replace("END", "<end>\n"), "<eos>", (0, 258, 259), 258),
        (TURN.replace("END", "<end>\n<eos>"), "<eos>", (258, 259), 258),
        (
            TURN.replace("END", "<end>"),
            "<eos>",
            (0, 259),
            259,
        ),  # which no chat of this model ends with
        (TURN.replace("END", " \n<end>"), "<eos>", (258, 259), 258),
        (PARTS.replace("END", "<end>"), "<eos>", (258, 259), 258),
        (SILENT, "<eos>", (0, 259), 259),
        (STRICT, "<eos>", (0, 259), 259),
        (None, "<eos>", (0, 259), 259),
        (None, None, (7,), 7),
    ],
)
def test_the_chat_template_says_what_closes_an_answer(
    template: str | None, eos: str | None, ends: tuple[int, ...], expected: int
) -> None:
    assert closing_id(tokenizer(template, eos), ends) == expected


@pytest.mark.parametrize("ends", [(0, 7), ()])
def test_no_end_is_guessed(ends: tuple[int, ...]) -> None:
    with pytest.raises(UserError, match=r"^pair\.target: which of the tokens \[.*\] ends"):
        closing_id(tokenizer(TURN.replace("END", "<end>")), ends)


@pytest.mark.parametrize("named", ["5", [None, 5], [[5]], True])
def test_ends_that_are_no_ids_are_refused_in_a_line(named: Any) -> None:
    with pytest.raises(UserError, match=r"^pair\.target: its eos_token_id is") as error:
        end_ids(model(config=named), None)
    assert "\n" not in str(error.value)
