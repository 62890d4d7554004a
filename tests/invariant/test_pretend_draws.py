"""Draws on a pretend device: none of probability 0, and one line where logits are no numbers."""

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from decoding.draft import Draft, RoundContext
from decoding.draft_tree import DraftTree
from decoding.engines.serial import SerialEngine
from decoding.models.loading import ModelPair
from decoding.picking import DevicePool
from decoding.sampling import Sampler, Warp, top_tokens
from decoding.stopping.never import Never
from decoding.structures.chain import Chain
from decoding.trace import Stopwatch
from decoding.verification import WarpedRows
from decoding.verifiers.hsd_released import HsdReleased
from runtime.errors import UserError
from tests.contract.engines import engine
from tests.contract.rules import load
from tests.helpers.device.device_report import PROMPT, pair_on
from tests.helpers.device.pretend_device import pretend
from tests.invariant.test_pretend_matrix import CASES

UNIFORM = (0.0, 0.25, 0.5, 0.75, 1 - 2.0**-53)


@pytest.mark.parametrize(
    "masses", [[1.0], [0.0, 1.0], [1.0, 0.0], [0.2, 0.0, 0.3, 0.0], [3.0, 0.0, 4.0], [1e-30, 0.0]]
)
def test_no_token_of_probability_0_is_drawn(masses: list[float]) -> None:
    with pretend():
        drawn = {DevicePool(torch.tensor(masses, device="cuda:0")).pick(u).token for u in UNIFORM}
    assert drawn <= {token for token, mass in enumerate(masses) if mass > 0}


def test_nor_where_a_sum_made_in_parts_rises_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parallel sums round each part in its own way, so they may step at a 0."""
    uneven = torch.tensor([0.25, 0.25 + 2.0**-30, 0.5, 1.0, 1.0 + 2.0**-30], dtype=torch.float64)
    monkeypatch.setattr(Tensor, "cumsum", lambda *_, **__: uneven.to("cuda:0"))
    with pretend():
        pool = DevicePool(torch.tensor([0.25, 0.0, 0.25, 0.5, 0.0], device="cuda:0"))
        assert pool.pick(0.25).token in (0, 2) and pool.pick(1 - 2.0**-50).token == 3


def test_nothing_is_drawn_from_nothing() -> None:
    with pretend(), pytest.raises(AssertionError, match="at least one token"):
        DevicePool(torch.zeros(3, device="cuda:0")).pick(0.5)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("warp", [Warp(0.0), Warp(), Warp(0.7, 0, 0.9), Warp(0.7, 3)])
def test_a_row_that_is_no_distribution_is_nan_throughout(warp: Warp, bad: float) -> None:
    with pretend():
        row = warp.probs(torch.tensor([1.0, bad, 0.0, 2.0]).to("cuda:0"))
        assert row.isnan().all()
        with pytest.raises(UserError, match="NaN or infinite logits"):
            DevicePool(row).pick(0.5)
        with pytest.raises(UserError, match="NaN or infinite logits"):
            next(top_tokens(row, Sampler.seeded(0)))


def spoiled(pair: ModelPair, side: str) -> ModelPair:
    """One row of the second forward is NaN."""
    calls = 0

    def spoil(_: object, __: object, logits: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == 2:
            logits = logits.clone()
            logits[:, 0] = math.nan
        return logits

    getattr(pair, side).model.lm_head.register_forward_hook(spoil)
    return pair


@pytest.mark.parametrize(
    ("name", "side"),
    [
        ("token-{}-chain", "target"),
        ("block-{}-chain", "target"),
        ("parallel-{'rule': 'block'}-parallel_paths", "target"),
        ("point_mass-{}-reranked", "draft"),
    ],
)
def test_nan_ends_in_one_line_as_on_the_host(name: str, side: str, tmp_path: Path) -> None:
    def decode(device: str) -> None:
        pair = spoiled(pair_on(device, device), side)
        made = engine(pair, CASES[name], tmp_path, None, Warp(0.8), Warp(0.8))
        with pytest.raises(UserError, match="NaN or infinite logits"):
            made.decode(PROMPT, 12, Sampler.seeded(4))

    decode("cpu")
    with pretend():
        decode("cuda:0")


def test_q_of_copied_and_of_drawn_tokens_keep_their_order() -> None:
    """Copied ones are on the host where no model has been asked before."""
    with pretend():
        lm = pair_on("cuda:0", "cuda:0").draft
        lm.output_device = lm.device
        tree = DraftTree(lm, RoundContext(torch.tensor(PROMPT), 9), Warp(), Stopwatch())
        row = tree.copy(0, 7)
        drawn = tree.draw(row)
        tree.copy(drawn, 3)
        q = tree.q(row)[tree.token[1]].item()
        assert tree.drawn == [1.0, pytest.approx(q), 1.0]


@pytest.mark.parametrize("places", [("cuda:0", "cuda:0"), ("cuda:0", "cuda:1")])
def test_hsd_as_released_decodes_there_what_it_decodes_on_the_host(places: tuple[str, str]) -> None:
    def decode(*places: str) -> list[int]:
        parts = Chain(4), Never(), HsdReleased(allow_lossy=True), Warp(0.8), Warp(0.8)
        return SerialEngine(pair_on(*places), *parts).decode(PROMPT, 12, Sampler.seeded(4)).tokens

    expected = decode("cpu", "cpu")
    with pretend():
        assert decode(*places) == expected


@pytest.mark.parametrize("name", ["rrs", "rrsw", "point_mass", "spechub"])
def test_nan_beside_the_accepted_path_comes_into_no_record(name: str) -> None:
    q, logits = torch.full((3,), 1 / 3), torch.zeros(4, 3)
    logits[0, 0] = 99.0  # so that the first child is accepted
    logits[2] = math.nan
    with pretend():
        rows = [row.to("cuda:0") for row in (q, 0 * q, q, 0 * q)]
        p = WarpedRows(logits.to("cuda:0"), Warp())
        with pytest.raises(UserError, match="NaN or infinite logits"):
            load(name).verify(Draft([0, 0, 2], [0, 1, 0], rows), p, Sampler.seeded(0))
