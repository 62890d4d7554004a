from collections import Counter

import pytest

from data_gen.prompts import Prompt
from data_gen.requests import make_requests, normalised, repeats, requests_of_split, split_prompts
from runtime.errors import UserError
from tests.helpers.models.tiny_pair import tiny_pair

NAMES = [f"prompt-{number}" for number in range(400)]


def prompts(*texts: str) -> list[Prompt]:
    return [Prompt(f"p{number}", "toy", "", text, chat=False) for number, text in enumerate(texts)]


def splits(names: list[str], calibration: float, test: float) -> dict[str, str]:
    return split_prompts([Prompt(f"id of {n}", "toy", "", n) for n in names], calibration, test)


def test_shares_are_about_right() -> None:
    counts = Counter(splits(NAMES, 0.1, 0.2).values())
    assert 20 <= counts["calibration"] <= 60 and 50 <= counts["test"] <= 110


def test_a_prompt_stays_in_its_split_when_the_set_changes() -> None:
    everywhere, fewer = splits(NAMES, 0.2, 0.2), splits(NAMES[:150][::-1], 0.2, 0.2)
    assert all(everywhere[name] == split for name, split in fewer.items())


def by_text(texts: list[str]) -> dict[str, set[str]]:
    """The splits of each text, where ids are the numbers of lines."""
    rows = [Prompt(f"jsonl-{n}", "jsonl", "", text) for n, text in enumerate(texts, 1)]
    found = split_prompts(rows, 0.1, 0.1)
    return {row.text: {found[r.id] for r in rows if r.text == row.text} for row in rows}


def test_prompts_with_the_same_text_share_a_split() -> None:
    texts = [f"Add {n % 20} and two." for n in range(200)]
    assert all(len(splits) == 1 for splits in by_text(texts).values())
    assert repeats([Prompt(str(n), "toy", "", text) for n, text in enumerate(texts)]) == 180


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
def test_texts_that_differ_in_what_does_not_matter_share_a_split(text: str, again: str) -> None:
    assert normalised(text) == normalised(again)


def test_texts_of_different_signs_or_marks_are_not_the_same() -> None:
    texts = ["2 + 3", "2 = 3", "\u0915\u093f", "\u0915\u093e", "?!", "...", "\u4e2d", "\U0001f600"]
    assert len({normalised(text) for text in texts}) == len(texts)


def test_a_line_put_in_front_moves_no_text() -> None:
    texts = [f"question {n}" for n in range(200)]
    before, after = by_text(texts), by_text(["another", *texts])
    assert all(after[text] == before[text] for text in texts)


@pytest.mark.parametrize("count", [3, 4, 7])
def test_no_split_of_a_small_set_is_empty(count: int) -> None:
    for start in range(0, 60, count):
        assert set(splits(NAMES[start : start + count], 0.1, 0.1).values()) == {
            "train",
            "calibration",
            "test",
        }


def test_impossible_splits_are_refused() -> None:
    with pytest.raises(UserError, match="^dataset: 2 prompts"):
        splits(NAMES[:2], 0.1, 0.1)
    with pytest.raises(UserError, match="^dataset: 4 prompts .* different texts among them: 2"):
        splits([*NAMES[:2], *(name.upper() for name in NAMES[:2])], 0.1, 0.1)
    with pytest.raises(UserError, match="^splits: "):
        splits(NAMES, 0.5, 0.5)


def test_prompts_that_do_not_fit_are_refused_by_name() -> None:
    texts = ["w1 w2 w3", "w4 w5", "w6 w7 w8 w9"]
    requests = make_requests(prompts(*texts), tiny_pair(), 92, 0.2, 0.2)
    assert [request.tokens.tolist() for request in requests] == [[1, 2, 3], [4, 5], [6, 7, 8, 9]]
    with pytest.raises(
        UserError, match=r"pair\.max_length: the prompt p2 has 4 tokens, there is room for 3"
    ):
        make_requests(prompts(*texts), tiny_pair(), 93, 0.2, 0.2)
    with pytest.raises(UserError, match="^max_new_tokens: "):
        make_requests(prompts(*texts), tiny_pair(), 95, 0.2, 0.2)
    with pytest.raises(UserError, match="^dataset: the prompt p1 is a single token"):
        make_requests(prompts("w1 w2", "w3", "w4 w5"), tiny_pair(), 20, 0.2, 0.2)


def test_a_draft_of_less_context_limits_only_what_runs_it_everywhere() -> None:
    pair, texts = tiny_pair(), prompts("w1 w2 w3", "w4 w5", "w6 w7 w8 w9")
    pair.draft.max_length = 40
    refused = pytest.raises(
        UserError,
        match=r"^pair\.draft: its context holds 40 tokens, and the prompt p2 has 4 before 37 new",
    )
    with refused:
        make_requests(texts, pair, 37, 0.2, 0.2)
    with refused:
        requests_of_split(texts, pair, 37, "all", {}, None)
    assert len(requests_of_split(texts, pair, 37, "all", {}, None, drafted=False)) == 3
