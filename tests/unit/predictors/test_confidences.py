"""Imported confidences: their table, sequential temperatures as engines fit them, and maps."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from predictors.calibration import fit_isotonic, fit_platt, fit_temperature
from predictors.confidences.maps import (
    accepted_length_loss,
    as_logged,
    conditional_temperatures,
    fit_maps,
    of_temperatures,
    reached,
)
from predictors.confidences.run import errors, helps, scored
from predictors.confidences.sts import Sts, equal_width_ece
from predictors.confidences.table import (
    MANIFEST,
    TENSORS,
    Confidences,
    blocks,
    is_imported,
    joined,
    read_confidences,
    table,
)
from runtime.errors import UserError
from tests.helpers.damage.refusals import refuses
from tests.helpers.training.confidences import TEMPERATURES, logged, write_logged

Z, S = torch.tensor([[1.0, 2.0]]), torch.tensor([[1.0, 0.0]])
NAN = torch.tensor([[1.0, float("nan")]])
DEEPSPEC = Sts(0.05, 20.0, 256, True, 20)
SGLANG = Sts(0.1, 10.0, 41, False, 15)


@pytest.mark.parametrize(
    ("logits", "labels", "says"),
    [
        (Z, S[:, :1], "same shape"),
        (Z[0], S[0], "same shape"),
        (Z[:0], S[:0], "same shape"),
        (NAN, S, "finite logits"),
        (Z, S.flip(1), "one that rises"),
        (Z, 2 * S, "between 0 and 1"),
        (Z, NAN, "between 0 and 1"),
    ],
)
def test_what_is_no_table_is_refused(logits, labels, says):
    with pytest.raises(UserError) as error:
        table("source.files: x.pt", "toy", logits, labels, torch.tensor([2]), torch.tensor([0]))
    line = str(error.value)
    assert line.startswith("source.files: x.pt: expected") and says in line and "\n" not in line


def test_values_that_do_not_count_may_be_anything_and_blocks_are_the_units():
    found = table("x", "toy", NAN, S.flip(1) + 1, torch.tensor([0]), torch.tensor([0]))
    assert found.logits.tolist() == [[0, 0]] and found.labels.tolist() == [[0, 0]]
    assert blocks(130).bincount().tolist() == [64, 64, 2]


def test_tables_are_joined_with_their_groups_and_domains_apart():
    found = joined([logged(100, domain="code"), logged(70, 1, "chat"), logged(10, 2, "code")], "x")
    assert found.domains == ("chat", "code")
    assert found.domain.bincount().tolist() == [70, 110]
    assert len(found.group.unique()) == 2 + 2 + 1


@pytest.mark.parametrize("gamma", [None, 2])
def test_one_gamma(gamma):
    other = table("x", "toy", Z, S, torch.tensor([2]), torch.tensor([0]))
    refuses(r"^x: expected proposals of \d tokens, got \d", joined, [logged(10), other], "x", gamma)


def test_a_folder_comes_back(tmp_path):
    made, found = logged(100), read_confidences(write_logged(tmp_path / "x", 100))
    for name in ("logits", "labels", "length", "group", "domain"):
        assert torch.equal(getattr(made, name), getattr(found, name))
    assert found.domains == ("toy",) and found.facts["labels"] == "realised"
    assert is_imported(tmp_path / "x") and not is_imported(tmp_path)


@pytest.mark.parametrize("name", [MANIFEST, TENSORS])
@pytest.mark.parametrize("how", ["cut", "gone", "changed"])
def test_a_damaged_folder_is_refused_in_one_line(name, how, tmp_path):
    path = write_logged(tmp_path / "x") / name
    content = path.read_bytes()
    if how == "gone":
        path.unlink()
    else:
        path.write_bytes(content[:-9] if how == "cut" else content[:-9] + b"x" + content[-8:])
    with pytest.raises(UserError) as error:
        read_confidences(tmp_path / "x")
    line = str(error.value)
    assert line.startswith("data:") and "import_confidence" in line and "\n" not in line


def plain_ece(predicted: list[float], labels: list[float], bins: int) -> float:
    """As the engines' notes have it, a proposal at a time."""
    cells: dict[int, list[tuple[float, float]]] = {}
    for p, label in zip(predicted, labels, strict=True):
        p = min(max(p, 1e-8), 1 - 1e-8)
        cells.setdefault(min(int(p * bins), bins - 1), []).append((p, label))
    gaps = [
        len(rows) * abs(sum(p for p, _ in rows) / len(rows) - sum(s for _, s in rows) / len(rows))
        for rows in cells.values()
    ]
    return sum(gaps) / len(predicted)


def test_the_error_is_that_of_the_engines():
    predicted = torch.rand(500, generator=torch.Generator().manual_seed(1)).double()
    predicted[:2] = torch.tensor([0.0, 1.0])
    labels = (predicted > 0.4).double()
    for bins in (15, 20):
        expected = plain_ece(predicted.tolist(), labels.tolist(), bins)
        assert equal_width_ece(predicted, labels, bins) == pytest.approx(expected, abs=1e-12)
    assert math.isnan(equal_width_ece(predicted[:0], labels[:0], 20))


@pytest.mark.parametrize("sts", [DEEPSPEC, SGLANG], ids=["deepspec", "sglang"])
def test_known_temperatures_are_found(sts):
    for found, true in zip(sts(logged(20000)), TEMPERATURES, strict=True):
        assert found == pytest.approx(true, rel=0.25)


def test_each_temperature_is_the_first_of_lowest_error_given_those_before():
    rows = logged(300)
    survival = torch.ones(300).double()
    for position, found in enumerate(SGLANG(rows)):
        z, labels = rows.logits[:, position], rows.labels[:, position].tolist()
        errors = {
            t: plain_ece((survival * torch.sigmoid(z / t)).tolist(), labels, 15)
            for t in torch.logspace(-1, 1, 41).double().tolist()
        }
        least = min(errors.values())
        assert found == next(t for t, error in errors.items() if error <= least + 1e-12)
        survival = survival * torch.sigmoid(rows.logits[:, position] / found)


def test_grids_and_a_position_that_nothing_came_to():
    assert len(DEEPSPEC.grid()) == 257 and 1.0 in DEEPSPEC.grid()
    assert torch.equal(SGLANG.grid(), torch.logspace(-1, 1, steps=41).double())
    assert SGLANG(replace(logged(100), length=torch.full((100,), 2)))[2] == 1.0


def test_only_what_counts_is_fitted_on():
    whole = logged(400)
    noise = torch.where(torch.arange(400)[:, None] % 2 == 0, whole.logits, -whole.logits * 9)
    half = torch.where(torch.arange(400) % 2 == 0, 3, 1)
    noise[:, 0] = whole.logits[:, 0]
    rows = table("toy", "toy", noise, whole.labels, half, blocks(400))
    found, clean = SGLANG(rows), SGLANG(whole)
    assert found[0] == clean[0]
    kept = whole.rows(half == 3)
    first = torch.sigmoid(kept.logits[:, 0] / found[0])
    errors = [
        equal_width_ece(first * torch.sigmoid(kept.logits[:, 1] / t), kept.labels[:, 1], 15)
        for t in SGLANG.grid().tolist()
    ]
    assert found[1] == SGLANG.grid()[errors.index(min(errors))]


def made(logits: Tensor, labels: Tensor, group: Tensor, length: int = 3) -> Confidences:
    return table("x", "toy", logits, labels, torch.full((len(logits),), length), group)


def coins(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


def test_temperatures_of_every_position():
    maps = fit_maps(logged(), fit_temperature, None, False)
    temperatures = maps.temperatures() or []
    assert temperatures == pytest.approx(TEMPERATURES, rel=0.2)
    assert temperatures == pytest.approx(conditional_temperatures(logged()), rel=0.1)
    z = torch.tensor([[1.0, -2.0, 0.5]]).double()
    expected = torch.sigmoid(z / torch.tensor(temperatures)).cumprod(1)
    assert torch.allclose(maps.surviving(z), expected, atol=1e-9)


@pytest.mark.parametrize("fit", [fit_platt, fit_isotonic])
def test_freer_maps_have_no_temperatures(fit):
    rows = logged(8000)
    shifted = made(rows.logits + 2, rows.labels, rows.group)
    maps = fit_maps(shifted, fit, None, False)
    survival, third = maps.surviving(shifted.logits), shifted.labels[:, 2]
    assert maps.temperatures() is None and helps(shifted, survival)
    after, before = (equal_width_ece(s[:, 2], third, 15) for s in (survival, as_logged(shifted)))
    assert after < 0.02 < before


@pytest.mark.parametrize("fit", [fit_temperature, fit_platt, fit_isotonic])
def test_expected_labels_fit_as_so_many_realised_ones(fit):
    base, times = logged(3000), 8
    true = torch.sigmoid(base.logits / torch.tensor(TEMPERATURES))
    labels = (coins((3000, times, 3), 3) < true[:, None]).double().cumprod(2)
    many, group = base.logits.repeat_interleave(times, 0), base.group.repeat_interleave(times)
    realised = made(many, labels.view(-1, 3), group)
    expected = made(base.logits, labels.mean(1), base.group)
    maps = [fit_maps(rows, fit, None, False) for rows in (realised, expected)]
    ours, theirs = (each.surviving(base.logits) for each in maps)
    assert torch.allclose(ours, theirs, atol=5e-3)


def test_only_what_came_so_far_is_learned_from_and_the_loss_is_of_the_accepted_length():
    rows = logged(500)
    logits, targets, group = reached(rows, 1)
    assert len(logits) == len(group) == int(rows.labels[:, 0].sum())
    assert torch.equal(targets.sum(1), torch.ones(len(targets)).double())
    z = torch.tensor([[0.3, -0.2, 1.0]]).double()
    c = torch.sigmoid(z)[0].tolist()
    likely = [1 - c[0], c[0] * (1 - c[1]), c[0] * c[1] * (1 - c[2]), c[0] * c[1] * c[2]]
    for accepted, p in enumerate(likely):
        rows = made(z, (torch.arange(3) < accepted).double()[None], torch.tensor([0]))
        loss = accepted_length_loss(rows, as_logged(rows))
        assert loss.item() == pytest.approx(-math.log(p))


def test_scores_by_domain_and_position():
    rows = joined([logged(640, domain="a"), logged(640, 1, "b")], "x")
    held_out = of_temperatures(list(TEMPERATURES)).surviving(rows.logits)
    scores = scored(rows, {"as logged": as_logged(rows), "true": held_out})
    assert list(scores) == ["all", "a", "b"] and helps(rows, held_out)
    assert scores["all"]["proposals"] == 1280 and scores["a"]["groups"] == 10
    value, low, high = scores["all"]["change"]["true"]
    assert low <= value <= high < 0
    first = scores["all"]["positions"][0]
    assert first["position"] == 1
    ece = equal_width_ece(as_logged(rows)[:, 0], rows.labels[:, 0], 20)
    value, low, high = first["stages"]["as logged"]["deepspec"]
    assert value == pytest.approx(ece, abs=1e-6) and low <= value <= high
    assert first["stages"]["true"]["sglang"][0] < first["stages"]["as logged"]["sglang"][0]


def test_survival_is_fitted_where_it_helps():
    """One coin for the whole of a draft: the product of its tokens' probabilities is too low."""
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(4000, 1, generator=generator).double()
    labels = (torch.rand(4000, 1, generator=generator) < torch.sigmoid(z)).double()
    rows = made(z.repeat(1, 3), labels.repeat(1, 3), torch.arange(4000) // 64)
    assert not fit_maps(rows, None, None, True).survival.is_product
    assert fit_maps(rows, None, None, False).survival.is_product


def test_errors_of_perfect_predictions_are_small():
    p, group = coins((20000,), 2).double(), torch.arange(20000) // 64
    labels = (coins((20000,), 1) < p).double()
    result = errors(p, labels, group)
    assert all(result[name][0] < 0.02 for name in ("deepspec", "sglang", "ours"))
    mean, low, high = result["perfect"]
    assert low < mean < high and low <= result["deepspec"][0] <= high
    assert errors(p[:500], labels[:500], group[:500])["perfect"][0] > 3 * mean


def test_a_position_without_proposals_is_named():
    rows = logged(200)
    short = made(rows.logits, rows.labels, rows.group, length=2)
    maps = fit_maps(short, fit_temperature, None, False)
    assert "no proposal came so far" in maps.positions[2].note
    assert scored(short, {"as logged": as_logged(short)})["toy"]["positions"][2]["rows"] == 0
    assert fit_maps(short, None, SGLANG, False).temperatures()[2] == 1  # type: ignore[index]
