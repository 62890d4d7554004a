"""Draws and warps, for distributions that nobody thought of."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from decoding.picking import BLOCK, HostPool, pick
from decoding.sampling import Sampler, Warp, iid, top_tokens, without_replacement

UNIFORM = st.floats(0, 1, exclude_max=True)
WARPS = st.builds(
    Warp,
    temperature=st.sampled_from([0.0, 0.2, 1.0, 3.0]),
    top_k=st.integers(0, 6),
    top_p=st.sampled_from([0.3, 0.9, 1.0]),
)
LOGITS = st.lists(st.floats(-40, 40, width=32) | st.just(-math.inf), min_size=1, max_size=9).filter(
    lambda row: max(row) > -math.inf
)


def distributions(most: int = 8) -> st.SearchStrategy[Tensor]:
    """Masses between 0 and 1, some of them nothing or next to nothing, at least one above; not
    normalised."""
    mass = st.sampled_from([0.0, 1e-30, 1e-12]) | st.floats(1e-6, 1)
    rows = st.lists(mass, min_size=1, max_size=most).filter(lambda row: max(row) > 0)
    return rows.map(lambda row: torch.tensor(row, dtype=torch.float32))


@given(distributions(), UNIFORM)
def test_a_draw_is_possible_and_is_the_inverse_of_the_cumulative_sum(
    distribution: Tensor, uniform: float
) -> None:
    token = int(pick(distribution, torch.tensor(uniform, dtype=torch.float64)))
    assert distribution[token] > 0
    before, total = float(distribution[:token].double().sum()), float(distribution.double().sum())
    after = before + float(distribution[token])
    assert before / total <= uniform + 1e-9 and uniform <= after / total + 1e-9


@given(distributions(), UNIFORM, st.integers(0, 2 * BLOCK))
def test_a_pool_draws_like_pick(distribution: Tensor, uniform: float, padding: int) -> None:
    distribution = torch.cat([distribution.new_zeros(padding), distribution, distribution])
    token = HostPool(distribution).pick(uniform).token
    assert distribution[token] > 0
    same = int(pick(distribution, torch.tensor(uniform, dtype=torch.float64)))
    between = distribution[min(token, same) + 1 : max(token, same)]
    rounding = 1e-6 * float(distribution.sum())  # at a boundary
    assert token == same or float(between.sum()) <= rounding


@given(distributions(), st.integers(0, 2**32))
def test_without_replacement_draws_the_whole_support_once(distribution: Tensor, seed: int) -> None:
    drawn = [each.token for each in without_replacement(distribution, Sampler.seeded(seed))]
    assert sorted(drawn) == distribution.nonzero()[:, 0].tolist()


@given(distributions(), st.integers(0, 2**32))
def test_independent_draws_are_possible(distribution: Tensor, seed: int) -> None:
    draws = iid(distribution, Sampler.seeded(seed))
    assert all(distribution[next(draws).token] > 0 for _ in range(5))


@given(distributions())
def test_top_tokens_fall(distribution: Tensor) -> None:
    tokens = [each.token for each in top_tokens(distribution, Sampler.seeded(0))]
    assert sorted(tokens) == distribution.nonzero()[:, 0].tolist()
    assert tokens == sorted(tokens, key=lambda token: (-distribution[token], token))


@given(LOGITS, WARPS)
def test_a_warped_distribution_is_a_distribution(row: list[float], warp: Warp) -> None:
    logits = torch.tensor(row, dtype=torch.float32)
    probs = warp.probs(logits)
    assert (probs >= 0).all() and abs(float(probs.double().sum()) - 1) < 1e-5
    assert not probs[logits == -math.inf].any()
    kept = probs > 0
    assert float(logits[kept].min()) >= max(logits[~kept].tolist(), default=-math.inf), (
        "what is left out ranks below"
    )
