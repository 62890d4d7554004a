"""Every verifier reproduces the target's law exactly; the published lossy variants do not, by known amounts."""

from pathlib import Path

import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf
from scipy.stats import chisquare

from decoding.draft import Draft, Verdict
from decoding.law import Verifier, sample_verdict
from decoding.sampling import Sampler
from decoding.verifiers.block import BlockVerifier, joint_ratios
from decoding.verifiers.token import TokenVerifier
from tests.contract.enumeration import autoregressive_law, largest_error, law_of, total_variation
from tests.contract.instances import FAMILIES, Instance, Rule, drafts, expected_accepted, instance, output_law
from tests.contract.oracles import hsd_capped, hsd_naive_single, hsd_released

CONF = Path(__file__).parents[2] / "conf" / "verifier"
VERIFIERS = sorted(path.stem for path in CONF.glob("*.yaml"))
SHAPES = [(2, 3), (3, 2), (3, 3), (5, 2)]


def load(name: str) -> Verifier:
    return instantiate(OmegaConf.load(CONF / f"{name}.yaml"))


def exact(case: Instance) -> dict:
    return autoregressive_law(case.p, case.vocab, case.gamma + 1)


def stops_unsure(case: Instance, eps: float = 0.4):
    """After a token of low probability, which stays."""
    return lambda drawn: bool(drawn) and case.q(drawn[:-1])[drawn[-1]] < eps


def stops_before(case: Instance, eps: float = 0.6):
    """Before drawing, from the prefix alone."""
    return lambda drawn: bool(case.q(drawn).max() < eps)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", VERIFIERS)
def test_law_is_the_targets(name: str, family: str) -> None:
    verifier = load(name)
    assert verifier.lossless
    for seed, (vocab, gamma) in enumerate(SHAPES):
        case = instance(family, vocab, gamma, seed)
        for stop in (lambda drawn: False, stops_unsure(case), stops_before(case)):
            law = output_law(case, verifier.law, drafts(case, stop))
            assert largest_error(law, exact(case)) < 1e-9


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", VERIFIERS)
def test_sampled_verdict_has_the_verifiers_law(name: str, family: str) -> None:
    """The lazy walk against the law, both enumerated: equal for every draft, to rounding."""
    verifier, case = load(name), instance(family, 3, 3, seed=7)
    for _, draft, p in drafts(case):
        walked = law_of(lambda sampler: outcome(verifier.verify(draft, p, sampler)))  # noqa: B023
        plain = law_of(lambda sampler: outcome(sample_verdict(draft, verifier.law(draft, p), sampler)))  # noqa: B023
        assert largest_error(walked, plain) < 1e-12


def outcome(verdict: Verdict) -> tuple[int, int | None]:
    assert verdict.accepted == verdict.row and len(verdict.emitted) == verdict.accepted + 1
    return verdict.row, verdict.token


@pytest.mark.parametrize("name", VERIFIERS)
def test_equal_laws_accept_everything(name: str) -> None:
    verifier, case = load(name), instance("equal", 4, 3, seed=1)
    for _, draft, p in drafts(case):
        torch.testing.assert_close(verifier.law(draft, p).end_prob, torch.tensor([0, 0, 0, 1.0]).double())


@pytest.mark.parametrize("name", VERIFIERS)
def test_greedy_target_gives_its_argmax(name: str) -> None:
    verifier, case = load(name), instance("greedy", 4, 3, seed=2)
    sampler = Sampler.seeded(0)
    for _, draft, p in drafts(case):
        emitted = verifier.verify(draft, p, sampler).emitted
        assert emitted == p.argmax(-1)[: len(emitted)].tolist()


@pytest.mark.parametrize("name", VERIFIERS)
def test_no_draft_is_one_draw_from_the_target(name: str) -> None:
    p = torch.tensor([[0.25, 0.75]], dtype=torch.float64)
    draft = Draft.chain([], torch.zeros(0, 2, dtype=torch.float64))
    law = law_of(lambda sampler: load(name).verify(draft, p, sampler).token)
    assert law == {0: 0.25, 1: 0.75}
    assert load(name).law(draft, p).end_prob.tolist() == [1.0]


@pytest.mark.parametrize("name", VERIFIERS)
def test_draft_token_the_target_excludes_is_rejected(name: str) -> None:
    p = torch.tensor([[0.0, 1.0], [0.5, 0.5]], dtype=torch.float64)
    draft = Draft.chain([0], torch.tensor([[1.0, 0.0]], dtype=torch.float64))
    assert law_of(lambda sampler: outcome(load(name).verify(draft, p, sampler))) == {(0, 1): 1.0}


@pytest.mark.parametrize("name", VERIFIERS)
def test_float32_laws_of_a_large_vocabulary(name: str) -> None:
    """What decoding feeds it: float32 rows that sum to one only nearly. Law and walk still agree, near 1e-6."""
    generator = torch.Generator().manual_seed(3)
    logits = 3 * torch.randn(4, 50_000, generator=generator)
    p, q = logits.softmax(-1), (logits[:3] + 0.5 * torch.randn(3, 50_000, generator=generator)).softmax(-1)
    draft = Draft.chain([Sampler(generator).draw(row) for row in q], q)
    verifier = load(name)
    law = verifier.law(draft, p)
    assert law.end_prob.sum().item() == pytest.approx(1, abs=1e-9)
    sampler = Sampler.seeded(0)
    rows = torch.tensor([verifier.verify(draft, p, sampler).row for _ in range(200)])
    assert (torch.bincount(rows, minlength=4) / 200 - law.end_prob).abs().max() < 0.12


@pytest.mark.parametrize("rounds", [10_000, pytest.param(100_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["token", "block"])
def test_sampled_verdicts_chi_square(name: str, rounds: int) -> None:
    verifier = load(name)
    case = instance("aligned", 4, 3, seed=5)
    _, draft, p = drafts(case)[17]
    law = law_of(lambda sampler: outcome(verifier.verify(draft, p, sampler)))
    sampler = Sampler.seeded(11)
    counts = dict.fromkeys(law, 0)
    for _ in range(rounds):
        counts[outcome(verifier.verify(draft, p, sampler))] += 1
    expected = [rounds * law[key] for key in counts]
    assert chisquare(list(counts.values()), expected, sum_check=False).pvalue > 0.01


def test_hsd_is_block_verification() -> None:
    block = BlockVerifier()
    for seed, family in enumerate(FAMILIES * 2):
        case = instance(family, 3, 4, seed)
        for _, draft, p in drafts(case):
            ours, literal = block.law(draft, p), hsd_capped(draft, p)
            torch.testing.assert_close(ours.end_prob, literal.end_prob, atol=1e-9, rtol=0)
            for row in range(len(draft) + 1):
                if ours.end_prob[row] > 1e-9:
                    torch.testing.assert_close(ours.residual(row), literal.residual(row), atol=1e-9, rtol=0)


def test_expected_acceptance_is_ordered() -> None:
    for seed in range(20):
        case = instance(FAMILIES[seed % len(FAMILIES)], 3, 3, seed)
        token, block, naive = (
            expected_accepted(case, rule) for rule in (TokenVerifier().law, BlockVerifier().law, hsd_naive_single)
        )
        assert token <= block + 1e-12 <= naive + 2e-12


def test_joint_ratios_never_underflow() -> None:
    tiny = torch.full((61, 2), 0.5, dtype=torch.float64)
    tiny[:, 0], tiny[:, 1] = 1e-30, 1 - 1e-30
    draft = Draft.chain([0] * 60, tiny[:60])
    assert joint_ratios(draft, tiny) == [1.0] * 61


# Frozen vectors -------------------------------------------------------------------------------------------------------

TWO = Instance(
    vocab=2,
    gamma=2,
    p=lambda prefix: torch.tensor({(): [0.8, 0.2]}.get(prefix, [0.5, 0.5]), dtype=torch.float64),
    q=lambda prefix: torch.tensor({(): [0.4, 0.6], (0,): [0.9, 0.1]}.get(prefix, [0.5, 0.5]), dtype=torch.float64),
)


@pytest.mark.parametrize(
    ("rule", "law", "accepted"),
    [
        (TokenVerifier().law, [0.40, 0.40, 0.10, 0.10], 1.04),
        (BlockVerifier().law, [0.40, 0.40, 0.10, 0.10], 1.04),
        (hsd_capped, [0.40, 0.40, 0.10, 0.10], 1.04),
        (hsd_released, [0.56, 0.24, 0.10, 0.10], 1.20),
    ],
)
def test_two_token_example(rule: Rule, law: list[float], accepted: float) -> None:
    found = output_law(TWO, rule)
    pairs = [sum(found[(a, b, c)] for c in range(2)) for a in range(2) for b in range(2)]
    assert pairs == pytest.approx(law, abs=1e-12)
    assert expected_accepted(TWO, rule) == pytest.approx(accepted, abs=1e-12)


# Negative controls ----------------------------------------------------------------------------------------------------


def biases(rule: Rule, family: str, vocab: int, gamma: int, drop: float = 0.0) -> list[float]:
    """Total variation of the law of gamma + 1 tokens from the target's, for ten instances."""
    found = []
    for seed in range(10):
        case = instance(family, vocab, gamma, seed + 100)
        proposals = dropping(case, drop) if drop else drafts(case)
        found.append(total_variation(output_law(case, rule, proposals), exact(case)))
    return found


def check_biased(name: str, found: list[float], published: float) -> None:
    """The law test fails the rule, and by as much as published (other random instances: within a factor of two)."""
    mean = sum(found) / len(found)
    print(f"{name}: mean total variation {mean:.3f} (published {published:.3f}), largest {max(found):.3f}")
    assert max(found) > 1e-9, "the law test would pass it"
    assert published / 2 < mean < published * 2


def dropping(case: Instance, eps: float) -> list[tuple[float, Draft, torch.Tensor]]:
    """SpecBranch's class 1 as printed: drawing ends at a token with q < eps, and that token is dropped."""
    unsure = stops_unsure(case, eps)
    return drafts(case, unsure, kept=lambda drawn: len(drawn) - bool(unsure(drawn)))


# published means over ten instances of each family
@pytest.mark.parametrize(
    ("rule", "family", "vocab", "gamma", "published"),
    [
        (hsd_released, "dirichlet", 3, 3, 4.4e-2),
        (hsd_released, "aligned", 4, 3, 3.1e-2),
        (hsd_released, "sparse", 3, 3, 3.0e-2),
        (hsd_naive_single, "dirichlet", 3, 3, 5.7e-2),
        (hsd_naive_single, "aligned", 4, 3, 3.9e-2),
        (hsd_naive_single, "sparse", 3, 3, 4.1e-2),
    ],
)
def test_published_variants_are_biased(rule: Rule, family: str, vocab: int, gamma: int, published: float) -> None:
    check_biased(rule.__name__, biases(rule, family, vocab, gamma), published)


@pytest.mark.parametrize(
    ("family", "vocab", "gamma", "published"), [("dirichlet", 3, 3, 1.1e-1), ("aligned", 4, 3, 2.2e-1)]
)
def test_dropping_an_unsure_token_is_biased(family: str, vocab: int, gamma: int, published: float) -> None:
    check_biased("q < eps dropped", biases(TokenVerifier().law, family, vocab, gamma, drop=0.3), published)


def test_dropping_an_unsure_token_example() -> None:
    """p = (.5, .5), q = (.9, .1), one position: (.55, .45) instead of p."""
    fixed = (torch.tensor([0.5, 0.5], dtype=torch.float64), torch.tensor([0.9, 0.1], dtype=torch.float64))
    case = Instance(vocab=2, gamma=1, p=lambda prefix: fixed[0], q=lambda prefix: fixed[1])
    law = output_law(case, TokenVerifier().law, dropping(case, eps=0.2))
    assert law[(0, 0)] + law[(0, 1)] == pytest.approx(0.55, abs=1e-12)
