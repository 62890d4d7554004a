"""Two sources: which tokens are copied, which are drawn, and that the draft model catches up on
copied ones."""

from types import SimpleNamespace

import pytest
import torch

from decoding.draft_tree import DraftStep
from decoding.engines.serial import SerialEngine
from decoding.models.table_lm import TableLM
from decoding.sampling import Sampler, Warp
from decoding.stopping.fixed import Fixed
from decoding.structures.lookup import Copies, longest_match
from decoding.structures.sources import Sources
from decoding.verifiers.token import TokenVerifier
from tests.helpers.decoding.value_stub import Saying
from tests.helpers.decoding.value_stub import grown as grown_by_value
from tests.unit.decoding.structures.test_structures import EOS, TABLE, grown


class Counting(Fixed):
    """Notes what it was shown."""

    def __init__(self, gamma: int) -> None:
        super().__init__(gamma)
        self.seen: list[list[int]] = []

    def should_stop(self, step: DraftStep) -> bool:
        self.seen.append(list(step.tokens))
        return super().should_stop(step)


def test_a_match_is_copied_without_asking_or_running_anything() -> None:
    stop = Counting(3)
    tree, draft = grown(Sources(5, 3, 2, 2), stop=stop, committed=torch.tensor([1, 2, 3, 4, 1, 2]))
    assert draft.token == [3, 4, 1, 2] and draft.is_chain and tree.forwards == 0 and not stop.seen
    assert all(q[token] == 1 == q.sum() for q, token in zip(draft.q[:4], draft.token, strict=True))
    _, ended = grown(Sources(5, 3, 2, 2), committed=torch.tensor([1, 2, 3, 4, 1, 2]), eos_ids=EOS)
    assert ended.token == [3, 4]


def test_grown_drafts_copy_where_the_committed_text_repeats_itself() -> None:
    says, copies = Saying(lambda depth: (0.9, 0.8, 0.0, 0.0)), Copies(3, 2, 2)
    structure, text = (
        grown_by_value(says, budget=4, copies=copies),
        torch.tensor([1, 2, 3, 4, 1, 2]),
    )
    tree, draft = grown(structure, committed=text)
    assert draft.token == [3, 4, 1, 2] and draft.is_chain and tree.forwards == 0
    _, draft = grown(grown_by_value(says, budget=2, copies=copies), committed=text)
    assert draft.token == [3, 4], "the budget is for copies, too"
    tree, draft = grown(structure, committed=text[:-1])
    assert tree.forwards and len(draft) <= 4
    assert not len(grown(structure, committed=text, max_new=1)[1])


@pytest.mark.parametrize("gamma", [1, 3])
def test_without_a_match_it_draws_as_a_chain_until_there_is_one(gamma: int) -> None:
    text, kinds = [0, 1, 2, 3, 1], set()
    for seed in range(40):
        stop = Counting(gamma)
        tree, draft = grown(Sources(9, 2, 2, 2), stop=stop, committed=torch.tensor(text), seed=seed)
        drawn = tree.forwards
        told = [*text, *draft.token[:drawn]]
        copied = len(draft) - drawn
        assert copied == (4 if longest_match(torch.tensor(told), [2]) else 0)
        assert 1 <= drawn <= gamma and max(map(len, stop.seen)) <= drawn
        for row, token in enumerate(draft.token):
            one_hot = draft.q[row].max() == 1
            assert one_hot == (row >= drawn) and draft.q[row][token] > 0
        kinds.add(copied)
    assert kinds == {0, 4}, "rounds of one source, and of both"


def test_the_draft_reads_accepted_copies_when_it_draws_again() -> None:
    pair = SimpleNamespace(target=TableLM(TABLE), draft=TableLM(TABLE))
    engine = SerialEngine(pair, Sources(4, 2, 2, 1), Fixed(2), TokenVerifier(), Warp(), Warp())
    copied_then_drawn = 0
    for seed in range(20):
        rounds = engine.decode([1, 2, 3, 1, 2], 24, Sampler.seeded(seed)).rounds
        for before, after in zip(rounds, rounds[1:], strict=False):
            copied_then_drawn += (
                before.draft_forwards == 0 < before.accepted and after.draft_forwards > 0
            )
        drawn = [(q, p) for r in rounds for q, p in zip(r.draft_q, r.draft_p, strict=True) if q < 1]
        assert all(q == pytest.approx(p) for q, p in drawn), "the same model after the same text"
    assert copied_then_drawn > 0
