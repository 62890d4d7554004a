"""Harvesting responses that are given equals harvesting those that the target draws itself."""

import json
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

from data_gen.harvest import Progress, answers_of, harvest, plan
from data_gen.requests import Request
from data_gen.settings import HarvestSettings
from data_gen.storage import shards
from decoding.models.loading import ModelPair
from decoding.sampling import Warp
from predictors.features.layers import RecordedLayers
from runtime.errors import UserError
from tests.helpers.models.tiny_pair import EOS, VOCAB

SAMPLED = HarvestSettings(
    gamma=4,
    seed=3,
    max_new_tokens=18,
    batch_size=4,
    mixing=0.15,
    stride=8,
    warp=Warp(0.9, top_k=20),
    draft_warp=Warp(1.1, top_p=0.95),
    layers=RecordedLayers([-1], [-3, -1]),
)
GREEDY = replace(SAMPLED, warp=Warp(0.0), draft_warp=Warp(0.0))


def some_requests(count: int = 10) -> list[Request]:
    generator = torch.Generator().manual_seed(5)
    lengths = torch.randint(2, 9, (count,), generator=generator).tolist()
    tokens = [torch.randint(1, VOCAB, (length,), generator=generator) for length in lengths]
    return [Request(f"p{n}", "toy", prompt, "train") for n, prompt in enumerate(tokens)]


def answered(folder: Path, requests: list[Request]) -> list[Request]:
    """With the responses of a harvest."""
    responses = {row["prompt_id"]: row["response_tokens"] for row in records(folder, "responses")}
    return [
        replace(request, response=torch.tensor(responses[request.prompt_id]))
        for request in requests
    ]


def records(folder: Path, kind: str) -> list[dict]:
    return [
        row
        for path in sorted(folder.glob(f"{kind}-*.parquet"))
        for row in pq.read_table(path).to_pylist()
    ]


@pytest.mark.parametrize("stride", [1, 8])
@pytest.mark.parametrize("recipe", [SAMPLED, GREEDY], ids=["sampled", "greedy"])
def test_records_are_those_of_generated_responses(
    pair: ModelPair,
    recipe: HarvestSettings,
    stride: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recipe, requests = replace(recipe, stride=stride), some_requests()
    harvest(pair, requests, recipe, tmp_path / "generated", Progress())
    given = answered(tmp_path / "generated", requests)
    ended = [int(request.response[-1]) == EOS for request in given if request.response is not None]
    assert {True, False} == set(ended), "some responses should end, some be cut"
    monkeypatch.setattr("data_gen.answers.MAX_BYTES", 7 * 4 * VOCAB)  # several forwards
    harvest(pair, given, recipe, tmp_path / "given", Progress())
    for kind in shards.SCHEMAS:
        ours, theirs = records(tmp_path / "given", kind), records(tmp_path / "generated", kind)
        assert len(ours) == len(theirs) == len(requests)
        for row, expected in zip(ours, theirs, strict=True):
            assert_equal_row(row, expected)


def assert_equal_row(row: dict, expected: dict) -> None:
    """Tokens, counts and places exactly; distributions and features up to rounding."""
    for name, values in expected.items():
        if name in shards.FEATURES:
            a, b = (
                torch.tensor(x, dtype=torch.int16).view(torch.bfloat16).float()
                for x in (row[name], values)
            )
            torch.testing.assert_close(a, b, atol=1e-6, rtol=0.01)
        elif isinstance(values, list) and values and isinstance(values[0], float):
            assert row[name] == pytest.approx(values, abs=1e-5), name
        else:
            assert row[name] == values, name


@pytest.mark.parametrize("recipe", [SAMPLED, GREEDY], ids=["sampled", "greedy"])
def test_a_response_is_followed_as_far_as_the_target_could_have_said_it(
    pair: ModelPair, recipe: HarvestSettings
) -> None:
    requests = some_requests(4)
    own = {
        requests[a.index].prompt_id: a
        for a in answers_of(pair, requests, recipe, lambda tokens: None)
    }
    for request in requests:
        said = own[request.prompt_id].distributions.response
        at = min(2, len(said) - 1)
        wrong = next(
            token
            for token in range(1, VOCAB)
            if not possible(pair, request, said[:at], token, recipe.warp)
        )
        given = torch.cat([said[:at], torch.tensor([wrong, 5, 6])])
        (answer,) = answers_of(
            pair, [replace(request, response=given)], recipe, lambda tokens: None
        )
        assert answer.distributions.response.tolist() == said[: at + 1].tolist(), (
            "and ends with a draw of its own"
        )
        assert pair.target.length == pair.draft.length == len(request.tokens) + at
        assert len(answer.distributions.accept) == at + 1 and len(answer.target_hidden) == 1


def possible(pair: ModelPair, request: Request, said: torch.Tensor, token: int, warp: Warp) -> bool:
    logits = pair.target.model(
        input_ids=torch.cat([request.tokens, said])[None], use_cache=False
    ).logits[0, -1]
    return bool(warp.probs(logits)[token] > 0)


def test_given_responses_do_not_mix_with_others(pair: ModelPair, tmp_path: Path) -> None:
    requests = some_requests()
    harvest(pair, requests, SAMPLED, tmp_path, Progress())
    given = answered(tmp_path, requests)
    assert plan(pair, given, SAMPLED) == plan(pair, given[::-1], SAMPLED)
    with pytest.raises(UserError, match=r"was made with responses=generated, here [0-9a-f]{16}\. "):
        harvest(pair, given, SAMPLED, tmp_path, Progress())
    other = [replace(given[0], response=torch.tensor([EOS])), *given[1:]]
    assert json.dumps(plan(pair, other, SAMPLED)) != json.dumps(plan(pair, given, SAMPLED))
