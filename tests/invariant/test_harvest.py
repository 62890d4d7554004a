"""A harvest equals what one would get prompt by prompt, position by position, round by round;
harvesting responses that are given equals harvesting those that the target draws itself; one
that stores no hidden states teaches what one that stores them teaches."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor

from data_gen.answers import Answer, Distributions, read_answers, uniforms
from data_gen.columns import Warps
from data_gen.harvest import Progress, answers_of, draws, harvest, outputs_on, plan
from data_gen.labels import accepted_length, siblings
from data_gen.records import label
from data_gen.requests import Request
from data_gen.rollouts import Places, Rollouts, Texts, roll, roll_greedy, shared_tokens
from data_gen.room import ON_A_CORE
from data_gen.samples import read_samples
from data_gen.settings import HarvestSettings
from data_gen.storage import shards
from data_gen.storage.dataset import Harvest
from data_gen.verdicts import Uniforms, Verdicts, sampled_verdicts
from decoding.draft import RoundContext
from decoding.draft_tree import DraftStep
from decoding.engines.serial import SerialEngine
from decoding.models.loading import CachedLM, ModelPair, load_pair
from decoding.pair import pair_settings
from decoding.picking import pick
from decoding.sampling import Sampler, Warp
from decoding.settings import Pair
from decoding.stopping.fixed import Fixed
from decoding.stopping.specdecpp import SpecDecPPStop
from decoding.structures.chain import Chain
from decoding.verifiers.token import TokenVerifier
from predictors.base import Predictor
from predictors.features.draft_statistics import Q_STATS, q_stats
from predictors.features.layers import side_by_side
from predictors.hrad import HRAD
from predictors.inputs import Inputs, live
from predictors.specdecpp import SpecDecPP
from runtime.errors import UserError
from tests.helpers.data import datasets
from tests.helpers.data.datasets import GREEDY, rows, some_requests
from tests.helpers.data.datasets import SAMPLED as RECIPE
from tests.helpers.models.tiny_pair import EOS, VOCAB, tiny_pair
from tests.helpers.training.checkpoints import write_checkpoint

NO_PROGRESS = Progress()
BOTH = pytest.mark.parametrize(
    "recipe", [replace(RECIPE, stride=8), replace(GREEDY, stride=8)], ids=["sampled", "greedy"]
)


def answers(pair: ModelPair, requests: list[Request], recipe: HarvestSettings) -> dict[str, Answer]:
    """By prompt id. The caches are those of the answer that ended last."""
    prompts = [request.tokens for request in requests]
    found = read_answers(pair, prompts, draws(requests, recipe), recipe)
    return {requests[answer.index].prompt_id: answer for answer in found}


def labelled(
    pair: ModelPair, recipe: HarvestSettings, kind: str, requests: list[Request]
) -> Iterator[tuple[Request, Distributions, dict[str, Any]]]:
    """Each prompt answered alone, with its records of one kind."""
    for request in requests:
        answer = answers(pair, [request], recipe)[request.prompt_id]
        row = label(pair, [request], [answer], recipe, ON_A_CORE)[0][kind]
        yield request, answer.distributions, row


def bfloats(bits: Any, *shape: int) -> Tensor:
    return torch.as_tensor(bits, dtype=torch.int16).view(torch.bfloat16).view(*shape, -1).float()


def close(found: Tensor, expected: Tensor) -> None:
    """Hidden states, up to their rounding to bfloat16."""
    torch.testing.assert_close(found.float(), expected.float(), atol=1e-6, rtol=0.01)


@torch.no_grad()
def naive(lm: CachedLM, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Logits [V] after `tokens`, run from nothing, and all hidden states [L + 1, n, H]."""
    result = lm.model(input_ids=tokens[None], use_cache=False, output_hidden_states=True)
    return result.logits[0, -1].float(), torch.cat(result.hidden_states)


def laws(pair: ModelPair, text: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """p and q after a text, and q at temperature 1."""
    logits = naive(pair.draft, text)[0]
    p = RECIPE.warp.probs(naive(pair.target, text)[0])
    return p, RECIPE.draft_warp.probs(logits), logits.softmax(-1)


def test_an_answer_does_not_depend_on_its_batch(pair: ModelPair) -> None:
    requests = some_requests(12)
    together = answers(pair, requests, RECIPE)
    lengths = {len(answer.distributions.response) for answer in together.values()}
    assert len(lengths) > 3, "some should end early"
    for request in requests:
        alone = answers(pair, [request], RECIPE)[request.prompt_id]
        other = together[request.prompt_id]
        assert torch.equal(alone.distributions.response, other.distributions.response)
        torch.testing.assert_close(alone.target_hidden, other.target_hidden)


def test_distributions_and_features_of_an_answer(pair: ModelPair) -> None:
    request = some_requests()[1]
    answer = answers(pair, some_requests(), RECIPE)[request.prompt_id]
    said = answer.distributions
    tokens = torch.cat([request.tokens, said.response])
    draw, candidate_draw, *_ = draws([request], RECIPE)[:, 0]
    for t in range(len(said.response)):
        text = tokens[: len(request.tokens) + t]
        p, q, unwarped_q = laws(pair, text)
        y = said.token[t]
        assert pick(p, draw[t]) == said.response[t] and pick(q, candidate_draw[t]) == y
        names = ("q", "accept", "overlap", *Q_STATS)
        found = torch.stack([getattr(said, name)[t] for name in names])
        accept = min(torch.tensor(1.0), p[y] / q[y])
        stats = q_stats(unwarped_q, y).values()
        expected = torch.stack([q[y], accept, torch.minimum(p, q).sum(), *stats])
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
        if t % RECIPE.stride == 0:
            hidden = naive(pair.target, text)[1][:, -2:-1]
            states = side_by_side(hidden[list(RECIPE.layers.target_layers)])[0]
            torch.testing.assert_close(answer.target_hidden[t // RECIPE.stride], states)


def after(request: Request, anchors: Tensor) -> Places:
    """The last committed tokens before each anchor."""
    return Places(anchors + len(request.tokens) - 1, torch.zeros_like(anchors))


def coins_with(verdicts: Tensor) -> Uniforms:
    return Uniforms(verdicts, uniforms(0, "x", "siblings", *verdicts.shape, 2))


def verdicts_of_all(pair: ModelPair, rolled: Rollouts, first: Distributions) -> Verdicts:
    """With coins that accept everything, so that no token is out of the question."""
    count, gamma = rolled.drawn.token.shape
    coins = coins_with(torch.zeros(count, gamma, dtype=torch.float64))
    warps = Warps.of(RECIPE, pair.draft)
    return sampled_verdicts(pair.target, rolled, first, torch.full((count,), gamma), coins, warps)


def test_rollouts_equal_one_at_a_time(pair: ModelPair) -> None:
    request = some_requests()[0]
    said = answers(pair, [request], RECIPE)[request.prompt_id].distributions
    anchors = torch.arange(0, len(said.response), RECIPE.stride)
    uniform = uniforms(0, "x", "rollouts", len(anchors), 3)
    before = pair.draft.length, pair.target.length
    places, first, layers = after(request, anchors), said.take(anchors), RECIPE.layers.draft_layers
    rolled = roll(pair.draft, places, first, uniform, RECIPE.draft_warp, layers)
    verdicts = verdicts_of_all(pair, rolled, first)
    assert (pair.draft.length, pair.target.length) == before
    sibling_coins = uniforms(0, "x", "siblings", len(anchors), 4, 2)
    for a, t in enumerate(anchors.tolist()):
        text = torch.cat([request.tokens, said.response[:t]])
        for d, token in enumerate(rolled.drawn.token[a]):
            p, q, unwarped_q = laws(pair, text)
            assert d == 0 or pick(q, uniform[a, d - 1]) == token
            found = torch.stack([getattr(rolled.drawn, name)[a, d] for name in ("q", *Q_STATS)])
            expected = torch.stack([q[token], *q_stats(unwarped_q, token).values()])
            torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
            accept = min(1.0, float(p[token] / q[token]))
            assert verdicts.accept[a, d].item() == pytest.approx(accept, abs=1e-4)
            if d:
                top, coins = rolled.drawn.top_token[a, d], sibling_coins[a, d]
                others = siblings(p[None], q[None], token[None], top[None], coins[None])
                for name, values in vars(others).items():
                    here = getattr(verdicts, name)[a, d]
                    torch.testing.assert_close(here, values[0], atol=2e-3, rtol=0)
            text = torch.cat([text, token[None]])
            hidden = naive(pair.draft, text)[1][list(layers), -1:]
            close(rolled.draft_hidden[a, d], side_by_side(hidden)[0])


@pytest.mark.parametrize("negligible", [0.02, 0.3])
def test_the_target_stops_where_a_rollout_is_as_good_as_rejected(
    pair: ModelPair, monkeypatch: pytest.MonkeyPatch, negligible: float
) -> None:
    request, gamma = some_requests()[0], 9
    first = answers(pair, [request], RECIPE)[request.prompt_id].distributions
    count = len(first.response)
    places, uniform = after(request, torch.arange(count)), uniforms(0, "x", "r", count, gamma - 1)
    rolled = roll(pair.draft, places, first, uniform, RECIPE.draft_warp, RECIPE.layers.draft_layers)
    everything = verdicts_of_all(pair, rolled, first).accept
    coins, drafted = uniforms(0, "x", "verdicts", count, gamma), torch.arange(count) % gamma + 1
    monkeypatch.setattr("data_gen.verdicts.NEGLIGIBLE", negligible)
    forwards, warps = pair.target.forwards, Warps.of(RECIPE, pair.draft)
    flips = coins_with(coins)
    accept = sampled_verdicts(pair.target, rolled, first, drafted, flips, warps).accept
    assert 0 < pair.target.forwards - forwards <= 3, "stages of 2, 3 and 4 tokens"
    left_out = accept == 0
    assert 0 < left_out.sum() < accept.numel()
    torch.testing.assert_close(accept[~left_out], everything[~left_out])
    counts = torch.arange(gamma) < drafted[:, None]
    assert (everything.cumprod(1)[left_out & counts] < negligible).all()
    lengths = [accepted_length(each, coins, drafted).tolist() for each in (accept, everything)]
    assert lengths[0] == lengths[1]


@pytest.mark.parametrize("gamma", [1, 3, 9])
def test_shared_greedy_rollouts_equal_their_own(pair: ModelPair, gamma: int) -> None:
    layers, shared = GREEDY.layers.draft_layers, 0
    for request in some_requests():
        first = answers(pair, [request], GREEDY)[request.prompt_id].distributions
        before, count = pair.draft.length, len(first.response)
        texts = Texts(after(request, torch.zeros(1, dtype=torch.int64)), [first.response])
        spared = roll_greedy(pair.draft, texts, first, gamma, layers, 7)
        assert pair.draft.length == before
        places = after(request, torch.arange(count))
        each = roll(pair.draft, places, first, torch.zeros(count, gamma - 1), Warp(0.0), layers)
        assert torch.equal(spared.places.row, each.places.row)
        assert torch.equal(spared.drawn.token, each.drawn.token)
        torch.testing.assert_close(vars(spared.drawn), vars(each.drawn))
        close(spared.draft_hidden, each.draft_hidden)
        shared += int((first.token == first.response)[:-1].sum())
    assert shared > 10


def test_where_shared_tokens_are_found() -> None:
    own = torch.tensor([True, False, False, True])
    assert shared_tokens(own, 3).tolist() == [[4, 5, 6], [1, 2, 7], [2, 7, 8], [7, 8, 9]]


def test_mixed_hidden_states_read_the_mixed_sequence(pair: ModelPair) -> None:
    ((request, said, row),) = labelled(pair, RECIPE, "mixed", some_requests()[:1])
    kept = torch.zeros(len(said.response), dtype=torch.bool)
    kept[row["position"]] = True
    assert 0 < kept.sum() < len(kept), "the seed should mix something"
    mixed = torch.where(kept, said.token, said.response)
    hidden = naive(pair.draft, torch.cat([request.tokens, mixed]))[1][:, len(request.tokens) :]
    stored = bfloats(row["draft_hidden"], int(kept.sum()))
    close(stored, side_by_side(hidden[list(RECIPE.layers.draft_layers)])[kept])
    torch.testing.assert_close(row["accept_prob"], said.accept[kept])
    assert torch.equal(row["token"], said.token[kept])


@pytest.mark.parametrize("gamma", [1, 4, 9])
def test_walking_greedy_rounds_replays_a_real_decode(pair: ModelPair, gamma: int) -> None:
    """Up to the last round of responses that were cut, whose drafts are limited by what is left to
    say."""
    most, ends = GREEDY.max_new_tokens, frozenset({EOS})
    engine = SerialEngine(
        pair, Chain(9), Fixed(gamma), TokenVerifier(), GREEDY.warp, GREEDY.draft_warp, ends
    )
    accepted_lengths, cut = [], 0
    for request, said, row in labelled(pair, replace(GREEDY, gamma=9), "rounds", some_requests()):
        trace = engine.decode(request.tokens, most, Sampler.seeded(0))
        assert trace.tokens == said.response.tolist()
        assert row["anchor"].tolist() == list(range(len(said.response)))
        position = 0
        for turn in trace.rounds:
            length = min(gamma, int(row["drafted"][position]), most - position - 1)
            accepted = min(int(row["accepted"][position]), length)
            assert length <= row["known"][position]
            assert row["token"][position, :length].tolist() == turn.draft_tokens
            assert accepted == turn.accepted
            ended = accepted == length and EOS in turn.draft_tokens
            position += accepted if ended else accepted + 1
            accepted_lengths.append(accepted)
        assert position == len(said.response)
        cut += int(said.response[-1]) != EOS
    assert len(accepted_lengths) > 10 and {0, min(gamma, 4)} <= set(accepted_lengths) and cut


def test_verdicts_beyond_a_cut_greedy_response_are_not_known(pair: ModelPair) -> None:
    gamma = GREEDY.gamma
    for _, said, row in labelled(pair, GREEDY, "rounds", some_requests()):
        length, ended = len(said.response), int(said.response[-1]) == EOS
        assert row["known"].tolist() == [
            gamma if ended else min(gamma, length - t) for t in range(length)
        ]
        assert (row["accept_prob"][torch.arange(gamma) >= row["known"][:, None]] == 0).all()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_siblings_of_a_greedy_target_are_what_the_response_says(
    pair: ModelPair, temperature: float
) -> None:
    recipe, seconds, thirds = replace(GREEDY, draft_warp=Warp(temperature)), 0, 0
    for _, said, row in labelled(pair, recipe, "rounds", some_requests(20)):
        response = said.response.tolist()
        for anchor in range(len(response)):
            for depth in range(recipe.gamma):
                here, place = (anchor, depth), anchor + depth
                reached = place < len(response) and all(row["accept_prob"][anchor, :depth] == 1)
                says = response[place] if reached else -2
                first, top, drawn = (
                    row[f"{law}token"][here].tolist() for law in ("", "top_", "rrsw_")
                )
                assert row["top_accept"][here].tolist() == [token == says for token in top]
                assert row["accept_prob"][here] == (first == says)
                more = row["rrsw_accept"][here].tolist()
                if temperature == 0:
                    assert top[0] == first and drawn == [-1, -1] and more == [0, 0]
                elif reached and first != says:
                    assert len({first, *drawn}) == 3 and more == [t == says for t in drawn]
                    thirds += more[1]
                seconds += reached and first != says and top[1] == says
    assert seconds > 0 and (temperature == 0 or thirds > 0)


class Noting(SpecDecPPStop):
    """The acceptance rule, writing down the features it reads in the first round of a request."""

    def begin_round(self, context: RoundContext) -> None:
        super().begin_round(context)
        self.first = context.round == 0
        self.read: list[Tensor] = [] if self.first else self.read

    def _acceptance(self, step: DraftStep) -> float:
        if self.first:
            drawn = step.drawn(0 if self.order == "paper" else 1)
            self.read.append(live(self.predictor.inputs, self._context, drawn)[0])
        return super()._acceptance(step)


@pytest.mark.parametrize("order", ["paper", "code"])
def test_features_along_a_rollout_are_those_the_stop_rule_reads(
    pair: ModelPair, order: Literal["paper", "code"], tmp_path: Path
) -> None:
    reads = Inputs(RECIPE.layers.draft_layers)
    checkpoint = write_checkpoint(tmp_path, "specdecpp", 24, inputs=reads)
    stop, ends, compared = Noting(checkpoint, 1.0, (1, GREEDY.gamma), order), frozenset({EOS}), 0
    engine = SerialEngine(
        pair, Chain(9), stop, TokenVerifier(), GREEDY.warp, GREEDY.draft_warp, ends
    )
    for request, said, row in labelled(pair, GREEDY, "rounds", some_requests(3)):
        stored = bfloats(row["draft_hidden"], len(row["anchor"]), GREEDY.gamma)
        for t in row["anchor"].tolist():
            committed = torch.cat([request.tokens, said.response[:t]])
            trace = engine.decode(committed, GREEDY.gamma + 1, Sampler.seeded(0))
            drafted = trace.rounds[0].draft_tokens
            assert drafted == row["token"][t, : len(drafted)].tolist()
            for depth, feature in enumerate(stop.read):
                close(stored[t, depth], feature)
                compared += 1
    assert compared > 50


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.parquet"))}


def test_resumed_equals_uninterrupted(pair: ModelPair, tmp_path: Path) -> None:
    requests, seen = some_requests(10), list[int]()

    def stop(count: int, tokens: int) -> None:
        seen.append(count)
        if len(seen) == 6:  # in the second of three chunks
            raise KeyboardInterrupt

    once, twice = tmp_path / "once", tmp_path / "twice"
    harvest(pair, requests, RECIPE, once, NO_PROGRESS)
    with pytest.raises(KeyboardInterrupt):
        harvest(pair, requests, RECIPE, twice, Progress(finished=stop))
    assert len(content(twice)) == 3
    untouched = (twice / "rounds-00000.parquet").stat().st_mtime_ns
    harvest(pair, requests[::-1], RECIPE, twice, NO_PROGRESS)
    assert (twice / "rounds-00000.parquet").stat().st_mtime_ns == untouched
    assert content(twice) == content(once) and len(content(once)) == 9


def test_settings_and_responses_do_not_mix(pair: ModelPair, tmp_path: Path) -> None:
    requests = some_requests()
    harvest(pair, requests, RECIPE, tmp_path, NO_PROGRESS)
    given = answered(tmp_path, requests)
    other = [replace(given[0], response=torch.tensor([EOS])), *given[1:]]
    assert plan(pair, given, RECIPE) == plan(pair, given[::-1], RECIPE)
    assert json.dumps(plan(pair, other, RECIPE)) != json.dumps(plan(pair, given, RECIPE))
    last = requests[-1]
    longer = [*requests[:-1], replace(last, tokens=torch.cat([last.tokens, last.tokens[:1]]))]
    goes_on = rf"\({last.prompt_id} goes on with '' at token {len(last.tokens)}, here '.+'\)\. "
    for models, asked, recipe, says in (
        (pair, longer, RECIPE, r"prompts\.sha256=[0-9a-f]{16}, here [0-9a-f]{16} " + goes_on),
        (pair, requests, replace(RECIPE, gamma=3), r"gamma=4, here 3\. Choose another out="),
        (pair, requests[:5], RECIPE, r"prompts\.count=6"),
        (replace(pair, draft=pair.target), requests, RECIPE, r"pair\.draft="),
        (pair, given, RECIPE, r"responses=generated, here [0-9a-f]{16}\. "),
    ):
        with pytest.raises(UserError, match=f"was made with .*{says}"):
            harvest(models, asked, recipe, tmp_path, NO_PROGRESS)
    for shard in tmp_path.glob("responses-*.parquet"):
        shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    with pytest.raises(
        UserError, match=r"prompts\.sha256=[0-9a-f]{16}, here [0-9a-f]{16}\. Choose"
    ):
        harvest(pair, longer, RECIPE, tmp_path, NO_PROGRESS)


def test_every_record_is_consistent(pair: ModelPair, tmp_path: Path) -> None:
    harvest(pair, some_requests(8), RECIPE, tmp_path, NO_PROGRESS)
    rounds = rows(tmp_path, "rounds")
    assert len(rounds) == 8
    for response, row in zip(rows(tmp_path, "responses"), rounds, strict=True):
        assert response["prompt_id"] == row["prompt_id"]
        assert row["anchor"] == list(range(0, len(response["response_tokens"]), RECIPE.stride))
        assert set(row["known"]) == {RECIPE.gamma}, "the target was run along every rollout"
        lengths = zip(row["accepted"], row["drafted"], strict=True)
        assert all(0 <= n <= m <= RECIPE.gamma for n, m in lengths)
        assert len(row["accept_prob"]) == len(row["token"]) == RECIPE.gamma * len(row["anchor"])


def test_nan_logits_stop_the_harvest_before_anything_is_written(tmp_path: Path) -> None:
    pair = tiny_pair()
    with torch.no_grad():
        pair.draft.model.lm_head.weight.fill_(float("nan"))
    with pytest.raises(UserError, match="NaN"):
        harvest(pair, some_requests(), RECIPE, tmp_path, NO_PROGRESS)
    assert not list(tmp_path.glob("*.parquet"))


def test_rollouts_of_one_token_need_no_forward(pair: ModelPair) -> None:
    recipe = replace(RECIPE, gamma=1)
    for _, said, row in labelled(pair, recipe, "rounds", some_requests()[:1]):
        torch.testing.assert_close(row["accept_prob"][:, 0], said.accept[row["anchor"]])


def test_outputs_arrive_where_they_did_after_an_error() -> None:
    pair, host, other = tiny_pair(), torch.device("cpu"), torch.device("meta")
    with pytest.raises(ZeroDivisionError), outputs_on(pair, other):
        assert pair.target.output_device == pair.draft.output_device == other
        _ = 1 / 0
    assert pair.target.output_device == pair.draft.output_device == host


# Given responses ----------------------------------------------------------------------------------


def answered(folder: Path, requests: list[Request]) -> list[Request]:
    """With the responses of a harvest."""
    said = {row["prompt_id"]: row["response_tokens"] for row in rows(folder, "responses")}
    return [replace(r, response=torch.tensor(said[r.prompt_id])) for r in requests]


@pytest.mark.parametrize("stride", [1, 8])
@BOTH
def test_records_are_those_of_generated_responses(
    pair: ModelPair,
    recipe: HarvestSettings,
    stride: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tokens, counts and places exactly; distributions and features up to rounding."""
    recipe, requests = replace(recipe, stride=stride), some_requests(10)
    harvest(pair, requests, recipe, tmp_path / "generated", NO_PROGRESS)
    given = answered(tmp_path / "generated", requests)
    ended = [int(request.response[-1]) == EOS for request in given if request.response is not None]
    assert {True, False} == set(ended), "some responses should end, some be cut"
    monkeypatch.setattr("data_gen.answers.MAX_BYTES", 7 * 4 * VOCAB)  # several forwards
    harvest(pair, given, recipe, tmp_path / "given", NO_PROGRESS)
    for kind in shards.SCHEMAS:
        found, expected = rows(tmp_path / "given", kind), rows(tmp_path / "generated", kind)
        assert len(found) == len(expected) == len(requests)
        for row, other in zip(found, expected, strict=True):
            for name, values in other.items():
                if name in shards.FEATURES:
                    close(bfloats(row[name]), bfloats(values))
                elif isinstance(values, list) and values and isinstance(values[0], float):
                    assert row[name] == pytest.approx(values, abs=1e-5), name
                else:
                    assert row[name] == values, name


@BOTH
def test_a_response_is_followed_as_far_as_the_target_could_have_said_it(
    pair: ModelPair, recipe: HarvestSettings
) -> None:
    requests = some_requests(4)
    for request in requests:
        said = answers(pair, [request], recipe)[request.prompt_id].distributions.response
        where = min(2, len(said) - 1)
        p = recipe.warp.probs(naive(pair.target, torch.cat([request.tokens, said[:where]]))[0])
        wrong = next(token for token in range(1, VOCAB) if not p[token] > 0)
        given = replace(request, response=torch.cat([said[:where], torch.tensor([wrong, 5, 6])]))
        (answer,) = answers_of(pair, [given], recipe, lambda tokens: None)
        drawn = answer.distributions
        assert drawn.response.tolist() == said[: where + 1].tolist(), "ends with a draw of its own"
        assert pair.target.length == pair.draft.length == len(request.tokens) + where
        assert len(drawn.accept) == where + 1 and len(answer.target_hidden) == 1


# Without hidden states ----------------------------------------------------------------------------

PREDICTORS = (SpecDecPP(), SpecDecPP(context="rollout"), HRAD(gamma=2))


@pytest.fixture(scope="module")
def settings(tiny_pair_dir: Path) -> Pair:
    folders = {side: str(tiny_pair_dir / side) for side in ("target", "draft")}
    return pair_settings(**folders, name="tiny")


@pytest.fixture(scope="module")
def folders(settings: Pair, tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """By whether features are stored."""
    pair, made = load_pair(settings), {}
    for stored in (True, False):
        made[stored] = tmp_path_factory.mktemp("harvest")
        recipe = replace(
            datasets.RECIPE, gamma=5, max_new_tokens=16, mixing=0.3, features_stored=stored
        )
        datasets.make_dataset(pair, made[stored], recipe=recipe)
    return made


@pytest.mark.parametrize("predictor", PREDICTORS)
def test_recomputed_features_equal_stored_ones(
    folders: dict[bool, Path], settings: Pair, predictor: Predictor
) -> None:
    for split in shards.SPLITS:
        stored = read_samples(Harvest.open(folders[True]), predictor, split)
        again = read_samples(Harvest.open(folders[False]), predictor, split, settings)
        assert stored.keys() == again.keys()
        for name, values in stored.items():
            assert values.dtype == again[name].dtype
            torch.testing.assert_close(again[name], values, atol=1e-5, rtol=0.01)


def test_nothing_of_them_is_on_disk(folders: dict[bool, Path]) -> None:
    for kind in shards.SCHEMAS:
        for row in pq.read_table(folders[False] / shards.shard_name(kind, 0)).to_pylist():
            assert not any(row[name] for name in shards.FEATURES if name in row)


def test_another_pair_is_refused(folders: dict[bool, Path], settings: Pair) -> None:
    harvest = Harvest.open(folders[False])
    other = pair_settings(target=settings.target, draft=settings.target, name="tiny")
    with pytest.raises(UserError, match=r"^pair\.draft: it is not the one of the harvest, tiny"):
        read_samples(harvest, HRAD(), "test", other)
    with pytest.raises(UserError, match=r"^pair: .* stores no hidden states"):
        read_samples(harvest, HRAD(), "test")
