"""Copies of harvested responses: which rows they give, and that these rows are unbiased labels of
acceptance."""

from collections import defaultdict
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression

from data_gen.copies import STRETCH, copied_tokens, copies
from decoding.models.table_lm import random_table
from decoding.sampling import Warp
from decoding.structures.lookup import following, longest_match
from predictors.copies import Copies, copy_features
from predictors.inputs import TEXT
from predictors.training.trainer import Trainer
from runtime.errors import UserError
from tests.harvests import write_harvest

SIZES = range(3, 0, -1)


def found(text: list[int], start: int, longest: int = 4) -> list[tuple[int, int, int]]:
    return list(copies(torch.tensor(text), start, SIZES, longest))


def test_rows_by_hand() -> None:
    prompt, response = [1, 2, 3], [1, 2, 9]
    assert found(prompt + response, len(prompt)) == [(1, 1, 2)], (
        "after 1 2 3 1 of 2 3 only 2 is right; on behind 9"
    )
    assert found([5, 5, 5, 5, 5, 5], 2, longest=2) == [(1, 2, 2), (3, 1, 1)], (
        "two copied, one more from the target"
    )
    assert found([5] * 9, 2) == [(1, 4, 4), (3, 4, 4)], (
        "all four agree, of which a decoder would have copied two"
    )
    assert found([1, 2, 7, 1, 2, 8, 1, 2, 8], 3) == [(1, 1, 4), (1, 2, 2)]
    assert found([1, 2, 3, 4], 1) == [] == found([7], 0) == found([], 0)


def test_rows_of_a_harvest(tmp_path: Path) -> None:
    records = copied_tokens(write_harvest(tmp_path), "train", SIZES, 4)
    assert {name: values.dtype for name, values in records.items()} == {
        **dict.fromkeys(("match", "depth", "group"), torch.int64),
        "accepted": torch.float32,
    }
    assert (
        records["match"].max() <= 3 and records["depth"].max() <= 4 and records["depth"].min() == 1
    )
    assert set(records["accepted"].tolist()) == {0, 1} and records["group"].max() < 12
    follows = records["depth"][1:] > 1
    assert records["accepted"][:-1][follows].min() == 1, "a token behind a rejected one has no row"
    with pytest.raises(UserError, match="^data: no text repeats itself in split train"):
        copied_tokens(tmp_path, "train", [40], 4)


@pytest.mark.parametrize(
    "warp", [Warp(), Warp(0.7, top_k=2), Warp(0.0)], ids=["T=1", "top-k", "greedy"]
)
def test_responses_are_unbiased_labels(warp: Warp) -> None:
    """Over all responses of the target, the mean of `accepted` after any text is p of the copied
    token."""
    table, prompt, length, vocab = random_table(3, 7), (0, 1, 0), 4, 3

    def p(text: tuple[int, ...]) -> torch.Tensor:
        return warp.probs(table(text).log())

    seen: dict[tuple[tuple[int, ...], int], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for response in product(range(vocab), repeat=length):
        text = prompt + response
        chance = float(
            torch.tensor([p(text[:i])[text[i]] for i in range(len(prompt), len(text))]).prod()
        )
        start = len(prompt)
        for size, agreed, known in copies(torch.tensor(text), start, SIZES, 3):
            while (match := longest_match(torch.tensor(text[:start]), SIZES)) is None:
                start += 1
            assert match[1] == size
            copied = following(torch.tensor(text[:start]), match[0], known)
            for place in range(min(agreed + 1, known)):
                weight = seen[text[: start + place], copied[place]]
                weight[0] += chance * (place < agreed)
                weight[1] += chance
            start += 1 + min(agreed, STRETCH * size)
    reached = {state: hits / total for state, (hits, total) in seen.items() if total > 0}
    assert len(reached) >= 4
    for (text, token), accepted in reached.items():
        assert accepted == pytest.approx(float(p(text)[token]), abs=1e-6)


def test_the_fit_is_that_of_logistic_regression() -> None:
    generator = torch.Generator().manual_seed(0)
    match, depth = (
        torch.randint(1, 9, (3000,), generator=generator),
        torch.randint(1, 20, (3000,), generator=generator),
    )
    x = copy_features(match, depth)
    accepted = (
        torch.rand(3000, generator=generator) < torch.sigmoid(x @ torch.tensor([0.5, 0.6, 0.2]) - 1)
    ).float()
    trainer = Trainer(epochs=30, batch_size=256, lr=0.03, schedule="cosine", warmup_ratio=0.03)
    records = {"features": x, "accepted": accepted, "group": torch.arange(3000) // 50}
    fitted = Copies().fit(records, TEXT, trainer).predict_proba(x).numpy()
    exact = (
        LogisticRegression(C=1e6, max_iter=1000)
        .fit(x.numpy(), accepted.numpy())
        .predict_proba(x.numpy())[:, 1]
    )
    assert np.abs(fitted - exact).mean() < 0.01


def test_longer_copies_are_less_likely_to_be_accepted_whole() -> None:
    predictor = Copies(longest=5)
    predictor.features, predictor.head = TEXT, predictor.build(3)
    chances = predictor.all_accepted(2)
    assert len(chances) == 5 and all(
        0 <= b <= a <= 1 for a, b in zip(chances, chances[1:], strict=False)
    )
    first, second = predictor.predict_proba(
        copy_features(torch.tensor([2, 2]), torch.tensor([1, 2]))
    ).tolist()
    assert chances[:2] == pytest.approx([first, first * second])


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"ngram_max": 0}, "ngram_max"),
        ({"longest": 2.5}, "longest"),
        ({"ngram_max": 2, "ngram_min": 3}, "ngram_min"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict, key: str) -> None:
    with pytest.raises(UserError, match=rf"^predictor\.{key}: "):
        Copies(**settings)
