"""Small drafts of every shape, enumerated: whatever a sibling distribution can draw, with its
probability."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

import torch

from decoding.draft import Draft, Shape
from decoding.interfaces import Verifier
from decoding.sampling import Sampler, SiblingSampler
from tests.contract.enumeration import distribution_of
from tests.contract.instances import Instance, Prefix, Proposals

Nodes = tuple[tuple[int, int], ...]
"""(row of the parent, token) of each node, depth first with siblings in draw order."""

Place = tuple[int, ...]
"""Where a node is: which child to take at each step from the root."""


@dataclass(frozen=True)
class Structure:
    """width: how many children to draw at a place; depth: length of the longest path; open: the
    target is not run on the deepest nodes"""

    shape: Shape
    depth: int
    width: Callable[[Place], int]
    vocabs: tuple[int, ...]
    open: bool = False

    @property
    def gamma(self) -> int:
        """Length of the longest path the target is run on."""
        return self.depth - self.open

    @property
    def widest(self) -> int:
        return max(self.width(place) for place in [(), (0,), (1,), (0, 0)])


def branch_point(length: int, candidates: int, vocabs: tuple[int, ...]) -> Structure:
    """A chain of `length` tokens, then `candidates` open leaves."""

    def width(place: Place) -> int:
        return candidates if len(place) == length else int(len(place) < length)

    return Structure("branch_point", length + 1, width, vocabs, open=True)


def paths(count: int, length: int, vocabs: tuple[int, ...]) -> Structure:
    return Structure(
        "paths", length, lambda place: int(len(place) < length) if place else count, vocabs
    )


def tree(widths: dict[Place, int], vocabs: tuple[int, ...]) -> Structure:
    """Given the children of each place that has some."""
    return Structure("tree", 1 + max(map(len, widths)), lambda place: widths.get(place, 0), vocabs)


STRUCTURES = {
    "chain": Structure("chain", 3, lambda place: int(len(place) < 3), (2, 3)),
    "branch_point": branch_point(2, 2, (2, 3)),
    "bare_branch_point": branch_point(0, 2, (3, 5)),
    "wide_branch_point": branch_point(1, 3, (2, 4)),
    "two_paths": paths(2, 2, (2, 3)),
    "three_paths": paths(3, 2, (3,)),
    "long_paths": paths(2, 3, (3,)),
    "uneven_paths": Structure("paths", 2, lambda place: {(): 2, (1,): 1}.get(place, 0), (2, 4)),
    "binary": tree({(): 2, (0,): 2, (1,): 2}, (3,)),
    "ragged": tree({(): 2, (0,): 1, (0, 0): 2}, (3,)),
    "one_then_two": tree({(): 1, (0,): 2, (0, 1): 1}, (3,)),
    "wide": tree({(): 3, (1,): 2}, (2, 3)),
}


def fits(verifier: Verifier, structure: Structure) -> bool:
    limit = verifier.max_siblings
    return structure.shape in verifier.shapes and (limit is None or structure.widest <= limit)


def proposals(case: Instance, structure: Structure, siblings: SiblingSampler) -> Proposals:
    """Every draft of the structure; fewer siblings where the distribution has no more to give."""
    last = structure.depth - 1 if structure.open else structure.depth
    distribution = distribution_of(lambda sampler: grow(case, structure.width, siblings, sampler))
    return [
        (probability, *as_draft(case, nodes, last)) for nodes, probability in distribution.items()
    ]


def grow(
    case: Instance, width: Callable[[Place], int], siblings: SiblingSampler, sampler: Sampler
) -> Nodes:
    nodes: list[tuple[int, int]] = []

    def descend(row: int, place: Place, prefix: Prefix) -> None:
        drawn = list(islice(siblings(case.q(prefix), sampler), width(place)))
        for number, (token, *_) in enumerate(drawn):
            nodes.append((row, token))
            descend(len(nodes), (*place, number), (*prefix, token))

    descend(0, (), ())
    return tuple(nodes)


def as_draft(case: Instance, nodes: Nodes, last: int) -> tuple[Draft, torch.Tensor]:
    """The draft and p [closed + 1, V]; nodes deeper than `last` are open leaves."""
    prefixes: list[Prefix] = [()]
    for parent, token in nodes:
        prefixes.append((*prefixes[parent], token))
    parents = {parent for parent, _ in nodes}
    zeros = torch.zeros(case.vocab, dtype=torch.float64)
    q = torch.stack(
        [case.q(prefix) if row in parents else zeros for row, prefix in enumerate(prefixes)]
    )
    p = torch.stack([case.p(prefix) for prefix in prefixes if len(prefix) <= last])
    parent, token = ([node[i] for node in nodes] for i in range(2))
    return Draft(parent, token, q, len(prefixes) - len(p)), p
