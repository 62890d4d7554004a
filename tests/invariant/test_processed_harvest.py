"""A harvest under processors that read the text: its labels are those of one uncached forward and
transformers' own processor on the text of each position, in responses and along rollouts."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import RepetitionPenaltyLogitsProcessor

from data_gen.columns import OwnTokens
from data_gen.harvest import NO_PROGRESS, draws, label_chunk, outputs_on
from data_gen.requests import Request
from data_gen.settings import HarvestSettings
from decoding.models.cached_lm import CachedLM
from decoding.models.loading import ModelPair
from decoding.picking import pick
from decoding.processors import processed
from decoding.sampling import Warp
from predictors.features.draft_statistics import Q_STATS, q_stats
from tests.helpers.data.datasets import SAMPLED, some_requests
from tests.helpers.models.tiny_pair import VOCAB, tiny_pair
from tests.invariant.test_joined import SOME, assert_merged_as_spread, narrow

SETTINGS: dict[str, Any] = {"repetition_penalty": 1.4, "frequency_penalty": 0.7}
PENALISED = replace(
    SAMPLED,
    warp=processed(0.9, 20, **SETTINGS),
    draft_warp=processed(1.1, top_p=0.95, **SETTINGS),
    stride=1,
)
PENALTY = RepetitionPenaltyLogitsProcessor(1.4)


@torch.no_grad()
def law(lm: CachedLM, warp: Warp, text: Tensor, prompt: int) -> tuple[Tensor, Tensor]:
    """The distribution after a text, and that without a warp: of one forward over all of it."""
    logits = lm.model(input_ids=text[None], use_cache=False).logits[0, -1].float()
    scores = PENALTY(text[None], logits[None].clone())[0]
    scores -= 0.7 * text[prompt:].bincount(minlength=len(logits))
    return warp.rest.probs(scores), logits.softmax(-1)


def rows_of(pair: ModelPair, recipe: HarvestSettings, requests: list[Request]) -> Any:
    with outputs_on(pair, pair.target.device, recipe.draft_warp):
        return label_chunk(pair, requests, recipe, NO_PROGRESS)


GREEDY_TARGET = replace(PENALISED, warp=processed(0.0, **SETTINGS))
GREEDY = replace(GREEDY_TARGET, draft_warp=GREEDY_TARGET.warp)
RECIPES = {"sampled": PENALISED, "greedy target": GREEDY_TARGET, "greedy": GREEDY}


@pytest.mark.parametrize("name", RECIPES)
def test_labels_are_those_of_each_text(name: str) -> None:
    pair, recipe, judged = tiny_pair(), RECIPES[name], 0
    requests = some_requests(5 if recipe is PENALISED else 20)
    kinds = rows_of(pair, recipe, requests)
    for number, request in enumerate(requests):
        responses, mixed, rounds = (
            kinds[kind][number] for kind in ("responses", "mixed", "rounds")
        )
        response, size = responses["response_tokens"], len(request.tokens)
        coins = draws([request], recipe)[0, 0]
        kept = {int(position): row for row, position in enumerate(mixed["position"])}
        for anchor in range(len(response)):
            text = torch.cat([request.tokens, response[:anchor]])
            p, _ = law(pair.target, recipe.warp, text, size)
            said = p.argmax() if recipe.warp.temperature == 0 else pick(p, coins[anchor])
            assert said == response[anchor]
            for depth, token in enumerate(rounds["token"][anchor]):
                p, _ = law(pair.target, recipe.warp, text, size)
                q, unwarped = law(pair.draft, recipe.draft_warp, text, size)
                facts = torch.stack([q[token], *q_stats(unwarped, token).values()])
                found = torch.stack([rounds[column][anchor, depth] for column in ("q", *Q_STATS)])
                torch.testing.assert_close(found, facts, atol=1e-4, rtol=0)
                accept = min(1.0, float(p[token] / q[token]))
                if rounds["accept_prob"][anchor, depth] > 0:  # else not needed
                    assert float(rounds["accept_prob"][anchor, depth]) == pytest.approx(
                        accept, abs=1e-4
                    )
                    judged += depth > 0
                if not depth and anchor in kept:
                    row = kept[anchor]
                    assert float(mixed["accept_prob"][row]) == pytest.approx(accept, abs=1e-4)
                    overlap = float(torch.minimum(p, q).sum())
                    assert float(mixed["overlap"][row]) == pytest.approx(overlap, abs=1e-4)
                text = torch.cat([text, token[None]])
    assert judged > (50 if recipe is PENALISED else 5)


@pytest.mark.parametrize("name", RECIPES)
def test_given_responses_are_labelled_as_drawn_ones(name: str) -> None:
    pair, recipe, requests = tiny_pair(), RECIPES[name], some_requests(5)
    drawn = rows_of(pair, recipe, requests)
    said = [row["response_tokens"] for row in drawn["responses"]]
    asked = [replace(r, response=tokens) for r, tokens in zip(requests, said, strict=True)]
    for kind, rows in rows_of(pair, recipe, asked).items():
        for row, other in zip(rows, drawn[kind], strict=True):
            for column, values in other.items():
                if isinstance(values, Tensor):
                    torch.testing.assert_close(row[column], values, atol=1e-4, rtol=1e-4)


def test_a_draft_with_a_smaller_vocabulary() -> None:
    """The other tokens are one column, except where processors of its warp read all of them."""
    recipe, requests = replace(PENALISED, draft_warp=Warp()), some_requests(4)
    assert_merged_as_spread(narrow(SOME), requests, recipe)
    with outputs_on(pair := narrow(SOME), torch.device("cpu"), PENALISED.draft_warp):
        assert OwnTokens.of(pair.draft).columns == VOCAB
    assert all(len(rows) == 4 for rows in rows_of(narrow(SOME), PENALISED, requests).values())
