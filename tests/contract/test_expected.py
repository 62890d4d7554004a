"""What is expected of a draft, averaged over every draft there is, against the first round of every
decode there is."""

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from decoding.draft import RoundContext
from decoding.engines.request import prefill
from decoding.engines.serial import SerialEngine
from decoding.sampling import Sampler, Warp
from evaluation.expect import expected_counts
from tests.contract.covering import covering, crossed
from tests.contract.engines import ALONE, ASKING, OFF, PROMPT, Case, engine, rule_of, toy_pair
from tests.contract.enumeration import Distribution, distribution_of

WARPS = [(OFF, OFF), (Warp(0.6), Warp(0.6)), (Warp(0.0), OFF)]
Counts = tuple[float, float]
"""Accepted and committed tokens of a round."""


def mean(distribution: Distribution) -> list[float]:
    """Of counts."""
    return [sum(p * of[i] for of, p in distribution.items()) for i in range(2)]  # type: ignore[index]


def expected(decoder: SerialEngine, length: int) -> list[float]:
    committed, models = torch.tensor(PROMPT), (decoder.pair.target, decoder.pair.draft)
    for model in models:
        model.reset()
    hidden = prefill(models[0], committed, decoder.target_layers)
    prefill(models[1], committed)
    before = [model.length for model in models]

    def run(sampler: Sampler) -> Counts:
        context = RoundContext(committed, length, 0, hidden, models[0].embed, decoder.eos_ids)
        found = decoder.expected(context, sampler)
        assert [model.length for model in models] == before
        return expected_counts(found.draft, found.verdict.end_prob, decoder.eos_ids)

    return mean(distribution_of(run))


def decoded(decoder: SerialEngine, length: int) -> list[float]:
    def run(sampler: Sampler) -> Counts:
        first = decoder.decode(PROMPT, length, sampler).rounds[0]
        return first.accepted, len(first.tokens)

    return mean(distribution_of(run))


def small(cases: Iterable) -> list:
    return [case for case in cases if not case.marks]


@pytest.mark.parametrize(
    ("case", "eos_ids"),
    covering(
        crossed(small(ASKING + ALONE), [frozenset(), frozenset({1})]),
        lambda case, eos_ids: (case.builds, not eos_ids),
        lambda case, eos_ids: rule_of(case),
        lambda case, eos_ids: eos_ids,
    ),
)
def test_it_is_the_mean_of_first_rounds(
    case: Case, eos_ids: frozenset[int], tmp_path: Path
) -> None:
    for warp, draft_warp in WARPS:
        pair = toy_pair(case.size.vocab, seed=31)
        decoder = engine(pair, case, tmp_path, warp=warp, draft_warp=draft_warp, eos_ids=eos_ids)
        accepted, tokens = expected(decoder, case.size.length)
        assert decoded(decoder, case.size.length) == pytest.approx([accepted, tokens], abs=1e-9)
        if not eos_ids and case.builds != "branch_point":
            assert tokens == pytest.approx(accepted + 1, abs=1e-9)
