"""Every verifier reproduces the target's distribution exactly on a single path, whatever the draft
and the stop rule."""

import pytest
import torch

from decoding.draft import Draft
from decoding.sampling import Sampler
from decoding.verification import DraftPath, sample_verdict
from decoding.verifiers.block import BlockVerifier, joint_ratios
from decoding.verifiers.token import TokenVerifier
from tests.contract.enumeration import (
    Distribution,
    autoregressive_distribution,
    distribution_of,
    largest_error,
)
from tests.contract.instances import (
    FAMILIES,
    Instance,
    Rule,
    drafts,
    exact,
    expected_accepted,
    instance,
    output_distribution,
)
from tests.contract.oracles import hsd_capped, hsd_naive_single, hsd_released, naive_hsd
from tests.contract.rules import RULES, walked

SHAPES = [(2, 3), (3, 2), (3, 3), (5, 2)]


def stops_unsure(case: Instance, eps: float = 0.4):
    """After a token of low probability, which stays."""
    return lambda drawn: bool(drawn) and case.q(drawn[:-1])[drawn[-1]] < eps


def stops_before(case: Instance, eps: float = 0.6):
    """Before drawing, from the prefix alone."""
    return lambda drawn: bool(case.q(drawn).max() < eps)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", RULES)
@pytest.mark.few(24)
def test_distribution_is_the_targets(name: str, family: str) -> None:
    verifier, worst = RULES[name], 0.0
    assert verifier.lossless
    for seed, (vocab, gamma) in enumerate(SHAPES):
        case = instance(family, vocab, gamma, seed)
        for stop in (lambda drawn: False, stops_unsure(case), stops_before(case)):
            worst = max(
                worst,
                largest_error(
                    output_distribution(case, verifier.distribution, drafts(case, stop)),
                    exact(case),
                ),
            )
    print(f"{name} {family}: largest error {worst:.1e}")
    assert worst < 1e-9


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", RULES)
@pytest.mark.few(12)
def test_sampled_verdict_has_the_verifiers_distribution(name: str, family: str) -> None:
    """The lazy walk against the distribution, both enumerated: equal for every draft, to
    rounding."""
    verifier, case = RULES[name], instance(family, 3, 3, seed=7)
    for _, draft, p in drafts(case):
        walk = distribution_of(lambda sampler: walked(verifier, draft, p, sampler))
        plain = distribution_of(
            lambda sampler: _plain(sample_verdict(draft, verifier.distribution(draft, p), sampler))
        )
        assert largest_error(walk, plain) < 1e-12


def _plain(verdict) -> tuple[int, int | None]:
    return verdict.row, verdict.token


@pytest.mark.parametrize("name", [name for name in RULES if name != "point_mass"])
def test_equal_distributions_accept_everything(name: str) -> None:
    verifier, case = RULES[name], instance("equal", 4, 3, seed=1)
    for _, draft, p in drafts(case):
        torch.testing.assert_close(
            verifier.distribution(draft, p).end_prob, torch.tensor([0, 0, 0, 1.0]).double()
        )


@pytest.mark.parametrize("name", RULES)
def test_greedy_target_gives_its_argmax(name: str) -> None:
    verifier, case = RULES[name], instance("greedy", 4, 3, seed=2)
    sampler = Sampler.seeded(0)
    for _, draft, p in drafts(case):
        emitted = verifier.verify(draft, p, sampler).emitted
        assert emitted == p.argmax(-1)[: len(emitted)].tolist()


@pytest.mark.parametrize("name", RULES)
def test_no_draft_is_one_draw_from_the_target(name: str) -> None:
    p = torch.tensor([[0.25, 0.75]], dtype=torch.float64)
    draft = Draft.chain([], torch.zeros(0, 2, dtype=torch.float64))
    distribution = distribution_of(lambda sampler: RULES[name].verify(draft, p, sampler).token)
    assert distribution == {0: 0.25, 1: 0.75}
    assert RULES[name].distribution(draft, p).end_prob.tolist() == [1.0]


@pytest.mark.parametrize("name", RULES)
def test_draft_token_the_target_excludes_is_rejected(name: str) -> None:
    p = torch.tensor([[0.0, 1.0], [0.5, 0.5]], dtype=torch.float64)
    draft = Draft.chain([0], torch.tensor([[1.0, 0.0]], dtype=torch.float64))
    assert distribution_of(lambda sampler: walked(RULES[name], draft, p, sampler)) == {(0, 1): 1.0}


@pytest.mark.parametrize("name", RULES)
def test_point_mass_candidates_are_exact_under_every_rule(name: str) -> None:
    """Tokens nobody drew (n-grams, say), each with a one-hot q: accepted with their probability
    under the target."""
    case = instance("dirichlet", 4, 3, seed=4)
    certain = Instance(
        4, 3, case.p, lambda prefix: torch.eye(4, dtype=torch.float64)[(sum(prefix) + 1) % 4]
    )
    (probability, draft, p), *others = drafts(certain)
    assert probability == 1 and not others
    assert (
        largest_error(output_distribution(certain, RULES[name].distribution), exact(certain)) < 1e-9
    )
    assert expected_accepted(certain, RULES[name].distribution) == pytest.approx(
        _joint_sum(draft, p), abs=1e-12
    )


def _joint_sum(draft: Draft, p: torch.Tensor) -> float:
    """sum_t p(x[1..t]), the E[tau] of all rules for point masses."""
    return float(p[range(len(draft)), draft.token].cumprod(0).sum())


def test_hsd_is_block_verification() -> None:
    block = BlockVerifier()
    for seed, family in enumerate(FAMILIES * 2):
        case = instance(family, 3, 4, seed)
        for _, draft, p in drafts(case):
            ours, literal = block.distribution(draft, p), hsd_capped(draft, p)
            torch.testing.assert_close(ours.end_prob, literal.end_prob, atol=1e-9, rtol=0)
            for row in range(len(draft) + 1):
                if ours.end_prob[row] > 1e-9:
                    torch.testing.assert_close(
                        ours.residual(row), literal.residual(row), atol=1e-9, rtol=0
                    )


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
        worst = max(
            worst, largest_error(distribution, autoregressive_distribution(case.p, vocab, gamma))
        )
        assert naive_accepted(case) == pytest.approx(
            expected_accepted(case, hsd_naive_single), abs=1e-12
        )
    print(f"naive HSD {family}: largest error {worst:.1e}")
    assert worst < 1e-9


def test_expected_acceptance_is_ordered() -> None:
    for seed in range(30):
        case = instance(FAMILIES[seed % len(FAMILIES)], 3, 3, seed)
        token, block, hsd = (
            expected_accepted(case, rule)
            for rule in (TokenVerifier().distribution, RULES["block"].distribution, hsd_capped)
        )
        assert token <= block + 1e-12 <= naive_accepted(case) + 2e-12
        assert hsd == pytest.approx(block, abs=1e-12)


def test_joint_ratios_never_underflow() -> None:
    tiny = torch.full((61, 2), 0.5, dtype=torch.float64)
    tiny[:, 0], tiny[:, 1] = 1e-30, 1 - 1e-30
    draft = Draft.chain([0] * 60, tiny[:60])
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
