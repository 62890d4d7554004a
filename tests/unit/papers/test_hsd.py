"""HSD's printed example, and an enumeration in contexts of a pair against the contract tests."""

import pytest
import torch

from decoding.draft import RoundContext
from decoding.engines.serial import SerialEngine
from decoding.sampling import Sampler
from decoding.stopping.fixed import Fixed
from decoding.structures.chain import Chain
from decoding.verifiers.block import joint_ratios
from papers.hsd.total_variation import enumerated
from tests.contract.engines import OFF, PROMPT, toy_pair
from tests.contract.enumeration import total_variation
from tests.contract.instances import Instance, exact, output_distribution
from tests.contract.rules import RULES, load

RELEASED = load("hsd_released", allow_lossy=True)


@pytest.mark.parametrize(("vocab", "gamma"), [(2, 3), (3, 2), (3, 3)])
def test_total_variation_in_a_context(vocab, gamma):
    pair = toy_pair(vocab, 5)
    p, q = (
        lambda prefix, side=side: side.distribution((*PROMPT, *prefix)).double()
        for side in (pair.target, pair.draft)
    )
    case = Instance(vocab, gamma, p, q)
    for rule in (RULES["token"], RULES["block"], RELEASED):
        pair.target.reset()
        pair.draft.reset()
        for model in (pair.target, pair.draft):
            model.forward(torch.tensor(PROMPT[:-1]))
        engine = enumerated(SerialEngine(pair, Chain(9), Fixed(gamma), rule, OFF, OFF))
        context = RoundContext(torch.tensor(PROMPT), max_new=100)
        found = engine.expected(context, Sampler.seeded(0)).verdict
        told = total_variation(output_distribution(case, rule.distribution), exact(case))
        assert found == pytest.approx(told, abs=1e-9)
        assert (found > 1e-3) == (rule is RELEASED)


def test_printed_example_of_capped_ratios():
    """Figure 2, a draft of ten tokens."""
    p = [0.7156, 1, 1, 1, 0, 0, 0, 1, 0, 0.4968]
    q = [0.8771, 0.79, 0.6514, 0.2592, 0.6773, 0.149, 0.5775, 1, 0.4611, 0.363]
    printed = [0.8159, 1, 1, 1, 0, 0, 0, 0, 0, 0]
    assert joint_ratios(zip(p, q, strict=True))[1:] == pytest.approx(printed, abs=1e-4)
