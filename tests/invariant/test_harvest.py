"""A harvest equals what one would get prompt by prompt, position by position, round by round."""

from dataclasses import replace
from pathlib import Path
from typing import Literal

import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor

from data_gen.answers import Answer, Distributions, read_answers, uniforms
from data_gen.columns import OwnTokens, Warps, at
from data_gen.harvest import Progress, draws, harvest
from data_gen.labels import accepted_length, siblings
from data_gen.records import label
from data_gen.requests import Request
from data_gen.rollouts import Places, Rollouts, Texts, roll, roll_greedy, shared_tokens
from data_gen.room import ON_A_CORE
from data_gen.settings import HarvestSettings
from data_gen.storage import shards
from data_gen.verdicts import Coins, Verdicts, sampled_verdicts
from decoding.draft import RoundContext
from decoding.draft_tree import DraftStep
from decoding.engines.serial import SerialEngine
from decoding.models.loading import CachedLM, ModelPair
from decoding.picking import pick
from decoding.sampling import Sampler, Warp
from decoding.stopping.fixed import Fixed
from decoding.stopping.specdecpp import SpecDecPPStop
from decoding.structures.chain import Chain
from decoding.verifiers.token import TokenVerifier
from predictors.features.draft_statistics import Q_STATS, entropy, q_stats
from predictors.features.layers import RecordedLayers, side_by_side
from predictors.inputs import Inputs, live
from runtime.errors import UserError
from tests.helpers.models.tiny_pair import EOS, VOCAB, tiny_pair
from tests.helpers.training.checkpoints import write_checkpoint

RECIPE = HarvestSettings(
    gamma=4,
    seed=3,
    max_new_tokens=18,
    batch_size=4,
    mixing=0.15,
    stride=2,
    warp=Warp(0.9, top_k=20),
    draft_warp=Warp(1.1, top_p=0.95),
    layers=RecordedLayers([-1], [-3, -1]),
)
GREEDY = replace(RECIPE, warp=Warp(0.0), draft_warp=Warp(0.0), stride=1)


def some_requests(count: int = 6) -> list[Request]:
    generator = torch.Generator().manual_seed(5)
    lengths = torch.randint(2, 9, (count,), generator=generator).tolist()
    tokens = [torch.randint(1, VOCAB, (length,), generator=generator) for length in lengths]
    splits = ("train", "calibration", "test")
    return [Request(f"p{n}", "toy", prompt, splits[n % 3]) for n, prompt in enumerate(tokens)]


def answers(pair: ModelPair, requests: list[Request], recipe: HarvestSettings) -> dict[str, Answer]:
    """By prompt id. The caches are those of the answer that ended last."""
    prompts = [request.tokens for request in requests]
    found = read_answers(pair, prompts, draws(requests, recipe), recipe)
    return {requests[answer.index].prompt_id: answer for answer in found}


@torch.no_grad()
def naive(lm: CachedLM, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Logits [V] after `tokens`, run from nothing, and all hidden states [L + 1, n, H]."""
    result = lm.model(input_ids=tokens[None], use_cache=False, output_hidden_states=True)
    return result.logits[0, -1].float(), torch.cat(result.hidden_states)


def test_an_answer_does_not_depend_on_its_batch(pair: ModelPair) -> None:
    requests = some_requests(12)
    together = answers(pair, requests, RECIPE)
    assert len({len(answer.distributions.response) for answer in together.values()}) > 3, (
        "some should end early"
    )
    for request in requests:
        alone = answers(pair, [request], RECIPE)[request.prompt_id]
        assert torch.equal(
            alone.distributions.response, together[request.prompt_id].distributions.response
        )
        torch.testing.assert_close(alone.target_hidden, together[request.prompt_id].target_hidden)


def test_distributions_and_features_of_an_answer(pair: ModelPair) -> None:
    request = some_requests()[1]
    answer = answers(pair, some_requests(), RECIPE)[request.prompt_id]
    tokens = torch.cat([request.tokens, answer.distributions.response])
    draw, candidate_draw, *_ = draws([request], RECIPE)[:, 0]
    for t in range(len(answer.distributions.response)):
        known = tokens[: len(request.tokens) + t]
        p, q = (
            w.probs(naive(lm, known)[0])
            for lm, w in zip((pair.target, pair.draft), warps(), strict=True)
        )
        assert pick(p, draw[t]) == answer.distributions.response[t]
        y = answer.distributions.token[t]
        assert pick(q, candidate_draw[t]) == y
        found = [
            answer.distributions.q[t],
            answer.distributions.accept[t],
            answer.distributions.overlap[t],
            *(getattr(answer.distributions, name)[t] for name in Q_STATS),
        ]
        unwarped_q = naive(pair.draft, known)[0].softmax(-1)
        expected = [
            q[y],
            min(torch.tensor(1.0), p[y] / q[y]),
            torch.minimum(p, q).sum(),
            *q_stats(unwarped_q, y).values(),
        ]
        torch.testing.assert_close(torch.stack(found), torch.stack(expected), atol=1e-4, rtol=0)
        if t % RECIPE.stride == 0:
            hidden = naive(pair.target, known)[1][:, -2:-1]
            states = side_by_side(hidden[list(RECIPE.layers.target_layers)])[0]
            torch.testing.assert_close(answer.target_hidden[t // RECIPE.stride], states)


def after(request: Request, anchors: Tensor) -> Places:
    """The last committed tokens before each anchor."""
    return Places(anchors + len(request.tokens) - 1, torch.zeros_like(anchors))


def warps() -> tuple[Warp, Warp]:
    return RECIPE.warp, RECIPE.draft_warp


def test_rollouts_equal_one_at_a_time(pair: ModelPair) -> None:
    request = some_requests()[0]
    answer = answers(pair, [request], RECIPE)[request.prompt_id]
    anchors = torch.arange(0, len(answer.distributions.response), RECIPE.stride)
    uniform = uniforms(0, "x", "rollouts", len(anchors), 3)
    distributions, places = answer.distributions, after(request, anchors)
    before = pair.draft.length, pair.target.length
    first = distributions.take(anchors)
    rolled = roll(pair.draft, places, first, uniform, RECIPE.draft_warp, RECIPE.layers.draft_layers)
    found = verdicts_of_all(pair, rolled, distributions.take(anchors))
    accept = found.accept
    assert (pair.draft.length, pair.target.length) == before
    for a, t in enumerate(anchors.tolist()):
        known = torch.cat([request.tokens, distributions.response[:t]])
        for d, token in enumerate(rolled.drawn.token[a]):
            p, q = (
                w.probs(naive(lm, known)[0])
                for lm, w in zip((pair.target, pair.draft), warps(), strict=True)
            )
            unwarped_q = naive(pair.draft, known)[0].softmax(-1)
            assert d == 0 or pick(q, uniform[a, d - 1]) == token
            assert rolled.drawn.q[a, d].item() == pytest.approx(q[token].item(), abs=1e-4)
            assert rolled.drawn.q_entropy[a, d].item() == pytest.approx(
                entropy(unwarped_q).item(), abs=1e-4
            )
            first_two = unwarped_q.sort(descending=True).values[:2].tolist()
            said = unwarped_q[token].item(), first_two[0], first_two[0] - first_two[1]
            drawn = (rolled.drawn.q_drawn, rolled.drawn.q_max, rolled.drawn.q_margin)
            assert [values[a, d].item() for values in drawn] == pytest.approx(said, abs=1e-4)
            assert accept[a, d].item() == pytest.approx(
                min(1.0, (p[token] / q[token]).item()), abs=1e-4
            )
            coins = uniforms(0, "x", "siblings", len(anchors), 4, 2)[a, d] if d else None
            if coins is not None:
                top = rolled.drawn.top_token[a, d]
                expected = siblings(p[None], q[None], token[None], top[None], coins[None])
                for name, values in vars(expected).items():
                    ours = getattr(found, name)[a, d]
                    torch.testing.assert_close(ours, values[0], atol=2e-3, rtol=0)
            known = torch.cat([known, token[None]])
            hidden = naive(pair.draft, known)[1][list(RECIPE.layers.draft_layers), -1:]
            states = side_by_side(hidden)[0]
            torch.testing.assert_close(rolled.draft_hidden[a, d], states, atol=1e-6, rtol=0.01)


def verdicts_of_all(pair: ModelPair, rolled: Rollouts, first: Distributions) -> Verdicts:
    """With coins that accept everything, so that no token is out of the question."""
    count, gamma = rolled.drawn.token.shape
    drafted = torch.full((count,), gamma)
    coins = coins_with(torch.zeros(count, gamma, dtype=torch.float64))
    return sampled_verdicts(
        pair.target, rolled, first, drafted, coins, Warps(*warps(), OwnTokens.of(pair.draft))
    )


def coins_with(verdicts: Tensor) -> Coins:
    return Coins(verdicts, uniforms(0, "x", "siblings", *verdicts.shape, 2))


@pytest.mark.parametrize("negligible", [0.02, 0.3])
def test_the_target_stops_where_a_rollout_is_as_good_as_rejected(
    pair: ModelPair, monkeypatch: pytest.MonkeyPatch, negligible: float
) -> None:
    request, gamma = some_requests()[0], 9
    distributions = answers(pair, [request], RECIPE)[request.prompt_id].distributions
    places = after(request, torch.arange(len(distributions.response)))
    first, count = distributions, len(distributions.response)
    uniform = uniforms(0, "x", "r", count, gamma - 1)
    rolled = roll(pair.draft, places, first, uniform, RECIPE.draft_warp, RECIPE.layers.draft_layers)
    everything, coins = (
        verdicts_of_all(pair, rolled, distributions).accept,
        uniforms(0, "x", "verdicts", count, gamma),
    )
    drafted = torch.arange(count) % gamma + 1
    monkeypatch.setattr("data_gen.verdicts.NEGLIGIBLE", negligible)
    forwards = pair.target.forwards
    accept = sampled_verdicts(
        pair.target,
        rolled,
        distributions,
        drafted,
        coins_with(coins),
        Warps(*warps(), OwnTokens.of(pair.draft)),
    ).accept
    assert 0 < pair.target.forwards - forwards <= 3, "stages of 2, 3 and 4 tokens"
    left_out = accept == 0
    assert 0 < left_out.sum() < accept.numel()
    torch.testing.assert_close(accept[~left_out], everything[~left_out])
    counts = torch.arange(gamma) < drafted[:, None]
    assert (everything.cumprod(1)[left_out & counts] < negligible).all()
    assert (
        accepted_length(accept, coins, drafted).tolist()
        == accepted_length(everything, coins, drafted).tolist()
    )


@pytest.mark.parametrize("gamma", [1, 3, 9])
def test_shared_greedy_rollouts_equal_their_own(pair: ModelPair, gamma: int) -> None:
    recipe, layers = replace(GREEDY, gamma=gamma), GREEDY.layers.draft_layers
    shared = 0
    for request in some_requests():
        distributions = answers(pair, [request], recipe)[request.prompt_id].distributions
        before, count = pair.draft.length, len(distributions.response)
        first = distributions
        texts = Texts(after(request, torch.zeros(1, dtype=torch.int64)), [distributions.response])
        spared = roll_greedy(pair.draft, texts, first, gamma, layers, 7)
        assert pair.draft.length == before
        places = after(request, torch.arange(count))
        each = roll(pair.draft, places, first, torch.zeros(count, gamma - 1), Warp(0.0), layers)
        assert torch.equal(spared.places.row, each.places.row) and torch.equal(
            spared.drawn.token, each.drawn.token
        )
        torch.testing.assert_close(vars(spared.drawn), vars(each.drawn))
        torch.testing.assert_close(spared.draft_hidden, each.draft_hidden, atol=1e-6, rtol=0.01)
        shared += int((first.token == distributions.response)[:-1].sum())
    assert shared > 10


def test_where_shared_tokens_are_found() -> None:
    own = torch.tensor([True, False, False, True])
    found = shared_tokens(own, 3).tolist()
    assert found == [[4, 5, 6], [1, 2, 7], [2, 7, 8], [7, 8, 9]]


def test_mixed_hidden_states_read_the_mixed_sequence(pair: ModelPair) -> None:
    request = some_requests()[0]
    answer = answers(pair, [request], RECIPE)[request.prompt_id]
    row = label(pair, [request], [answer], RECIPE, ON_A_CORE)[0]["mixed"]
    kept = torch.zeros(len(answer.distributions.response), dtype=torch.bool)
    kept[row["position"]] = True
    assert 0 < kept.sum() < len(kept), "the seed should mix something"
    mixed = torch.where(kept, answer.distributions.token, answer.distributions.response)
    hidden = naive(pair.draft, torch.cat([request.tokens, mixed]))[1][:, len(request.tokens) :]
    stored = (
        torch.from_numpy(row["draft_hidden"]).view(torch.bfloat16).view(int(kept.sum()), -1).float()
    )
    torch.testing.assert_close(
        stored,
        side_by_side(hidden[list(RECIPE.layers.draft_layers)])[kept].float(),
        atol=1e-6,
        rtol=0.01,
    )
    torch.testing.assert_close(row["accept_prob"], answer.distributions.accept[kept])
    assert torch.equal(row["token"], answer.distributions.token[kept])


@pytest.mark.parametrize("gamma", [1, 4, 9])
def test_walking_greedy_rounds_replays_a_real_decode(pair: ModelPair, gamma: int) -> None:
    """Up to the last round of responses that were cut, whose drafts are limited by what is left to
    say."""
    recipe, most = replace(GREEDY, gamma=9), GREEDY.max_new_tokens
    engine = SerialEngine(
        pair, Chain(9), Fixed(gamma), TokenVerifier(), Warp(0.0), Warp(0.0), frozenset({EOS})
    )
    accepted_lengths, cut = [], 0
    for request in some_requests():
        answer = answers(pair, [request], recipe)[request.prompt_id]
        row = label(pair, [request], [answer], recipe, ON_A_CORE)[0]["rounds"]
        response = answer.distributions.response
        trace = engine.decode(request.tokens, most, Sampler.seeded(0))
        assert trace.tokens == response.tolist()
        assert row["anchor"].tolist() == list(range(len(response)))
        position = 0
        for turn in trace.rounds:
            length = min(gamma, int(row["drafted"][position]), most - position - 1)
            accepted = min(int(row["accepted"][position]), length)
            assert length <= row["known"][position]
            assert (row["token"][position, :length].tolist(), accepted) == (
                turn.draft_tokens,
                turn.accepted,
            )
            ended = accepted == length and EOS in turn.draft_tokens
            position += accepted if ended else accepted + 1
            accepted_lengths.append(accepted)
        assert position == len(response)
        cut += int(response[-1]) != EOS
    assert len(accepted_lengths) > 10 and {0, min(gamma, 4)} <= set(accepted_lengths) and cut


def test_verdicts_beyond_a_cut_greedy_response_are_not_known(pair: ModelPair) -> None:
    for request in some_requests():
        answer = answers(pair, [request], GREEDY)[request.prompt_id]
        row = label(pair, [request], [answer], GREEDY, ON_A_CORE)[0]["rounds"]
        length, ended = (
            len(answer.distributions.response),
            int(answer.distributions.response[-1]) == EOS,
        )
        whole = [GREEDY.gamma if ended else min(GREEDY.gamma, length - t) for t in range(length)]
        assert row["known"].tolist() == whole
        beyond = torch.arange(GREEDY.gamma) >= row["known"][:, None]
        assert (row["accept_prob"][beyond] == 0).all()


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
    checkpoint = write_checkpoint(
        tmp_path, "specdecpp", 24, inputs=Inputs(RECIPE.layers.draft_layers)
    )
    stop = Noting(checkpoint, 1.0, (1, GREEDY.gamma), order)
    engine = SerialEngine(
        pair, Chain(9), stop, TokenVerifier(), GREEDY.warp, GREEDY.draft_warp, frozenset({EOS})
    )
    compared = 0
    for request in some_requests(3):
        answer = answers(pair, [request], GREEDY)[request.prompt_id]
        row = label(pair, [request], [answer], GREEDY, ON_A_CORE)[0]["rounds"]
        stored = (
            torch.from_numpy(row["draft_hidden"])
            .view(torch.bfloat16)
            .view(len(row["anchor"]), GREEDY.gamma, -1)
        )
        for t in row["anchor"].tolist():
            committed = torch.cat([request.tokens, answer.distributions.response[:t]])
            drafted = (
                engine.decode(committed, GREEDY.gamma + 1, Sampler.seeded(0)).rounds[0].draft_tokens
            )
            assert drafted == row["token"][t, : len(drafted)].tolist()
            for depth, feature in enumerate(stop.read):
                torch.testing.assert_close(stored[t, depth].float(), feature, atol=1e-6, rtol=0.01)
                compared += 1
    assert compared > 50


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.parquet"))}


def stop_after(prompts: int) -> Progress:
    seen = []

    def finished(count: int, tokens: int) -> None:
        seen.append(count)
        if len(seen) == prompts:
            raise KeyboardInterrupt

    return Progress(finished=finished)


def test_resumed_equals_uninterrupted(pair: ModelPair, tmp_path: Path) -> None:
    requests = some_requests(10)
    harvest(pair, requests, RECIPE, tmp_path / "once", Progress())
    with pytest.raises(KeyboardInterrupt):
        harvest(
            pair, requests, RECIPE, tmp_path / "twice", stop_after(6)
        )  # in the second of three chunks
    assert len(content(tmp_path / "twice")) == 3
    untouched = (tmp_path / "twice" / "rounds-00000.parquet").stat().st_mtime_ns
    harvest(pair, requests[::-1], RECIPE, tmp_path / "twice", Progress())
    assert (tmp_path / "twice" / "rounds-00000.parquet").stat().st_mtime_ns == untouched
    assert content(tmp_path / "twice") == content(tmp_path / "once")
    assert len(content(tmp_path / "once")) == 9


def test_settings_do_not_mix(pair: ModelPair, tmp_path: Path) -> None:
    requests = some_requests()
    harvest(pair, requests, RECIPE, tmp_path, Progress())
    with pytest.raises(UserError, match=r"was made with gamma=4, here 3\. Choose another out="):
        harvest(pair, requests, replace(RECIPE, gamma=3), tmp_path, Progress())
    with pytest.raises(UserError, match=r"prompts\.count=6"):
        harvest(pair, requests[:5], RECIPE, tmp_path, Progress())
    other = replace(pair, draft=pair.target)
    with pytest.raises(UserError, match=r"pair\.draft="):
        harvest(other, requests, RECIPE, tmp_path, Progress())


def test_every_record_is_consistent(pair: ModelPair, tmp_path: Path) -> None:
    harvest(pair, some_requests(8), RECIPE, tmp_path, Progress())
    for index in range(2):
        responses = pq.read_table(tmp_path / shards.shard_name("responses", index)).to_pylist()
        rounds = pq.read_table(tmp_path / shards.shard_name("rounds", index)).to_pylist()
        for response, row in zip(responses, rounds, strict=True):
            assert response["prompt_id"] == row["prompt_id"]
            length = len(response["response_tokens"])
            assert row["anchor"] == list(range(0, length, RECIPE.stride))
            assert set(row["known"]) == {RECIPE.gamma}, "the target was run along every rollout"
            assert all(
                0 <= n <= m <= RECIPE.gamma
                for n, m in zip(row["accepted"], row["drafted"], strict=True)
            )
            assert len(row["accept_prob"]) == len(row["token"]) == RECIPE.gamma * len(row["anchor"])


def test_nan_logits_stop_the_harvest_before_anything_is_written(tmp_path: Path) -> None:
    pair = tiny_pair()
    with torch.no_grad():
        pair.draft.model.lm_head.weight.fill_(float("nan"))
    with pytest.raises(UserError, match="NaN"):
        harvest(pair, some_requests(), RECIPE, tmp_path, Progress())
    assert not list(tmp_path.glob("*.parquet"))


def test_rollouts_of_one_token_need_no_forward(pair: ModelPair) -> None:
    request = some_requests()[0]
    recipe = replace(RECIPE, gamma=1)
    answer = answers(pair, [request], recipe)[request.prompt_id]
    row = label(pair, [request], [answer], recipe, ON_A_CORE)[0]["rounds"]
    torch.testing.assert_close(row["accept_prob"][:, 0], answer.distributions.accept[row["anchor"]])


def test_at_reads_the_last_axis() -> None:
    assert at(
        torch.tensor([[0.1, 0.9], [0.6, 0.4]]), torch.tensor([1, 0])
    ).tolist() == pytest.approx([0.9, 0.6])
