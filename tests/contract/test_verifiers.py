"""Every verifier on every shape of draft it takes reproduces the target's distribution exactly, on
the host and on a device; the lazy walk, and what a rule must refuse."""

from dataclasses import replace
from functools import lru_cache

import pytest
import torch
from scipy.stats import chisquare

from decoding.draft import Draft
from decoding.sampling import Sampler, SiblingSampler
from decoding.verification import DraftPath, VerdictDistribution, sample_verdict
from decoding.verifiers.block import BlockVerifier, joint_ratios
from decoding.verifiers.token import TokenVerifier
from tests.contract.covering import covering
from tests.contract.enumeration import (
    Distribution,
    autoregressive_distribution,
    distribution_of,
    largest_error,
)
from tests.contract.instances import (
    FAMILIES,
    Instance,
    Proposals,
    Rule,
    assert_same,
    chain,
    drafts,
    exact,
    expected_accepted,
    instance,
    output_distribution,
)
from tests.contract.oracles import hsd_capped, hsd_naive_single, hsd_released, naive_hsd
from tests.contract.rules import FIRST, RULES, outcome, walked
from tests.contract.trees import STRUCTURES, as_draft, branch_point, fits, grow, proposals
from tests.helpers.device.pretend_device import pretend

DEVICE = torch.device("cuda:0")
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


def drawn_plainly(draft: Draft, distribution: VerdictDistribution) -> Distribution:
    def run(sampler: Sampler) -> tuple[int, int | None]:
        return outcome(draft, sample_verdict(draft, distribution, sampler))

    return distribution_of(run)


@pytest.mark.parametrize(("name", "kind"), covering(CASES))
def test_distribution_is_the_targets(name: str, kind: str) -> None:
    verifier, structure, worst = RULES[name], STRUCTURES[kind], 0.0
    for vocab in structure.vocabs:
        for seed, family in enumerate(FAMILIES):
            case, found = drawn(family, vocab, seed, kind, verifier.siblings)
            output = output_distribution(case, verifier.distribution, found)
            worst = max(worst, largest_error(output, exact(case)))
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
            plain = drawn_plainly(draft, distribution)
            assert largest_error(walk, plain) < 1e-12


@pytest.mark.parametrize(("name", "kind"), covering(CASES))
def test_a_walk_on_a_device_has_the_verifiers_distribution(name: str, kind: str) -> None:
    """It sends the numbers of all its trials at once; at most 6 drafts of each family."""
    verifier, structure = RULES[name], STRUCTURES[kind]
    for seed, family in enumerate(FAMILIES):
        _, found = drawn(family, structure.vocabs[-1], seed + 50, kind, verifier.siblings)
        for _, draft, p in found[:: 1 + len(found) // 6]:
            plain = drawn_plainly(draft, verifier.distribution(draft, p))
            with pretend():
                placed = replace(draft, q=[row.to(DEVICE) for row in draft.q])
                target = p.to(DEVICE)
                walk = distribution_of(lambda sampler: walked(verifier, placed, target, sampler))
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
        every = proposals(case, point, found.siblings)
        accepted = expected_accepted(case, found.distribution, every)
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
        output = output_distribution(case, verifier.distribution, found)
        assert largest_error(output, exact(case)) < 1e-9
        if target[0] == target[1] == 0:
            assert expected_accepted(case, verifier.distribution, found) == 0


# Sampling -----------------------------------------------------------------------------------------


def typical_draft(name: str) -> tuple[Draft, torch.Tensor]:
    """One with something to reject: uncertain distributions, and the widest structure the rule
    takes."""
    verifier = RULES[name]
    kinds = ("wide", "binary", "three_paths", "chain")
    structure = next(STRUCTURES[kind] for kind in kinds if fits(verifier, STRUCTURES[kind]))
    case = instance("dirichlet", 4, structure.depth, seed=7)
    nodes = grow(case, structure.width, verifier.siblings, Sampler.seeded(3))
    return as_draft(case, nodes, structure.depth)


@pytest.mark.parametrize("rounds", [10_000, pytest.param(100_000, marks=pytest.mark.full)])
@pytest.mark.parametrize("name", list(RULES))
@pytest.mark.few(2)
def test_sampled_verdicts_chi_square(name: str, rounds: int) -> None:
    verifier, (draft, p) = RULES[name], typical_draft(name)
    distribution = drawn_plainly(draft, verifier.distribution(draft, p))
    counts, sampler = dict.fromkeys(distribution, 0), Sampler.seeded(11)
    for _ in range(rounds):
        counts[walked(verifier, draft, p, sampler)] += 1
    common = [key for key in distribution if rounds * distribution[key] >= 5]
    groups = [*([key] for key in common), [key for key in distribution if key not in common]]
    groups = [group for group in groups if group]
    seen = [sum(counts[key] for key in group) for group in groups]
    expected = [rounds * sum(distribution[key] for key in group) for group in groups]
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
    with pytest.raises(AssertionError):
        RULES[name].distribution(draft, p)


@pytest.mark.parametrize("name", [name for name in RULES if name != "point_mass"])
def test_a_token_of_probability_zero_cannot_have_been_drawn(name: str) -> None:
    draft, p = flat_draft([0], [1])
    draft.q[0] = torch.tensor([0.5, 0.0, 0.5])
    with pytest.raises(AssertionError):
        RULES[name].distribution(draft, p)
    with pytest.raises(AssertionError):
        RULES[name].verify(draft, p, Sampler.seeded(0))


SHAPES = [(2, 3), (3, 2), (3, 3), (5, 2)]


def stops_unsure(case: Instance, eps: float = 0.4):
    """After a token of low probability, which stays."""
    return lambda drawn: bool(drawn) and case.q(drawn[:-1])[drawn[-1]] < eps


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", RULES)
@pytest.mark.few(24)
def test_distribution_of_a_chain_under_any_stop_rule(name: str, family: str) -> None:
    verifier, worst = RULES[name], 0.0
    assert verifier.lossless
    for seed, (vocab, gamma) in enumerate(SHAPES):
        case = instance(family, vocab, gamma, seed)
        before = lambda drawn: bool(case.q(drawn).max() < 0.6)  # noqa: E731
        for stop in (lambda drawn: False, stops_unsure(case), before):
            found = output_distribution(case, verifier.distribution, drafts(case, stop))
            worst = max(worst, largest_error(found, exact(case)))
    print(f"{name} {family}: largest error {worst:.1e}")
    assert worst < 1e-9


@pytest.mark.parametrize("name", RULES)
def test_point_mass_candidates_are_exact_under_every_rule(name: str) -> None:
    """Tokens nobody drew (n-grams, say), each with a one-hot q: accepted with their probability
    under the target."""
    case = instance("dirichlet", 4, 3, seed=4)
    eye = torch.eye(4, dtype=torch.float64)
    certain = Instance(4, 3, case.p, lambda prefix: eye[(sum(prefix) + 1) % 4])
    (probability, draft, p), *others = drafts(certain)
    assert probability == 1 and not others
    rule = RULES[name].distribution
    assert largest_error(output_distribution(certain, rule), exact(certain)) < 1e-9
    joint = p[range(len(draft)), draft.token].cumprod(0)  # their sum is E[tau] of all rules
    assert expected_accepted(certain, rule) == pytest.approx(float(joint.sum()), abs=1e-12)


def test_hsd_is_block_verification() -> None:
    assert FIRST["hsd"] == "block"
    block = BlockVerifier()
    for seed, family in enumerate(FAMILIES * 2):
        case = instance(family, 3, 4, seed)
        for _, draft, p in drafts(case):
            assert_same(block.distribution(draft, p), hsd_capped(draft, p))


def naive_accepted(case: Instance) -> float:
    """E[tau] of naive HSD."""
    found = 0.0
    for probability, draft, _ in drafts(case):
        end_prob = naive_hsd(draft.token, case.p, case.q).end_prob
        found += probability * float(end_prob @ torch.arange(len(end_prob)).double())
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_naive_hsd_is_exact_with_full_resampling(family: str) -> None:
    """And only then: with one token resampled it is among the negative controls."""
    worst = 0.0
    for seed, (vocab, gamma) in enumerate(SHAPES):
        case, distribution = instance(family, vocab, gamma, seed), Distribution()
        for probability, draft, _ in drafts(case):
            for tokens, share in naive_hsd(draft.token, case.p, case.q).distribution.items():
                distribution[tokens] = distribution.get(tokens, 0.0) + probability * share
        plain = autoregressive_distribution(case.p, vocab, gamma)
        worst = max(worst, largest_error(distribution, plain))
        single = expected_accepted(case, hsd_naive_single)
        assert naive_accepted(case) == pytest.approx(single, abs=1e-12)
    print(f"naive HSD {family}: largest error {worst:.1e}")
    assert worst < 1e-9


def test_expected_acceptance_is_ordered() -> None:
    for seed in range(30):
        case = instance(FAMILIES[seed % len(FAMILIES)], 3, 3, seed)
        rules = (RULES[name].distribution for name in ("token", "block"))
        token, block = (expected_accepted(case, rule) for rule in rules)
        assert token <= block + 1e-12 <= naive_accepted(case) + 2e-12


def test_joint_ratios_never_underflow() -> None:
    tiny = torch.full((61, 2), 0.5, dtype=torch.float64)
    tiny[:, 0], tiny[:, 1] = 1e-30, 1 - 1e-30
    draft = chain([0] * 60, tiny)
    assert joint_ratios(DraftPath.whole(draft, tiny).drawn()) == [1.0] * 61


# A frozen vector ----------------------------------------------------------------------------------

TWO = Instance(
    vocab=2,
    gamma=2,
    p=lambda prefix: torch.tensor({(): [0.8, 0.2]}.get(prefix, [0.5, 0.5]), dtype=torch.float64),
    q=lambda prefix: torch.tensor(
        {(): [0.4, 0.6], (0,): [0.9, 0.1]}.get(prefix, [0.5, 0.5]), dtype=torch.float64
    ),
)


@pytest.mark.parametrize(
    ("rule", "distribution", "accepted"),
    [
        (TokenVerifier().distribution, [0.40, 0.40, 0.10, 0.10], 1.04),
        (BlockVerifier().distribution, [0.40, 0.40, 0.10, 0.10], 1.04),
        (hsd_capped, [0.40, 0.40, 0.10, 0.10], 1.04),
        (hsd_released, [0.56, 0.24, 0.10, 0.10], 1.20),
    ],
)
def test_two_token_example(rule: Rule, distribution: list[float], accepted: float) -> None:
    found = output_distribution(TWO, rule)
    pairs = [sum(found[(a, b, c)] for c in range(2)) for a in range(2) for b in range(2)]
    assert pairs == pytest.approx(distribution, abs=1e-12)
    assert expected_accepted(TWO, rule) == pytest.approx(accepted, abs=1e-12)
