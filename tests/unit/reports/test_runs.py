"""What figures read of evaluations, and their intervals."""

from evaluation.table import SPEEDUP
from reports.runs import (
    CALLS,
    ROLLBACK,
    extent,
    method,
    pooled,
    runs,
    sweeps,
    with_all,
    with_method,
)
from runtime.intervals import Estimate
from tests.helpers.evaluation.evaluations import chain, evaluation, lacks, plain, trace
from tests.helpers.evaluation.evaluations import method as made

FIXED = made("serial", "chain", "token", "fixed", structure={"gamma_max": 20}, stop={"gamma": 4})
CONFIDENCE = {"confidence": {"_target_": "x.Confidence", "threshold": 0.2}}
HRAD = made("serial", "chain", "token", "hrad", stop=CONFIDENCE)


def test_a_method_is_what_its_config_says():
    chosen = {**FIXED, "stop": {**FIXED["stop"], "gamma": 2}}
    found = evaluation({"fixed": FIXED, "hrad": HRAD}, {})
    found.results["methods"] = {"fixed": {"settings": chosen}}
    fixed, hrad = method(found, "fixed"), method(found, "hrad")
    assert fixed.chain and fixed.stop == "Fixed"
    assert fixed.settings == {"structure.gamma_max": 20, "stop.gamma": 2}, "that was chosen"
    assert hrad.settings == {"stop.confidence": "Confidence", "stop.confidence.threshold": 0.2}
    assert method(found, "autoregressive").structure == ""


def test_runs_by_dataset_and_temperature():
    both = [trace([chain(1, 1)], dataset="x"), trace([chain(1, 0)], dataset="y")]
    traces = {"autoregressive": [plain(2, dataset="x"), plain(1, dataset="y")], "fixed": both}
    warm, cold = (evaluation({"fixed": FIXED}, traces, temperature) for temperature in (1.0, 0.0))
    found = runs([warm, cold], lambda how: how.stop == "Fixed")
    kinds = [(run.temperature, run.dataset) for run in found]
    assert kinds == [(0.0, "x"), (0.0, "y"), (1.0, "x"), (1.0, "y")]
    assert found[0].traces == both[:1] and len(found[0].baseline[0].tokens) == 2
    together = [(run.temperature, run.dataset, len(run.traces)) for run in pooled(found)]
    assert together == [(0.0, "all", 2), (1.0, "all", 2)]
    assert extent(found) == "2 prompts, 4 rounds"


def test_a_dataset_called_all_is_not_all_and_names_shown_alike_are_two():
    both = [trace([chain(1, 1)], dataset="all"), trace([chain(1, 0)], dataset="y")]
    found = with_all(runs([evaluation({"fixed": FIXED}, {"fixed": both})]))
    assert [(run.dataset, len(run.traces)) for run in found] == [('"all"', 1), ("y", 1), ("all", 2)]
    methods = {"a_b": FIXED, "a b": FIXED}
    found = evaluation(methods, {name: [trace([chain(1, 1)])] for name in methods})
    assert [run.name for run in runs([found])] == [run.name for run in pooled(runs([found]))]
    assert len(runs([found])) == 2


def test_of_two_evaluations_of_the_same_the_larger_counts():
    small = evaluation({"fixed": FIXED}, {"fixed": [trace([chain(1, 1)])]})
    both = [trace([chain(1, 1)]), trace([chain(1, 0)], prompt="b")]
    large = evaluation({"fixed": FIXED}, {"fixed": both})
    for order in ([small, large], [large, small]):
        assert [len(run.traces) for run in runs(order)] == [2]


def test_a_sweep_differs_in_one_setting():
    def stop(eps: float, **others: float) -> dict[str, object]:
        settings = {"stop": {"threshold": eps}, "structure": others}
        return made("serial", "chain", "token", "confidence", **settings)

    names = {"a": stop(0.1), "b": stop(0.2), "c": stop(0.3, gamma_max=2), "same": stop(0.1)}
    names["fixed"] = FIXED
    found = evaluation(names, {name: [trace([chain(1, 1)])] for name in names})
    swept = sweeps([found], lambda how: how.structure == "Chain", "stop.threshold")
    assert [run.name for run in swept] == ["a", "b", "same"]


def test_missing_says_what_is_needed():
    found = evaluation({"fixed": FIXED}, {"fixed": []})
    assert with_method([found], lambda how: how.stop == "Fixed", "needs it") == [found]
    lacks("needs it", with_method, [found], lambda how: how.stop == "Never", "needs it")


def test_a_run_says_what_the_table_says():
    """A figure of one run is that of the evaluation's table, the interval too."""
    drafted = [trace([chain(4, count)], 1.0, prompt) for prompt, count in (("a", 3), ("b", 1))]
    decoded = {"autoregressive": [plain(2, 2.0, prompt) for prompt in "abab"], "fixed": drafted}
    found = evaluation({"fixed": FIXED}, decoded)
    table = found.summary["all"]
    for run in pooled(runs([found])):
        for name in (SPEEDUP, CALLS, ROLLBACK, "acceptance", "tokens/s"):
            if name in table[run.name]:
                assert run.estimate(name) == table[run.name][name], name
    assert run.estimate("acceptance") == Estimate(0.5, 0.25, 0.75)
