"""Draws and warps, for laws that nobody thought of."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from decoding.sampling import BLOCK, Pool, Sampler, Warp, iid, pick, top_tokens, without_replacement

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


def laws(most: int = 8) -> st.SearchStrategy[Tensor]:
    """Masses between 0 and 1, some of them nothing or next to nothing, at least one above; not normalised."""
    mass = st.sampled_from([0.0, 1e-30, 1e-12]) | st.floats(1e-6, 1)
    rows = st.lists(mass, min_size=1, max_size=most).filter(lambda row: max(row) > 0)
    return rows.map(lambda row: torch.tensor(row, dtype=torch.float32))


@given(laws(), UNIFORM)
def test_a_draw_is_possible_and_is_the_inverse_of_the_cumulative_sum(law: Tensor, uniform: float) -> None:
    token = int(pick(law, torch.tensor(uniform, dtype=torch.float64)))
    assert law[token] > 0
    before, total = float(law[:token].double().sum()), float(law.double().sum())
    assert before / total <= uniform + 1e-9 and uniform <= (before + float(law[token])) / total + 1e-9


@given(laws(), UNIFORM, st.integers(0, 2 * BLOCK))
def test_a_pool_draws_like_pick(law: Tensor, uniform: float, padding: int) -> None:
    law = torch.cat([law.new_zeros(padding), law, law])
    token = Pool(law).pick(uniform)
    assert law[token] > 0
    same = int(pick(law, torch.tensor(uniform, dtype=torch.float64)))
    between = law[min(token, same) + 1 : max(token, same)]
    assert token == same or float(between.sum()) <= 1e-6 * float(law.sum()), "but for rounding at a boundary"


@given(laws(), st.integers(0, 2**32))
def test_without_replacement_draws_the_whole_support_once(law: Tensor, seed: int) -> None:
    drawn = list(without_replacement(law, Sampler.seeded(seed)))
    assert sorted(drawn) == law.nonzero()[:, 0].tolist()


@given(laws(), st.integers(0, 2**32))
def test_independent_draws_are_possible(law: Tensor, seed: int) -> None:
    draws = iid(law, Sampler.seeded(seed))
    assert all(law[next(draws)] > 0 for _ in range(5))


@given(laws())
def test_top_tokens_fall(law: Tensor) -> None:
    tokens = list(top_tokens(law, Sampler.seeded(0)))
    assert sorted(tokens) == law.nonzero()[:, 0].tolist()
    assert all(law[a] > law[b] or (law[a] == law[b] and a < b) for a, b in zip(tokens, tokens[1:], strict=False))


@given(LOGITS, WARPS)
def test_a_warped_law_is_a_law(row: list[float], warp: Warp) -> None:
    logits = torch.tensor(row, dtype=torch.float32)
    probs = warp.probs(logits)
    assert (probs >= 0).all() and abs(float(probs.double().sum()) - 1) < 1e-5
    assert not probs[logits == -math.inf].any()
    kept = probs > 0
    assert float(logits[kept].min()) >= max(logits[~kept].tolist(), default=-math.inf), "what is left out ranks below"
