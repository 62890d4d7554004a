import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from decoding.draft import RoundContext, Verdict
from decoding.engines.serial import SerialEngine
from decoding.models.table_lm import TableLM, mixed_table, random_table
from decoding.sampling import Sampler, Warp
from decoding.stopping.adaedl import AdaEDL, entropy
from decoding.stopping.confidence import Confidence
from decoding.stopping.confidence_before import ConfidenceBefore
from decoding.stopping.fixed import Fixed
from decoding.stopping.product import Product
from decoding.stopping.stop_loss import StopLoss
from decoding.structures.branch_point import BranchPoint
from decoding.structures.chain import Chain
from decoding.verifiers.rrsw import RrswVerifier
from decoding.verifiers.token import TokenVerifier
from runtime.errors import UserError
from tests.helpers.decoding.costs import write_cost


class Step:
    """A DraftStep whose next distribution and last drawn token are given."""

    def __init__(self, count: int, unwarped_q: list[float], drawn: float = 1.0) -> None:
        self.count = count
        self.unwarped_q = lambda: torch.tensor(unwarped_q)
        self.drawn_unwarped_q = lambda: drawn


def context(round_: int = 0) -> RoundContext:
    return RoundContext(torch.tensor([1]), max_new=9, round=round_)


def verdict(accepted: int, drafted: int) -> Verdict:
    return Verdict(accepted, [0] * accepted, 0, drafted)


def ada_edl() -> AdaEDL:
    return AdaEDL(0.4, kappa=0.2, target_rate=0.9, step=0.01, rate_memory=0.5, threshold_memory=0.9)


def test_fixed_counts() -> None:
    assert [Fixed(2).should_stop(Step(count, [1.0])) for count in range(4)] == [
        False,
        False,
        True,
        True,
    ]


def test_confidence_after_the_draw() -> None:
    rule = Confidence(0.3)
    rule.begin_round(context())
    assert not rule.should_stop(Step(0, [1.0], drawn=0.1))
    assert rule.should_stop(Step(1, [1.0], drawn=0.29)) and not rule.should_stop(
        Step(1, [1.0], drawn=0.3)
    )
    assert rule.predicted == [0.29, 0.3]
    rule.begin_round(context(1))
    assert rule.predicted == []


def test_product_of_all_that_was_drawn() -> None:
    rule = Product(0.3)
    for round_ in (0, 1):
        rule.begin_round(context(round_))
        asked = [rule.should_stop(Step(count, [1.0], drawn=0.6)) for count in range(4)]
        assert asked == [False, False, False, True]
        assert rule.predicted == pytest.approx([0.6, 0.36, 0.216])


def test_products_are_tried_closely_where_they_are_small() -> None:
    grid = Product(0.3).grid(50, 20)
    assert (len(grid), grid[0], grid[-1]) == (51, 0, 1) and sorted(set(grid)) == grid
    assert sum(0 < value < 1e-3 for value in grid) >= 10


def test_confidence_before_the_draw() -> None:
    rule = ConfidenceBefore(0.5)
    assert rule.should_stop(Step(0, [0.4, 0.3, 0.3])) and not rule.should_stop(Step(0, [0.6, 0.4]))


def test_entropy() -> None:
    assert entropy(torch.tensor([0.5, 0.5, 0.0])) == pytest.approx(math.log(2))
    assert entropy(torch.tensor([0.0, 1.0])) == 0
    assert entropy(torch.full((50_000,), 1 / 50_000)) == pytest.approx(math.log(50_000), rel=1e-4)


def test_ada_edl_stops_where_its_bound_is_low() -> None:
    rule = ada_edl()
    uniform = [1 / 6] * 6  # 1 - sqrt(0.2 log 6) = 0.4014
    assert not rule.should_stop(Step(0, uniform))
    assert rule.should_stop(Step(0, [1 / 7] * 7))
    assert rule.predicted == pytest.approx(
        [1 - math.sqrt(0.2 * math.log(n)) for n in (6, 7)], abs=1e-6
    )


def test_ada_edl_threshold_follows_the_acceptance_rate() -> None:
    rule = ada_edl()
    rule.end_round(verdict(0, 4))  # mean rate 0.45 < 0.9: up
    assert (rule.rate, rule.level) == (pytest.approx(0.45), pytest.approx(0.401))
    rule.end_round(verdict(0, 0))  # nothing drafted, nothing learnt
    assert rule.level == pytest.approx(0.401)
    rule.rate = 1.0
    rule.end_round(verdict(4, 4))  # above target, but all accepted: kept
    assert rule.level == pytest.approx(0.401)
    rule.end_round(verdict(9, 10))  # mean rate 0.95: down
    assert rule.level == pytest.approx(0.400)
    rule.end_round(verdict(0, 4))
    rule.begin_round(context(round_=3))
    assert rule.level > 0.4
    rule.begin_round(context(round_=0))
    assert (rule.rate, rule.level) == (0.9, 0.4)


class Recorded(AdaEDL):
    """Notes the threshold after every round."""

    def end_round(self, verdict: Verdict) -> None:
        super().end_round(verdict)
        self.seen.append(self.level)


def test_ada_edl_is_content_when_one_of_the_open_leaves_is_accepted() -> None:
    """The draft is the target: the chain and the first leaf are always accepted, the other two
    never can be."""
    same = random_table(5, seed=1)
    pair = SimpleNamespace(target=TableLM(same), draft=TableLM(same))
    stop = Recorded(
        0.4, kappa=0.2, target_rate=0.9, step=0.01, rate_memory=0.5, threshold_memory=0.9
    )
    stop.seen = []
    trace = SerialEngine(pair, BranchPoint(4, 3), stop, RrswVerifier(), Warp(), Warp()).decode(
        [1, 2], 200, Sampler.seeded(0)
    )
    assert len(trace.rounds) >= 40 and sum(
        len(r.tokens) == r.accepted for r in trace.rounds
    ) == len(trace.rounds)
    assert max(stop.seen) <= 0.4 and {len(r.draft_tokens) for r in trace.rounds} >= {7}


# Stop loss ----------------------------------------------------------------------------------------


def stop_loss(folder: Path, draft: float, loss: float) -> StopLoss:
    return StopLoss(Fixed(3), write_cost(folder / "cost.json", draft=draft, target=1.0), loss)


@pytest.mark.parametrize(("weight", "pays"), [(0.0, False), (1.0, True)])
def test_a_request_is_given_up_once_it_is_behind_and_loses_no_more(
    weight: float, pays: bool, tmp_path: Path
) -> None:
    target, draft, loss = random_table(8, 1, concentration=0.3), 0.3, 0.05
    pair = SimpleNamespace(
        target=TableLM(target),
        draft=TableLM(mixed_table(target, random_table(8, 2, concentration=0.3), weight)),
    )
    engine = SerialEngine(
        pair, Chain(9), stop_loss(tmp_path, draft, loss), TokenVerifier(), Warp(), Warp()
    )
    for seed in range(8):
        rounds = engine.decode([1, 2, 3], 60, Sampler.seeded(seed)).rounds
        drafting = [bool(round_.draft_tokens) for round_ in rounds]
        given_up = drafting.index(False) if False in drafting[:-1] else len(rounds)
        assert (given_up == len(rounds)) == pays
        costs = [1 + draft * round_.draft_forwards - len(round_.tokens) for round_ in rounds]
        assert sum(costs) <= loss * 60 + 3 * draft, "what it may lose, and a round"
        assert pays or (sum(costs[: given_up - 1]) <= loss * 60 < sum(costs[:given_up]))
        assert not any(drafting[given_up:-1]) and not sum(
            round_.draft_forwards for round_ in rounds[given_up:]
        )


def test_every_request_has_an_account_of_its_own(tmp_path: Path) -> None:
    rule = stop_loss(tmp_path, draft=9.0, loss=0.1)
    for round_, stops in ((0, False), (1, True), (2, True), (0, False)):
        rule.begin_round(context(round_))
        assert rule.should_stop(SimpleNamespace(count=0, forwards=3)) == stops
        rule.end_round(verdict(0, 0 if stops else 3))


def test_without_measured_costs_there_is_no_account(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^stop\.cost: .*is missing\. Measure it: .* cost=measure"):
        StopLoss(Fixed(3), tmp_path / "none.json", 0.02)
