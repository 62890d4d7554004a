"""What a harvest says of siblings is what the verifiers say of one position."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from data_gen.labels import greedy_point_masses, siblings, top_tokens
from decoding.picking import pick
from decoding.verifiers.point_mass import PointMassVerifier
from decoding.verifiers.rrsw import RrswVerifier
from decoding.verifiers.spechub import SpecHubVerifier
from decoding.verifiers.tree_walk import TreeVerifier


def shares(verifier: TreeVerifier, p: Tensor, q: Tensor, tokens: Sequence[int]) -> Tensor:
    """P(each candidate is the one accepted), from the rule's own trials."""
    trials = verifier.trials(p.double(), q.double(), tokens)
    found, left = [0.0] * len(tokens), 1.0
    try:
        while True:
            candidate, a, b = next(trials)
            share = min(1.0, a / b) if b > 0 else 0.0
            found[candidate], left = left * share, left * (1 - share)
    except StopIteration:
        pass
    return torch.tensor(found)


@pytest.mark.parametrize("kind", ["soft", "sparse", "equal", "greedy"])
@pytest.mark.parametrize("vocabulary", [2, 3, 9])
def test_every_rule(kind: str, vocabulary: int) -> None:
    generator = torch.Generator().manual_seed(vocabulary)
    p, q = torch.rand(2, 60, vocabulary, generator=generator).pow(3).unbind(0)
    if kind == "sparse":
        p[:, : vocabulary // 2] = 0
        q[:, vocabulary // 2 + 1 :] = 0
    if kind == "greedy":
        p = torch.nn.functional.one_hot(p.argmax(-1), vocabulary).float()
    p, q = (x / x.sum(-1, keepdim=True) for x in (p, q))
    p = q if kind == "equal" else p
    coins = torch.rand(3, 60, generator=generator, dtype=torch.float64)
    token, top = pick(q, coins[0]), top_tokens(q.log())
    found = siblings(p, q, token, top, coins[1:].T)
    for row in range(60):
        drawn = [int(token[row]), *(int(t) for t in found.rrsw_token[row] if t >= 0)]
        assert len(set(drawn)) == len(drawn) == min(3, int((q[row] > 0).sum()))
        first = (p[row, drawn[0]] / q[row, drawn[0]]).clamp_max(1)
        accept = torch.cat([first[None], found.rrsw_accept[row, : len(drawn) - 1]])
        close(accept, shares(RrswVerifier(), p[row], q[row], drawn))
        hub = int(q[row].argmax())
        pair = drawn[:2] if drawn[0] == hub else [drawn[0], hub]
        expected = shares(SpecHubVerifier(), p[row], q[row], pair)
        close(found.hub_accept[row, : len(pair)], expected)
        best = [int(t) for t in top[row] if t >= 0]
        close(found.top_accept[row, : len(best)], shares(PointMassVerifier(), p[row], q[row], best))


def close(chances: Tensor, expected: Tensor) -> None:
    """chances: [k], of each candidate if its elder ones are rejected."""
    rejected = torch.cat([torch.ones(1), (1 - chances[:-1]).cumprod(0)])
    torch.testing.assert_close(rejected * chances, expected, atol=2e-6, rtol=0)


def test_top_tokens_are_the_lowest_ids_on_ties_and_missing_where_nothing_is_left() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 0.0], [float("-inf"), 3.0, float("-inf"), 1.0]])
    assert top_tokens(logits).tolist() == [[1, 2, 0], [1, 3, -1]]


def test_a_greedy_target_accepts_one_of_them_or_none() -> None:
    top = torch.tensor([[4, 2, 7], [4, 2, -1]])
    assert greedy_point_masses(top, torch.tensor([2, 9])).tolist() == [[0, 1, 0], [0, 0, 0]]
