import math
from collections.abc import Iterable
from itertools import islice

import pytest
import torch

from decoding.picking import (
    CertainPool,
    Draw,
    HostPool,
    certain_token,
    draw,
    largest,
    pick,
    point_mass,
    pool_of,
)
from decoding.sampling import Sampler, Warp, hub_pair, iid, top_tokens, without_replacement
from decoding.verification import residual_distribution
from tests.helpers.damage.refusals import refuses

LOGITS = torch.tensor([[2.0, 0.0, 1.0, -1.0], [0.0, 0.0, 0.0, 5.0]])


def test_default_warp_is_softmax_and_a_temperature_divides():
    torch.testing.assert_close(Warp().probs(LOGITS), LOGITS.softmax(-1))
    assert Warp().probs(LOGITS.bfloat16()).dtype == torch.float32
    assert Warp().probs(LOGITS.double()).dtype == torch.float64
    torch.testing.assert_close(Warp(0.5).probs(LOGITS), (LOGITS * 2).softmax(-1))


def test_greedy_takes_the_lowest_of_tied_tokens():
    assert Warp(0.0).probs(torch.tensor([1.0, 3.0, 3.0])).tolist() == [0, 1, 0]
    many = torch.zeros(50_000)
    assert Warp(0.0).probs(many).argmax() == 0


def test_top_k_keeps_k_tokens_and_what_ties_with_the_last_before_top_p():
    assert (Warp(top_k=2).probs(LOGITS) > 0).tolist() == [[True, False, True, False], [True] * 4]
    assert Warp(top_k=9).probs(LOGITS).gt(0).all()
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    assert (Warp(top_k=2, top_p=0.6).probs(logits) > 0).tolist() == [True, True, False, False]
    assert (Warp(top_p=0.6).probs(logits) > 0).tolist() == [True, True, False, False]
    assert (Warp(top_k=2, top_p=0.55).probs(logits) > 0).tolist() == [True, False, False, False]


def test_top_p_keeps_the_fewest_tokens_that_hold_the_mass_of_many_too():
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    torch.testing.assert_close(Warp(top_p=0.79).probs(logits), torch.tensor([0.625, 0.375, 0, 0]))
    assert (Warp(top_p=0.81).probs(logits) > 0).tolist() == [True, True, True, False]
    assert (Warp(top_p=1e-6).probs(logits) > 0).tolist() == [True, False, False, False]
    kept = (Warp(top_p=0.5).probs(torch.arange(4000) * 1e-4) > 0).sum()
    exact = torch.arange(4000).mul(1e-4).softmax(-1).sort(descending=True).values.cumsum(0)
    assert kept == (exact < 0.5).sum() + 1


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("warp", [Warp(), Warp(0.0), Warp(top_k=2)])
def test_broken_logits_are_refused(warp, bad):
    refuses("NaN or infinite", warp.probs, torch.tensor([[0.0, 1.0], [bad, 0.0]]))


@pytest.mark.parametrize("total", [0.3, 1 - 2.0**-24, 1.0, 1 + 2.0**-23, 7.0])
def test_pick_never_takes_an_impossible_token(total):
    probs = torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64) * total
    for uniform in (0.0, 0.5, 1 - 2.0**-53):
        assert pick(probs, torch.tensor(uniform, dtype=torch.float64)) == 1


@pytest.mark.parametrize("vocab", [2, 255, 256, 257, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_pool_picks_what_the_cumulative_sum_says(vocab, dtype):
    generator = torch.Generator().manual_seed(vocab)
    probs = torch.rand(vocab, generator=generator, dtype=dtype)
    probs *= torch.rand(vocab, generator=generator) < 0.6
    probs[-1] = 0.5
    before, left, pool = probs.clone(), probs.clone(), HostPool(probs)
    for _ in range(int(probs.count_nonzero())):
        numbers = torch.rand(22, generator=generator, dtype=torch.float64)
        numbers[0], numbers[-1] = 0.0, 1 - 2.0**-53
        picked = [pool.pick(number).token for number in numbers.tolist()]
        assert picked == pick(left.expand(22, vocab), numbers).tolist()
        assert torch.equal(pool.distribution(), left) and not pool.empty
        pool.take(picked[3])
        left[picked[3]] = 0
    assert pool.empty and torch.equal(probs, before)


@pytest.mark.parametrize("vocab", [1, 2, 257])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_certain_token_is_drawn_from_a_view_as_from_a_copy(vocab, dtype):
    for token in {0, vocab // 2, vocab - 1}:
        probs = point_mass(token, vocab, dtype)
        copied = HostPool(one_hot := probs.clone())
        assert one_hot.argmax() == token and one_hot.sum() == 1
        assert certain_token(probs) == token and certain_token(one_hot) is None
        assert certain_token(probs[1:]) is None and certain_token(probs[:-1]) is None
        pool = pool_of(probs)
        assert isinstance(pool, CertainPool) and not pool.empty
        assert pool.pick(0.5) == copied.pick(0.5) and pool.peak() == copied.peak()
        assert torch.equal(pool.distribution(), one_hot)
        assert residual_distribution(probs, torch.full_like(probs, 1 / vocab)) is probs
        pool.take(token)
        assert pool.empty and not pool.distribution().any() and torch.equal(probs, one_hot)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("vocab", [3, 256, 600, 1024])
def test_pick_in_two_steps_is_the_inverse_of_the_whole_sum(vocab, dtype):
    generator = torch.Generator().manual_seed(vocab)
    probs = torch.rand(3, 40, vocab, dtype=torch.float64, generator=generator) ** 8
    probs[..., vocab // 3 : vocab // 3 + 260] = 0  # a block without mass
    probs[0, 0] = torch.eye(vocab)[-1]
    distribution = (probs + torch.eye(vocab)[0] * 1e-3).to(dtype)
    uniform = torch.rand(3, 40, dtype=torch.float64, generator=generator)
    uniform[0, :2], uniform[1, 0] = 1 - 2.0**-53, 0.0
    cumulative = distribution.cumsum(-1, dtype=torch.float64)
    point = uniform[..., None] * cumulative[..., -1:]
    found = pick(distribution, uniform)
    assert (distribution.gather(-1, found[..., None]) > 0).all()
    above = cumulative.gather(-1, found[..., None]) - point
    below = point - (cumulative - distribution).gather(-1, found[..., None])
    slack = 1e-6 if dtype == torch.float32 else 1e-12
    assert (above > -slack * vocab).all() and (below > -slack * vocab).all()
    assert (found == (cumulative <= point).sum(-1).clamp(max=vocab - 1)).float().mean() > 0.98


def test_largest_takes_the_lowest_of_tied_tokens():
    values = torch.full((2, 700), -5.0)
    values[0, [300, 310, 650]] = 2.0
    values[1, 699] = -4.0
    assert largest(values).tolist() == [300, 699] and largest(values[0, 320:]) == 330
    assert largest(torch.full((5,), -math.inf)) == 0


def test_draws_follow_the_distribution():
    probs = torch.tensor([0.1, 0.0, 0.6, 0.3])
    drawn = draw(probs.expand(40_000, 4), torch.Generator().manual_seed(0))
    assert (torch.bincount(drawn, minlength=4) / 40_000 - probs).abs().max() < 0.01


def test_sampler_is_one_stream():
    probs = torch.full((5,), 0.2)
    one, other = Sampler.seeded(3), Sampler.seeded(3)
    assert [one.draw(probs) for _ in range(20)] == list(islice(iid(probs, other), 20))
    assert one.accept(1.0, 1.0) and not one.accept(0.0, 1.0)
    assert 0.2 < sum(one.accept(0.1, 0.4) for _ in range(2000)) / 2000 < 0.3


def tokens(draws: Iterable[Draw]) -> list[int]:
    return [each.token for each in draws]


def test_sibling_distributions():
    q, sampler = torch.tensor([0.1, 0.6, 0.0, 0.3]), Sampler.seeded(0)
    assert sorted(tokens(without_replacement(q, sampler))) == [0, 1, 3]
    assert tokens(top_tokens(q, sampler)) == [1, 3, 0]
    pairs = [tuple(tokens(hub_pair(q, sampler))) for _ in range(50)]
    assert set(pairs) == {(0, 1), (3, 1), (1, 0), (1, 3)}
    certain = torch.tensor([0.0, 1.0])
    for siblings in (hub_pair, without_replacement):
        assert list(siblings(certain, sampler)) == [(1, 1.0, ())]
    assert q.tolist() == pytest.approx([0.1, 0.6, 0.0, 0.3]), "it is left as it is"


@pytest.mark.parametrize(
    "wrong",
    [
        *({"temperature": value} for value in (-1.0, math.nan, math.inf)),
        *({"top_p": value} for value in (0.0, 2.0, math.nan)),
        {"top_k": -1},
    ],
)
def test_a_warp_that_is_no_distribution_is_refused_from_python(wrong):
    refuses("^warp: expected temperature >= 0", Warp, **wrong)
