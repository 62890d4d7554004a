"""From prompts to requests: the split of every text, and tokens that fit the models."""

from collections import Counter
from dataclasses import replace

import pytest

from data_gen.prompts import Prompt
from data_gen.requests import (
    fitted,
    make_requests,
    normalised,
    repeats,
    requests_of_split,
    split_prompts,
)
from data_gen.storage.shards import SPLITS
from tests.helpers.damage.refusals import refuses
from tests.helpers.models.tiny_pair import tiny_pair

NAMES = [f"prompt-{number}" for number in range(400)]


def prompts(*texts: str) -> list[Prompt]:
    return [Prompt(f"p{number}", "toy", "", text, chat=False) for number, text in enumerate(texts)]


def splits_of(some: list[Prompt]) -> dict[str, str]:
    return split_prompts(some, 0.2, 0.2)


def splits(texts: list[str], calibration: float, test: float) -> dict[str, str]:
    """By text; texts with several splits are refused."""
    rows = prompts(*texts)
    found = split_prompts(rows, calibration, test)
    by_text = {row.text: found[row.id] for row in rows}
    assert all(by_text[row.text] == found[row.id] for row in rows), "one text, one split"
    return by_text


def test_shares_are_about_right():
    counts = Counter(splits(NAMES, 0.1, 0.2).values())
    assert 20 <= counts["calibration"] <= 60 and 50 <= counts["test"] <= 110


@pytest.mark.parametrize("some", [NAMES[:150][::-1], ["another", *NAMES]])
def test_a_text_stays_in_its_split_whatever_its_id_and_whatever_is_around_it(some):
    everywhere = splits(NAMES, 0.2, 0.2)
    found = splits(some, 0.2, 0.2)
    assert all(found[text] == everywhere[text] for text in found.keys() & everywhere.keys())


def test_prompts_with_the_same_text_share_a_split():
    texts = [f"Add {n % 20} and two." for n in range(200)]
    assert len(splits(texts, 0.1, 0.1)) == 20
    assert repeats(prompts(*texts)) == 180


@pytest.mark.parametrize(
    ("text", "again"),
    [
        ("Add 2 and 3.", "  add 2\n and\t3 !"),
        ("What is it?", "WHAT IS IT"),
        ("\uff21\uff22 caf\u00e9", "ab cafe\u0301"),
        ("a\u200bb", "a b"),
        ("x=1;y = 2", "x = 1; y=2"),
        ("I don't know e-mail", "I dont know email"),
        ("\u00bf?", " \u00bf? "),
    ],
)
def test_texts_that_differ_in_what_does_not_matter_share_a_split(text, again):
    assert normalised(text) == normalised(again)


def test_texts_of_different_signs_or_marks_are_not_the_same():
    texts = ["2 + 3", "2 = 3", "\u0915\u093f", "\u0915\u093e", "?!", "...", "\u4e2d", "\U0001f600"]
    assert len({normalised(text) for text in texts}) == len(texts)


@pytest.mark.parametrize("count", [3, 4, 7])
def test_no_split_of_a_small_set_is_empty(count):
    for start in range(0, 60, count):
        assert {*splits(NAMES[start : start + count], 0.1, 0.1).values()} == {*SPLITS}


def test_impossible_splits_are_refused():
    twice = [*NAMES[:2], *(name.upper() for name in NAMES[:2])]
    for texts, share, says in (
        (NAMES[:2], 0.1, "^dataset: 2 prompts"),
        (twice, 0.1, "^dataset: 4 prompts .* different texts among them: 2"),
        (NAMES, 0.5, "^splits: "),
    ):
        refuses(says, split_prompts, prompts(*texts), share, share)


def test_prompts_that_do_not_fit_are_refused_by_name():
    texts = prompts("w1 w2 w3", "w4 w5", "w6 w7 w8 w9")
    requests = make_requests(texts, tiny_pair(), 92, 0.2, 0.2)
    assert [request.tokens.tolist() for request in requests] == [[1, 2, 3], [4, 5], [6, 7, 8, 9]]
    for asked, new_tokens, says in (
        (texts, 93, r"pair\.max_length: the prompt p2 has 4 tokens, there is room for 3"),
        (texts, 95, "^max_new_tokens: "),
        (prompts("w1 w2", "w3", "w4 w5"), 20, "^dataset: the prompt p1 is a single token"),
    ):
        refuses(says, make_requests, asked, tiny_pair(), new_tokens, 0.2, 0.2)


def test_prompts_that_do_not_fit_are_left_out_or_cut_where_that_is_said():
    words, tokenizer = " ".join(f"w{n}" for n in range(1, 10)), tiny_pair().tokenizer
    for what, kept, counts in (
        ("skip", ["w1 w2"], {"skip": 1}),
        ("cut", ["w1 w2", "w1 w2 w3 w4"], {"cut": 1}),
        ("error", ["w1 w2", words], {}),
    ):
        asked = [replace(prompt, too_long=what) for prompt in prompts("w1 w2", words)]
        found, counted = fitted(asked, tokenizer, 4)
        assert [prompt.text.strip() for prompt in found] == kept and dict(counted) == counts
    asked = [replace(prompt, too_long="cut") for prompt in prompts(words, *NAMES)]
    cut = [fitted(asked, tokenizer, room)[0] for room in (2, 4)]
    assert splits_of(cut[0]) == splits_of(cut[1]) == splits_of(asked), "how much was cut is no text"
    skipped = [replace(asked[0], too_long="skip")]
    refuses("^dataset.too_long: none of 1 prompts has 0", fitted, skipped, tokenizer, 0)


def test_a_draft_of_less_context_limits_only_what_runs_it_everywhere():
    pair, texts = tiny_pair(), prompts("w1 w2 w3", "w4 w5", "w6 w7 w8 w9")
    pair.draft.max_length = 40
    says = r"^pair\.draft: its context holds 40 tokens, and the prompt p2 has 4 before 37 new"
    refuses(says, make_requests, texts, pair, 37, 0.2, 0.2)
    refuses(says, requests_of_split, texts, pair, 37, "all", {}, None)
    assert len(requests_of_split(texts, pair, 37, "all", {}, None, drafted=False)) == 3
