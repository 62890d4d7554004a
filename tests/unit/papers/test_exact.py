"""Figures that are computed: acceptance of toy distributions, and masks."""

from pathlib import Path

import pytest
import torch

from decoding.verifiers.rrs import RrsVerifier
from decoding.verifiers.rrsw import RrswVerifier
from papers.dyspec.masks import mask_order, trees
from papers.spechub.toy import RULES as RULES_OF
from papers.spechub.toy import (
    Distributions,
    distinct_pair,
    hub_pair,
    independent,
    of_rule,
    softmaxes,
    toy_acceptance,
    toy_distributions,
)
from reports.figure import save

RULES = ["one candidate", "RRS", "RRSw", "SpecHub", "OTM, i.i.d. pairs", "OTM, distinct pairs"]


def test_acceptance_of_three_tokens_is_what_pencil_and_paper_say() -> None:
    figure = toy_acceptance(toy_distributions()[:2])
    first, second = (row[2:6] for row in figure.rows)
    assert first == pytest.approx([0.9, 0.91, 0.925, 1.0])
    assert second == pytest.approx([0.7, 0.85, 0.98, 1.0])
    assert figure.kind == "exact" and "2 pairs" in figure.n and "enumerated" in figure.interval


@pytest.mark.parametrize(
    "distributions", toy_distributions()[2:4], ids=lambda distributions: distributions.name
)
def test_no_rule_passes_the_optimum_of_its_pairs(distributions: Distributions) -> None:
    for pair in distributions.pairs[:2]:
        row = dict(
            zip(RULES, toy_acceptance([Distributions("one", [pair])]).rows[0][2:], strict=True)
        )
        assert row["one candidate"] <= row["RRS"] <= row["OTM, i.i.d. pairs"] + 1e-9  # type: ignore[operator]
        assert row["RRSw"] <= row["OTM, distinct pairs"] + 1e-9  # type: ignore[operator]


@pytest.mark.parametrize(
    ("name", "verifier", "pair"),
    [("RRS", RrsVerifier(), independent), ("RRSw", RrswVerifier(), distinct_pair)],
)
def test_siblings_are_accepted_as_their_rule_says(name, verifier, pair) -> None:  # type: ignore[no-untyped-def]
    """In closed form, against every pair and verdict enumerated."""
    small = [one.pairs[0] for one in toy_distributions()[:2]]
    for p, q in [*small, *softmaxes("uniform", 0.1, 0.5)[:1]]:
        assert RULES_OF[name](p, q) == pytest.approx(of_rule(verifier, pair, p, q))


@pytest.mark.slow
def test_normal_logits_are_those_whose_cells_are_printed() -> None:
    """OTM of i.i.d. pairs leads SpecHub at T = .5 and is behind it at T = .1."""
    for temperature, leads in ((0.1, False), (0.5, True)):
        pairs = softmaxes("normal", temperature, 0.7)
        best, hub = (
            sum(RULES_OF[rule](*pair) for pair in pairs)
            for rule in ("OTM, i.i.d. pairs", "SpecHub")
        )
        assert (best > hub) is leads


@pytest.mark.parametrize("distribution", [independent, distinct_pair, hub_pair])
def test_pair_distributions_are_distributions(distribution) -> None:  # type: ignore[no-untyped-def]
    q = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
    pairs = distribution(q)
    assert pairs.sum().item() == pytest.approx(1) and pairs.sum(1).tolist() == pytest.approx(
        q.tolist()
    )


def test_means_are_over_the_pairs_of_a_row() -> None:
    (p, q), (other_p, other_q) = (
        distributions.pairs[0] for distributions in toy_distributions()[:2]
    )
    figure = toy_acceptance([Distributions("both", [(p, q), (other_p, other_q)])])
    assert figure.column("RRS, probability of acceptance") == pytest.approx([(0.91 + 0.85) / 2])
    assert figure.column("pairs (p, q)") == [2]


def test_a_star_and_a_chain_have_the_blocks_one_counts() -> None:
    figure = mask_order({"chain": list(range(63)), "star": [0] * 63}, prefix=32)
    counts = figure.column("non-empty 32 x 32 blocks")
    # the prefix two, the tree: a triangle of three; a star's first column and diagonal
    assert counts == [5] * 8
    assert figure.column("blocks") == [6] * 8
    assert figure.column("order") == ["as drawn", "breadth first", "depth first", "heavy path"] * 2


def test_orders_that_keep_subtrees_together_touch_fewer_blocks() -> None:
    figure = mask_order()
    counts = figure.column("non-empty 32 x 32 blocks")
    assert counts == [*(326, 265, 184, 182), *(393, 328, 183, 180), *(17, 18, 18, 18)]
    assert [len(parents) for parents in trees().values()] == [768, 768, 64]


def test_pictures_are_drawn(tmp_path: Path) -> None:
    for figure in (
        toy_acceptance(toy_distributions()[:2]),
        mask_order({"chain": list(range(63))}, prefix=32),
    ):
        assert figure.kind == "exact" and figure.interval.startswith("no interval")
        assert all(path.stat().st_size > 100 for path in save(figure, tmp_path))
