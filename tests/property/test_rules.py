"""Losslessness and trees, for distributions and shapes that nobody thought of."""

from functools import cache, partial

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from decoding.draft import Draft
from decoding.models.forward import RowTree
from tests.contract.enumeration import largest_error
from tests.contract.instances import Instance, Prefix, exact, output_distribution
from tests.contract.rules import RULES
from tests.contract.trees import STRUCTURES, fits, proposals

CASES = [
    (name, kind) for name in RULES for kind in STRUCTURES if fits(RULES[name], STRUCTURES[kind])
]
MASS = st.sampled_from([0, 0, 1, 1, 2, 3, 7, 100, 10**6])


@st.composite
def distributions(draw: st.DrawFn, vocab: int) -> torch.Tensor:
    masses = draw(st.lists(MASS, min_size=vocab, max_size=vocab).filter(any))
    return torch.tensor(masses, dtype=torch.float64) / sum(masses)


@st.composite
def instances(draw: st.DrawFn, vocab: int, gamma: int) -> Instance:
    """p and q after every prefix are among a few distributions, so that they are now equal, now far
    apart, now disjoint."""
    some = draw(st.lists(distributions(vocab), min_size=1, max_size=4))
    shift = draw(st.integers(0, 3))

    @cache
    def distribution(prefix: Prefix, side: int) -> torch.Tensor:
        return some[(sum(prefix) + len(prefix) + side) % len(some)]

    p, q = (partial(distribution, side=side) for side in (0, shift))
    return Instance(vocab, gamma, p, q)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_every_rule_is_lossless_on_every_shape_it_takes(data: st.DataObject) -> None:
    name, kind = data.draw(st.sampled_from(CASES))
    verifier, structure = RULES[name], STRUCTURES[kind]
    case = data.draw(instances(min(structure.vocabs), structure.gamma))
    every = proposals(case, structure, verifier.siblings)
    distribution = output_distribution(case, verifier.distribution, every)
    assert largest_error(distribution, exact(case)) < 1e-9


@st.composite
def parents(draw: st.DrawFn) -> list[int]:
    """Of each node the row of its parent, 0 being the root."""
    return [draw(st.integers(0, row)) for row in range(draw(st.integers(0, 12)))]


@given(parents())
def test_every_node_is_reached_by_one_path(above: list[int]) -> None:
    draft = Draft(above, list(range(len(above))), [])
    below = sorted(row for rows in draft.children() for row in rows)
    assert below == list(range(1, len(above) + 1))
    for row in range(len(above) + 1):
        path = draft.rows_to(row)
        assert path[-1:] == ([row] if row else []) and len(draft.path(row)) == len(path)
        assert [above[step - 1] for step in path] == [0, *path[:-1]][: len(path)]


@given(parents(), st.integers(0, 12))
def test_a_row_of_a_tree_sees_its_ancestors_and_itself(above: list[int], cut: int) -> None:
    grown = RowTree()
    for part in (above[:cut], above[cut:]):
        grown = grown.grown(torch.tensor(part, dtype=torch.long) - 1)
    draft = Draft(above, list(range(len(above))), [])
    for row in range(len(above)):
        path = [step - 1 for step in draft.rows_to(row + 1)]
        assert grown.visible()[row].nonzero()[:, 0].tolist() == path
        assert grown.depth[row] == len(path) - 1
    assert torch.equal(grown.visible(min(cut, len(above))), grown.visible()[cut:])
