"""Every verifier on what decoding feeds it: float32 distributions, of large vocabularies and next
to point masses."""

from collections import defaultdict
from functools import partial
from itertools import islice

import pytest
import torch

from decoding.draft import Draft
from decoding.picking import Draw
from decoding.sampling import SMALLEST, Sampler, Warp
from decoding.verification import sample_verdict
from tests.contract.enumeration import distribution_of, largest_error
from tests.contract.instances import Instance
from tests.contract.rules import RULES
from tests.contract.trees import STRUCTURES, as_draft, fits, grow

# A large vocabulary -------------------------------------------------------------------------------


class Decisions(Sampler):
    """Enumerates what is accepted; keeps the distribution of the token that follows instead of
    drawing it."""

    def __init__(self, sampler: Sampler) -> None:
        self.accept = sampler.accept  # type: ignore[method-assign]

    def draw(self, probs: torch.Tensor) -> Draw:
        self.follows = probs
        return Draw(0, 1.0)


def large_case(vocab: int = 50_000) -> Instance:
    """float32 distributions that sum to one only nearly, q near p."""
    generator = torch.Generator().manual_seed(3)
    logits = {place: 3 * torch.randn(2, vocab, generator=generator) for place in range(40)}
    seen: dict[tuple[int, ...], int] = {}

    def distribution(prefix: tuple[int, ...], draft: bool) -> torch.Tensor:
        target, noise = logits[seen.setdefault(prefix, len(seen))]
        return (target + noise if draft else target).softmax(-1)

    p, q = (partial(distribution, draft=draft) for draft in (False, True))
    return Instance(vocab, 2, p, q)


@pytest.mark.parametrize("name", RULES)
def test_float32_distributions_of_a_large_vocabulary(name: str) -> None:
    """What decoding feeds it. The walk, in float32, against the distribution, in float64: every
    decision and what follows it."""
    verifier, case = RULES[name], large_case()
    kinds = (STRUCTURES[kind] for kind in ("binary", "three_paths", "chain"))
    structure = next(kind for kind in kinds if fits(verifier, kind))
    nodes = grow(case, structure.width, verifier.siblings, Sampler.seeded(5))
    draft, p = as_draft(case, nodes, structure.depth)
    assert p.dtype == torch.float32
    distribution = verifier.distribution(draft, p)
    follows = defaultdict[int, torch.Tensor](lambda: torch.zeros(case.vocab).double())

    def run(sampler) -> int:
        decisions = Decisions(sampler)
        row = verifier.verify(draft, p, decisions).row
        follows[row] += sampler.probability * decisions.follows
        return row

    ends = distribution_of(run)
    assert distribution.end_prob.sum().item() == pytest.approx(1, abs=1e-9)
    off = largest_error(ends, dict(enumerate(distribution.end_prob.tolist())))
    apart = max(
        (follows[row] / ends[row] - distribution.residual(row)).abs().sum().item() / 2
        for row in ends
        if ends[row] > 1e-3
    )
    print(f"{name}: off by {off:.1e} in where it ends, {apart:.1e} in what follows")
    assert off < 1e-5 and apart < 1e-5


# Next to point masses -----------------------------------------------------------------------------

NEARLY = [  # draft logits and the warp that turns them into a distribution with a tail
    ([0.0, -90.0, -91.0, -1.0], Warp()),  # subnormal
    ([0.0, -90.0, -91.0, -95.0], Warp()),
    ([0.0, -70.0, -103.0, -80.0], Warp()),  # down to the smallest float32 there is
    ([0.0, -102.0, -102.5, -103.0], Warp()),  # nothing but a few times that
    ([0.0, -9.2, -9.3, -9.25], Warp(0.1)),
    ([0.0, -64.0, -66.0, -68.0], Warp()),  # above 1e-30: the smallest that stay
    ([0.0, -6.4, -6.6, -6.8], Warp(0.1)),
    ([0.0, -16.0, -17.0, -40.0], Warp()),  # 1 - q(hub) is 0 or one unit in the last place
    ([-90.0, 0.0, 0.0, -91.0], Warp()),
]
TARGETS = [
    [0.0, 0.0, 0.0, 0.0],
    [-90.0, 0.0, -1.0, -91.0],
    [-68.0, -1.0, -67.0, 0.0],
    [0.0, -66.0, -64.0, -68.0],
    [-3.0, -1.0, 0.0, -0.5],
]
WIDTHS = [
    (name, width)
    for name in RULES
    for width in (1, 2)
    if width == 1 or "paths" in RULES[name].shapes
]


def position_error(name: str, p: torch.Tensor, q: torch.Tensor, width: int, lazily: bool) -> float:
    """Of the distribution of the token at one position, from p: every draw of candidates, every
    verdict."""
    verifier = RULES[name]

    def first(sampler: Sampler) -> int:
        tokens = [each.token for each in islice(verifier.siblings(q, sampler), width)]
        leaves = [torch.zeros_like(q)] * len(tokens)
        draft = Draft([0] * len(tokens), tokens, [q, *leaves])
        rows = p.expand(len(tokens) + 1, -1)
        if lazily:
            return verifier.verify(draft, rows, sampler).emitted[0]
        return sample_verdict(draft, verifier.distribution(draft, rows), sampler).emitted[0]

    distribution, exact = distribution_of(first), p.double() / p.double().sum()
    assert sum(distribution.values()) == pytest.approx(1, abs=1e-5)
    return largest_error(distribution, dict(enumerate(exact.tolist())))


@pytest.mark.parametrize("lazily", [True, False], ids=["walk", "distribution"])
@pytest.mark.parametrize(("name", "width"), WIDTHS)
def test_drafts_that_are_nearly_point_masses(name: str, width: int, lazily: bool) -> None:
    worst = 0.0
    for logits, warp in NEARLY:
        q = warp.probs(torch.tensor(logits))
        for target in TARGETS:
            p = Warp().probs(torch.tensor(target))
            worst = max(worst, position_error(name, p, q, width, lazily))
    print(f"{name}, {width} candidates: largest error {worst:.1e}")
    assert worst < 1e-5


def test_what_is_below_the_smallest_probability_is_zero() -> None:
    for logits, warp in NEARLY:
        exact = (torch.tensor(logits).double() / warp.temperature).softmax(-1)
        for dtype in (torch.float32, torch.float64):
            probs = warp.probs(torch.tensor(logits, dtype=dtype))
            assert ((probs == 0) == (exact < SMALLEST)).all()
            torch.testing.assert_close(probs.double(), exact, rtol=1e-4, atol=SMALLEST)
    at_the_edge = Warp().probs(torch.tensor([0.0, -69.0, -69.1]))  # e^-69.08 = 1e-30
    assert (at_the_edge > 0).tolist() == [True, True, False]
    assert Warp(top_p=0.9).probs(torch.tensor([0.0, -90.0])).tolist() == [1, 0]


@pytest.mark.parametrize("rest", [1e-38, 1e-39, 3e-45])
@pytest.mark.parametrize("target", TARGETS)
def test_spechub_takes_any_ratio_of_hub_to_rest(rest: float, target: list[float]) -> None:
    """q(hub) / (1 - q(hub)) is beyond float32 here."""
    q, p = torch.tensor([1.0, rest, rest, 0.0]), Warp().probs(torch.tensor(target))
    for lazily in (True, False):
        assert position_error("spechub", p, q, 2, lazily) < 1e-5
