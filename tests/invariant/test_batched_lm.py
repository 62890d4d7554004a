"""Sequences advanced together equal each one run on its own."""

import pytest
import torch

from decoding.models.batched_lm import BatchedLM, _groups
from decoding.models.cached_lm import CachedLM
from tests.invariant.test_cached_lm import build, random_tokens

LENGTHS = (7, 0, 3, 12)
LAYERS = (-3, -2, -1)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gemma2"])
def test_batch_equals_single_sequences(kind: str) -> None:
    lm = CachedLM(build(kind))
    prefixes = [random_tokens(length, seed) for seed, length in enumerate(LENGTHS)]
    continued = torch.stack([random_tokens(6, 10 + seed) for seed in range(len(LENGTHS))])
    alone = [
        own_run(lm, torch.cat([prefix, after]))
        for prefix, after in zip(prefixes, continued, strict=True)
    ]

    batch, rows = BatchedLM(lm, prefixes, more=6), torch.arange(len(LENGTHS))
    for step in range(6):
        if step == 3:
            rows = torch.tensor([1, 3])
            batch.keep(rows)
        output = batch.step(continued[rows, step], LAYERS)
        assert output.hidden is not None
        for place, row in enumerate(rows.tolist()):
            logits, hidden = alone[row]
            torch.testing.assert_close(
                output.logits[place], logits[LENGTHS[row] + step], atol=1e-4, rtol=1e-4
            )
            torch.testing.assert_close(
                output.hidden[:, place], hidden[:, LENGTHS[row] + step], atol=1e-4, rtol=1e-4
            )


@pytest.mark.parametrize("together", [1, 8, 14])
def test_a_prefill_in_groups_is_the_same(together: int, monkeypatch: pytest.MonkeyPatch) -> None:
    lm = CachedLM(build("llama"))
    prefixes = [random_tokens(length, seed) for seed, length in enumerate(LENGTHS)]
    expected = BatchedLM(lm, prefixes, more=1).step(torch.tensor([5, 6, 7, 8])).logits
    monkeypatch.setattr("decoding.models.batched_lm.TOGETHER", together)
    found = BatchedLM(lm, prefixes, more=1).step(torch.tensor([5, 6, 7, 8])).logits
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_groups_hold_what_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("decoding.models.batched_lm.TOGETHER", 14)
    assert _groups(LENGTHS) == [[2, 0], [3]]
    assert _groups([20, 0, 30]) == [[0], [2]]
    assert _groups([4, 5, 5, 1]) == [[3, 0], [1, 2]]


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_a_sequence_goes_on_in_the_single_cache(kind: str) -> None:
    lm = CachedLM(build(kind))
    prefixes = [random_tokens(length, seed) for seed, length in enumerate(LENGTHS)]
    batch = BatchedLM(lm, prefixes, more=2)
    tokens = torch.tensor([5, 6, 7, 8])
    batch.step(tokens)
    more = random_tokens(4, 20)
    for row, prefix in enumerate(prefixes):
        batch.hand_over(row)
        assert lm.length == LENGTHS[row] + 1
        found = lm.forward(more).logits
        expected = own_run(lm, torch.cat([prefix, tokens[row, None], more]))[0][-4:]
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def own_run(lm: CachedLM, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    lm.crop(0)
    output = lm.forward(tokens, hidden=LAYERS)
    assert output.hidden is not None
    return output.logits, output.hidden
