from collections import Counter

import pytest

from data_gen.prompts import Prompt
from data_gen.requests import assign_splits, make_requests, requests_of_split
from runtime.errors import UserError
from tests.tiny_pair import tiny_pair

NAMES = [f"prompt-{number}" for number in range(400)]


def prompts(*texts: str) -> list[Prompt]:
    return [Prompt(f"p{number}", "toy", "", text, chat=False) for number, text in enumerate(texts)]


def test_shares_are_about_right() -> None:
    counts = Counter(assign_splits(NAMES, 0.1, 0.2).values())
    assert 20 <= counts["calibration"] <= 60 and 50 <= counts["test"] <= 110


def test_a_prompt_stays_in_its_split_when_the_set_changes() -> None:
    everywhere, fewer = assign_splits(NAMES, 0.2, 0.2), assign_splits(NAMES[:150][::-1], 0.2, 0.2)
    assert all(everywhere[name] == split for name, split in fewer.items())


@pytest.mark.parametrize("count", [3, 4, 7])
def test_no_split_of_a_small_set_is_empty(count: int) -> None:
    for start in range(0, 60, count):
        assert set(assign_splits(NAMES[start : start + count], 0.1, 0.1).values()) == {
            "train",
            "calibration",
            "test",
        }


def test_impossible_splits_are_refused() -> None:
    with pytest.raises(UserError, match="^dataset: 2 prompts"):
        assign_splits(NAMES[:2], 0.1, 0.1)
    with pytest.raises(UserError, match="^splits: "):
        assign_splits(NAMES, 0.5, 0.5)


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
