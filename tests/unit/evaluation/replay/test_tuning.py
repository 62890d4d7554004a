"""The oracle, frontiers, choices and rates of grown drafts on cases whose answer is known; costs;
how long a sweep takes."""

import json
from dataclasses import dataclass, replace
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from data_gen.storage.chunks import WarpSettings
from decoding.cost import CostTable, cost_table, observed_cost, read_cost, regress, regress_traces
from decoding.processors import processed
from decoding.stopping.adaedl import AdaEDL
from decoding.stopping.base import TunableRule
from decoding.stopping.confidence import Confidence
from decoding.stopping.confidence_before import ConfidenceBefore
from decoding.stopping.fixed import Fixed
from decoding.stopping.hrad import HRADStop
from decoding.stopping.rollout_table import RolloutTable, build
from decoding.stopping.specdecpp import SpecDecPPStop
from decoding.structures.comb import Worth
from decoding.trace import STAGES, RoundTrace, Trace
from evaluation.replay import tuning
from evaluation.replay.read import tunable_rules
from evaluation.replay.simulate import Replayer, counts_of
from evaluation.replay.tune import report, same_questions, with_questions
from evaluation.replay.tuning import Candidate, Grower, choose, hindsight, seconds, sweep
from predictors.outcomes import Chances
from runtime.errors import UserError
from runtime.intervals import Array
from tests.helpers.damage.refusals import refuses
from tests.helpers.data.rollout_tables import sampled_table
from tests.helpers.training.checkpoints import write_checkpoint

GAMMA = 6
COSTS = [cost_table(1.0, 5.0, row=row) for row in (0.0, 0.02, 0.3)]


def table_of(differs: list[list[bool]], gamma: int = GAMMA) -> RolloutTable:
    """Greedy responses whose draft differs at the given positions."""
    rows = []
    for number, misses in enumerate(differs):
        length, padded = len(misses), ~np.array([*misses, *[True] * gamma])
        right = np.array([padded[start : start + gamma] for start in range(length)])
        accept = np.logical_and.accumulate(right, axis=1)
        facts = {"prompt_id": str(number), "length": length, "max_new": length}
        values = dict.fromkeys(("confidence", "max_q", "entropy", "tokens"), np.ones(accept.shape))
        drawn = {"drawn": [gamma] * length, "accepted": accept.sum(1)}
        rows.append(facts | values | drawn | {"accept": accept})
    return build(rows, greedy=True)


FIXED = Fixed(1).policy(table_of([[False]]))


def random_misses(seed: int, length: int = 40, prompts: int = 4) -> list[list[bool]]:
    return (np.random.default_rng(seed).random((prompts, length)) < 0.3).tolist()


def lengths(seed: int) -> tuple[Replayer, list[Candidate]]:
    replayer = Replayer(table_of(random_misses(seed)), GAMMA)
    return replayer, sweep(replayer, {"fixed": FIXED}, {"fixed": range(1, GAMMA + 1)})


def test_regression_recovers_known_costs():
    forwards = np.random.default_rng(0).integers(1, 60, (30, 2)).astype(float)
    exact = regress(forwards, forwards @ [0.0234, 0.112])
    assert (exact.draft, exact.target, exact.r2) == pytest.approx((0.0234, 0.112, 1))
    noise = np.random.default_rng(1).normal(0, 0.1, 30)
    rough = regress(forwards, forwards @ [0.0234, 0.112] + noise)
    assert (rough.draft, rough.target) == pytest.approx((0.0234, 0.112), rel=0.1)
    assert 0.95 < rough.r2 < 1
    assert "23.40 ms N_draft + 112.00 ms N_target over 30 generations" in str(exact)


def round_of(drafted: int, forwards: int, calls: int, **seconds: float) -> RoundTrace:
    parts = {stage: seconds.get(stage, 0.0) for stage in STAGES}
    tokens, parents, q = [1] * drafted, list(range(drafted)), [1.0] * drafted
    return RoundTrace(tokens, parents, q, 0, 0, [1], [0.5] * calls, forwards, parts)


def trace_of(rounds: list[RoundTrace]) -> Trace:
    spent = sum(sum(r.seconds.values()) for r in rounds)
    return Trace(3, [1] * len(rounds), rounds, 0.5, 0.5 + spent)


def test_costs_are_read_off_real_decodes():
    spent = {"draft": 0.2, "sample": 0.02, "target": 1.0, "verify": 0.1, "stop": 0.06}
    short = [round_of(1, 2, 2, **spent) for _ in range(3)]
    long = [round_of(4, 4, 4, **{stage: 2 * each for stage, each in spent.items()})] * 3
    rare = [round_of(9, 9, 9, draft=0.9, sample=0.09, target=99.0, stop=0.27)]
    plain = [trace_of([round_of(0, 0, 0, target=0.8, sample=0.1)] * 4)]
    found = observed_cost({"confidence": [trace_of(short + long + rare)]}, plain)
    assert found.draft == pytest.approx(0.11) and found.autoregressive == pytest.approx(0.9)
    assert found.target.rows == [2, 5], "one round is no measurement"
    assert found.target.seconds == pytest.approx([1.1, 2.2])
    assert found.calls["confidence"] == pytest.approx(0.03)
    fit = regress_traces([trace_of(short), trace_of(long)])
    total = sum(sum(each.seconds.values()) for each in short)
    assert fit.draft * 6 + fit.target * 3 == pytest.approx(total)
    few = {"fixed 1": [trace_of([round_of(1, 1, 0, draft=0.1, target=1.0)])]}
    refuses(r"cost\.limit: too few rounds", observed_cost, few, plain)


def test_a_price_is_a_sum_over_rounds(tmp_path):
    by_length = np.zeros((1, GAMMA + 1))
    by_length[0, [0, 2]] = 1, 3  # a round without a draft and three of two tokens
    numbers = {"draft_forwards": 8.0, "questions": 9.0, "emitted": 8.0}
    counts = {name: np.array([value]) for name, value in numbers.items()}
    counts["calls_by_drafted"] = by_length
    table = cost_table(0.1, {1: 1.0, 3: 1.5}, 0.9, {"entropy": 0.01})
    assert table.price(counts, "entropy") == pytest.approx(0.8 + 1.0 + 3 * 1.5 + 0.09)
    assert table.price(counts, "fixed") == pytest.approx(0.8 + 1.0 + 3 * 1.5)
    fewer = cost_table(0.1, {1: 1.0, 2: 1.25}, 0.9)
    assert fewer.price(counts) == pytest.approx(table.price(counts)), "rows beyond are not free"
    assert table.plain(counts) == pytest.approx(7.2)
    file = tmp_path / "cost.json"
    refuses(r"cost\.file: .*is missing\. Measure it: .* cost=measure", read_cost, file)
    more = {"pair": {"target": "aa"}, "measured_on": {"threads": 3}}
    file.write_text(json.dumps({"seconds": table.to_dict(), **more}))
    assert read_cost(file) == replace(table, **more)
    file.write_text(json.dumps(json.loads(file.read_text()) | {"pair": "aa"}))
    refuses(r"^cost\.file: .*is damaged .no valid pair.*cost=measure", read_cost, file)


def test_a_row_may_cost_a_share_of_a_call():
    flat, dear = cost_table(1.0, 5.0, row=0), cost_table(1.0, 5.0, row=0.02)
    assert flat == cost_table(1.0, 5.0) and flat.target(100) == 5
    assert [dear.target(rows) for rows in (1, 2, 11)] == pytest.approx([5, 5.1, 6])
    assert dear.autoregressive == 5
    again = {int(rows): seconds for rows, seconds in dear.to_dict()["target"].items()}
    assert cost_table(1.0, again) == dear
    with pytest.raises(UserError, match=r"^cost\.row: expected 0 where cost\.target says seconds"):
        cost_table(1.0, {1: 5.0}, row=0.02)
    refuses(r"^cost\.autoregressive: ", cost_table, 1.0, {2: 1.0})
    cost_table(1.0, {2: 1.0}, 0.5, {"hrad": 0.0})


@pytest.mark.parametrize(
    ("differs", "calls"),
    [
        ([False], (0, 1)),
        ([True], (0, 1)),
        ([False] * 5, (4, 1)),
        ([True] * 5, (0, 5)),
        ([False, True, False, False], (2, 2)),
        ([False, True, False, True], (2, 2)),
    ],
)
def test_oracle_counts_calls_at_the_edges(differs, calls):
    """Decoding with a draft as long as the text shows them: nothing is discarded, the calls add up
    to the tokens."""
    assert tuning.oracle_calls(differs) == calls
    assert sum(calls) == len(differs)
    least = hindsight(Replayer(table_of([differs], gamma=9), 9), cost_table(1.0, 10.0))
    assert least[0] == calls[0] * 1.0 + calls[1] * 10.0


def test_hindsight_is_the_oracle_where_drafting_pays():
    misses = random_misses(0)
    replayer = Replayer(table_of(misses, gamma=40), 40)
    calls = [tuning.oracle_calls(row) for row in misses]
    assert tuning.oracle_totals(replayer.table) == tuple(map(sum, zip(*calls, strict=True)))
    for draft, target in ((1.0, 4.0), (0.0234, 0.112)):
        least = hindsight(replayer, cost_table(draft, target))
        assert least == pytest.approx(np.array(calls) @ [draft, target])


def test_no_policy_beats_hindsight_and_useless_drafts_are_not_drawn():
    replayer, found = lengths(1)
    for cost in (cost_table(1.0, 5.0), cost_table(1.0, {1: 2.0, 4: 9.0}), cost_table(9.0, 1.0)):
        least = hindsight(replayer, cost)
        assert all((least <= cost.price(candidate.counts) + 1e-9).all() for candidate in found)
    assert hindsight(replayer, cost_table(9.0, 1.0)) == pytest.approx(40.0), "without a draft"
    measured, less = (cost_table(0.1, {1: 2.0, last: 1.0 + last}) for last in (GAMMA + 1, 2))
    assert hindsight(replayer, less) == pytest.approx(hindsight(replayer, measured))


def test_knowing_the_target_a_draft_ends_before_a_token_that_is_too_unlikely():
    table = table_of([[False, False, True, False, True]], gamma=3)
    row = counts_of(Replayer(table, 3).replay(tuning.knowing(table), 0.5), 0)
    assert row["rounds"] == 2 and row["accepted"] == 3, "two tokens, then the one before the end"
    assert row["drafted"] == row["accepted"], "nothing is discarded"
    always = table_of([[True] * 4], gamma=3)
    first = Replayer(always, 3).replay(tuning.knowing(always), 0.5)
    assert first["drafted"].tolist() == [3], "the first token is drawn, whatever it is worth"


def candidate(rule: str, threshold: float, discarded: float, rounds: float) -> Candidate:
    return Candidate(rule, threshold, counts_with(np.array([rounds]), np.array([discarded])))


def counts_with(rounds: Array, drafted: Array) -> dict[str, Array]:
    """Of prompts with 100 tokens each, nothing accepted, no draft's time."""
    zero = np.zeros(len(rounds))
    columns = {"draft_forwards": zero, "questions": zero, "accepted": zero, "emitted": zero + 100}
    return {**columns, "drafted": drafted, "rounds": rounds, "calls_by_drafted": rounds[:, None]}


def test_frontier_keeps_what_nothing_beats():
    points = [(10, 60), (20, 40), (20, 50), (30, 45), (40, 30), (40, 30)]
    found = [candidate("fixed", level, *rates) for level, rates in enumerate(points)]
    assert [kept.threshold for kept in tuning.frontier(found)] == [0, 1, 4]
    assert found[0].rates == (0.1, 0.6)
    others = [found[0], found[4]]
    for rates, share in (((9, 60), 0.5), ((10, 60), 0), ((10, 59), 0.5), ((9, 61), 0), ((5, 5), 1)):
        assert tuning.dominated_share([candidate("specdecpp", 0.5, *rates)], others) == share


def test_choices_depend_on_costs_and_are_judged_on_other_prompts():
    (_, first), (replayer, second) = lengths(3), lengths(4)
    slow, fast = cost_table(1.0, 2.0), cost_table(1.0, 100.0)
    assert tuning.best(first, slow).threshold < tuning.best(first, fast).threshold
    assert tuning.speedup(tuning.best(first, fast), fast) > 1
    assert tuning.speedup(tuning.best(first, slow), cost_table(5.0, 1.0)) < 1
    cost = cost_table(1.0, 8.0)
    (choice,) = choose(first, second, cost, hindsight(replayer, cost))
    assert choice.threshold == tuning.best(first, cost).threshold
    judged = next(c for c in second if c.threshold == choice.threshold)
    assert choice.speedup == tuning.speedup(judged, cost) and choice.regret > 0
    assert choice.expected == tuning.speedup(tuning.best(first, cost), cost)
    assert choice.interval[0] <= choice.speedup <= choice.interval[1]


def test_rules_are_compared_prompt_by_prompt():
    rng, rules = np.random.default_rng(0), []
    hard = rng.uniform(10, 100, 30)  # rounds of a prompt: prompts differ far more than rules
    for name, factor in (("a", 1.0), ("b", 1.1), ("c", 1.3)):
        spent = hard * factor * rng.uniform(0.99, 1.01, 30)
        rules.append(Candidate(name, 0.5, counts_with(spent, np.zeros(30))))
    cost = cost_table(1.0, 8.0)
    first, second, third = choose(rules, rules, cost, np.ones(30))
    assert [choice.other for choice in (first, second, third)] == ["b", "a", "a"]
    assert first.gain == pytest.approx(1.1, rel=0.01) and third.gain == pytest.approx(1 / 1.3, 0.01)
    low, high = first.gain_interval
    assert 1.09 < low <= first.gain <= high < 1.11 and low > first.interval[0] / second.speedup
    (alone,) = choose(rules[:1], rules[:1], cost, np.ones(30))
    assert alone.other is None


def test_the_rule_to_advise_is_the_best_where_chosen_and_pays_beyond_the_noise():
    by_choice, by_verdict = candidate("a", 0.5, 0, 40), candidate("b", 0.5, 0, 50)
    swapped = [replace(by_verdict, rule="a"), replace(by_choice, rule="b")]
    found = choose([by_choice, by_verdict], swapped, cost_table(1.0, 8.0), np.ones(1))
    assert [choice.rule for choice in found] == ["a", "b"] and found[0].speculate
    assert found[0].expected > found[1].expected and found[0].speedup < found[1].speedup
    (_, first), (_, second) = lengths(3), lengths(4)
    pays, noise = set(), 0
    for price in np.arange(0.1, 2.0, 0.05):  # of a draft token; a target call is 1
        cost = cost_table(float(price), 1.0)
        (choice,) = choose(first, second, cost, np.ones(1))
        picked = next(c for c in first if c.threshold == choice.threshold)
        assert choice.speculate == (tuning.over_plain(picked, cost).low > 1)
        pays.add(choice.speculate)
        noise += choice.expected > 1 and not choice.speculate
    assert pays == {True, False} and noise, "faster, but not beyond the noise"


def test_an_interval_covers_the_ratio_of_sums():
    rng, covered = np.random.default_rng(0), 0
    for _ in range(60):
        below = rng.gamma(2.0, 1.0, 80)
        found = tuning.ratio(2 * below + rng.normal(0, 0.5, 80), below)
        covered += found.low <= 2 <= found.high
    assert covered >= 52
    assert tuning.ratio(np.ones(1), np.ones(1)) == (1, None, None), "one prompt has none"


def table(seed: int = 0) -> RolloutTable:
    """A sampled target. Acceptance varies from token to token."""
    rng, shape = np.random.default_rng(seed), (12, 40, GAMMA)
    return sampled_table(rng.beta(2, 1, shape), 0.0, rng.beta(1, 2, (*shape, 2)))


def told(found: RolloutTable) -> Worth:
    """By a predictor that knows the present token and its siblings, and guesses the next one."""
    accept = torch.from_numpy(found.accept)
    second, third = torch.from_numpy(found.siblings).unbind(-1)
    return Worth.of(Chances(accept, torch.full_like(accept, 0.67), second, third))


def grower() -> Grower:
    found = table()
    return Grower("comb", Replayer(found, GAMMA), told(found), 12)


@pytest.mark.parametrize("cost", COSTS)
def test_the_rate_is_what_it_reaches(cost):
    found = grower().settled(cost)
    reached = found.counts["emitted"].sum() / seconds(found, cost)
    assert abs(reached - found.threshold) <= 1e-4 * reached
    assert grower().regret(cost, found.threshold) < 0.01
    assert reached > 1 / cost.autoregressive


def test_leaves_pay_where_rows_are_cheap():
    free, cheap, dear = (
        seconds(grower().chain().settled(cost), cost) / seconds(grower().settled(cost), cost)
        for cost in COSTS
    )
    assert free > cheap > dear >= 1 and free > 1.05


@dataclass(frozen=True)
class Restless(Grower):
    def at(self, cost: CostTable, rate: float) -> Candidate:
        counts = counts_with(np.zeros(1), np.zeros(1))
        self.prompts.append(rate)
        counts["draft_forwards"] += 10.0 + len(self.prompts) % 2
        return Candidate("comb", rate, counts)

    @property
    def prompts(self) -> list[float]:
        return self.worth


def test_a_rate_that_never_rests_is_the_fastest_of_those_tried():
    tried = list[float]()
    assert seconds(Restless("comb", None, tried, 12).settled(COSTS[0]), COSTS[0]) == 10
    assert len(tried) < 100


def results(cost: CostTable) -> dict[str, Any]:
    """What is found of a structure `comb` beside fixed lengths."""
    structure = SimpleNamespace(budget=12, worth=told)
    samples = []
    for seed in (0, 1):
        replayer = Replayer(table(seed), GAMMA)
        rules = sweep(replayer, {"fixed": FIXED}, {"fixed": [1, 2]})
        samples.append(tuning.sample(replayer, rules, {"comb": structure}, points=4))
    assert [bound.rule for bound in samples[0].bounds] == ["knows p"] * 5
    return tuning.result(*samples, cost, tuning.settled_rates(samples[0], cost))


def test_what_is_not_tuned_is_compared_with_what_is():
    found = results(COSTS[1])
    loss = found["untuned"]["comb"]
    assert loss["rate"] == found["structures"]["comb"]["threshold"] and 1.0 in tuning.FACTORS
    assert 0 <= loss["regret"] < 0.02 and 0 <= loss["chain_regret"] < 0.02
    assert found["structures"]["comb"]["other"] == "fixed" and list(found["bounds"]) == ["knows p"]


def test_a_structure_pays_for_what_it_asks():
    cfg = OmegaConf.create(
        {
            "methods": ["fixed", "comb", "other"],
            "rules": {"fixed": {}, "worth": {"checkpoint": "a"}},
            "structures": {"comb": {"checkpoint": "a/"}, "other": {"checkpoint": "b"}},
        }
    )
    assert same_questions(cfg) == {"comb": "worth"}
    cost = with_questions(cfg, replace(COSTS[1], calls={"worth": 0.1}))
    assert cost.calls == {"worth": 0.1, "comb": 0.1}
    assert with_questions(cfg, replace(cost, calls={"worth": 1, "comb": 2})).calls["comb"] == 2
    assert with_questions(cfg, COSTS[1]) == COSTS[1]

    drafts, free = grower().settled(cost), grower().settled(COSTS[1])
    assert drafts.threshold == free.threshold, "a request does not count them either"
    asked = 0.1 * free.counts["draft_forwards"].sum()
    assert seconds(drafts, cost) == pytest.approx(seconds(free, COSTS[1]) + asked)


@pytest.mark.parametrize(("temperature", "law"), [(0.0, "point masses"), (0.7, "RRSw")])
def test_what_replay_leaves_out_is_said_where_there_is_a_structure(temperature, law):
    facts = {
        **{"cost": "c5", "chosen_on": "train", "judged_on": "test", "frontier": {}},
        **{"oracle_calls": None, "elsewhere": {}, "gamma": GAMMA},
        "draft_warp": {"temperature": temperature},
        "data": {"folder": "data/rounds"},
    }
    found = results(COSTS[0])
    lines = report(facts | {"results": {"chosen": found}}).splitlines()
    (line,) = [line for line in lines if "after a leaf" in line]
    assert f"a path of {GAMMA} tokens at most" in line and "two leaves" in line and law in line
    for calls, words in (
        ({}, "; predictions cost nothing here\n"),
        ({"comb": 1.0}, f"; oracle {found['oracle_speedup']:.2f}x\n"),
        ({"fixed": 1.0}, "; predictions of comb cost nothing here\n"),
    ):
        priced = found | {"cost": replace(COSTS[0], calls=calls).to_dict()}
        assert words in report(facts | {"results": {"chosen": priced}})
    alone = found | {"structures": {}, "untuned": {}}
    assert "leaf" not in report(facts | {"results": {"chosen": alone}})


@pytest.mark.slow
def test_a_thousand_combinations_on_five_hundred_prompts_in_a_minute(tmp_path):
    head = SpecDecPPStop(write_checkpoint(tmp_path / "head", "specdecpp", 4), 0.5, [1, 20], "paper")
    classes = HRADStop(write_checkpoint(tmp_path / "classes", "hrad", 4, gamma=3), Confidence(0.4))
    rng, shape = np.random.default_rng(0), (500, 100, 20)
    columns = {name: rng.random(shape) for name in ("max_q", "confidence")}
    predicted: dict[str, Any] = {head.survival: np.cumprod(rng.random(shape), -1)}
    predicted[classes.outcomes] = rng.integers(0, 3, shape[:2])
    recorded = sampled_table(rng.random(shape))
    recorded = replace(recorded, **columns, entropy=5 * rng.random(shape), predicted=predicted)
    started = perf_counter()
    stops: dict[str, TunableRule] = {
        "fixed": Fixed(1),
        "confidence": Confidence(0.4),
        "confidence_before": ConfidenceBefore(0.4),
        "adaedl": AdaEDL(0.4, 0.2, 0.9, 0.01, 0.5, 0.9),
        "specdecpp": head,
        "hrad": classes,
    }
    policies = {name: stop.policy(recorded) for name, stop in stops.items()}
    replayer = Replayer(recorded, shape[-1])
    grid = {name: np.linspace(0, 1, 37).tolist() for name in policies}
    candidates = sweep(replayer, policies, grid | {"fixed": list(range(1, shape[-1] + 1))})
    costs = [cost_table(1.0, float(ratio)) for ratio in (2, 4, 5, 10, 15)]
    for cost in costs:
        assert len(choose(candidates, candidates, cost, hindsight(replayer, cost))) == len(policies)
    spent = perf_counter() - started
    print(f"{len(candidates) * len(costs)} combinations in {spent:.1f} s")
    assert len(candidates) * len(costs) >= 1000 and spent < 60


def test_grown_drafts_of_a_processed_greedy_draft_are_refused() -> None:
    """The most probable tokens that a harvest records are those without processors."""
    cfg = OmegaConf.create(
        {"methods": ["grown"], "rules": {}, "structures": {"grown": {}}, "data": "x"}
    )
    warp = processed(0.0, repetition_penalty=1.1).to_dict()
    draft = WarpSettings.model_validate_json(json.dumps(warp))
    harvest: Any = SimpleNamespace(warps=SimpleNamespace(draft=draft))
    refuses("^methods: grown takes the most probable tokens", tunable_rules, cfg, harvest)
