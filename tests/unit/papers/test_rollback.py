"""Rollback, ablation and sensitivity of SpecBranch, from hand-made rounds."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from papers.specbranch.ablation import ablation, ablation_modelled
from papers.specbranch.chosen_lengths import optimal_lengths
from papers.specbranch.rollback import rollback_rates
from papers.specbranch.sensitivity import BRANCHES, EPSILON, by_value, by_value_modelled
from reports.figure import Missing, save
from tests.helpers.evaluation.evaluations import (
    chain,
    evaluation,
    labels,
    method,
    overlapped,
    plain,
    trace,
)

epsilon, epsilon_modelled = partial(by_value, EPSILON), partial(by_value_modelled, EPSILON)
most_branches = partial(by_value, BRANCHES)
most_branches_modelled = partial(by_value_modelled, BRANCHES)
CONFIDENCE = {"_target_": "decoding.stopping.confidence.Confidence"}


def specbranch(
    eps: float = 0.2, candidates: int = 2, stop: str = "hrad", pre_verify: bool = False
) -> dict:
    settings = {"confidence": {**CONFIDENCE, "threshold": eps}} if stop == "hrad" else {}
    branches = {"gamma_max": 3, "candidates": candidates}
    return method(
        "overlapped",
        "branch_point",
        "token",
        stop,
        engine={"pre_verify": pre_verify},
        structure=branches,
        stop=settings,
    )


METHODS = {
    "fixed": method("serial", "chain", "token", "fixed"),
    "pearl": specbranch(stop="never", pre_verify=True),
    "specbranch": specbranch(),
    "without_branch": method("serial", "chain", "token", "hrad"),
    "without_hrad": specbranch(stop="confidence"),
    "adaedl": method("serial", "chain", "token", "confidence"),
}
SHARED = [
    trace([overlapped(2, 2, 4, 0), overlapped(2, 1, 2, 1)], 2.0, "a"),
    trace([overlapped(1, 0, 2, 2)], 2.0, "b"),
]
SERIAL = [trace([chain(2, 1), chain(0, 0)], 2.0, "a"), trace([chain(1, 1)], 2.0, "b")]


def compared() -> list:
    traces = {
        name: SHARED if METHODS[name]["engine"].get("pre_verify") is not None else SERIAL
        for name in METHODS
    }
    traces["without_hrad"] = [replace(each, seconds=6.0) for each in SHARED]
    found = evaluation(
        METHODS, {"autoregressive": [plain(2, 2.0, "a"), plain(2, 2.0, "b")], **traces}
    )
    found.config["modelled"] = [2]
    return [found]


def swept(**values: dict) -> list:
    traces = {name: SHARED for name in values}
    found = evaluation(
        values, {"autoregressive": [plain(2, 2.0, "a"), plain(2, 2.0, "b")], **traces}
    )
    found.config["modelled"] = [2]
    return [found]


def test_rollback_rates() -> None:
    figure = rollback_rates(compared())
    found = {row[2]: row[3:] for row in figure.rows}
    assert "autoregressive" not in found
    assert found["specbranch"] == [3 / 8, pytest.approx(1 / 6), 1], (
        "3 of 8 steps; prompt a 1 of 6, b 2 of 2"
    )
    assert found["fixed"] == [pytest.approx(1 / 3), 0, 0.5]
    assert (figure.kind, figure.n) == ("measured", "2 prompts, 18 rounds")


def test_ablation_knows_the_parts_by_their_config() -> None:
    figure = ablation(compared())
    assert set(figure.column("method")) == {
        "fixed length",
        "PEARL",
        "SpecBranch",
        "without branches",
        "without H-RAD",
    }
    speeds = dict(zip(figure.column("method"), figure.column("speed-up"), strict=True))
    assert speeds["SpecBranch"] == pytest.approx((6 / 4) / (4 / 4))
    assert speeds["without H-RAD"] == pytest.approx((6 / 12) / (4 / 4))
    assert speeds["without branches"] == pytest.approx(5 / 4)
    assert figure.kind == "measured"


def test_datasets_together_are_not_counted_again() -> None:
    (found,) = compared()
    traces = {
        name: [*each, *(replace(one, dataset="other") for one in each)]
        for name, each in found.traces.items()
    }
    figure = ablation([replace(found, traces=traces)])
    assert "all" in figure.column("dataset")
    assert figure.n == f"4 prompts, {2 * int(ablation([found]).n.split()[2])} rounds"


def test_ablation_modelled() -> None:
    figure = ablation_modelled(compared())
    speeds = {(row[1], row[2]): row[3] for row in figure.rows}
    # without branches: 3 draft forwards, 3 target calls of 2, 5 tokens; plain: 2 a token
    assert speeds["without branches", 2] == pytest.approx(2 / (9 / 5))
    assert figure.kind == "modelled"


def test_sensitivity_to_epsilon_and_branches() -> None:
    by_eps = swept(eps_20=specbranch(eps=0.2), eps_50=specbranch(eps=0.5))
    figure = epsilon(by_eps)
    assert figure.column("epsilon") == [0.2, 0.5]
    assert figure.column("rollback RB") == [3 / 8, 3 / 8]
    assert figure.column("tokens/target call") == [2, 2]
    assert (figure.kind, epsilon_modelled(by_eps).kind) == ("measured", "modelled")
    assert epsilon_modelled(by_eps).column("speed ratio") == ["c = 2", "c = 2"]
    by_branches = swept(branches_1=specbranch(candidates=1), branches_4=specbranch(candidates=4))
    assert most_branches(by_branches).column("branches") == [1, 4]
    # a round: its pending tokens one by one, then a draft forward beside a target call of 2; 11 for
    # 6 tokens
    assert most_branches_modelled(by_branches).column("speed-up") == pytest.approx(
        [12 / 11, 12 / 11]
    )
    with pytest.raises(Missing, match="experiment=specbranch_thresholds"):
        epsilon(by_branches)
    with pytest.raises(Missing, match="experiment=specbranch_branches"):
        most_branches_modelled(by_eps)


def test_right_and_chosen_lengths_of_one_prompt() -> None:
    figure = optimal_lengths(compared())
    rows = [row[1:] for row in figure.rows if row[0] == "specbranch"]
    assert rows == [[1, 2, 2, "2 or more"], [2, 2, 1, "1"]], (
        "prompt a, by accepted tokens the upper one of two"
    )
    assert [row[1:] for row in figure.rows if row[0] == "without branch"] == [
        [1, 2, 1, "1"],
        [2, 0, 0, "0 or more"],
    ]
    assert "fixed" not in figure.column("method") and "single rounds" in figure.interval


def test_what_is_missing_is_named() -> None:
    for build in (rollback_rates, ablation, ablation_modelled, optimal_lengths):
        with pytest.raises(Missing, match="python scripts/evaluate.py experiment=specbranch"):
            build([])


def test_outputs_that_end_before_anything_is_drafted() -> None:
    (found,) = compared()
    at_once = [trace([chain(0, 0)], 1.0, "a")]
    with pytest.raises(Missing, match="something is drafted"):
        rollback_rates([replace(found, traces={name: at_once for name in found.traces})])
    with pytest.raises(Missing, match="with rounds"):
        optimal_lengths([replace(found, traces={name: [trace([])] for name in found.traces})])


@pytest.mark.slow
def test_they_draw(tmp_path: Path) -> None:
    both = swept(a=specbranch(eps=0.2), b=specbranch(eps=0.5), c=specbranch(candidates=4))
    builds = (rollback_rates, ablation, ablation_modelled, optimal_lengths)
    sensitivities = (epsilon, epsilon_modelled, most_branches, most_branches_modelled)
    figures = [*(build(compared()) for build in builds), *(build(both) for build in sensitivities)]
    written = [path for figure in figures for path in save(figure, tmp_path)]
    assert len(set(written)) == 16 and all(path.stat().st_size for path in written)
    assert [labels(figure) for figure in figures] == [
        {("dataset", "rollback RB")},
        {("dataset", "speed-up, measured")},
        {("speed ratio c", "speed-up, modelled")},
        {("round (target call)", "draft tokens")},
        {("epsilon", "rollback RB"), ("epsilon", "tokens/target call")},
        {("epsilon", "speed-up, modelled")},
        {("branches", "rollback RB"), ("branches", "tokens/target call")},
        {("branches", "speed-up, modelled")},
    ]
