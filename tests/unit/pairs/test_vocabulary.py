"""Counting what a target says, and what a draft vocabulary costs and saves."""

from dataclasses import astuple

import pytest
import torch

from decoding.models.cached_lm import CachedLM
from decoding.models.draft_vocabulary import keep_rows
from decoding.models.loading import ModelPair
from decoding.sampling import Warp
from pairs.chats import Chat
from pairs.vocabulary import (
    Text,
    count,
    draft_seconds,
    fits,
    modelled_speedup,
    ranked,
    shortened,
    target_seconds,
)
from tests.helpers.models.tiny_pair import VOCAB, tiny_pair

TOKENS = torch.tensor([2, 3, 11, 19, 30])
TEXTS = [Text(torch.arange(1, 12), 3), Text(torch.tensor([30, 4, 9, 9]), 2)]


def test_responses_are_counted_and_cut_and_prompts_are_not():
    joined = Text.joined(torch.tensor([5, 5, 5]), torch.tensor([2, 7, 2]))
    texts = [joined, Text(torch.tensor([7, 0, 7]), 1)]
    chat = Chat(torch.tensor([1, 1, 7], dtype=torch.int32), 2, torch.zeros(1, 4))
    counts = count([*texts, Text.of(chat)], 9)
    assert counts.tolist() == [1, 0, 2, 0, 0, 0, 0, 3, 0]
    # the lowest id first of those as frequent
    assert ranked(counts).tolist() == [7, 2, 0, 1, 3, 4, 5, 6, 8]
    assert [len(text.response) for text in shortened(TEXTS, 3)] == [3]
    assert [len(text.response) for text in shortened(TEXTS, 9)] == [8, 1]
    assert [len(text.response) for text in shortened(TEXTS, 99)] == [8, 2]


@pytest.mark.parametrize("temperatures", [(1.0, 1.0), (0.0, 0.0), (0.7, 1.2)], ids=str)
def test_fit_is_that_of_the_draft_with_this_vocabulary(temperatures):
    warps = tuple(map(Warp, temperatures))
    found = fits(tiny_pair(), TEXTS, [TOKENS, torch.arange(VOCAB)], warps)
    for fit, tokens in zip(found, (TOKENS, torch.arange(VOCAB)), strict=True):
        assert astuple(fit) == pytest.approx(plainly(limited(tokens), tokens, warps), abs=1e-5)
    assert found[1].mass == pytest.approx(1) and found[0].mass < 0.9
    assert found[0].acceptance < found[1].acceptance


def limited(tokens: torch.Tensor) -> ModelPair:
    pair = tiny_pair()
    keep_rows(pair.draft.model, tokens)
    pair.draft = CachedLM(pair.draft.model, vocab_size=VOCAB, vocabulary=tokens)
    return pair


def plainly(pair: ModelPair, tokens: torch.Tensor, warps: tuple[Warp, Warp]) -> list[float]:
    sums, n = torch.zeros(3), 0
    for text in TEXTS:
        for position in range(text.start, len(text.tokens)):
            distributions = []
            for lm, warp in zip((pair.target, pair.draft), warps, strict=True):
                lm.reset()
                logits = lm.forward(text.tokens[:position], logits="last").logits[0]
                distributions.append(warp.probs(logits))
            p, q = distributions
            same = (p.argmax() == q.argmax()).float()
            sums += torch.stack([p[tokens].sum(), torch.minimum(p, q).sum(), same])
            n += 1
    return (sums / n).tolist()


def test_timing_leaves_the_draft_as_it_was():
    pair = tiny_pair()
    seconds = [draft_seconds(pair.draft, [TOKENS]), target_seconds(pair.target, 3)]
    assert [len(each) for each in seconds] == [2, 3] and min(map(min, seconds)) > 0
    assert pair.draft.vocabulary is None
    assert torch.isfinite(pair.draft.forward(torch.tensor([1])).logits).all()


def test_speedup_by_hand():
    assert modelled_speedup(0.5, 0.1, [1.0, 1.0, 1.0]) == (pytest.approx(1.75 / 1.2), 2)
    assert modelled_speedup(0.5, 0.5, [1.0, 1.1, 9.0]) == (pytest.approx(1.5 / 1.6), 1)
