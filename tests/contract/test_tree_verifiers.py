"""Every verifier on every shape of draft it takes: exact distributions, the lazy walk, float32, and
what it must refuse."""

from collections.abc import Callable
from functools import lru_cache

import pytest
import torch
from scipy.stats import chisquare

from decoding.draft import Draft
from decoding.sampling import Sampler, SiblingSampler
from decoding.verification import sample_verdict
from tests.contract.covering import covering
from tests.contract.enumeration import distribution_of, largest_error
from tests.contract.instances import (
    FAMILIES,
    Instance,
    Proposals,
    exact,
    expected_accepted,
    instance,
    output_distribution,
)
from tests.contract.rules import FIRST, RULES, outcome, walked
from tests.contract.trees import STRUCTURES, as_draft, branch_point, fits, grow, proposals

CASES = [
    (name, kind) for kind in STRUCTURES for name in RULES if fits(RULES[name], STRUCTURES[kind])
]


@lru_cache(maxsize=64)  # rules of one sibling distribution share the drafts of a structure
def drawn(
    family: str, vocab: int, seed: int, kind: str, siblings: SiblingSampler
) -> tuple[Instance, Proposals]:
    """An instance and every draft of it."""
    case = instance(family, vocab, STRUCTURES[kind].gamma, seed)
    return case, proposals(case, STRUCTURES[kind], siblings)


def test_hsd_is_block() -> None:
    assert FIRST["hsd"] == "block"


@pytest.mark.parametrize(("name", "kind"), covering(CASES))
def test_distribution_is_the_targets(name: str, kind: str) -> None:
    verifier, structure, worst = RULES[name], STRUCTURES[kind], 0.0
    for vocab in structure.vocabs:
        for seed, family in enumerate(FAMILIES):
            case, found = drawn(family, vocab, seed, kind, verifier.siblings)
            worst = max(
                worst,
                largest_error(output_distribution(case, verifier.distribution, found), exact(case)),
            )
    print(f"{name} {kind}: largest error {worst:.1e}")
    assert worst < 1e-9


@pytest.mark.parametrize(("name", "kind"), covering(CASES))
def test_sampled_verdict_has_the_verifiers_distribution(name: str, kind: str) -> None:
    """The lazy walk against the distribution, both enumerated, on at most 25 drafts of each
    family."""
    verifier, structure = RULES[name], STRUCTURES[kind]
    for seed, family in enumerate(FAMILIES):
        _, found = drawn(family, structure.vocabs[-1], seed + 50, kind, verifier.siblings)
        for _, draft, p in found[:: 1 + len(found) // 25]:
            distribution = verifier.distribution(draft, p)
            assert float(distribution.end_prob.sum()) == pytest.approx(1, abs=1e-12)
            walk = distribution_of(lambda sampler: walked(verifier, draft, p, sampler))
            plain = distribution_of(
                lambda sampler: outcome(draft, sample_verdict(draft, distribution, sampler))
            )
            assert largest_error(walk, plain) < 1e-12


@pytest.mark.parametrize(
    ("name", "kind"), covering([case for case in CASES if case[0] != "point_mass"])
)
def test_equal_distributions_accept_everything(name: str, kind: str) -> None:
    """The path always ends at a leaf."""
    verifier, structure = RULES[name], STRUCTURES[kind]
    for _, draft, p in drawn("equal", structure.vocabs[-1], 1, kind, verifier.siblings)[1]:
        inner = sorted(set(draft.parent))
        assert verifier.distribution(draft, p).end_prob[inner].max() < 1e-12


def test_point_masses_are_accepted_with_their_probability() -> None:
    case = instance("equal", 5, 0, seed=1)
    top = case.p(()).sort(descending=True).values
    for count in range(1, 6):
        point, found = branch_point(0, count, (5,)), RULES["point_mass"]
        accepted = expected_accepted(
            case, found.distribution, proposals(case, point, found.siblings)
        )
        assert accepted == pytest.approx(top[:count].sum().item(), abs=1e-12)


@pytest.mark.parametrize(("name", "kind"), covering(CASES))
def test_greedy_target_gives_its_argmax(name: str, kind: str) -> None:
    verifier, structure = RULES[name], STRUCTURES[kind]
    sampler = Sampler.seeded(0)
    case, found = drawn("greedy", structure.vocabs[-1], 2, kind, verifier.siblings)
    for _, draft, p in found:
        emitted = tuple(verifier.verify(draft, p, sampler).emitted)
        assert all(case.p(emitted[:t])[token] == 1 for t, token in enumerate(emitted))


@pytest.mark.parametrize("support", [1, 2])
@pytest.mark.parametrize(("name", "kind"), covering(CASES))
def test_drafts_of_small_support(name: str, kind: str, support: int) -> None:
    """q allows fewer tokens than siblings are asked for, or the target none of them."""
    verifier, structure = RULES[name], STRUCTURES[kind]
    q = torch.tensor([0.7, 0.3, 0, 0] if support == 2 else [1.0, 0, 0, 0], dtype=torch.float64)
    for target in ([0.1, 0.2, 0.3, 0.4], [0.0, 0.5, 0.5, 0.0], [0.0, 0.0, 0.5, 0.5]):
        p = torch.tensor(target, dtype=torch.float64)
        case = Instance(4, structure.gamma, lambda prefix: p, lambda prefix: q)
        found = proposals(case, structure, verifier.siblings)
        assert (
            largest_error(output_distribution(case, verifier.distribution, found), exact(case))
            < 1e-9
        )
        if target[0] == target[1] == 0:
            assert expected_accepted(case, verifier.distribution, found) == 0


# Sampling -----------------------------------------------------------------------------------------


def typical_draft(name: str) -> tuple[Draft, torch.Tensor]:
    """One with something to reject: uncertain distributions, and the widest structure the rule
    takes."""
    verifier = RULES[name]
    kind = next(
        kind
        for kind in ("wide", "binary", "three_paths", "chain")
        if fits(verifier, STRUCTURES[kind])
    )
    structure = STRUCTURES[kind]
    case = instance("dirichlet", 4, structure.depth, seed=7)
    nodes = grow(case, structure.width, verifier.siblings, Sampler.seeded(3))
    return as_draft(case, nodes, structure.depth)


@pytest.mark.parametrize("rounds", [10_000, pytest.param(100_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", list(RULES))
@pytest.mark.few(2)
def test_sampled_verdicts_chi_square(name: str, rounds: int) -> None:
    verifier, (draft, p) = RULES[name], typical_draft(name)
    distribution = distribution_of(
        lambda sampler: outcome(
            draft, sample_verdict(draft, verifier.distribution(draft, p), sampler)
        )
    )
    counts, sampler = dict.fromkeys(distribution, 0), Sampler.seeded(11)
    for _ in range(rounds):
        counts[walked(verifier, draft, p, sampler)] += 1
    common = [key for key in distribution if rounds * distribution[key] >= 5]
    groups = [*([key] for key in common), [key for key in distribution if key not in common]]
    seen, expected = (
        [sum(count[key] for key in group) for group in groups if group]
        for count in (
            counts,
            {key: rounds * probability for key, probability in distribution.items()},
        )
    )
    pvalue = chisquare(seen, expected, sum_check=False).pvalue
    print(f"{name}: chi-square p = {pvalue:.2f} over {len(common)} outcomes")
    assert len(common) > 5 and pvalue > 0.01


# What a rule is not exact for ---------------------------------------------------------------------


def flat_draft(parent: list[int], token: list[int], open_: int = 0) -> tuple[Draft, torch.Tensor]:
    distributions = torch.full((len(token) + 1, 3), 1 / 3, dtype=torch.float64)
    draft = Draft(parent, token, distributions, open_)
    return draft, distributions[: draft.closed + 1].clone()


@pytest.mark.parametrize(
    ("name", "parent", "token", "open_"),
    [
        ("token", [0, 0], [1, 2], 0),
        ("block", [0, 0], [1, 2], 0),
        ("block", [0, 1], [1, 2], 1),
        ("parallel", [0, 1, 1], [1, 2, 0], 0),
        ("parallel", [0, 0], [1, 2], 1),
        ("spechub", [0, 0, 0], [0, 1, 2], 0),
        ("spechub", [0, 0], [1, 2], 0),  # the hub of equal probabilities is token 0
        ("rrsw", [0, 0], [1, 1], 0),
    ],
)
def test_misuse_is_a_bug(name: str, parent: list[int], token: list[int], open_: int) -> None:
    draft, p = flat_draft(parent, token, open_)
    p[0] = torch.tensor([0.0, 0.0, 1.0]) if name != "spechub" else p[0]
    assert refuses(lambda: RULES[name].distribution(draft, p))


@pytest.mark.parametrize("name", [name for name in RULES if name != "point_mass"])
def test_a_token_of_probability_zero_cannot_have_been_drawn(name: str) -> None:
    draft, p = flat_draft([0], [1])
    draft.q[0] = torch.tensor([0.5, 0.0, 0.5])
    assert refuses(lambda: RULES[name].distribution(draft, p))
    assert refuses(lambda: RULES[name].verify(draft, p, Sampler.seeded(0)))


def refuses(action: Callable[[], object]) -> bool:
    try:
        action()
    except AssertionError:
        return True
    return False
