"""Stop rules: what each looks at, what looking costs, and which checkpoints learned ones take."""

import math
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from decoding.draft import RoundContext, Verdict
from decoding.draft_tree import DraftTree
from decoding.engines.serial import SerialEngine
from decoding.interfaces import LMOutput
from decoding.models.table_lm import TableLM, mixed_table, random_table
from decoding.sampling import Sampler, Warp
from decoding.stopping import shared
from decoding.stopping.adaedl import AdaEDL, entropy
from decoding.stopping.confidence import Confidence
from decoding.stopping.confidence_before import ConfidenceBefore
from decoding.stopping.fixed import Fixed
from decoding.stopping.hrad import HRADStop
from decoding.stopping.product import Product
from decoding.stopping.shared import Shared
from decoding.stopping.specdecpp import SpecDecPPStop
from decoding.stopping.stop_loss import StopLoss
from decoding.stopping.value import ValueStop
from decoding.structures.branch_point import BranchPoint
from decoding.structures.chain import Chain
from decoding.trace import Stopwatch
from decoding.verifiers.rrsw import RrswVerifier
from decoding.verifiers.token import TokenVerifier
from predictors.calibration import Calibration
from predictors.inputs import Inputs
from predictors.survival import Survival
from runtime.errors import UserError
from tests.contract.engines import batch_cost, toy_pair
from tests.helpers.damage.refusals import refuses
from tests.helpers.decoding.costs import write_cost
from tests.helpers.training.checkpoints import columns, write_checkpoint, write_logistic

VOCAB = 4
CONTEXT = RoundContext(committed=torch.tensor([0]), max_new=100)
VERIFIED = replace(CONTEXT, target_hidden=torch.zeros(1, 2), embed=lambda token: torch.zeros(1))


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


def test_counts_and_confidences():
    assert [Fixed(2).should_stop(Step(count, [1.0])) for count in (0, 1, 2, 3)] == [0, 0, 1, 1]
    rule = Confidence(0.3)
    rule.begin_round(context())
    steps = Step(0, [1.0], drawn=0.1), Step(1, [1.0], drawn=0.29), Step(1, [1.0], drawn=0.3)
    assert [rule.should_stop(step) for step in steps] == [False, True, False]
    assert rule.predicted == [0.29, 0.3]
    rule.begin_round(context(1))
    assert rule.predicted == []
    before = ConfidenceBefore(0.5)
    assert before.should_stop(Step(0, [0.4, 0.3, 0.3]))
    assert not before.should_stop(Step(0, [0.6, 0.4]))


def test_product_of_all_that_was_drawn_is_tried_closely_where_it_is_small():
    rule = Product(0.3)
    for round_ in (0, 1):
        rule.begin_round(context(round_))
        asked = [rule.should_stop(Step(count, [1.0], drawn=0.6)) for count in range(4)]
        assert asked == [False, False, False, True]
        assert rule.predicted == pytest.approx([0.6, 0.36, 0.216])
    grid = Product(0.3).grid(50, 20)
    assert (len(grid), grid[0], grid[-1]) == (51, 0, 1) and sorted(set(grid)) == grid
    assert sum(0 < value < 1e-3 for value in grid) >= 10


def test_entropy():
    assert entropy(torch.tensor([0.5, 0.5, 0.0])) == pytest.approx(math.log(2))
    assert entropy(torch.tensor([0.0, 1.0])) == 0
    assert entropy(torch.full((50_000,), 1 / 50_000)) == pytest.approx(math.log(50_000), rel=1e-4)


def test_ada_edl_stops_where_its_bound_is_low():
    rule = ada_edl()
    uniform = [1 / 6] * 6  # 1 - sqrt(0.2 log 6) = 0.4014
    assert not rule.should_stop(Step(0, uniform))
    assert rule.should_stop(Step(0, [1 / 7] * 7))
    bounds = [1 - math.sqrt(0.2 * math.log(n)) for n in (6, 7)]
    assert rule.predicted == pytest.approx(bounds, abs=1e-6)


def test_ada_edl_threshold_follows_the_acceptance_rate():
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


def test_ada_edl_is_content_when_one_of_the_open_leaves_is_accepted():
    """The draft is the target: the chain and the first leaf are always accepted, the other two
    never can be."""
    same = random_table(5, seed=1)
    pair, stop = SimpleNamespace(target=TableLM(same), draft=TableLM(same)), ada_edl()
    engine = SerialEngine(pair, BranchPoint(4, 3), stop, RrswVerifier(), Warp(), Warp())
    rounds = engine.decode([1, 2], 200, Sampler.seeded(0)).rounds
    assert len(rounds) >= 40 and all(len(r.tokens) == r.accepted for r in rounds)
    assert stop.level <= 0.4 and 7 in {len(r.draft_tokens) for r in rounds}


def stop_loss(folder: Path, draft: float, loss: float) -> StopLoss:
    return StopLoss(Fixed(3), write_cost(folder / "cost.json", draft=draft, target=1.0), loss)


@pytest.mark.parametrize(("weight", "pays"), [(0.0, False), (1.0, True)])
def test_a_request_is_given_up_once_it_is_behind_and_loses_no_more(weight, pays, tmp_path):
    target, noise = (random_table(8, seed, concentration=0.3) for seed in (1, 2))
    models = {"target": TableLM(target), "draft": TableLM(mixed_table(target, noise, weight))}
    pair, draft, loss = SimpleNamespace(**models), 0.3, 0.05
    rule = stop_loss(tmp_path, draft, loss)
    engine = SerialEngine(pair, Chain(9), rule, TokenVerifier(), Warp(), Warp())
    for seed in range(8):
        rounds = engine.decode([1, 2, 3], 60, Sampler.seeded(seed)).rounds
        drafting = [bool(round_.draft_tokens) for round_ in rounds]
        given_up = drafting.index(False) if False in drafting[:-1] else len(rounds)
        assert (given_up == len(rounds)) == pays
        costs = [1 + draft * round_.draft_forwards - len(round_.tokens) for round_ in rounds]
        assert sum(costs) <= loss * 60 + 3 * draft, "what it may lose, and a round"
        assert pays or (sum(costs[: given_up - 1]) <= loss * 60 < sum(costs[:given_up]))
        assert not any(drafting[given_up:-1])
        assert not any(round_.draft_forwards for round_ in rounds[given_up:])


def test_every_request_has_an_account_of_its_own(tmp_path):
    rule = stop_loss(tmp_path, draft=9.0, loss=0.1)
    for round_, stops in ((0, False), (1, True), (2, True), (0, False)):
        rule.begin_round(context(round_))
        assert rule.should_stop(SimpleNamespace(count=0, forwards=3)) == stops
        rule.end_round(verdict(0, 0 if stops else 3))


def test_without_measured_costs_there_is_no_account(tmp_path):
    with pytest.raises(UserError, match=r"^stop\.cost: .*is missing\. Measure it: .* cost=measure"):
        StopLoss(Fixed(3), tmp_path / "none.json", 0.02)


class ScriptedLM:
    """Uniform distributions; the hidden state of the i-th drafted token is the logit of
    accept[i]."""

    vocab_size, max_length, seconds = VOCAB, 1000, 0.0
    device = output_device = torch.device("cpu")

    def __init__(self, accept: Sequence[float]) -> None:
        self.states = [0.0, *(math.log(f / (1 - f)) for f in accept)]
        self.length = self.forwards = 0

    def forward(self, tokens: Tensor, *_: object, hidden: Any = (), **__: object) -> LMOutput:
        self.length += len(tokens)
        self.forwards += 1
        state = torch.tensor([self.states[self.length - 1]]).reshape(1, 1, 1)
        return LMOutput(torch.zeros(1, VOCAB), state if hidden else None)

    def crop(self, length: int) -> None: ...
    def keep_path(self, rows: list[int]) -> None: ...
    def reset(self) -> None: ...
    def embed(self, token: int) -> Tensor:
        return torch.zeros(1)


def drafted(stop: SpecDecPPStop, accept: Sequence[float]) -> tuple[int, int]:
    """Tokens drawn and draft forwards spent in one round."""
    lm = ScriptedLM([*accept, *[0.5] * 30])
    tree = DraftTree(lm, CONTEXT, Warp(), Stopwatch(), layers=(-1,), stop=stop)
    stop.begin_round(CONTEXT)
    Chain(25).grow(tree)
    return len(tree.token), lm.forwards


@pytest.fixture
def head(tmp_path: Path) -> Path:
    return write_logistic(tmp_path / "specdecpp")


@pytest.mark.parametrize(("order", "spent"), [("paper", (3, 4)), ("code", (4, 4))])
def test_an_order_pays_a_forward_or_sends_a_token_without_a_score(head, order, spent):
    """Products .9, .81, .405: 1 - .405 > .5 after the third token; features are rounded to
    bfloat16."""
    stop = SpecDecPPStop(head, threshold=0.5, bounds=[1, 20], order=order)
    assert drafted(stop, [0.9, 0.9, 0.5]) == spent
    assert stop.predicted == pytest.approx([0.9, 0.9, 0.5], abs=1e-3)


@pytest.mark.parametrize("order", ["paper", "code"])
def test_bounds(head, order):
    assert drafted(SpecDecPPStop(head, 0.0, [3, 20], order), [0.1] * 9)[0] == 3
    stop = SpecDecPPStop(head, 1.0, [2, 5], order)
    for _ in range(2):  # rounds are independent
        assert drafted(stop, [0.9] * 9) == (5, 5), "the upper bound needs no score"


def test_calibrated_survival_takes_the_place_of_the_product(tmp_path):
    """Products .9, .81, .729: log-odds 2.2, 1.45, .99 less 2, i.e. survival .55, .37, .27."""
    head = write_logistic(tmp_path / "head", Calibration(survival=Survival(bias=-2.0)))
    assert drafted(SpecDecPPStop(head, 0.5, [1, 20], "paper"), [0.9] * 9)[0] == 2
    assert drafted(SpecDecPPStop(head, 0.7, [1, 20], "paper"), [0.9] * 9)[0] == 3
    stop = SpecDecPPStop(head, 0.5, [1, 20], "code")
    assert drafted(stop, [0.9] * 9) == (3, 3)
    assert stop.predicted == pytest.approx([0.9, 0.9], abs=1e-3), "what the head said"


def test_an_untuned_threshold_of_a_calibrated_head_is_said(head, tmp_path):
    assert not SpecDecPPStop(head, 0.7, [1, 20], "paper").caution
    for calibration in (Calibration("temperature"), Calibration(survival=Survival(bias=-2.0))):
        calibrated = write_logistic(tmp_path / "calibrated", calibration)
        stop = SpecDecPPStop(calibrated, 0.7, [1, 20], "paper")
        assert stop.caution.startswith("threshold 0.7 is not tuned") and "tune.py" in stop.caution


def test_the_papers_threshold_applies_to_the_head_as_it_was_trained(tmp_path):
    """Whatever its checkpoint was calibrated to: .9, .81, .729 rejects with .271 after the third
    token."""
    calibration = Calibration("temperature", (0.0, 3.0), (2.0, 2.0), survival=Survival(bias=-2.0))
    checkpoint = write_logistic(tmp_path / "head", calibration)
    stop = SpecDecPPStop(checkpoint, 0.25, [1, 20], "paper", calibrated=False)
    assert drafted(stop, [0.9] * 9)[0] == 3 and not stop.caution
    assert stop.predicted == pytest.approx([0.9] * 3, abs=1e-3)
    assert stop.survival != SpecDecPPStop(checkpoint, 0.25, [1, 20], "paper").survival


def test_wrong_settings_and_checkpoints(head, tmp_path):
    with pytest.raises(UserError, match=r"stop\.bounds: expected the smaller number first"):
        SpecDecPPStop(head, 0.5, [20, 2], "paper")
    with pytest.raises(UserError, match=r"stop\.checkpoint: no checkpoint.*python train\.py"):
        SpecDecPPStop(tmp_path / "nowhere", 0.5, [2, 20], "paper")
    hrad = write_checkpoint(tmp_path / "hrad", "hrad", 2)
    refuses("does not score draft tokens", SpecDecPPStop, hrad, 0.5, [2, 20], "paper")
    refuses("does not predict a round", HRADStop, head, Confidence(0.2))
    refuses(r"^stop\.checkpoint: .* holds 'specdecpp', which does not", ValueStop, str(head), 0.2)
    with pytest.raises(UserError, match=r"^stop\.balance: "):  # it would do nothing
        HRADStop(hrad, Confidence(0.5), 0.5)


def saying(stop: HRADStop, chances: list[float]) -> HRADStop:
    """The same with a head that says the same of everything."""
    bias = torch.tensor(chances).log()
    stop.predictor.head.layers[-1].load_state_dict({"weight": torch.zeros(3, 64), "bias": bias})
    return stop


class FixedClass:
    """A predictor that always answers `outcome`."""

    def __init__(self, outcome: int, like: HRADStop) -> None:
        self.outcome, self.inputs = outcome, like.predictor.inputs
        self.calibration = Calibration()

    def predict_proba(self, x: Tensor) -> Tensor:
        assert x.shape == (1, 3)  # one layer of width 2 and the embedding of width 1
        return torch.nn.functional.one_hot(torch.tensor([self.outcome]), 3).float()


@pytest.mark.parametrize("given", [(0, 0.0, 0), (1, 0.5, 1), (1, 0.1, 4), (2, 0.5, 4)])
def test_hrad_class_decides(tmp_path, given):
    """The scripted distributions are uniform on 4 tokens: confidence 0.25 is below eps 0.5 and
    above 0.1."""
    outcome, eps, count = given
    stop = HRADStop(write_checkpoint(tmp_path, "hrad", 3, gamma=4), Confidence(eps))
    stop.predictor = FixedClass(outcome, stop)  # type: ignore[assignment]
    assert hrad_drafted(stop, VERIFIED) == count
    assert stop.predicted == [outcome]


@pytest.mark.parametrize(("balance", "outcome"), [(1.0, 2), (0.5, 2), (0.0, 0)])
def test_hrad_weighs_classes_by_the_priors_it_was_calibrated_with(tmp_path, balance, outcome):
    """Balanced posterior (.25, .25, .5), priors 3 : 1 : 1: posterior (.5, .17, .33)."""
    priors = Calibration("offset", offset=(math.log(3), 0.0, 0.0))
    head = write_checkpoint(tmp_path, "hrad", 3, calibration=priors)
    stop = saying(HRADStop(head, Confidence(0.5), balance), [0.25, 0.25, 0.5])
    assert stop.classify(VERIFIED) == outcome


@pytest.mark.parametrize(("none", "count"), [(0.69, 0), (0.71, 1)])
def test_hrad_drafts_nothing_where_none_is_probable(tmp_path, none, count):
    """Else as the confidence rule says, though "all" may be more probable than "some"."""
    head = write_checkpoint(tmp_path, "hrad", 3)
    stop = saying(HRADStop(head, Confidence(0.5), none=none), [0.7, 0.1, 0.2])
    assert hrad_drafted(stop, VERIFIED) == count


def test_a_head_of_older_states_is_not_asked_in_turns(tmp_path):
    older = write_checkpoint(tmp_path, "hrad", 3, settings={"age": 1})
    stop = HRADStop(older, Confidence(0.5))
    for ask in (lambda: stop.begin_round(CONTEXT), lambda: stop.policy(None)):  # type: ignore[arg-type]
        refuses(r"^stop\.checkpoint: .*engine\.a_priori=true$", ask)


def test_hrad_without_features_asks_the_confidence_rule(tmp_path):
    stop = HRADStop(write_checkpoint(tmp_path, "hrad", 3), Confidence(0.5))
    assert hrad_drafted(stop, CONTEXT) == 1
    stop.end_round(Verdict(0, [], 1, 1))


def hrad_drafted(stop: HRADStop, context: RoundContext) -> int:
    tree = DraftTree(ScriptedLM([0.5] * 30), context, Warp(), Stopwatch(), stop=stop)
    stop.begin_round(context)
    Chain(25).grow(tree)
    return len(tree.token)


def value_stop(folder: Path, threshold: float, survival: Survival | None = None) -> ValueStop:
    calibration = Calibration(survival=survival or Survival())
    write_checkpoint(folder, "value", columns("value", 0), calibration=calibration)
    rule = ValueStop(str(folder), threshold)
    rule.predictor.head.scale.fill_(0.3)  # an untrained head says nearly the same of everything
    return rule


def value_rounds(rule: ValueStop, gamma: int = 6) -> list[tuple[int, int, list[float]]]:
    """Tokens, draft forwards and predictions of each round but the last ones."""
    engine = SerialEngine(toy_pair(3, 1), Chain(gamma), rule, TokenVerifier(), Warp(), Warp())
    rounds = engine.decode([1, 0], 150, Sampler.seeded(0)).rounds[:-7]
    return [(len(one.draft_tokens), one.draft_forwards, one.predicted) for one in rounds]


def test_the_first_token_is_always_drawn_and_none_is_looked_at_in_vain(tmp_path):
    for tokens, forwards, predicted in value_rounds(value_stop(tmp_path, 1.0)):
        assert (tokens, forwards, len(predicted)) == (1, 1, 1)


def test_it_goes_on_while_the_next_token_is_worth_it(tmp_path):
    found = value_rounds(value_stop(tmp_path, 0.03))
    assert len({tokens for tokens, _, _ in found}) > 1
    for tokens, forwards, predicted in found:
        assert forwards == tokens, "no forward of its own"
        assert all(worth >= 0.03 for worth in predicted[:-1])
        assert tokens == 6 or predicted[-1] < 0.03
    assert {tokens for tokens, _, _ in value_rounds(value_stop(tmp_path, 0.0))} == {6}


def test_calibrated_survival_takes_the_place_of_what_is_reached(tmp_path):
    mapped = Survival(scale=0.5, bias=0.3, depth=-0.2)
    plain, calibrated = (value_rounds(value_stop(tmp_path, 0.0, of)) for of in (None, mapped))
    for (_, _, products), (_, _, found) in zip(plain, calibrated, strict=True):
        expected = mapped.of_products(torch.tensor(products, dtype=torch.float64))
        assert found == pytest.approx(expected.tolist()[: len(found)])


def test_thresholds_are_tried_at_equal_ratios(tmp_path):
    grid = np.array(value_stop(tmp_path, 0.2).grid(20, 8))
    assert grid[0] == 0 and grid[-1] == 1 and len(grid) == 21
    assert np.allclose(grid[2:] / grid[1:-1], grid[2] / grid[1])


def test_only_the_state_at_the_token_costs_a_forward(tmp_path):
    rule, table = value_stop(tmp_path, 0.2), torch.rand(2, 3, 4).numpy()
    replayed = type("Table", (), {"of_predictor": lambda self, name: table})()
    assert not rule.policy(replayed).ahead
    rule.predictor.inputs = Inputs(draft_before=[-1])
    assert not rule.policy(replayed).ahead
    rule.predictor.inputs = Inputs([-1])
    assert rule.policy(replayed).ahead
    assert np.isinf(rule.policy(replayed).reach[..., 0]).all(), "before the first, no look"


@pytest.mark.parametrize("kind", ["prompt", "step", "token", "reading", "much reading"])
def test_what_steps_take_beyond_the_costs_is_of_tokens_or_of_all_steps(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A text that is read in the first step with a draft, and what a step without one takes as
    well, are no cost of a token; of what is one it makes none, and tries again some time. Nor does
    it where a draft has to read much for few tokens."""
    clock, drawn, unread = [0.0], list[int](), 40 if kind in ("prompt", *READING) else 0
    monkeypatch.setattr(shared, "perf_counter", lambda: clock[0])
    rule, left = Shared(batch_cost(tmp_path / "costs.json"), learns=True), READING.get(kind, 9)
    for step in range(2000):
        count = 0
        if not rule.rests():
            rule.begin_round(RoundContext(torch.tensor([1, 2, 3]), 9, step))
            while count < 2 and rule.budget(rule, count, 1.0, unread * (not count), left):
                count += 1
            rule.end_round(Verdict(count, [1] * count, 2, count))
        clock[0] += {"step": 5.0, "token": 50.0 * count}.get(kind, 0.05 * unread * (count > 0))
        clock[0] += 1.0 + 0.25 * count  # as the costs say
        unread *= not (kind == "prompt" and count)
        drawn.append(count)
    tried = [count > 0 for count in drawn[100:]]
    if kind in ("token", "much reading"):
        assert 0 < sum(tried) < 40, tried
    else:
        assert sum(drawn) > 1.9 * len(drawn), "but for some looks at a step without"


READING = {"reading": 10_000, "much reading": 2}  # tokens that may still come


@pytest.mark.parametrize(("copies", "least"), [(0.0, 0.9), (0.5, 0.7)])
@pytest.mark.parametrize("length", [64, 10**6])
def test_requests_that_come_and_go_draft_again_when_it_is_worth_it(
    length: int, copies: float, least: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens cost much at first, and one reading of a text takes a minute; others take each
    request's place. copies: share of rounds that ask nothing."""
    clock, random, tried = [0.0], np.random.default_rng(0), list[bool]()
    monkeypatch.setattr(shared, "perf_counter", lambda: clock[0])
    rule = Shared(batch_cost(tmp_path / "costs.json", 0.02), learns=True)
    rules = [deepcopy(rule, {id(rule.budget): rule.budget}) for _ in range(2)]
    left = {each: length // (1 + place) for place, each in enumerate(rules)}
    text = torch.tensor([1, 2, 3])
    for step in range(3000):
        active = list[Shared]()
        for each in rules:
            if not each.rests():
                each.begin_round(RoundContext(text, 9, int(left[each] < length)))
                active += [each] * (random.random() >= copies and not each.budget.rests())
        asks = [(each, 0, 1.0, 40 * (left[each] == length), 9) for each in active]
        drawn = rule.budget.together(asks) if asks else []
        reads = any(ask[3] and yes for ask, yes in zip(asks, drawn, strict=True))
        tried.append(any(drawn))
        clock[0] += 1.0 + 0.02 * sum(drawn) + 2.0 * sum(drawn) * (step < 500) + 0.05 * any(drawn)
        clock[0] += 60.0 * (reads and step < 20)
        for each in rules:
            if each in active or not rule.budget.rests():
                each.end_round(Verdict(1, [1], 2, 1))
            left[each] -= 1
            if not left[each]:
                each.end_request()
                left[each] = length
    assert sum(tried[1500:]) > least * 1500
