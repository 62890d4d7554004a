"""What scripts/evaluate.py refuses, in one line each."""

import json
from pathlib import Path

import pytest

from tests.helpers.evaluation.evaluating import GREEDY, refused, run, write_checkpoints


@pytest.mark.slow
def test_missing_and_foreign_checkpoints(evaluating: list[str]) -> None:
    message = refused(*evaluating, "methods=[hrad]")
    assert (
        "method.hrad.stop.checkpoint: no checkpoint" in message
        and "python train.py predictor=" in message
    )
    warp = {"temperature": 1.0, "top_k": 0, "top_p": 1.0}
    write_checkpoints(evaluating, warp)
    message = refused(*evaluating, *GREEDY, "methods=[specdecpp]")
    assert "method.specdecpp.stop.checkpoint" in message and "warp.temperature" in message
    message = refused(*evaluating, "methods=[hrad]", "structure.gamma_max=2")
    assert "method.hrad.stop.checkpoint" in message and "structure.gamma_max is 2" in message
    write_checkpoints(
        evaluating, warp, pair={"target": "another", "draft": "one", "tokenizer": "x"}
    )
    assert "pair.draft" in refused(*evaluating, "methods=[hrad]")
    held = [
        "methods=[custom]",
        "stop=stop_loss",
        "stop.cost=none.json",
        "stop.rule._target_=decoding.stopping.specdecpp.SpecDecPPStop",
        "+stop.rule.checkpoint=checkpoints/specdecpp",
        "+stop.rule.bounds=[1,4]",
        "+stop.rule.order=paper",
    ]
    message = refused(*evaluating, *held)
    assert "method.custom" not in message and "stop.rule.checkpoint" in message


def test_costs_of_another_pair_are_refused_and_of_another_machine_warned_of(
    evaluating: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    given = [
        "methods=[custom]",
        "stop=stop_loss",
        "stop.cost=cost.json",
        "max_new_tokens=4",
        "limit=1",
        "split=all",
    ]
    facts = {"seconds": {"draft": 1.0, "target": 1.0}, "measured_on": None}
    theirs = {"name": "theirs", "target": "whole x", "draft": "whole y", "tokenizer": "z"}
    Path("cost.json").write_text(json.dumps(facts | {"pair": theirs}))
    said = refused(*evaluating, *given)
    assert (
        "stop.cost: cost.json was measured with another target and draft and eos_ids and tokenizer."
        " Measure" in said
    )
    Path("cost.json").write_text(json.dumps(facts | {"pair": None, "measured_on": {"threads": 64}}))
    assert "stop.cost: cost.json does not say with which hardware" in refused(*evaluating, *given)
    abacus = {
        "hardware": {"target": "abacus", "draft": "abacus"},
        "dtypes": {"target": "bead"},
        "threads": 64,
    }
    Path("cost.json").write_text(json.dumps(facts | {"pair": None, "measured_on": abacus}))
    run(*evaluating, *given)
    assert (
        "warning: cost.json was measured on another machine: hardware abacus, here"
        in capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("methods=[fastest]", "methods: expected names among autoregressive, fixed, "),
        ("repeats=0", "repeats: expected a whole number from 1 on, got 0"),
        (
            "tried.fixed.stop.gamma=[0,2]",
            "tried.fixed.stop.gamma: expected a list, each a whole number from 1 to 1000, got [0",
        ),
        (
            "tried.fixed.stop.gamma=[1,abc]",
            "tried.fixed.stop.gamma: expected a list, each a whole number from 1 to 1000, got [1",
        ),
        ("methods=[custom] stop=adaedl stop.step=nan", "stop.step: expected a number from "),
        ("tried.fixed.stop.gamma=4", "tried.fixed.stop.gamma: expected a list of values, such as "),
        ("tried.fixed.stop.gamma=[2,21]", "at most structure.gamma_max=20, got 21"),
        (
            "tried.fixed.stop.gamma=[]",
            "tried.fixed.stop.gamma: expected a list of values, such as ",
        ),
        (
            "+tried.fixed.stop.gama=[2]",
            "tried.fixed.stop.gama: expected a list, each gamma, perhaps, got [2]",
        ),
        (
            "+tried.fastest.stop.gamma=[2]",
            "tried.fastest: expected a method that the command line does not make: ",
        ),
        ("tried.fixed=4", "tried.fixed: expected settings of the method, such as "),
        ("methods=[hrad] method.hrad.stop._target_=os.system", ""),
        (
            "methods=[hrad] method.hrad.stop._target_=no_library.Rule",
            "stop._target_: expected a stop",
        ),
        (
            "methods=fixed",
            "methods: expected a list of different names, such as [a,b], got 'fixed'",
        ),
        ("bound=figures", "bound: expected true or false, got 'figures'"),
        ("against.fixed=fixed", "against.fixed: expected a list of one or more different names, "),
        ("max_new_tokens=2.5", "max_new_tokens: expected a whole number from 1 on, got 2.5"),
        ("repeats=null", "repeats: expected a whole number from 1 on, got null"),
        ("split=dev", "split: expected train, calibration, test or all, got 'dev'"),
        ("out=prompts.jsonl/x", "out: prompts.jsonl/x cannot be made"),
        ("limit=0", "limit: expected a whole number from 1 on or null, got 0"),
        ("pair.draft=nowhere/at/all", "pair.draft: no model in nowhere/at/all"),
        ("max_new_tokens=2000", "pair.max_length"),
        ("method.fixed.stop.gama=3", "gama"),
        (
            "methods=[custom] method.custom.stop={_target_:decoding.stopping.never.Never}",
            "method.custom.stop: the custom method takes the top-level stop",
        ),
        (
            "engine=lookahead engine.ngram=1 methods=[custom]",
            "engine.ngram: expected a whole number from 2 to 16, got 1",
        ),
        (
            "engine=lookahead stop=adaedl methods=[custom]",
            "stop, engine: LookaheadEngine takes no stop",
        ),
        (
            "engine=lookahead structure.gamma_max=3 methods=[custom]",
            "structure, engine: LookaheadEngine takes no",
        ),
        (
            "modelled=[fast]",
            "modelled: expected a list of measured, pipeline and speed ratios above 0, ",
        ),
        (
            "modelled=[-1]",
            "modelled: expected a list of measured, pipeline and speed ratios above 0, ",
        ),
        (
            "modelled=5",
            "modelled: expected a list of measured, pipeline and speed ratios above 0, ",
        ),
        ("modelled=[.inf]", "modelled: expected a list of measured, pipeline and speed ratios"),
        ("methods=null", "methods: expected a list of different names, such as [a,b], got null"),
        ("methods=[fixed,fixed]", "methods: expected a list of different names"),
        ("thresholds=5", "thresholds: expected a path or null, got 5"),
        ("seed=18446744073709551616", "seed: expected a whole number from 0 to 4294967295"),
        ("+against.other=[fastest]", "against.other: expected names among autoregressive, "),
        ("+method.mine.engine=5", "method.mine.engine: expected a choice of the group engine"),
        ("+method.fixed.stops=5", "method.fixed.stops: expected stop, perhaps, got something else"),
        (
            "engine=lookahead engine.prompt_pool=2 methods=[custom]",
            "engine.prompt_pool: expected true or false, got 2",
        ),
    ],
)
@pytest.mark.few(6)
def test_bad_settings_end_with_one_line(argument: str, words: str, evaluating: list[str]) -> None:
    assert words in refused(*evaluating, "methods=[fixed]", *argument.split())
