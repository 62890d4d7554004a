"""Accepted lengths of hand-made rounds, and their fit computed by hand."""

from functools import partial

import pytest

from papers.specbranch.accepted_lengths import (
    accepted_lengths,
    fitted,
    length_fits,
    observed,
    total_variation,
)
from reports.figure import Missing
from tests.helpers.evaluation.evaluations import (
    chain,
    drawn,
    evaluation,
    interval,
    labels,
    method,
    overlapped,
    plain,
    records_by,
    trace,
)

# rounds (g, tau): (2, 0) (2, 1) (2, 2) (2, 2) (1, 1): 6 accepted, 2 rejected, so a = 6 / 8
TRACES = [
    trace([chain(2, 0), chain(2, 1), chain(2, 2), chain(0, 0)], prompt="a"),
    trace([chain(2, 2), chain(1, 1)], prompt="b"),
]
RULE = partial(method, "serial", "chain", "token", "fixed")
FIXED = {f"fixed_{gamma}": RULE(stop={"gamma": gamma}) for gamma in (1, 2)}
DECODED = {"autoregressive": [plain(4)], "fixed_1": [trace([chain(1, 1)])], "fixed_2": TRACES}
EVALUATION = evaluation(FIXED, DECODED)


def test_shares_and_the_distribution_of_the_greatest_likelihood():
    figure = accepted_lengths([EVALUATION])
    assert set(figure.column("method")) == {"fixed 2"}, "the longest one"
    assert figure.column("accepted tokens") == [0, 1, 2]
    assert figure.column("share of rounds") == pytest.approx([1 / 5, 2 / 5, 2 / 5])
    # rounds of 2: 1/4, 3/16, 9/16; the round of 1: 1/4, 3/4
    by_hand = [5 / 20, (4 * 3 / 16 + 3 / 4) / 5, 4 * 9 / 16 / 5]
    assert figure.column("fitted") == pytest.approx(by_hand)
    # prompt b has none of 0, prompt a one of three
    assert interval(figure.records[0], "share of rounds")[1:] == [0, pytest.approx(1 / 3)]
    assert (figure.kind, figure.n) == ("measured", "2 prompts, 6 rounds")
    assert "bootstrap intervals over prompts" in figure.interval


def test_fits_by_method():
    figure = length_fits([EVALUATION])
    rows = records_by(figure, "method")
    two, one = rows["fixed 2"], rows["fixed 1"]
    assert two["rounds"] == 5 and two["mean accepted"] == pytest.approx(6 / 5)
    assert interval(two, "a") == [6 / 8, 3 / 5, 1]
    assert two["total variation"] == pytest.approx((0.05 + 0.1 + 0.05) / 2)
    assert figure.kind == "modelled", "a fit"
    assert interval(one, "a") == [1, None, None], "one prompt has no interval"


def test_a_constant_acceptance_is_found_and_fits():
    rounds = [(2, 0)] * 4 + [(2, 1)] * 2 + [(2, 2)] * 2  # a = 1/2 to the letter
    assert fitted(rounds, 0.5) == observed(rounds) == [0.5, 0.25, 0.25]
    assert total_variation(rounds, 0.5) == 0 and total_variation(rounds, 0.0) == 0.5


def test_what_is_missing_is_named():
    branches = method("overlapped", "branch_point", "token", "confidence")
    traces = {"autoregressive": [plain(4)], "x": [trace([overlapped(2, 1, 3, 2)])]}
    for build in (accepted_lengths, length_fits):
        with pytest.raises(Missing, match="python scripts/evaluate.py experiment=draft_lengths"):
            build([evaluation({"x": branches}, traces)])


def test_it_draws(tmp_path):
    drawn(accepted_lengths([EVALUATION]), tmp_path)
    axes = {("accepted draft tokens per round", "share of rounds")}
    assert labels(accepted_lengths([EVALUATION])) == axes
    drawn(length_fits([EVALUATION]), tmp_path)
