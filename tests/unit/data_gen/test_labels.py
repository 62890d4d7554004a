"""Labels are what the verdicts and the verifiers say of one position; given responses are drawn as
their harvest says, or not."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from data_gen.answers import compare
from data_gen.columns import OwnTokens, Warps
from data_gen.labels import acceptance, accepted_length, overlap, siblings, top_tokens
from data_gen.statistics import given_row, small_splits, surprisal, surprisal_lines, warning
from decoding.picking import pick
from decoding.sampling import Warp
from decoding.verifiers.point_mass import PointMassVerifier
from decoding.verifiers.rrsw import RrswVerifier
from decoding.verifiers.spechub import SpecHubVerifier
from decoding.verifiers.tree_walk import TreeVerifier
from predictors.hrad import class_chances, class_of_length, length_chances, round_length

COUNT, VOCAB, END, MOST = 400, 60, 0, 40
Bend = Callable[[Tensor], Tensor]


def test_acceptance_is_capped_at_one_and_overlap_is_its_mean():
    p, q = torch.tensor([0.1, 0.6, 0.0]), torch.tensor([0.4, 0.2, 0.5])
    assert acceptance(p, q).tolist() == [0.25, 1.0, 0.0]
    p, q = torch.tensor([[0.7, 0.2, 0.1]]), torch.tensor([[0.2, 0.3, 0.5]])
    assert overlap(p, q).item() == pytest.approx((q * acceptance(p, q)).sum().item())
    assert overlap(p, q).item() == pytest.approx(0.5)


def test_round_lengths_and_classes():
    accepted, drafted = torch.tensor([0, 1, 3, 2, 0]), torch.tensor([3, 3, 3, 2, 1])
    expected = {3: ([0, 1, 3, 3, 0], [0, 1, 2, 2, 0]), 1: ([0, 1, 1, 1, 0], [0, 2, 2, 2, 0])}
    for gamma, (lengths, classes) in expected.items():
        found = round_length(accepted, drafted, gamma)
        assert found.tolist() == lengths
        assert class_of_length(found, gamma).tolist() == classes
    found = round_length(torch.tensor([2, 5]), torch.tensor([20, 5]), 7)
    assert found.tolist() == [2, 7] and class_of_length(found, 7).tolist() == [1, 2]


def test_chances_of_lengths_and_classes_are_how_often_coins_give_them():
    accept = torch.tensor([[0.9, 0.5, 0.8], [0.6, 0.7, 0.0]])
    drafted, count = torch.tensor([3, 2]), 200_000  # the second ends with its second token
    coins = torch.rand(count, 2, 3, generator=torch.Generator().manual_seed(0))
    expected = torch.tensor([[0.1, 0.45, 0.09, 0.36], [0.4, 0.18, 0.42, 0.0]])
    for row in (0, 1):
        lengths_drafted = drafted[row].expand(count)
        accepted = accepted_length(accept[row].expand(count, 3), coins[:, row], lengths_drafted)
        share = torch.bincount(accepted, minlength=4) / count
        torch.testing.assert_close(share, expected[row], atol=4e-3, rtol=0)
        for gamma in (1, 2, 3):
            chances = length_chances(accept, drafted, gamma)
            lengths = round_length(accepted, lengths_drafted, gamma)
            share = torch.bincount(lengths, minlength=gamma + 1) / count
            torch.testing.assert_close(chances[row], share, atol=4e-3, rtol=0)
            share = torch.bincount(class_of_length(lengths, gamma), minlength=3) / count
            torch.testing.assert_close(class_chances(chances)[row], share, atol=4e-3, rtol=0)


def test_a_greedy_target_has_no_coins():
    accept = torch.tensor([[1.0, 1, 1], [1, 0, 0], [0, 0, 0], [1, 1, 0]])
    drafted = torch.tensor([3, 3, 3, 2])
    accepted = accepted_length(accept, torch.full((4, 3), 0.5), drafted)
    assert torch.equal(accepted_length(accept, torch.zeros(4, 3), drafted), accepted)
    for gamma in (1, 2, 3):
        lengths = round_length(accepted, drafted, gamma)
        chances = length_chances(accept, drafted, gamma)
        assert torch.equal(chances, one_hot(lengths, gamma + 1).float())
        classes = one_hot(class_of_length(lengths, gamma), 3)
        assert torch.equal(class_chances(chances), classes.float())


def close(chances: Tensor, rule: TreeVerifier, p: Tensor, q: Tensor, tokens: Sequence[int]) -> None:
    """chances: [k], of each candidate if those before it are rejected; the rule's own trials say
    how probable it is that each is the one accepted."""
    trials, expected, left = rule.trials(p.double(), q.double(), tokens), [0.0] * len(tokens), 1.0
    for candidate, a, b in trials:
        share = min(1.0, a / b) if b > 0 else 0.0
        expected[candidate], left = left * share, left * (1 - share)
    rejected = torch.cat([torch.ones(1), (1 - chances[:-1]).cumprod(0)])
    torch.testing.assert_close(rejected * chances, torch.tensor(expected), atol=2e-6, rtol=0)


@pytest.mark.parametrize("kind", ["soft", "sparse", "equal", "greedy"])
@pytest.mark.parametrize("vocabulary", [2, 3, 9])
def test_siblings_of_every_rule_are_what_the_verifiers_say(kind, vocabulary):
    generator = torch.Generator().manual_seed(vocabulary)
    p, q = torch.rand(2, 60, vocabulary, generator=generator).pow(3).unbind(0)
    if kind == "sparse":
        p[:, : vocabulary // 2] = 0
        q[:, vocabulary // 2 + 1 :] = 0
    if kind == "greedy":
        p = one_hot(p.argmax(-1), vocabulary).float()
    p, q = (x / x.sum(-1, keepdim=True) for x in (p, q))
    p = q if kind == "equal" else p
    coins = torch.rand(3, 60, generator=generator, dtype=torch.float64)
    token, top = pick(q, coins[0]), top_tokens(q.log())
    found = siblings(p, q, token, top, coins[1:].T)
    for row in range(60):
        laws = p[row], q[row]
        drawn = [int(token[row]), *(int(t) for t in found.rrsw_token[row] if t >= 0)]
        assert len(set(drawn)) == len(drawn) == min(3, int((q[row] > 0).sum()))
        first = (p[row, drawn[0]] / q[row, drawn[0]]).clamp_max(1)
        accept = torch.cat([first[None], found.rrsw_accept[row, : len(drawn) - 1]])
        close(accept, RrswVerifier(), *laws, drawn)
        hub = int(q[row].argmax())
        pair = drawn[:2] if drawn[0] == hub else [drawn[0], hub]
        close(found.hub_accept[row, : len(pair)], SpecHubVerifier(), *laws, pair)
        best = [int(t) for t in top[row] if t >= 0]
        close(found.top_accept[row, : len(best)], PointMassVerifier(), *laws, best)


def test_top_tokens_are_the_lowest_ids_on_ties_and_missing_where_nothing_is_left():
    logits = torch.tensor([[1.0, 2.0, 2.0, 0.0], [float("-inf"), 3.0, float("-inf"), 1.0]])
    assert top_tokens(logits).tolist() == [[1, 2, 0], [1, 3, -1]]


# Whether given responses are drawn as their harvest says: known laws, drawn honestly and not ------


def honest(logits: Tensor) -> Tensor:
    return logits


def top(count: int) -> Bend:
    def bend(logits: Tensor) -> Tensor:
        return logits.masked_fill(logits < logits.topk(count).values[:, -1:], float("-inf"))

    return bend


def responses(bend: Bend, warp: Warp | None = None) -> dict:
    """Of responses drawn from bent logits, what the law of `warp` says; an end token cuts them."""
    generator, rows = torch.Generator().manual_seed(7), []
    warps = Warps(warp or Warp(), Warp(), OwnTokens(None, VOCAB))
    for _ in range(COUNT):
        logits = 2 * torch.randn(MOST, VOCAB, generator=generator)
        drawn = torch.multinomial(bend(logits).softmax(-1), 1, generator=generator)[:, 0]
        ends = (drawn == END).nonzero()[:, 0].tolist()
        length = ends[0] + 1 if ends else MOST
        coins = torch.rand(MOST, 2).double()
        excess = compare(warps, logits, logits, logits, coins, drawn).excess[:length]
        impossible = (~torch.isfinite(excess)).nonzero()[:, 0].tolist()
        rows.append(given_row(excess[: impossible[0] + 1 if impossible else length]))
    return surprisal(rows)


def test_honest_responses_raise_no_alarm():
    found = responses(honest)
    assert found["low"] < 0 < found["high"] and found["prompts"] == COUNT
    assert warning(found, greedy=False) is None
    assert "(" in surprisal_lines(found, greedy=False)["-log p(token) - H(p)"]
    assert responses(top(20), Warp(top_k=20))["impossible"] == 0


@pytest.mark.parametrize(
    ("bend", "sign"),
    [(lambda logits: logits / 0.9, -1), (top(20), -1), (lambda logits: logits / 1.2, 1)],
    ids=["temperature 0.9", "top_k 20", "flatter"],
)
def test_another_distribution_is_told_by_its_surprisal(bend, sign):
    found = responses(bend)
    line = warning(found, greedy=False)
    assert found["mean"] * sign > 0 and line and "repetition_penalty" in line and "\n" not in line


def test_tokens_without_probability_are_counted_and_no_nan():
    found = responses(honest, Warp(top_k=20))
    assert found["impossible"] > 50 and found["mean"] == found["mean"]
    assert "tokens with p = 0" in "".join(surprisal_lines(found, greedy=False))
    assert "have p = 0 under warp" in (warning(found, greedy=False) or "")


def test_a_greedy_target_is_compared_with_its_argmax():
    found = responses(top(1), Warp(0.0))
    assert surprisal_lines(found, greedy=True)["given = argmax"].startswith("100.00%")
    assert warning(found, greedy=True) is None
    other = responses(honest, Warp(0.0))
    assert "differ from the target's argmax" in (warning(other, greedy=True) or "")


def test_too_few_responses_say_nothing():
    assert surprisal([[0, 0.0, 1]])["mean"] is None
    single = surprisal_lines(surprisal([[9, 2.0, 0]]), greedy=False)
    assert single == {"-log p(token) - H(p)": "no interval: it takes tokens of two prompts or more"}
    few = surprisal([[10, 5.0, 0], [12, 6.5, 0]])
    assert few["mean"] > 0.4 and warning(few, greedy=False) is None


def test_splits_on_which_nothing_can_be_fitted_or_judged_are_warned_of():
    assert small_splits({"train": 6, "calibration": 2, "test": 2}) is None
    warned = small_splits({"train": 6, "calibration": 1, "test": 2})
    assert warned and warned.startswith("warning: the calibration split has 1 prompt: ")
    assert "dataset.limit" in warned and "the test split has 0 prompts" in (small_splits({}) or "")


def test_the_chances_of_the_most_probable_tokens_are_exact_where_the_first_is_nearly_certain() -> (
    None
):
    logits = torch.zeros(1, 50)
    logits[0, :3] = torch.tensor([30.0, 13.0, 12.0])
    chances = []
    for dtype in (torch.float32, torch.float64):
        p = logits.to(dtype).softmax(-1)
        uniform = torch.full((1, 2), 0.5, dtype=dtype)
        made = siblings(p, p, torch.tensor([0]), top_tokens(logits), uniform)
        chances.append(made.top_accept.double())
    assert torch.allclose(*chances, rtol=1e-5, atol=0)
