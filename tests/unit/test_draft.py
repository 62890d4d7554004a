from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from decoding.draft import Draft, DraftStep
from decoding.sampling import Warp
from decoding.stopping.confidence import DrawnConfidence, PredictableConfidence
from decoding.stopping.fixed import Fixed
from decoding.table_lm import TableLM, random_table
from decoding.trace import Stopwatch

COMMITTED = torch.tensor([1, 0, 2])


def new_step(warp: Warp | None = None, keep_hidden: bool = False) -> tuple[DraftStep, TableLM]:
    lm = TableLM(random_table(3, seed=4))
    lm.forward(COMMITTED[:1])
    return DraftStep(lm, COMMITTED, warp or Warp(), Stopwatch(), keep_hidden), lm


def test_chain_and_tree_paths() -> None:
    chain = Draft.chain([5, 6], torch.ones(2, 7))
    assert chain.is_chain and len(chain) == 2 and chain.q.shape == (3, 7)
    assert [chain.path(row) for row in range(3)] == [[], [5], [5, 6]]
    tree = Draft(torch.tensor([0, 0, 1]), torch.tensor([5, 6, 7]), torch.ones(4, 8))
    assert not tree.is_chain
    assert tree.path(3) == [5, 7] and tree.path(2) == [6]


def test_draft_runs_on_what_it_missed_and_then_token_by_token() -> None:
    step, lm = new_step()
    torch.testing.assert_close(step.q(), lm.law((1, 0, 2)))
    assert lm.length == 3
    step.push(1)
    assert lm.length == 3 and step.count == 1 and step.drawn_q == [pytest.approx(lm.law((0, 2))[1].item())]
    torch.testing.assert_close(step.q(), lm.law((2, 1)))
    assert lm.length == 4 and step.forwards == 2


@pytest.mark.parametrize(
    ("stop", "forwards"), [(Fixed(2), 2), (DrawnConfidence(0.0), 3), (PredictableConfidence(0.0), 3)]
)
def test_looking_costs_no_more_forwards_than_promised(stop: Fixed, forwards: int) -> None:
    """A rule that counts or looks back costs nothing; one that looks ahead costs the draw's own forward."""
    step, _ = new_step()
    stop.begin_round(SimpleNamespace(round=0))
    while step.count < 3 and not step.stopped_by(stop):
        step.q()
        step.push(0)
    assert step.forwards == forwards
    before = step.forwards
    step.stopped_by(stop)
    assert step.forwards == before + isinstance(stop, PredictableConfidence)


def test_hidden_states_ahead_and_behind() -> None:
    step, lm = new_step(keep_hidden=True)
    first = step.hidden()
    assert first.shape == (3, 4) and step.forwards == 1
    step.push(1)
    assert step.previous_hidden() is not None and step.forwards == 1
    torch.testing.assert_close(step.previous_hidden(), first)
    ahead = step.hidden()
    assert step.forwards == 2 and not torch.equal(ahead, first)
    torch.testing.assert_close(
        ahead, lm.forward(torch.tensor([1]), torch.tensor([2 - lm.length]), hidden=True).hidden[:, 0]
    )


def refuses(action: Callable[[], object]) -> bool:
    try:
        action()
    except AssertionError:
        return True
    return False


def test_asking_too_early_is_a_bug() -> None:
    step, _ = new_step()
    assert refuses(step.drawn_belief) and refuses(step.previous_hidden)
    step.push(0)
    step.q()
    assert refuses(step.drawn_belief), "the draft has moved on"


def test_belief_is_the_unwarped_draft() -> None:
    step, lm = new_step(Warp(0.0))
    law = lm.law((1, 0, 2))
    assert step.q().max() == 1
    torch.testing.assert_close(step.belief(), law)
    step.push(int(law.argmax()))
    assert step.drawn_q == [1.0] and step.drawn_belief() == pytest.approx(law.max().item())


def test_a_token_of_probability_zero_cannot_have_been_drawn() -> None:
    step, lm = new_step(Warp(0.0))
    with pytest.raises(AssertionError, match="q > 0"):
        step.push(int(lm.law((1, 0, 2)).argmin()))
