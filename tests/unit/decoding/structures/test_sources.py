"""Two sources: which tokens are copied, which are drawn, and that the draft model catches up on
copied ones."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from decoding.draft_tree import DraftStep
from decoding.engines.serial import SerialEngine
from decoding.models.table_lm import TableLM
from decoding.sampling import Sampler, Warp
from decoding.stopping.fixed import Fixed
from decoding.structures.lookup import longest_match
from decoding.structures.sources import Sources
from decoding.verifiers.token import TokenVerifier
from runtime.errors import UserError
from tests.checkpoints import write_checkpoint, write_copies
from tests.contract.engines import write_lengths
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


def learned(folder: Path, gamma: int = 5, **thresholds: float) -> Sources:
    """Copies 0, 2, 3 tokens after matches of 1, 2, 3, unless the thresholds say otherwise."""
    return Sources(
        gamma, 3, 1, 9, write_lengths(folder), **{"first": 0.5, "eps": 0.3, **thresholds}
    )


@pytest.mark.parametrize(
    ("text", "copied"),
    [
        ([1, 2, 3, 4, 0, 1, 2, 3], [4, 0, 1]),
        ([1, 2, 3, 4, 0, 2, 3], [4, 0]),
        ([3, 1, 1, 1], [1, 1]),
    ],
)
def test_copies_are_as_long_as_learned(text: list[int], copied: list[int], tmp_path: Path) -> None:
    stop = Counting(1)
    tree, draft = grown(learned(tmp_path), stop=stop, committed=torch.tensor(text))
    assert draft.token == copied and tree.forwards == 0 and not stop.seen
    assert all(q[token] == 1 == q.sum() for q, token in zip(draft.q, copied, strict=False))


def test_a_match_that_says_too_little_does_not_count(tmp_path: Path) -> None:
    stop = Counting(1)
    tree, draft = grown(learned(tmp_path), stop=stop, committed=torch.tensor([3, 1, 2, 3]))
    assert tree.forwards == 1 and stop.seen[0] == [] and draft.q[0].max() < 1, (
        "drawn under the stop rule, as elsewhere"
    )


def test_the_thresholds_decide_whether_and_how_far(tmp_path: Path) -> None:
    def lengths(survival: float = 1.0, **thresholds: float) -> list[int | None]:
        return [learned(tmp_path, **thresholds).length(size, survival) for size in (1, 2, 3)]

    assert lengths() == [None, 2, 3]
    assert lengths(eps=0.4) == [None, 1, 3]
    assert lengths(first=0.0) == [0, 2, 3], "not even one token passes eps"
    assert lengths(first=0.0, eps=0.0) == [3, 3, 3], "as far as the predictor goes"
    assert lengths(first=0.8) == [None, None, 3] and lengths(first=1.0) == [None, None, None]
    assert lengths(survival=0.5) == [None, 1, 2], "less behind drawn tokens that may be rejected"
    assert lengths(survival=0.1) == [None, 0, 0]


def test_learned_copies_at_the_edges(tmp_path: Path) -> None:
    text = torch.tensor([1, 4, 3, 1, 4, 3, 1])
    for max_new, expected in ((1, []), (2, [4]), (3, [4, 3]), (20, [4, 3, 1])):
        assert grown(learned(tmp_path), committed=text, max_new=max_new)[1].token == expected
    assert grown(learned(tmp_path), committed=text, eos_ids=EOS)[1].token == [4], (
        "nothing behind EOS"
    )
    tree, draft = grown(learned(tmp_path, gamma=1), stop=Counting(1), committed=torch.tensor([2]))
    assert len(draft) == 1 == tree.forwards, "one token has no match"


def test_a_checkpoint_that_is_none_of_copies_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "specdecpp", "specdecpp", 3)
    with pytest.raises(
        UserError,
        match=r"^structure\.copies: .* holds 'specdecpp'.*python train.py predictor=copies$",
    ):
        Sources(4, 3, 1, 2, tmp_path / "specdecpp")
    with pytest.raises(UserError, match=r"^structure\.copies: no checkpoint in .*nowhere"):
        Sources(4, 3, 1, 2, tmp_path / "nowhere")


@pytest.mark.parametrize(("longest", "shortest"), [(4, 2), (2, 2), (3, 1)])
def test_a_checkpoint_of_other_matches_is_refused(
    longest: int, shortest: int, tmp_path: Path
) -> None:
    folder = write_copies(tmp_path, [0.0, 0.0, 0.0], 0.0, ngram_max=3, ngram_min=2, longest=4)
    with pytest.raises(
        UserError, match=r"^structure\.copies: .* trained with n-grams of 2 to 3 tokens.*ngram_max="
    ):
        Sources(4, longest, shortest, 2, folder)
    assert Sources(4, 3, 3, 2, folder).length(3) == 3, "fewer sizes are fine"


@pytest.mark.parametrize("name", ["config.json", "calibration.json", "model.safetensors"])
def test_a_damaged_checkpoint_is_refused_in_one_line(name: str, tmp_path: Path) -> None:
    path = write_lengths(tmp_path) / name
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(
        UserError, match=r"^structure\.copies: .* is incomplete or damaged .*python train.py"
    ) as refusal:
        Sources(4, 3, 1, 2, tmp_path)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("value", [-0.1, 1.5, True, "a", float("nan")])
@pytest.mark.parametrize("key", ["first", "eps"])
def test_thresholds_are_probabilities(key: str, value: object) -> None:
    with pytest.raises(UserError, match=rf"^structure\.{key}: "):
        Sources(4, 3, 1, 2, **{key: value})
