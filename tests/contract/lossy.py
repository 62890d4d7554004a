"""Rules as published or released that do not keep the target's distribution. The distribution test
must fail each of them."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise, takewhile

import torch
from torch import Tensor

from decoding.draft import Draft, RoundContext, depth_first
from decoding.draft_tree import DraftTree
from decoding.engines.branching import Branches, Drafter, Pending
from decoding.picking import Draw, Pool
from decoding.sampling import Sampler, SiblingSampler, top_tokens
from decoding.structures.grown import Grown
from decoding.verification import VerdictDistribution, residual_distribution
from decoding.verifiers.parallel import paths
from decoding.verifiers.rrs import RrsVerifier
from decoding.verifiers.rrsw import RrswVerifier
from decoding.verifiers.tree_walk import Trials
from tests.contract.instances import Instance, Prefix
from tests.contract.trees import Nodes


class DuplicatesSkipped(RrsVerifier):
    """A candidate seen before is passed over, and with it the update of the residual
    distribution."""

    def trials(self, p: Tensor, q: Tensor, tokens: Sequence[int]) -> Trials:
        left = p
        for number, token in enumerate(tokens):
            if token not in tokens[:number]:
                yield number, left[token].item(), q[token].item()
                left = residual_distribution(left, q)
        return left


def any_passing(draft: Draft, p: Tensor) -> VerdictDistribution:
    """SpecBranch Algorithm 1, two branches: all whose uniform is below p / q pass, the one with the
    largest wins."""
    tokens, q = draft.token, draft.q[0]
    low, high = sorted(
        (min(1.0, (p[0] / q)[token].item()), row) for row, token in enumerate(tokens, 1)
    )
    end_prob = torch.zeros(3, dtype=torch.float64)
    both = low[0] * high[0]
    low_wins = low[0] / (2 * high[0]) if high[0] > 0 else 0.0
    end_prob[low[1]] = low[0] * (1 - high[0]) + both * low_wins
    end_prob[high[1]] = high[0] * (1 - low[0]) + both * (1 - low_wins)
    end_prob[0] = 1 - end_prob.sum()
    return VerdictDistribution(
        end_prob, lambda row: None if row else residual_distribution(p[0], q)
    )


def best_target(draft: Draft, p: Tensor) -> VerdictDistribution:
    """SpecBranch as released: the branch the target likes best, then one test with p / q."""
    q, best = draft.q[0], int(p[0][draft.token].argmax())
    token = draft.token[best]
    end_prob = torch.zeros(len(draft) + 1, dtype=torch.float64)
    end_prob[best + 1] = min(1.0, (p[0][token] / q[token]).item())
    end_prob[0] = 1 - end_prob[best + 1]
    return VerdictDistribution(
        end_prob, lambda row: None if row else residual_distribution(p[0], q)
    )


def hsd_parallel(draft: Draft, p: Tensor, carried: bool, uncapped: bool) -> VerdictDistribution:
    """HSD with several drafts. carried: the joint ratio of the accepted prefix starts the next
    draft, instead of 1; uncapped: a draft is accepted to its end with min(1, r(1:g)), instead of
    the capped ratio. Released: both."""
    end_prob = torch.zeros(len(draft) + 1, dtype=torch.float64)
    mixed = torch.zeros(len(draft) + 1, p.shape[-1], dtype=torch.float64)
    drafts = [[0, *rows] for rows in paths(draft)]

    def consume(
        number: int, weight: float, accepted: list[int], left: Tensor, start: float
    ) -> None:
        """Drafts from `number` on, with probability `weight`; accepted: rows from the root, left:
        target distribution there."""
        if number == len(drafts):
            end_prob[accepted[-1]] += weight
            mixed[accepted[-1]] += weight * left
            return
        rows, count = drafts[number], len(accepted)
        if draft.path(rows[count - 1]) != draft.path(accepted[-1]):
            consume(number + 1, weight, accepted, left, start)
            return
        targets = [left, *p[rows[count:]]]
        distributions = [draft.q[row] for row in rows[count - 1 :]]
        joint, full = [start], start
        for target, distribution, row in zip(targets, distributions, rows[count:], strict=False):
            ratio = (target / distribution)[draft.token[row - 1]].item()
            joint.append(min(1.0, joint[-1] * ratio))
            full *= ratio
        coins = [_coin(*state) for state in zip(targets[:-1], distributions, joint, strict=False)]
        coins = [1.0, *coins[1:], min(1.0, full) if uncapped else joint[-1]]
        for t in reversed(range(len(coins))):
            here = [*accepted, *rows[count : count + t]]
            if t == len(coins) - 1:
                consume(len(drafts), weight * coins[t], here, targets[t], 1.0)
            elif weight * coins[t] > 0:
                residual = residual_distribution(targets[t], distributions[t], joint[t])
                consume(number + 1, weight * coins[t], here, residual, joint[t] if carried else 1.0)
            weight *= 1 - coins[t]

    consume(0, 1.0, [0], p[0], 1.0)
    return VerdictDistribution(end_prob, lambda row: mixed[row] / end_prob[row])


def _coin(p: Tensor, q: Tensor, joint: float) -> float:
    mass = (joint * p - q).clamp(min=0).sum().item()
    return mass / (mass + 1 - joint) if mass + 1 - joint > 0 else 1.0


def heap_tree(case: Instance, budget: int, sampler: Sampler) -> list[tuple[int, int, float]]:
    """DySpec's greedy tree: (parent row, token, value) of `budget` draws, each made where it is
    likeliest to be of use.

    Value: probability, under the draft, that the path and none of the earlier siblings is taken.
    """
    nodes: list[tuple[int, int, float]] = []
    prefixes: list[Prefix] = [()]
    waiting = [(1.0, 0, case.q(()))]
    while waiting and len(nodes) < budget:
        likeliest = max(range(len(waiting)), key=lambda i: waiting[i][0])
        value, row, distribution = waiting.pop(likeliest)
        token = sampler.draw(distribution).token
        share, rest = (distribution[token] / distribution.sum()).item(), distribution.clone()
        rest[token] = 0
        nodes.append((row, token, value * share))
        prefixes.append((*prefixes[row], token))
        waiting.append((value * share, len(nodes), case.q(prefixes[-1])))
        if rest.any():
            waiting.append((value * (1 - share), row, rest))
    return nodes


def without_the_least(nodes: list[tuple[int, int, float]]) -> list[tuple[int, int, float]]:
    """Biased: the drawn node of least value is taken back. It has no children, their values would
    be lower."""
    least = min(range(len(nodes)), key=lambda i: nodes[i][2])
    below = least + 1
    return [(row - (row > below), *rest) for i, (row, *rest) in enumerate(nodes) if i != least]


def depth_first_nodes(nodes: list[tuple[int, int, float]]) -> Nodes:
    order = depth_first([row for row, _, _ in nodes])
    place = {row: number for number, row in enumerate(order)}
    return tuple((place[nodes[row - 1][0]], nodes[row - 1][1]) for row in order[1:])


class AnyPassing(RrsVerifier):
    """`any_passing` as a rule for the two branches of an engine."""

    max_siblings = 2

    def trials(self, p: Tensor, q: Tensor, tokens: Sequence[int]) -> Trials:
        draft = Draft([0] * len(tokens), tokens, [q, *[q] * len(tokens)])
        if len(tokens) < 2:
            return (yield from super().trials(p, q, tokens))
        distribution = any_passing(draft, p[None])
        first, second = distribution.end_prob[1:].tolist()
        yield 0, first, 1.0
        if first < 1:
            yield 1, second, 1 - first
        return residual_distribution(p, q)


class TopTokensAsDrawn(RrswVerifier):
    """SpecBranch Eq. 7: the most probable tokens, verified with p / q as if they had been drawn."""

    siblings: SiblingSampler = staticmethod(top_tokens)


class Redrawing(Drafter):
    """SpecBranch's class 1 as printed: the unsure drawn token is dropped, and the candidates are
    drawn afresh."""

    def start(self, context: RoundContext, outcome: int) -> Pending:
        found = super().start(context, outcome)
        if not found.unsure:
            return found
        tree = found.tree
        for nodes in (tree.token, tree.parent, tree.depth, tree.drawn):
            nodes.pop()
        return replace(found, q=found.q[:-1], unsure=False)


class CutOnDrawn(Drafter):
    """SpecBranch's posterior selection as printed: a branch ends before the first drawn token that
    is unlikely."""

    def _until_unlikely(self, tree: DraftTree, path: Sequence[int]) -> list[int]:
        def likely(step: tuple[int, int]) -> bool:
            above, row = step
            return tree.unwarped_q(above)[tree.token[row - 1]].item() >= self.confidence.threshold

        return [row for _, row in takewhile(likely, pairwise(path))]


class StoppedOnDrawn(CutOnDrawn):
    """SpecBranch's branches as printed: they stop at a drawn token that is unlikely, and do without
    it."""

    def branch(
        self, pending: Pending, context: RoundContext, outcome: int, continuation: int
    ) -> Branches:
        found = super().branch(pending, context, outcome, continuation)
        cut = [[path[0], *self._until_unlikely(pending.tree, path)] for path in found.paths]
        return replace(found, paths=cut)


class WidthOfSecond(Drafter):
    """The number of branches, one or two, follows from candidate 2, which goes when it asks for
    one.

    A token that goes whatever it is would do no harm: the number is then independent of all
    candidates."""

    def _candidates(self, tree: DraftTree, tip: int, unsure: bool) -> tuple[list[int], Tensor]:
        distribution = tree.q(tip)
        drawn = self.rule.siblings(distribution, self.sampler)
        rows, second = [tree.add(tip, next(drawn))], next(drawn, None)
        if second is not None and int(self.k_max * (1 - second.q)) > 1:
            rows.append(tree.add(tip, second))
        return rows, distribution


class AsPrinted(StoppedOnDrawn, WidthOfSecond, Redrawing):
    """SpecBranch as printed; its candidates and their test are those of `TopAnyPassing`."""


class TopAnyPassing(AnyPassing):
    """The most probable tokens, two at most, and the best of those that pass p / q."""

    max_siblings = None
    siblings: SiblingSampler = staticmethod(top_tokens)


class FirstDrawn(Sampler):
    """Gives `first` on the first draw."""

    def __init__(self, first: Draw, sampler: Sampler) -> None:
        self.first: Draw | None = first
        self.sampler = sampler

    def draw(self, probs: Tensor | Pool) -> Draw:
        first, self.first = self.first, None
        return self.sampler.draw(probs) if first is None else first


class UnsureAsCandidate(Drafter):
    """The unsure drawn token is kept, but tested by the branch rule, not by that of the chain it
    was drawn in."""

    def start(self, context: RoundContext, outcome: int) -> Pending:
        found = super().start(context, outcome)
        return replace(found, q=found.q[: found.length], unsure=False)

    def _candidates(self, tree: DraftTree, tip: int, unsure: bool) -> tuple[list[int], Tensor]:
        if len(tree.token) == tip:
            return super()._candidates(tree, tip, unsure)
        first = Draw(tree.token[tip], tree.drawn[tip])
        drawn = self.rule.siblings(tree.q(tip), FirstDrawn(first, self.sampler))
        next(drawn)
        second = next(drawn, None)
        rows = [tip + 1] if second is None else [tip + 1, tree.add(tip, second)]
        return rows, tree.q(tip)


class Pruning:
    """Draws, then keeps the most valuable half of the nodes by their own probability."""

    def grow(self, tree) -> None:
        super().grow(tree)
        reach = [1.0]
        for token, parent in zip(tree.token, tree.parent, strict=True):
            reach.append(reach[parent] * tree.q(parent)[token].item())
        least = sorted(reach, reverse=True)[: 1 + len(tree.token) // 2][-1]
        # A parent is worth more than its children
        kept = [row for row in range(len(reach)) if reach[row] >= least]
        tree.parent = [kept.index(tree.parent[row - 1]) for row in kept if row]
        tree.token = [tree.token[row - 1] for row in kept if row]
        tree.drawn = [tree.drawn[row - 1] for row in kept if row]
        for facts in (tree._distributions, tree._cached):
            renamed = {new: facts[old] for new, old in enumerate(kept) if old in facts}
            facts.clear()
            facts.update(renamed)


class PruningGrown(Pruning, Grown):
    """Drafts grown by value against cost, of which the better half is sent."""
