"""What predictors read of a harvest and while decoding; the heads of published ones by hand."""

import pytest
import torch
import torch.nn.functional as F

from predictors.features.catalogue import CATALOGUE, FIXED
from predictors.features.draft_statistics import (
    Q_STATS,
    TINY,
    entropy,
    history_row,
    history_rows,
    path_row,
    path_rows,
    q_stats,
    q_stats_of,
)
from predictors.features.layers import LAYERS as LAYERS_OF
from predictors.features.layers import RecordedLayers, checked_layers, narrowed, side_by_side
from predictors.hrad import ClassMLP
from predictors.inputs import Inputs, matrix, recorded, refuse_unreadable
from predictors.specdecpp import AcceptanceHead
from runtime.errors import UserError
from tests.helpers.damage.refusals import refuses

HIDDEN = torch.arange(4 * 2 * 3, dtype=torch.float32).view(4, 2, 3)  # [n_layers + 1, n, H]
LAYERS = RecordedLayers([-1], [-3, -2, -1])
H = 6


def rounds(count: int = 5, gamma: int = 4) -> dict[str, torch.Tensor]:
    """Records of the kind `rounds`, with what is worked out of them: H = 3, E = 2."""
    shape = count, gamma
    return {
        "draft_hidden": torch.randn(*shape, 3).bfloat16(),
        "draft_first": torch.randn(count, 3).bfloat16(),
        "target_hidden": torch.randn(count, 9).bfloat16(),
        "embedding": torch.randn(*shape, 2).bfloat16(),
        "committed_embedding": torch.randn(count, 2).bfloat16(),
        "history": torch.rand(count, 3),
        "depth": torch.arange(1, gamma + 1).expand(shape),
        **{name: torch.rand(shape) for name in Q_STATS},
    }


def test_values_have_the_precision_of_the_harvested_files():
    facts = {"draft_hidden": torch.randn(5, 7), "embedding": torch.randn(5, 2)}
    rows = matrix(Inputs([-1], token=True), facts)
    wanted = torch.cat([facts["draft_hidden"], facts["embedding"]], dim=1)
    assert torch.equal(rows.float(), wanted.bfloat16().float())


@pytest.mark.parametrize("name", CATALOGUE)
def test_columns_are_in_the_order_of_the_catalogue(name):
    records, one = rounds(), {name: (-1,) if name in LAYERS_OF else True}
    everything = Inputs(**{each: (-1,) if each in LAYERS_OF else True for each in CATALOGUE})
    alone = recorded(Inputs(**one), LAYERS, records, "token")
    widths = dict.fromkeys(LAYERS_OF, 3) | {"token": 2} | FIXED
    start = sum(widths[other] for other in list(CATALOGUE)[: list(CATALOGUE).index(name)])
    both = recorded(everything, LAYERS, records, "token")
    assert torch.equal(both[..., start : start + alone.shape[-1]], alone.float())


def test_facts_are_where_they_belong():
    records = rounds()
    rows = recorded(Inputs([-1], q_stats=True), LAYERS, records, "token")
    assert rows.dtype == torch.float32
    assert torch.equal(rows[..., 3:], torch.stack([records[name] for name in Q_STATS], -1))
    rows = recorded(Inputs((), [-2], history=True), LAYERS, records, "token")
    assert rows.shape == (5, 4, 6)
    assert torch.equal(rows[:, 3, :3], records["target_hidden"][:, 3:6].float())
    assert torch.equal(rows[:, 0, 3:], records["history"])
    rows = recorded(Inputs(draft_before=[-1]), LAYERS, records, "token")
    assert torch.equal(rows[:, 0], records["draft_first"])
    assert torch.equal(rows[:, 1:], records["draft_hidden"][:, :-1])


def test_before_a_round_the_token_is_the_last_committed_one():
    records, reads = rounds(), Inputs((), [-3, -1], token=True)
    assert reads.columns("round") == ("target_hidden", "committed_embedding")
    assert reads.columns("token") == ("target_hidden", "embedding", "depth")
    rows = recorded(reads, LAYERS, records, "round")
    hidden = records["target_hidden"].view(5, 3, 3)[:, [0, 2]].flatten(1)
    assert torch.equal(rows, torch.cat([hidden, records["committed_embedding"]], 1))


def test_round_trip_and_null_for_all_that_were_recorded():
    reads = Inputs([-2, -1], None, q_stats=True)
    assert Inputs.from_dict(reads.to_dict()) == reads
    assert Inputs.from_dict({"draft_hidden": [-1]}) == Inputs([-1])
    assert Inputs(None, None).among(LAYERS) == Inputs([-1], [-3, -2, -1])
    assert Inputs([-1], depth=True).among(LAYERS) == Inputs([-1], depth=True)


@pytest.mark.parametrize("layers", [[-3, -1], [-2], [-3, -2, -1]])
def test_recorded_columns_of_some_layers_are_what_decoding_reads(layers):
    hidden = torch.randn(4, 2, 3)
    rows = narrowed(side_by_side(hidden[-3:]), [-3, -2, -1], layers)
    assert torch.equal(rows, side_by_side(hidden[layers]))
    rollouts = side_by_side(hidden[-3:])[:, None].expand(2, 5, -1)
    assert narrowed(rollouts, [-3, -2, -1], layers).shape == (2, 5, 3 * len(layers))


@pytest.mark.parametrize("wanted", [[-4], [-1, -2], [-5, -1]])
def test_what_was_not_recorded_is_refused(wanted):
    says = r"the recorded layers \[-3, -2, -1\], in their order, got .* inputs\.target_layers="
    refuses(rf"^predictor\.layers: expected some of {says}", Inputs((), wanted).among, LAYERS)


def test_layers_that_are_none_or_differ_are_refused():
    for layers in (3, "-1", "", [0], [True], [-1.0]):
        refuses(r"^predictor\.layers: expected negative layers", checked_layers, layers)
    with pytest.raises(UserError, match=r"^inputs\.draft_before: expected the layers of"):
        Inputs(draft_hidden=[-1], draft_before=[-2])


@pytest.mark.parametrize(
    ("reads", "when", "kind", "words"),
    [
        (Inputs(), "token", "rounds", "expected new to read something"),
        (Inputs([-1]), "round", "rounds", "before a round, got draft_hidden"),
        (Inputs(depth=True, q_stats=True), "round", "rounds", "got q_stats, depth of a drawn"),
        (Inputs([-1], [-1]), "token", "mixed", "mixed records hold, got target_hidden"),
        (Inputs(history=True), "token", "mixed", "mixed records hold, got history"),
    ],
)
def test_what_is_not_there_is_refused(reads, when, kind, words):
    with pytest.raises(UserError, match=f"^predictor: .*{words}"):
        refuse_unreadable(reads, when, kind, "new")  # type: ignore[arg-type]


def test_numbers_of_a_path_and_of_a_drawn_token():
    rows = path_rows(torch.tensor([0.5, 0.8, 0.1]))
    torch.testing.assert_close(rows[:, 0].exp(), torch.tensor([0.5, 0.4, 0.04]))
    torch.testing.assert_close(rows[:, 1:], torch.tensor([[0.5, 1], [0.5, 0.5], [0.1, 0.8]]))
    unwarped = torch.tensor([[0.5, 0.3, 0.2], [0.0, 0.0, 1.0]])
    numbers = q_stats(unwarped, torch.tensor([1, 2]))
    expected = [[0.3, 1.0], [0.5, 1.0], [0.2, 1.0], [1.02965, 0.0]]
    assert list(numbers) == list(Q_STATS)
    torch.testing.assert_close(torch.stack(list(numbers.values())), torch.tensor(expected))


def test_numbers_of_one_token_are_those_of_many():
    generator = torch.Generator().manual_seed(0)
    for vocab in (2, 3, 1000):
        logits = torch.randn(40, vocab, generator=generator) * 4
        logits[:4, 1:] = -torch.inf
        logits[4:8, :2] = logits[4:8].max()
        unwarped, token = logits.softmax(-1), torch.arange(40) % vocab
        expected = torch.stack(list(q_stats(unwarped, token).values()), -1)
        found = [q_stats_of(row, int(one)) for row, one in zip(unwarped, token, strict=True)]
        torch.testing.assert_close(torch.tensor(found), expected, rtol=1e-6, atol=1e-7)
        path = unwarped[:, 0]
        found = [path_row(path[: n + 1].tolist()) for n in range(40)]
        torch.testing.assert_close(torch.tensor(found), path_rows(path), rtol=1e-6, atol=1e-6)


def test_history_looks_back_on_the_last_verdicts():
    assert history_row([]).tolist() == [0.5, 0.5, 0.0]
    assert history_row([True]).tolist() == [0.75, 0.75, 1 / 16]
    row = history_row([True] * 14 + [False] * 6)
    assert row.tolist() == pytest.approx([0.5 / 5, 10.5 / 17, 1.0])
    rows = history_rows(torch.tensor([True, False, False]))
    assert torch.equal(rows[2], history_row([True, False])) and rows.shape == (3, 3)


@pytest.mark.parametrize(
    ("inputs", "dims"),
    [
        (Inputs((), (), depth=True), {1}),
        (Inputs((), (), depth=True, history=True), {4}),
        (Inputs([-1]), set(range(1, 13))),
        (Inputs([-1, -2]), {2, 4, 6, 8, 10, 12}),
        (Inputs([-1, -2], depth=True), {3, 5, 7, 9, 11}),
        (Inputs([-1, -2], [-1, -2]), {4, 6, 8, 10, 12}),
        (Inputs([-1, -2], token=True), set(range(3, 13))),
    ],
)
def test_how_many_columns_inputs_can_make(inputs, dims):
    assert {dim for dim in range(13) if inputs.fit(dim)} == dims


def test_entropy_of_a_draft_over_part_of_the_vocabulary():
    """Zeros give nothing, in the time of other numbers: `TINY` has a logarithm that is quick."""
    probs = torch.tensor([0.5, 0.0, 0.25, 0.0, 0.25])
    torch.testing.assert_close(entropy(probs), torch.tensor(1.0397208))
    assert entropy(torch.eye(4)).tolist() == [0.0] * 4
    assert TINY >= torch.finfo(torch.float32).smallest_normal


@pytest.mark.parametrize(("depth", "tied"), [(0, False), (2, False), (2, True)])
def test_acceptance_head_by_hand(depth, tied):
    """Tied blocks repeat one block; depth 0 is logistic regression."""
    head, x = AcceptanceHead(H, depth, tied), torch.randn(3, H)
    expected, blocks = x, list(head.blocks) * (2 if tied else 1)
    assert len(blocks) == depth
    for block in blocks:
        expected = expected + F.silu(expected @ block.weight.T + block.bias)
    assert torch.allclose(head(x), expected @ head.out.weight.T + head.out.bias, atol=1e-6)


def test_class_mlp_shape_and_dropout():
    layers = ClassMLP(H, dropout=0.4).layers
    shapes = [tuple(layer.weight.shape) for layer in layers if hasattr(layer, "weight")]
    assert shapes == [(256, H), (64, 256), (3, 64)]
    assert [layer.p for layer in layers if isinstance(layer, torch.nn.Dropout)] == [0.4, 0.4]
