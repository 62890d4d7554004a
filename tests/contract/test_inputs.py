"""What a predictor reads while decoding is what it was trained on: a real decode, and a harvest of
the same text."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from data_gen.harvest import Progress, harvest, plan
from data_gen.requests import Request
from data_gen.run import finish
from data_gen.samples import read_inputs
from data_gen.storage.dataset import Harvest
from decoding.draft import RoundContext
from decoding.draft_tree import DraftStep
from decoding.engines.serial import SerialEngine
from decoding.models.loading import ModelPair
from decoding.sampling import Sampler, Warp
from decoding.stopping.fixed import Fixed
from decoding.structures.chain import Chain
from decoding.trace import Trace
from decoding.verifiers.token import TokenVerifier
from predictors.features.catalogue import CATALOGUE
from predictors.features.draft_statistics import HISTORY, history_row
from predictors.features.layers import LAYERS as LAYERS_OF
from predictors.inputs import Inputs, live
from tests.helpers.data.datasets import RECIPE, SETTINGS, some_requests
from tests.helpers.models.tiny_pair import EOS, tiny_pair

GAMMA, MOST = 3, 24
LAYERS = RECIPE.layers.draft_layers, RECIPE.layers.target_layers
BEFORE = Inputs((), LAYERS[1], token=True, history=True)
EVERYTHING = {n: LAYERS["target" in n] if n in LAYERS_OF else True for n in CATALOGUE}
DRAWN = Inputs(**EVERYTHING)
STATES = {"atol": 1e-6, "rtol": 0.01}  # bfloat16


class Reader(Fixed):
    """Notes every row that a predictor would be given."""

    draft_layers, target_layers = LAYERS

    def begin_round(self, context: RoundContext) -> None:
        super().begin_round(context)
        self.context = context
        rounds = getattr(self, "rounds", [])
        self.rounds: list[tuple[Tensor, list[Tensor]]] = [*rounds, (live(BEFORE, context)[0], [])]

    def should_stop(self, step: DraftStep) -> bool:
        if step.count:
            self.rounds[-1][1].append(live(DRAWN, self.context, step.drawn())[0])
        return super().should_stop(step)


@pytest.fixture(scope="module")
def pair() -> ModelPair:
    return tiny_pair()


def decoded(pair: ModelPair, request: Request, warp: Warp) -> tuple[Trace, Reader]:
    stop, verifier = Reader(GAMMA), TokenVerifier()
    engine = SerialEngine(pair, Chain(GAMMA + 1), stop, verifier, warp, warp, frozenset({EOS}))
    return engine.decode(request.tokens, MOST, Sampler.seeded(7)), stop


def harvested(
    pair: ModelPair, request: Request, trace: Trace, warp: Warp, folder: Path
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The rounds at every position of the decoded text, before they are drafted and after each
    token."""
    given = replace(request, response=torch.tensor(trace.tokens), split="train")
    settings = replace(RECIPE, gamma=GAMMA, max_new_tokens=MOST, stride=1)
    settings = replace(settings, warp=warp, draft_warp=warp)
    harvest(pair, [given], settings, folder, Progress())
    finish(plan(pair, [given], settings), len(trace.tokens), folder, *SETTINGS.values())
    before, drawn = (
        SimpleNamespace(reads=reads, when=when, name="any")
        for reads, when in ((BEFORE, "round"), (DRAWN, "token"))
    )
    asked = "rounds", "train", ("accepted", "token")
    read = Harvest.open(folder)
    return read_inputs(read, before, *asked), read_inputs(read, drawn, *asked)


def starts(trace: Trace) -> list[int]:
    """Tokens committed before each round."""
    lengths = [len(round_.tokens) for round_ in trace.rounds]
    return [sum(lengths[:index]) for index in range(len(lengths))]


def test_every_input_of_the_catalogue_is_compared() -> None:
    assert set(DRAWN.names) == set(CATALOGUE)
    assert DRAWN.names[-1] == BEFORE.names[-1] == "history", "the last columns"


def test_rows_of_a_greedy_decode_are_those_of_its_harvest(pair: ModelPair, tmp_path: Path) -> None:
    compared = 0
    for request in some_requests(4):
        trace, stop = decoded(pair, request, Warp(0.0))
        folder = tmp_path / request.prompt_id
        before, drawn = harvested(pair, request, trace, Warp(0.0), folder)
        rounds = zip(starts(trace), stop.rounds, trace.rounds, strict=True)
        for start, (row, tokens), round_ in rounds:
            count = len(tokens)
            assert drawn["token"][start, :count].tolist() == round_.draft_tokens[:count]
            expected = before["inputs"][start].float()
            torch.testing.assert_close(row[:-HISTORY], expected[:-HISTORY], **STATES)
            for depth, values in enumerate(tokens):
                expected = drawn["inputs"][start, depth].float()
                torch.testing.assert_close(values[:-HISTORY], expected[:-HISTORY], **STATES)
                assert torch.equal(values[-HISTORY:], row[-HISTORY:]), "one for the whole round"
                compared += 1
    assert compared > 40


def test_history_differs_only_in_positions_without_a_draft_token(
    pair: ModelPair, tmp_path: Path
) -> None:
    equal = bonus = 0
    for request in some_requests(4):
        trace, stop = decoded(pair, request, Warp(0.0))
        folder = tmp_path / request.prompt_id
        before, _ = harvested(pair, request, trace, Warp(0.0), folder)
        everywhere, known = (before["accepted"] > 0).tolist(), list[int]()
        for start, (row, _), round_ in zip(starts(trace), stop.rounds, trace.rounds, strict=True):
            assert torch.equal(row[-HISTORY:], history_row([everywhere[place] for place in known]))
            if len(known) == start:
                assert torch.equal(row[-HISTORY:], before["inputs"][start].float()[-HISTORY:])
                equal += 1
            bonus += round_.accepted == len(round_.draft_tokens)
            tested = round_.accepted + (round_.accepted < len(round_.draft_tokens))
            known += range(start, start + tested)
    assert equal > 8 and bonus > 2


def test_rounds_of_a_sampled_decode_are_those_of_its_harvest(
    pair: ModelPair, tmp_path: Path
) -> None:
    """But for the history: the harvest's draft tokens are others."""
    rounds = 0
    for request in some_requests(4):
        trace, stop = decoded(pair, request, Warp())
        before, _ = harvested(pair, request, trace, Warp(), tmp_path / request.prompt_id)
        for start, (row, _) in zip(starts(trace), stop.rounds, strict=True):
            expected = before["inputs"][start].float()
            torch.testing.assert_close(row[:-HISTORY], expected[:-HISTORY], **STATES)
            assert row[-1] <= expected[-1], "decoding knows fewer verdicts"
            rounds += 1
    assert rounds > 20
