"""Several candidates for one position: how much each rule accepts, against optimal transport and
known numbers."""

from collections.abc import Iterator
from itertools import islice

import pytest
import torch
from torch import Tensor

from decoding.sampling import SiblingSampler, hub_pair, iid, without_replacement
from papers.spechub.toy import transport_optimum
from tests.contract.enumeration import distribution_of
from tests.contract.instances import (
    FAMILIES,
    Instance,
    Rule,
    expected_accepted,
    instance,
    output_distribution,
)
from tests.contract.oracles import transport_minimum_cut
from tests.contract.rules import RULES
from tests.contract.trees import branch_point, proposals

POSITIONS = [
    instance(family, vocab, 0, seed)
    for seed in range(5)
    for family in FAMILIES
    for vocab in (2, 3, 5)
]


def fixed(p: list[float], q: list[float]) -> Instance:
    distributions = torch.tensor(p, dtype=torch.float64), torch.tensor(q, dtype=torch.float64)
    return Instance(len(p), 0, lambda prefix: distributions[0], lambda prefix: distributions[1])


def distribution_and_acceptance(
    case: Instance, rule: Rule, siblings: SiblingSampler, candidates: int = 2
) -> tuple[Tensor, float]:
    """Distribution [V] of the token at this position, and the probability that it is a
    candidate."""
    found = proposals(case, branch_point(0, candidates, ()), siblings)
    distribution = output_distribution(case, rule, found)
    probs = [distribution.get((token,), 0.0) for token in range(case.vocab)]
    return torch.tensor(probs, dtype=torch.float64), expected_accepted(case, rule, found)


def acceptance(case: Instance, name: str, candidates: int = 2) -> float:
    rule = RULES[name]
    return distribution_and_acceptance(case, rule.distribution, rule.siblings, candidates)[1]


def pair_distribution(q: Tensor, siblings: SiblingSampler) -> Tensor | None:
    """[V, V], joint distribution of the first two candidates; None where there is only one."""
    pairs = torch.zeros(len(q), len(q), dtype=torch.float64)
    for pair, probability in distribution_of(
        lambda sampler: tuple(each.token for each in islice(siblings(q, sampler), 2))
    ).items():
        if len(pair) < 2:
            return None
        pairs[pair] = probability
    return pairs


def distributions(case: Instance) -> tuple[Tensor, Tensor, int]:
    p, q = case.p(()), case.q(())
    return p, q, int(q.argmax())


def of_pairs(siblings: SiblingSampler) -> Iterator[tuple[Instance, Tensor]]:
    """Positions with two candidates or more, and the distribution of the first two."""
    for case in POSITIONS:
        pairs = pair_distribution(case.q(()), siblings)
        if pairs is not None:
            yield case, pairs


def test_hub_pairs_have_the_published_distribution() -> None:
    for case, pairs in of_pairs(hub_pair):
        _, q, hub = distributions(case)
        expected = torch.zeros_like(pairs)
        expected[:, hub] = q
        expected[hub] = q[hub] * q / (1 - q[hub])
        expected[hub, hub] = 0
        torch.testing.assert_close(pairs, expected, atol=1e-12, rtol=0)


def test_spechub_accepts_as_much_as_any_rule_for_its_pairs() -> None:
    """Linear programme and minimum cut."""
    gaps = []
    for case, pairs in of_pairs(hub_pair):
        optima = transport_optimum(case.p(()), pairs), transport_minimum_cut(case.p(()), pairs)
        gaps += [abs(acceptance(case, "spechub") - optimum) for optimum in optima]
    assert len(gaps) > 2 * 70 and max(gaps) < 1e-9


@pytest.mark.parametrize(("name", "siblings"), [("rrs", iid), ("rrsw", without_replacement)])
def test_recursive_rejection_stays_below_the_optimum(name: str, siblings: SiblingSampler) -> None:
    gaps = []
    for case, pairs in of_pairs(siblings):
        p = case.p(())
        optimum = transport_optimum(p, pairs)
        assert optimum == pytest.approx(transport_minimum_cut(p, pairs), abs=1e-9)
        gaps.append(optimum - acceptance(case, name))
    assert min(gaps) > -1e-9 and max(gaps) > 1e-3


def test_spechub_beats_rrs_where_the_hub_is_heavy() -> None:
    """q(a) / (1 - q(a)) >= 1 - alpha, alpha = the acceptance of one candidate."""
    met = 0
    for case in POSITIONS:
        p, q, hub = distributions(case)
        if q[hub] / (1 - q[hub]) >= 1 - torch.minimum(p, q).sum():
            met += 1
            assert acceptance(case, "spechub") >= acceptance(case, "rrs") - 1e-12
    assert met > len(POSITIONS) / 2


def test_more_candidates_are_accepted_more_often() -> None:
    for case in POSITIONS[::3]:
        for name in ("rrs", "rrsw", "point_mass"):
            one, two, three = (acceptance(case, name, candidates) for candidates in (1, 2, 3))
            assert one <= two + 1e-12 <= three + 2e-12


# Frozen vectors -----------------------------------------------------------------------------------

FIRST = fixed([0.5, 0.3, 0.2], [0.6, 0.3, 0.1])
SECOND = fixed([0.2, 0.5, 0.3], [0.5, 0.3, 0.2])


@pytest.mark.parametrize(
    ("case", "accepted"), [(FIRST, [0.91, 0.925, 1.0]), (SECOND, [0.85, 0.98, 1.0])]
)
def test_acceptance_of_two_candidates(case: Instance, accepted: list[float]) -> None:
    found = [acceptance(case, name) for name in ("rrs", "rrsw", "spechub")]
    assert found == pytest.approx(accepted, abs=1e-12)


def test_two_most_probable_tokens_as_point_masses() -> None:
    verifier = RULES["point_mass"]
    distribution, accepted = distribution_and_acceptance(
        FIRST, verifier.distribution, verifier.siblings
    )
    assert [*distribution.tolist(), accepted] == pytest.approx([0.5, 0.3, 0.2, 0.8], abs=1e-12)
