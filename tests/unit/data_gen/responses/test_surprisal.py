"""Whether given responses are drawn as their harvest says: known laws, drawn honestly and not."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from data_gen.answers import compare
from data_gen.columns import OwnTokens, Warps
from data_gen.statistics import given_row, surprisal, surprisal_lines, warning
from decoding.sampling import Warp

COUNT, VOCAB, END, MOST = 400, 60, 0, 40
PLAIN = Warp()


def responses(bend: Callable[[Tensor], Tensor], warp: Warp = PLAIN) -> dict:
    """Of responses drawn from bent logits, what the law of `warp` says; an end token cuts them."""
    generator = torch.Generator().manual_seed(7)
    rows = []
    for _ in range(COUNT):
        logits = 2 * torch.randn(MOST, VOCAB, generator=generator)
        drawn = torch.multinomial(bend(logits).softmax(-1), 1, generator=generator)[:, 0]
        ends = (drawn == END).nonzero()[:, 0].tolist()
        length = ends[0] + 1 if ends else MOST
        warps = Warps(warp, Warp(), OwnTokens(None, VOCAB))
        found = compare(warps, logits, logits, torch.rand(MOST, 2).double(), drawn)
        excess = found.excess[:length]
        impossible = (~torch.isfinite(excess)).nonzero()[:, 0].tolist()
        rows.append(given_row(excess[: impossible[0] + 1 if impossible else length]))
    return surprisal(rows)


def top(count: int) -> Callable[[Tensor], Tensor]:
    return lambda logits: logits.masked_fill(
        logits < logits.topk(count).values[:, -1:], float("-inf")
    )


def test_honest_responses_raise_no_alarm() -> None:
    found = responses(lambda logits: logits)
    assert found["low"] < 0 < found["high"] and found["prompts"] == COUNT
    assert warning(found, greedy=False) is None
    assert "(" in surprisal_lines(found, greedy=False)["-log p(token) - H(p)"]
    assert responses(top(20), Warp(top_k=20))["impossible"] == 0


@pytest.mark.parametrize(
    ("bend", "sign"),
    [(lambda logits: logits / 0.9, -1), (top(20), -1), (lambda logits: logits / 1.2, 1)],
    ids=["temperature 0.9", "top_k 20", "flatter"],
)
def test_another_distribution_is_told_by_its_surprisal(
    bend: Callable[[Tensor], Tensor], sign: int
) -> None:
    found = responses(bend)
    assert found["mean"] * sign > 0
    line = warning(found, greedy=False)
    assert line and "repetition_penalty" in line and "\n" not in line


def test_tokens_without_probability_are_counted_and_no_nan() -> None:
    found = responses(lambda logits: logits, Warp(top_k=20))
    assert found["impossible"] > 50 and found["mean"] == found["mean"]
    assert "tokens with p = 0" in "".join(surprisal_lines(found, greedy=False))
    assert "have p = 0 under warp" in (warning(found, greedy=False) or "")


def test_a_greedy_target_is_compared_with_its_argmax() -> None:
    found = responses(top(1), Warp(0.0))
    assert surprisal_lines(found, greedy=True)["given = argmax"].startswith("100.00%")
    assert warning(found, greedy=True) is None
    other = responses(lambda logits: logits, Warp(0.0))
    assert "differ from the target's argmax" in (warning(other, greedy=True) or "")


def test_too_few_responses_say_nothing() -> None:
    assert surprisal([[0, 0.0, 1]])["mean"] is None
    single = surprisal_lines(surprisal([[9, 2.0, 0]]), greedy=False)
    assert single == {"-log p(token) - H(p)": "no interval: it takes tokens of two prompts or more"}
    few = surprisal([[10, 5.0, 0], [12, 6.5, 0]])
    assert few["mean"] > 0.4 and warning(few, greedy=False) is None
