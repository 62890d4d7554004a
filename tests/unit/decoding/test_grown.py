"""Drafts grown by value: wide where rows are free, a chain where they are dear, the same in replay;
and which draws a comb consists of, against drawing one at a time."""

from dataclasses import astuple
from math import prod

import numpy as np
import pytest
import torch

from decoding.asking import load_value
from decoding.cost import CostTable, cost_table
from decoding.draft import RoundContext
from decoding.sampling import hub_pair, top_tokens, without_replacement
from decoding.structures.comb import Comb, Worth, grow, row_seconds
from decoding.structures.grown import PRIOR, Grown
from decoding.structures.lookup import Copies
from predictors.calibration import Calibration
from predictors.inputs import Inputs
from predictors.outcomes import OUTCOMES, Chances
from predictors.survival import Survival
from runtime.errors import UserError
from tests.helpers.damage.refusals import refuses
from tests.helpers.decoding.value_stub import EVERYTHING, Nosy, Saying, grown
from tests.helpers.training.checkpoints import write_checkpoint
from tests.unit.decoding.test_structures import COMMITTED, EOS, check_sound, depths
from tests.unit.decoding.test_structures import grown as drafted

NUMBERS = Inputs(q_stats=True, q_path=True, depth=True, history=True)
CURVED = Survival(0.9, -0.1, 0.1)
STEADY = Saying(lambda depth: (0.8, 0.7, 0.4, 0.3))


def rows(share: float, draft: float = 1.0) -> CostTable:
    """A call takes as long as 5 drafts, each further row a share of it."""
    return cost_table(draft, {1: 5.0, 101: 5.0 + 500 * share})


def test_wide_where_rows_are_free_a_chain_where_they_are_dear_siblings_where_forwards_are():
    leaves, lengths = [], []
    for share in (0.0, 0.02, 0.1, 0.4):
        _, draft = drafted(grown(STEADY, rows(share), 0.3, 12, 3))
        children = draft.children()
        leaves.append(len(draft) - max(depths(draft)))
        lengths.append(len(draft))
        assert max(map(len, children)) <= 3
    assert leaves == sorted(leaves, reverse=True) and leaves[0] > leaves[1] > leaves[3] == 0
    assert lengths[0] == 12 and draft.is_chain
    _, draft = drafted(grown(STEADY, rows(0.0, draft=9.0), 0.2, 12, 3))
    assert draft.parent == [0, 0, 0]


def test_a_draft_forward_runs_for_inner_nodes_alone():
    tree, draft = drafted(grown(Nosy(NUMBERS), rows(0.01), 0.1, 16, 3))
    inner = sum(bool(children) for children in draft.children())
    assert tree.forwards == inner < len(draft)


@pytest.mark.parametrize("budget", [1, 2, 5])
@pytest.mark.parametrize("siblings", [1, 2, 3])
def test_the_budget_binds(budget, siblings):
    structure = grown(STEADY, rows(0.0, draft=0.01), 0.1, budget, siblings)
    assert structure.shape == ("chain" if siblings == 1 else "tree")
    _, draft = drafted(structure)
    assert len(draft) == budget and max(map(len, draft.children())) <= siblings


def test_where_the_budget_binds_it_goes_by_value():
    """Rows are free, so every leaf has the best ratio; but another token is worth more."""
    sure = Saying(lambda depth: (0.95, 0.95, 0.1, 0.1))
    _, draft = drafted(grown(sure, rows(0.0, draft=0.1), 0.2, 6, 3))
    assert draft.is_chain and len(draft) == 6


@pytest.mark.parametrize("siblings", [without_replacement, hub_pair, top_tokens])
def test_ends_of_the_output_and_of_the_text(siblings):
    for seed in range(20):
        for max_new in (1, 2, 3, 20):
            structure = grown(Nosy(NUMBERS), rows(0.0), 0.1, 9, 2)
            _, draft = drafted(structure, siblings, max_new=max_new, eos_ids=EOS, seed=seed)
            check_sound(draft, max_new - 1, EOS)
            assert bool(len(draft)) == (max_new > 1)


def test_a_certain_draft_has_no_siblings():
    certain = torch.tensor([0.0, 1.0], dtype=torch.float64)
    for siblings in (without_replacement, hub_pair, top_tokens):
        given = {"table": lambda context: certain, "committed": torch.tensor([1, 0])}
        _, draft = drafted(grown(STEADY, rows(0.0), 0.1, 5, 2), siblings, **given)
        assert draft.is_chain and draft.token == [1] * len(draft)


def test_each_drawn_token_is_asked_about_once_and_none_before_something_is_verified():
    predictor = Nosy(NUMBERS)
    tree, _ = drafted(grown(predictor, rows(0.0), 0.1, 16, 3))
    assert 3 < predictor.asked < len(tree.token), "not about leaves that nothing may come after"
    predictor = Nosy(EVERYTHING)
    assert EVERYTHING.target_layers
    _, draft = drafted(grown(predictor, rows(0.0), 0.1, 9, 2))
    assert len(draft) == 1 and not predictor.asked, "there are no states of the target yet"


def test_a_request_finds_its_rate_from_its_own_rounds():
    cost = rows(0.0)
    structure = grown(STEADY, cost, None, 3, 1)
    first = RoundContext(COMMITTED, 20)
    assert structure._rate(first) == PRIOR / (PRIOR * 5) == 1 / cost.autoregressive
    drafted(structure)
    later = RoundContext(torch.cat([COMMITTED, COMMITTED[:4]]), 16, round=1)
    assert structure._rate(later) == pytest.approx((4 + PRIOR) / (3 * 1.0 + 5 + PRIOR * 5))
    assert structure._rate(first) == 1 / cost.autoregressive, "another request starts afresh"
    assert grown(STEADY, cost, 0.7, 3, 1)._rate(later) == 0.7


def test_a_round_that_copies_costs_its_rows():
    cost, text = rows(0.1), torch.tensor([1, 2, 3, 4, 1, 2])
    structure = grown(STEADY, cost, None, 9, 1, copies=Copies(3, 2, 2))
    structure._rate(RoundContext(text, 20))
    _, draft = drafted(structure, committed=text)
    assert len(draft) == 4
    later = RoundContext(torch.cat([text, text[:3]]), 17, round=1)
    assert structure._rate(later) == pytest.approx((3 + PRIOR) / (cost.target(5) + PRIOR * 5))


@pytest.mark.parametrize("siblings", [1, 3])
@pytest.mark.parametrize("rate", [0.15, 0.3])
def test_a_replayed_comb_is_what_is_drawn(siblings, rate):
    """Where no sibling gets a child."""
    said = [(0.9, 0.8, 0.5, 0.4), (0.7, 0.9, 0.3, 0.9), (0.8, 0.6, 0.9, 0.2), (0.5, 0.5, 0.5, 0.5)]
    said += [(0.9, 0.2, 0.1, 0.1)] * 9

    cost, budget, gamma = rows(0.02), 9, 8
    predictor = Saying(lambda depth: said[depth - 1])
    predictor.calibration = Calibration(survival=CURVED)
    structure = grown(predictor, cost, rate, budget, siblings)
    tree, draft = drafted(structure)
    chances = Chances(*torch.tensor(said[:gamma], dtype=torch.float64).unbind(-1))
    worth = Worth.of(chances, CURVED).up_to(siblings - 1)
    worth = Worth(worth.further[None, None], worth.leaf[None, None])
    comb = grow(worth, np.array([[gamma]]), cost, rate, budget)
    children = draft.children()
    path, row, leaves = 0, 0, []
    while children[row]:
        leaves.append(len(children[row]) - 1)
        path, row = path + 1, children[row][0]
    assert comb.path.item() == path and comb.leaves[0, 0, :path].tolist() == leaves


def test_only_a_predictor_of_outcomes_and_copies_will_do(tmp_path):
    folder = write_checkpoint(tmp_path / "specdecpp", "specdecpp", 4)
    with pytest.raises(UserError, match=r"^structure\.checkpoint: .* holds 'specdecpp'"):
        Grown(str(folder), rows(0.0), None, 4, 2)
    with pytest.raises(UserError, match=r"^structure\.checkpoint: no checkpoint in"):
        load_value(tmp_path, "structure.checkpoint")
    refuses("structure.copies: expected decoding.+Copies, got Saying", grown, STEADY, copies=STEADY)


def test_a_checkpoint_that_runs_the_draft_for_every_question_is_refused(tmp_path):
    folder = write_checkpoint(tmp_path / "value", "value", 8, inputs=Inputs([-1], q_stats=True))
    with pytest.raises(UserError, match=r"^structure\.checkpoint: .* reads draft_hidden,.* Train"):
        Grown(str(folder), rows(0.0), None, 4, 2)


def test_what_is_said_is_what_chances_are():
    generator = torch.Generator().manual_seed(0)
    probs = torch.rand(50, len(OUTCOMES), generator=generator, dtype=torch.float64)
    probs[:10] *= (torch.rand(10, len(OUTCOMES), generator=generator) > 0.5).double()
    for row in [*probs, *torch.eye(len(OUTCOMES), dtype=torch.float64)]:
        chances = Chances.of(row)
        expected = (chances.first, chances.following, chances.second, chances.third)
        numbers = astuple(Chances.of_numbers(row.tolist()))
        assert numbers == pytest.approx([part.item() for part in expected])


SHAPE = 3, 10, 6  # prompts, positions, tokens
COSTS = {
    "flat": cost_table(1.0, 5.0),
    "linear": cost_table(1.0, {1: 5.0, 100: 15.0}),
    "steps": cost_table(1.0, {1: 5.0, 4: 5.2, 5: 7.0, 9: 7.0}),
}


def chances(seed: int = 0) -> Chances:
    logits = torch.randn(*SHAPE, 5, generator=torch.Generator().manual_seed(seed)) * 1.5
    return Chances.of((logits + torch.tensor([0, 0, 0, 1.0, 2.0])).softmax(-1).double())


def limits() -> np.ndarray:
    return np.random.default_rng(0).integers(0, SHAPE[-1] + 1, SHAPE[:-1])


def one_by_one(
    here: list[list[float]], limit: int, cost: CostTable, rate: float, budget: int
) -> tuple[int, list[int]]:
    """here: [G][4], first, following, second and third of each token. Path and leaves."""
    path, leaves = min(limit, 1), [0] * SHAPE[-1]
    while 0 < path < budget - sum(leaves):
        nodes = path + sum(leaves)
        reach = [prod(token[0] for token in here[:depth]) for depth in range(path + 1)]
        offers = []  # worth less the draft's time, the token that gets a leaf
        if path < limit:
            offers.append((reach[path] * here[path - 1][1] - rate * cost.draft, -1))
        for depth in range(path):
            first, _, second, third = here[depth]
            if leaves[depth] < 2:
                chance = [second, (1 - second) * third][leaves[depth]]
                offers.append((reach[depth] * (1 - first) * chance, depth))
        gain, place = max(offers, default=(-1.0, -1))
        if gain < rate * row_seconds(cost, budget)[nodes]:
            break
        if place < 0:
            path += 1
        else:
            leaves[place] += 1
    return path, leaves


@pytest.mark.parametrize("name", COSTS)
@pytest.mark.parametrize("budget", [1, 5, 18])
@pytest.mark.parametrize("rate", [0.1, 0.4])
def test_the_best_draw_goes_first(name, budget, rate):
    said, cost = chances(), COSTS[name]
    rows = torch.stack([said.first, said.following, said.second, said.third], -1).tolist()
    found = grow(Worth.of(said), limits(), cost, rate, budget)
    for (batch, place), limit in np.ndenumerate(limits()):
        path, leaves = one_by_one(rows[batch][place], int(limit), cost, rate, budget)
        assert (found.path[batch, place], found.leaves[batch, place].tolist()) == (path, leaves)
    assert len(np.unique(found.nodes)) > 2 or budget == 1
    assert (found.nodes <= budget).all() and (found.path <= limits()).all()


def test_dear_rows_make_a_chain_and_free_ones_a_wide_tree():
    worth, limit = Worth.of(chances()), np.full(SHAPE[:2], SHAPE[-1])
    sizes = [
        grow(worth, limit, cost_table(1.0, {1: 5.0, 100: 5.0 + 99 * row}), 0.3, 18).leaves.sum()
        for row in (0.0, 0.1, 0.5, 3.0)
    ]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] > sizes[1] > sizes[2] > sizes[3] == 0


def test_a_chain_ends_where_the_next_token_is_not_worth_its_time():
    worth, limit, cost = Worth.of(chances()), limits(), COSTS["linear"]
    found = grow(worth.up_to(0), limit, cost, 0.4, 18)
    least = 0.4 * (cost.draft + row_seconds(cost, 1)[0])
    willing = np.logical_and.accumulate(worth.further > least, axis=-1).sum(-1).clip(min=1)
    assert np.array_equal(found.path, np.minimum(willing, limit)) and found.leaves.sum() == 0


def test_a_row_costs_what_it_does_on_the_way_to_a_larger_draft_measured_or_not():
    steps = cost_table(1.0, {1: 5.0, 2: 6.0, 5: 6.0, 6: 8.0})
    assert row_seconds(steps, 5).tolist() == [0.25, 0.0, 0.0, 0.0, 2.0]
    measured = cost_table(1.0, {1: 5.0, 3: 7.0})
    assert row_seconds(measured, 6).tolist() == [1.0] * 6


def test_nodes_are_counted():
    comb = Comb(np.array([[2]]), np.array([[[2, 1, 0]]]))
    assert comb.nodes.tolist() == [[5]]
