"""What a predictor of value learns from, and how its predictions become the survival of a draft."""

import pytest
import torch

from predictors.features.catalogue import CATALOGUE, FIXED
from predictors.inputs import Inputs
from predictors.outcomes import FALLS, OUTCOMES, Chances, survival
from predictors.training.losses import mean_loss, weighted_cross_entropy
from predictors.training.trainer import Trainer
from predictors.value import Value, ValueHead, next_acceptance
from runtime.errors import TooFewRows
from tests.helpers.damage.refusals import refuses

READS = ["q_stats", "q_path", "depth"]


def records(**changed: torch.Tensor) -> dict[str, torch.Tensor]:
    """Two rounds of three tokens."""
    some = {
        "inputs": torch.arange(48.0).view(2, 3, 8),
        "accept_prob": torch.tensor([[0.5, 0.4, 1.0], [1.0, 0.0, 0.0]]),
        "drafted": torch.tensor([3, 3]),
        "known": torch.tensor([3, 3]),
        "accepted": torch.tensor([0, 1]),
        "group": torch.tensor([4, 7]),
        "q": torch.full((2, 3), 0.5),
        "q_max": torch.full((2, 3), 0.6),
        "rrsw_token": torch.tensor([[[1, 2]] * 3, [[-1, -1]] * 3]),
        "rrsw_accept": torch.tensor([0.3, 0.2]).expand(2, 3, 2),
        "top_accept": torch.tensor([0.9, 0.8, 0.7]).expand(2, 3, 3),
    }
    return some | changed


def test_labels_and_weights_are_probabilities_of_the_harvest_and_not_its_coins():
    rows = Value(READS).samples(records())
    found = Chances.of(rows["outcomes"])
    assert rows["group"].tolist() == [4, 4, 7, 7]
    assert rows["weight"].tolist() == pytest.approx([1, 0.5, 1, 1])
    assert rows["reached"].tolist() == [True, False, True, True]
    assert rows["inputs"][:, 0].tolist() == [0, 8, 24, 32]
    assert found.first.tolist() == pytest.approx([0.5, 0.4, 1, 0])
    assert found.following.tolist() == pytest.approx([0.4, 1, 0, 0])
    assert rows["outcomes"].sum(-1).tolist() == pytest.approx([1] * 4)
    rows = Value(READS).samples(records(accept_prob=torch.full((2, 3), 0.5)))
    found = Chances.of(rows["outcomes"])
    assert found.second.tolist() == pytest.approx([0.3, 0.3, 0.8, 0.8])
    assert found.third.tolist() == pytest.approx([0.2, 0.2, 0.7, 0.7])


def test_the_token_after_the_last_that_counts_is_not_known():
    accept = torch.tensor([[0.9, 0.8, 0.7]]).expand(3, 3)
    following, known = next_acceptance(accept, torch.tensor([3, 2, 3]), torch.tensor([3, 3, 1]))
    assert following[0, :2].tolist() == pytest.approx([0.8, 0.7])
    assert known.tolist() == [[True, True, False], [True, False, False], [False] * 3]
    with pytest.raises(TooFewRows, match=r"^data: expected rounds in which a token follows .*py$"):
        Value(READS).samples(records(drafted=torch.tensor([1, 1])))


def test_survival_is_the_way_there_times_the_next_step():
    chances = Chances(*torch.rand(4, 2, 5, generator=torch.Generator().manual_seed(0)).double())
    found = survival(chances.outcomes())
    first, following = chances.first, chances.following
    torch.testing.assert_close(found[:, 0], first[:, 0] * following[:, 0])
    torch.testing.assert_close(found[:, 2], first[:, :3].prod(1) * following[:, 2])
    f = torch.tensor([[0.2, 0.8], [0.5, 0.5]])
    assert survival(f).tolist() == pytest.approx([0.8, 0.4]), "of two classes: all so far"


def test_a_weight_is_as_many_rows():
    logits = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    y = torch.softmax(torch.randn(3, 5, generator=torch.Generator().manual_seed(1)), -1)
    weighted = weighted_cross_entropy(logits, y * torch.tensor([[2.0], [1.0], [0.0]]))
    repeated = weighted_cross_entropy(logits[[0, 0, 1]], y[[0, 0, 1]])
    assert float(mean_loss(*weighted)) == pytest.approx(float(mean_loss(*repeated)))


def test_the_head_sees_orders_of_magnitude():
    """It takes the logs of the last columns: numbers come last in the catalogue."""
    kinds = [name in FIXED for name in CATALOGUE]
    assert kinds == sorted(kinds)
    head = ValueHead(3, 2, width=4, dropout=0.0)
    x = torch.tensor([[0.5, 1e-3, -1e-5]])
    expected = torch.tensor([[0.5, 1e-3, -1e-5, 1e-3, 1e-5]])
    expected[0, 3:] = (expected[0, 3:] + 1e-6).log()
    assert torch.allclose(head.spread(x), expected)
    assert head(x).shape == (1, len(OUTCOMES))


@pytest.mark.parametrize("states", [0, 40])
def test_one_row_gets_what_it_gets_among_others(states):
    torch.manual_seed(states)
    predictor = Value(READS, width=16)
    predictor.head = head = ValueHead(states + 8, 8, 16, 0.2).eval()
    head.mean.normal_()
    head.scale.uniform_(0.1, 2)
    rows = torch.randn(50, states + 8) * torch.logspace(-4, 1, 50)[:, None]
    for _ in range(2):
        together = predictor.predict_proba(rows)
        alone = torch.cat([predictor.predict_proba(row[None]) for row in rows])
        assert alone.shape == (50, 5) and (alone - together).abs().max() < 1e-6
        head.train()
        head.mean = torch.randn_like(head.mean)
        head.layers[0].weight.data = torch.randn(16, len(head.mean)) / 8
        head.eval()


@pytest.mark.parametrize("size", [(READS, 8, 64), (["draft_hidden", "q_path"], 579, 100)])
def test_size_is_what_is_checked(size):
    names, dim, width = size
    predictor = Value(names, width)
    size = sum(weights.numel() for weights in predictor.build(dim).parameters())
    assert size <= 100_000
    predictor.width = 1024
    line = refuses("^predictor.width: expected a head of at most 100000", predictor.build, dim)
    real = ValueHead(dim, sum(FIXED.get(name, 0) for name in names), 1024, 0.0)
    count = sum(weights.numel() for weights in real.parameters())
    assert f"got {count} for 1024 units on {dim} inputs" in line


def test_inputs_of_all_kinds_are_read_by_their_names():
    reads = Value(list(CATALOGUE)).reads
    assert reads == Inputs(None, None, True, True, True, True, draft_before=None, q_path=True)
    assert reads.names == tuple(CATALOGUE)
    refuses(r"^predictor.inputs: expected some of draft_hidden, ", Value, ["q_stats", "temper"])


@pytest.mark.slow
def test_it_learns_chances():
    """first and following follow from one number each; the siblings' chances do not depend on
    anything."""
    generator = torch.Generator().manual_seed(0)
    x, ones = torch.rand(4000, 8, generator=generator), torch.ones(4000)
    chances = Chances(x[:, 0], x[:, 1], 0.3 * ones, 0.1 * ones)
    group = torch.arange(4000) // 40
    rows = {"inputs": x, "outcomes": chances.outcomes(), "weight": ones, "group": group}
    trainer = Trainer(epochs=12, batch_size=64, lr=3e-3, schedule="cosine")
    predictor = Value(READS, 32, 0.0)
    predictor.fit(rows, Inputs(q_stats=True, q_path=True, depth=True), trainer)
    said = Chances.of(predictor.predict_proba(x))
    for name in ("first", "following", "second", "third"):
        gap = (getattr(said, name) - getattr(chances, name)).abs()
        assert float((gap * (chances.first if name == "following" else 1)).mean()) < 0.04, name


def test_there_and_back_and_what_cannot_happen_has_no_chance():
    chances = Chances(*torch.rand(4, 7, 3).unbind(0))
    found = Chances.of(chances.outcomes())
    torch.testing.assert_close(chances.outcomes().sum(-1), torch.ones(7, 3))
    for name in ("first", "following", "second", "third"):
        torch.testing.assert_close(getattr(found, name), getattr(chances, name))
    sure = Chances.of(torch.tensor([0.0, 0.0, 0.0, 0.0, 1.0]))
    assert (sure.first, sure.following, sure.second, sure.third) == (1, 1, 0, 0)
    never = Chances.of(torch.tensor([1.0, 0.0, 0.0, 0.0, 0.0]))
    assert (never.first, never.following, never.second, never.third) == (0, 0, 0, 0)


def test_siblings_that_were_not_learned_fall_on():
    chances = Chances(0.5, 0.5, second=0.4, third=0.2)
    assert chances.younger(0) == [] and chances.younger(1) == [0.4]
    assert chances.younger(4) == pytest.approx([0.4, 0.2, 0.1, 0.05])
    assert Chances(0.5, 0.5, 0.2, 0.4).younger(3)[2] == pytest.approx(0.4 * FALLS)
    assert Chances(1.0, 0.5, 0.0, 0.0).younger(3) == [0.0, 0.0, 0.0]
