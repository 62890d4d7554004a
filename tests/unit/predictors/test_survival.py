import math

import pytest
import torch
from torch import Tensor

from predictors.survival import Prefixes, Survival, binary_nll, by_depth, counted, fit_survival
from runtime.errors import UserError

GAMMA = 6


def prefixes(f: Tensor, accept: Tensor, length: Tensor, group: Tensor) -> Prefixes:
    return counted(f.double().cumprod(1), accept.double().cumprod(1), length, group)


def rollouts(spread: float, prompts: int = 60, rows: int = 20, hard: bool = False) -> Prefixes:
    """Each rollout is easy or hard as a whole (log-odds shifted by `spread` * normal), which f does
    not know: the product of the tokens' marginal probabilities is too small."""
    generator = torch.Generator().manual_seed(0)
    count = prompts * rows
    seen = 1 + 0.5 * torch.randn(count, GAMMA, generator=generator, dtype=torch.float64)
    hidden = spread * torch.randn(2000, 1, generator=generator, dtype=torch.float64)
    accept = torch.sigmoid(seen + hidden[torch.randint(2000, (count,), generator=generator)])
    f = torch.sigmoid(seen[..., None] + hidden[:200, 0]).mean(-1)
    if hard:
        accept = (torch.rand(accept.shape, generator=generator) < accept).double()
    return prefixes(f, accept, torch.full((count,), GAMMA), torch.arange(count) // rows)


def loss(survival: Tensor, rows: Prefixes) -> float:
    return float(binary_nll(survival, rows.accepted).mean())


@pytest.mark.parametrize("hard", [False, True])
def test_dependent_tokens_are_seen_in_the_product(hard):
    rows = rollouts(2.0, hard=hard)
    found = fit_survival(rows)
    assert not found.is_product and not found.note
    calibrated = found.of_prefixes(rows)
    for name, part in by_depth(rows.k):
        if name in ("3", "4", "5-8"):
            before, after = (
                abs(float((predicted - rows.accepted)[part].mean()))
                for predicted in (rows.product, calibrated)
            )
            assert after < before / 3
    assert loss(calibrated, rows) < loss(rows.product, rows) - 0.01
    assert found.nll_before == pytest.approx(loss(rows.product, rows))
    assert found.nll_after == pytest.approx(loss(calibrated, rows))


def test_a_product_that_is_right_is_kept_and_it_rises_with_it_at_every_depth():
    rows = rollouts(0.0)
    found = fit_survival(rows)
    assert found.is_product or torch.allclose(found.of_prefixes(rows), rows.product, atol=0.02)
    found = fit_survival(rollouts(2.0))
    product = torch.linspace(1e-5, 1 - 1e-5, 500, dtype=torch.float64)
    assert found.of_products(product[:, None].expand(-1, 20)).diff(dim=0).min() > 0


@pytest.mark.parametrize("weights", [(1.0, 0.0, 2.0), (0.5, 0.1, 0.01), (1.0, 0.0, -0.1)])
def test_a_longer_prefix_is_never_more_likely(weights):
    """A positive weight of the depth lifts long prefixes, and products below `CLIP` count as
    `CLIP`."""
    survival, f = Survival(*weights), torch.tensor([[0.9, *[0.99] * 3], [1e-7, 0.5, 0.5, 1.0]])
    assert survival(f).diff(dim=-1).max() <= 0
    rows = prefixes(f, f, torch.tensor([3, 4]), torch.tensor([0, 1]))
    whole = torch.cat([survival(f[0, :3]), survival(f[1])])
    assert torch.allclose(survival.of_prefixes(rows), whole, rtol=1e-14, atol=0), (
        "but for vector lanes"
    )


def test_one_way_of_reading_it():
    f = torch.rand(5, 4, generator=torch.Generator().manual_seed(0))
    for survival in (Survival(), Survival(0.8, 0.2, -0.3)):
        batch = survival(f)
        assert batch.shape == (5, 4) and batch.dtype == torch.float64
        for row, expected in zip(f, batch, strict=True):
            grown = torch.stack([survival(row[: k + 1])[-1] for k in range(4)])
            assert torch.equal(grown, expected)
        rows = prefixes(f, f, torch.full((5,), 4), torch.arange(5))
        assert torch.equal(survival.of_prefixes(rows), batch.flatten())
    assert torch.equal(Survival()(f), f.double().cumprod(1))
    assert torch.isfinite(Survival(2.0, 0.1)(torch.tensor([1.0, 0.0]))).all()


def test_prefixes_end_where_the_draft_does_and_deep_ones_are_reported_together():
    f = torch.tensor([[0.5, 0.4, 0.9], [0.2, 0.5, 1.0]])
    accept = torch.tensor([[1.0, 0.5, 0.5], [0.5, 0.0, 1.0]])
    rows = prefixes(f, accept, torch.tensor([3, 2]), torch.tensor([7, 9]))
    assert rows.k.tolist() == [1, 2, 3, 1, 2] and rows.group.tolist() == [7, 7, 7, 9, 9]
    assert rows.product.tolist() == pytest.approx([0.5, 0.2, 0.18, 0.2, 0.1])
    assert rows.accepted.tolist() == [1.0, 0.5, 0.25, 0.5, 0.0]
    k = torch.arange(1, 21).double()
    parts = {name: k[part].tolist() for name, part in by_depth(k)}
    assert list(parts) == ["all", "1", "2", "3", "4", "5-8", "9-"]
    assert parts["5-8"] == [5, 6, 7, 8] and parts["9-"] == list(range(9, 21))


def test_one_prompt_and_nan():
    rows = rollouts(2.0, prompts=1)
    assert fit_survival(rows).is_product and "two prompts" in fit_survival(rows).note
    with pytest.raises(UserError, match=r"^calibration\.survival: .*NaN"):
        fit_survival(rows._replace(product=rows.product * math.nan))


@pytest.mark.parametrize("survival", [Survival(), Survival(0.8, -0.3, 0.4)])
def test_one_prefix_is_worth_what_all_of_them_say(survival):
    """Also where a longer one is more likely, as by what was learned since."""
    products = torch.tensor([0.999999999, 0.7, 0.2, 0.6, 1e-9, 0.0], dtype=torch.float64)
    found = [1.0]
    for k, product in enumerate(products.tolist(), 1):
        found.append(survival.of_product(product, k, found[-1]))
    assert found[1:] == pytest.approx(survival.of_products(products).tolist(), abs=1e-12)
