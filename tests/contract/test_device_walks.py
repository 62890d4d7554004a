"""On a device, a pretend one, verification sends the numbers of all its trials at once, and has the
distribution that it has on the host: enumerated."""

from dataclasses import replace

import pytest
import torch

from decoding.draft import Draft
from decoding.verification import sample_verdict
from tests.contract.covering import covering
from tests.contract.enumeration import distribution_of, largest_error
from tests.contract.instances import FAMILIES
from tests.contract.rules import RULES, outcome, walked
from tests.contract.test_tree_verifiers import CASES, drawn
from tests.contract.trees import STRUCTURES
from tests.helpers.device.pretend_device import pretend

DEVICE = torch.device("cuda:0")


def there(draft: Draft) -> Draft:
    return replace(draft, q=[row.to(DEVICE) for row in draft.q])


@pytest.mark.parametrize(("name", "kind"), covering(CASES))
def test_a_walk_on_a_device_has_the_verifiers_distribution(name: str, kind: str) -> None:
    """At most 6 drafts of each family."""
    verifier, structure = RULES[name], STRUCTURES[kind]
    for seed, family in enumerate(FAMILIES):
        _, found = drawn(family, structure.vocabs[-1], seed + 50, kind, verifier.siblings)
        for _, draft, p in found[:: 1 + len(found) // 6]:
            distribution = verifier.distribution(draft, p)
            plain = distribution_of(
                lambda sampler: outcome(draft, sample_verdict(draft, distribution, sampler))
            )
            with pretend():
                placed, target = there(draft), p.to(DEVICE)
                walk = distribution_of(lambda sampler: walked(verifier, placed, target, sampler))
            assert largest_error(walk, plain) < 1e-12
