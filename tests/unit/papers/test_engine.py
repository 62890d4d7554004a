"""SpecBranch and SpecDec++ beside others, from hand-made rounds and computed by hand."""

from dataclasses import replace
from functools import partial

import pytest

from evaluation.table import SPEEDUP
from papers.specbranch.accepted_lengths import optimal_lengths
from papers.specbranch.engine import (
    BRANCHES,
    EPSILON,
    ablation,
    ablation_modelled,
    by_value,
    by_value_modelled,
    rollback_rates,
    specbranch_modelled,
    specbranch_speed,
    specbranch_times,
)
from papers.specdecpp.speed import specdecpp_modelled, specdecpp_speed
from reports.artifacts import Evaluation
from reports.figure import Missing
from reports.runs import CALLS, LENGTH, ROLLBACK, runs
from tests.helpers.evaluation.evaluations import (
    chain,
    drawn,
    evaluation,
    interval,
    labels,
    lacks,
    method,
    overlapped,
    plain,
    records_by,
    trace,
)

HRAD = method("serial", "chain", "token", "hrad")
BESIDE = method("overlapped", "branch_point", "token", "hrad", engine={"pre_verify": False})
HEAD = method("serial", "chain", "token", "acceptance")
# two prompts of 4 tokens; plain decoding takes 4 s each, the chain 1 and 3 s
CHAIN = [trace([chain(3, 3)], 1.0, "a"), trace([chain(2, 1), chain(2, 1)], 3.0, "b")]
PLAIN = [plain(4, 4.0, "a"), plain(4, 4.0, "b")]
BRANCH = [trace([overlapped(2, 2, 4, 1)], 2.0, "a"), trace([overlapped(2, 0, 3, 3)], 2.0, "b")]
CONFIDENCE = {"_target_": "decoding.stopping.confidence.Confidence"}


def compared(**results: object) -> list[Evaluation]:
    found = evaluation(
        {"without_branch": HRAD, "specbranch": BESIDE},
        {"autoregressive": PLAIN, "without_branch": CHAIN, "specbranch": BRANCH},
        **results,
    )
    found.config["modelled"] = ["measured", 2, 10]
    return [found]


def priced(speed: float) -> dict:
    """What an evaluation said of costs measured there, on all prompts."""
    figures = {"speed-up, measured": [speed, None, None], "speed-up, c=2": [7.0, None, None]}
    return {"all": {"without_branch": figures}}


def test_estimates_of_a_run():
    run = next(run for run in runs(compared()) if run.name == "without_branch")
    assert run.estimate(SPEEDUP) == (2, 4 / 3, 4), "8 tokens in 4 s over 8 in 8; b alone 4/3, a 4"
    assert run.estimate(CALLS) == (pytest.approx(8 / 3), 2, 4)
    assert run.estimate(LENGTH).value == pytest.approx(5 / 3), "5 tokens in 3 rounds"
    assert run.estimate(ROLLBACK) == (pytest.approx(2 / 7), 0, 0.5)
    # c = 2, draft forwards 7, target calls 3: 13 for 8 tokens, plain decoding 16
    assert run.modelled_speedup(2.0) == pytest.approx((16 / 13, 8 / 8, 8 / 5))


def test_the_measured_table():
    figure = specbranch_speed(compared())
    rows = records_by(figure, "method")
    ours, plainly = rows["without branch"], rows["autoregressive"]
    assert ours["drafted/round"] == pytest.approx(7 / 3) and ours["tokens/s"] == 2
    assert (ours["speed-up"], ours["speed-up high"]) == (2, 4)
    assert ours["rollback RB"] == pytest.approx(2 / 7)
    assert interval(plainly, "speed-up") == [1, None, None]
    assert plainly["accepted length M"] is None
    assert rows["specbranch"]["rollback RB"] == pytest.approx(4 / 7), "as the engine has counted"
    assert (figure.kind, figure.n) == ("measured", "2 prompts, 13 rounds")
    assert "bootstrap" in figure.interval and "SpecBranch" in figure.source


def test_the_modelled_table_takes_ratios_and_what_was_priced():
    figure = specbranch_modelled(compared(summary=priced(1.25)))
    rows, stored = records_by(figure, "method"), "speed-up, forwards as measured"
    assert figure.kind == "modelled" and "speed-up, c = 10 low" in figure.columns
    ours = rows["without branch"]
    assert ours["speed-up, c = 2"] == pytest.approx(16 / 13), "priced here, not as stored"
    assert (ours[stored], rows["specbranch"][stored]) == (1.25, None)


def test_datasets_together_have_no_stored_price():
    other = evaluation(
        {"specbranch": BESIDE, "without_branch": HRAD},
        {
            "autoregressive": [plain(4, 4.0, dataset="other")],
            "specbranch": [trace([overlapped(1, 1, 1, 0)], dataset="other")],
            "without_branch": [trace([chain(1, 1)], 1.0, dataset="other")],
        },
        summary=priced(1.5),
    )
    other.config["modelled"] = ["measured", 2]
    figure = specbranch_modelled([*compared(summary=priced(1.25)), other])
    every = records_by(figure, "dataset", "method")
    rows = {data: row for (data, name), row in every.items() if name == "without branch"}
    assert rows["other"]["speed-up, c = 10"] == pytest.approx(2 * 10 / 11)
    stored = {name: row["speed-up, forwards as measured"] for name, row in rows.items()}
    assert stored == {"toy": 1.25, "other": 1.5, "all": None}


def test_specdecpp_is_known_by_its_stop_rule_and_priced_at_the_ratios_of_papers():
    found = evaluation({"stop_50": HEAD}, {"autoregressive": PLAIN, "stop_50": CHAIN})
    measured = records_by(specdecpp_speed([*compared(), found]), "method")
    assert measured["stop 50"]["speed-up"] == 2
    found.config["modelled"] = [2]
    modelled = records_by(specdecpp_modelled([found]), "method")
    assert modelled["stop 50"]["speed-up, c = 2"] == pytest.approx(16 / 13)
    found = compared()
    del found[0].config["modelled"]
    names = [name for name in specbranch_modelled(found).columns if name.endswith(" low")]
    assert names == [f"speed-up, c = {c} low" for c in (4, 5, 10, 15)]


def test_times_of_specbranch_are_of_its_comparison():
    parts = {"specbranch": BESIDE, "fixed": method("serial", "chain", "token", "fixed")}
    traces = {"specbranch": [trace([overlapped(1, 1, 2, 0)])], "fixed": [trace([chain(1, 1)])]}
    traces["autoregressive"] = PLAIN
    alone = evaluation({"stop_50": HEAD}, {"autoregressive": PLAIN, "stop_50": CHAIN})
    figure = specbranch_times([evaluation(parts, traces), alone])
    assert figure.column("method") == ["specbranch", "fixed", "autoregressive"]


def specbranch(eps: float = 0.2, candidates: int = 2, stop: str = "hrad") -> dict:
    return method(
        *("overlapped", "branch_point", "token", stop),
        engine={"pre_verify": stop == "never"},
        structure={"gamma_max": 3, "candidates": candidates},
        stop={"confidence": {**CONFIDENCE, "threshold": eps}} if stop == "hrad" else {},
    )


METHODS = {
    "fixed": method("serial", "chain", "token", "fixed"),
    "pearl": specbranch(stop="never"),
    "specbranch": specbranch(),
    "without_branch": HRAD,
    "without_hrad": specbranch(stop="confidence"),
    "adaedl": method("serial", "chain", "token", "confidence"),
}
TWO = [overlapped(2, 2, 4, 0), overlapped(2, 1, 2, 1)]
SHARED = [trace(TWO, 2.0, "a"), trace([overlapped(1, 0, 2, 2)], 2.0, "b")]
SERIAL = [trace([chain(2, 1), chain(0, 0)], 2.0, "a"), trace([chain(1, 1)], 2.0, "b")]


def decoded(methods: dict, **traces: list) -> list[Evaluation]:
    """With all methods' traces as of SpecBranch, but for those given."""
    every = {"autoregressive": [plain(2, 2.0, "a"), plain(2, 2.0, "b")]}
    every |= {name: traces.get(name, SHARED) for name in methods}
    found = evaluation(methods, every)
    found.config["modelled"] = [2]
    return [found]


def parts() -> list[Evaluation]:
    slow = [replace(each, seconds=6.0) for each in SHARED]
    serial = dict.fromkeys(("fixed", "without_branch", "adaedl"), SERIAL)
    return decoded(METHODS, without_hrad=slow, **serial)


def test_rollback_rates():
    figure = rollback_rates(parts())
    rows = records_by(figure, "method")
    assert "autoregressive" not in rows
    # 3 of 8 steps; prompt a 1 of 6, b 2 of 2
    assert interval(rows["specbranch"], ROLLBACK) == [3 / 8, pytest.approx(1 / 6), 1]
    assert interval(rows["fixed"], ROLLBACK) == [pytest.approx(1 / 3), 0, 0.5]
    assert (figure.kind, figure.n) == ("measured", "2 prompts, 18 rounds")


def test_ablation_knows_the_parts_by_their_config():
    figure = ablation(parts())
    speeds = {name: row["speed-up"] for name, row in records_by(figure, "method").items()}
    left_out = {"without branches", "without H-RAD"}
    assert speeds.keys() == {"fixed length", "PEARL", "SpecBranch", *left_out}
    assert speeds["SpecBranch"] == pytest.approx((6 / 4) / (4 / 4))
    assert speeds["without H-RAD"] == pytest.approx((6 / 12) / (4 / 4))
    assert speeds["without branches"] == pytest.approx(5 / 4)
    assert figure.kind == "measured"
    modelled = ablation_modelled(parts())
    rows = records_by(modelled, "method", "speed ratio c")
    # without branches: 3 draft forwards, 3 target calls of 2, 5 tokens; plain: 2 a token
    assert rows["without branches", 2]["speed-up"] == pytest.approx(2 / (9 / 5))
    assert modelled.kind == "modelled"


def test_datasets_together_are_not_counted_again():
    (found,) = parts()
    traces = {name: list(each) for name, each in found.traces.items()}
    for each in traces.values():
        each += [replace(one, dataset="other") for one in each]
    figure = ablation([replace(found, traces=traces)])
    assert "all" in figure.column("dataset")
    assert figure.n == f"4 prompts, {2 * int(ablation([found]).n.split()[2])} rounds"


def test_sensitivity_to_epsilon_and_branches():
    by_eps = decoded({"eps_20": specbranch(eps=0.2), "eps_50": specbranch(eps=0.5)})
    figure, modelled = by_value(by_eps, EPSILON), by_value_modelled(by_eps, EPSILON)
    assert figure.column("epsilon") == [0.2, 0.5]
    assert figure.column("rollback RB") == [3 / 8, 3 / 8]
    assert figure.column("tokens/target call") == [2, 2]
    assert (figure.kind, modelled.kind) == ("measured", "modelled")
    assert modelled.column("speed ratio") == ["c = 2", "c = 2"]
    by_branches = decoded({"one": specbranch(candidates=1), "four": specbranch(candidates=4)})
    assert by_value(by_branches, BRANCHES).column("branches") == [1, 4]
    # a round: its pending tokens one by one, then a draft forward beside a target call of 2; 11 for
    # 6 tokens
    speeds = by_value_modelled(by_branches, BRANCHES).column("speed-up")
    assert speeds == pytest.approx([12 / 11, 12 / 11])
    lacks("experiment=specbranch_thresholds", by_value, by_branches, EPSILON)
    lacks("experiment=specbranch_branches", by_value_modelled, by_eps, BRANCHES)


def test_right_and_chosen_lengths_of_one_prompt():
    figure = optimal_lengths(parts())
    rows: dict[str, list] = {name: [] for name in figure.column("method")}
    for name, *row in figure.rows:
        rows[name].append(row)
    # prompt a, by accepted tokens the upper one of two
    assert rows["specbranch"] == [[1, 2, 2, "2 or more"], [2, 2, 1, "1"]]
    assert rows["without branch"] == [[1, 2, 1, "1"], [2, 0, 0, "0 or more"]]
    assert "fixed" not in rows and "single rounds" in figure.interval


@pytest.mark.parametrize(
    ("build", "experiment"),
    [
        (rollback_rates, "specbranch"),
        (ablation, "specbranch"),
        (ablation_modelled, "specbranch"),
        (optimal_lengths, "specbranch"),
        (specbranch_speed, "specbranch"),
        (specbranch_times, "specbranch"),
        (specdecpp_speed, "specdecpp"),
    ],
)
def test_what_is_missing_is_named(build, experiment):  # type: ignore[no-untyped-def]
    alone = evaluation({"eps_10": BESIDE}, {"autoregressive": PLAIN, "eps_10": BRANCH})
    for evaluations in ([], [alone]):
        lacks(f"python scripts/evaluate.py experiment={experiment}", build, evaluations)


def test_outputs_that_end_before_anything_is_drafted():
    (found,) = parts()
    at_once = [trace([chain(0, 0)], 1.0, "a")]
    with pytest.raises(Missing, match="something is drafted"):
        rollback_rates([replace(found, traces={name: at_once for name in found.traces})])
    with pytest.raises(Missing, match="with rounds"):
        optimal_lengths([replace(found, traces={name: [trace([])] for name in found.traces})])


RATIO = "speed ratio c: draft forwards per target forward"
PICTURES = [
    (specbranch_speed, compared, {("speed-up, measured", "")}),
    (specbranch_modelled, compared, {(RATIO, "speed-up, modelled")}),
    (rollback_rates, parts, {("dataset", "rollback RB")}),
    (ablation, parts, {("dataset", "speed-up, measured")}),
    (ablation_modelled, parts, {("speed ratio c", "speed-up, modelled")}),
    (optimal_lengths, parts, {("round (target call)", "draft tokens")}),
]


@pytest.mark.slow
def test_they_draw(tmp_path):
    swept = {"a": specbranch(eps=0.2), "b": specbranch(eps=0.5), "c": specbranch(candidates=4)}
    pictures = list(PICTURES)
    for setting in (EPSILON, BRANCHES):
        name, calls = setting.name, "tokens/target call"
        counts, speed = {(name, "rollback RB"), (name, calls)}, {(name, "speed-up, modelled")}
        for build, axes in ((by_value, counts), (by_value_modelled, speed)):
            pictures.append((partial(build, setting=setting), partial(decoded, swept), axes))
    for build, evaluations, axes in pictures:
        drawn(build(evaluations()), tmp_path)
        assert labels(build(evaluations())) == axes
    assert len(list(tmp_path.iterdir())) == 2 * len(pictures), "each has a name of its own"
