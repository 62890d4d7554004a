"""Grown drafts, from the command line: greedy and sampled, and what does not fit is refused."""

import json
from pathlib import Path

import pytest

from decoding.trace import read_traces
from tests.helpers.evaluation.evaluating import identity, refused, run
from tests.helpers.programs.programs import GREEDY
from tests.helpers.training.checkpoints import write_checkpoint

NUMBERS = 8  # inputs of the predictor
COSTS = {"seconds": {"draft": 1.0, "target": {"1": 4.0, "65": 5.0}}}
WARPS = {"greedy": 0.0, "sampled": 1.0}


@pytest.fixture
def given(evaluating: list[str]) -> list[str]:
    """A predictor for either temperature, and costs."""
    for name, temperature in WARPS.items():
        warp = {"temperature": temperature, "top_k": 0, "top_p": 1.0}
        context = {"pair": identity(evaluating), "warp": warp, "draft_warp": warp}
        write_checkpoint(Path(name), "value", NUMBERS, context=context)
    Path("costs.json").write_text(json.dumps(COSTS))
    methods = ("grown", "grown_greedy")
    return [*evaluating, *(f"method.{name}.structure.cost.file=costs.json" for name in methods)]


def test_greedy_drafts_grow_and_the_text_is_that_of_plain_decoding(given: list[str]) -> None:
    names = ["grown", "grown_greedy", "reranked"]
    checkpoints = [f"method.{name}.structure.checkpoint=greedy" for name in names[:2]]
    printed = run(*given, *GREEDY, *checkpoints, f"methods=[{','.join(names)}]", "verbose=true")
    assert printed.count("8 of 8 outputs equal autoregressive decoding") == 3
    wide = {}
    for name in names:
        rounds = [r for t in read_traces(Path(f"runs/x/traces-{name}.jsonl")) for r in t.rounds]
        parents = [round_.draft_parents for round_ in rounds]
        wide[name] = any(len(set(found)) < len(found) for found in parents)
    assert wide == {"grown": False, "grown_greedy": True, "reranked": True}, (
        "siblings of a greedy draft are point masses"
    )


def test_sampled_drafts_grow(given: list[str]) -> None:
    run(*given, "methods=[grown]", "method.grown.structure.checkpoint=sampled")
    rounds = [r for t in read_traces(Path("runs/x/traces-grown.jsonl")) for r in t.rounds]
    assert any(round_.depth < len(round_.draft_tokens) for round_ in rounds)
    assert all(round_.seconds["stop"] > 0 for round_ in rounds if len(round_.draft_tokens) > 1)


@pytest.mark.slow
def test_what_does_not_fit_is_refused(given: list[str]) -> None:
    theirs = {"name": "theirs", "target": "whole x", "draft": "whole y", "tokenizer": "z"}
    Path("theirs.json").write_text(json.dumps(COSTS | {"pair": theirs}))
    key, sampled = "method.grown.structure", "checkpoint=sampled"
    for values, words in {
        "checkpoint=greedy": f"{key}.checkpoint: greedy was trained with",
        "checkpoint=nowhere": "train.py predictor=value",
        f"{sampled} cost.file=nowhere.json": f"{key}.cost.file: nowhere.json is missing",
        f"{sampled} cost.file=theirs.json": f"{key}.cost.file: theirs.json was measured with anoth",
        f"{sampled} siblings=17": f"{key}.siblings: expected",
    }.items():
        changes = [f"{key}.{value}" for value in values.split()]
        assert words in refused(*given, "methods=[grown]", *changes)
    table = [one for one in given if ".cost.file=" not in one]
    falling = (f"cost@{key}.cost=c5", f"{key}.cost.target={{3:5,1:4}}", f"{key}.{sampled}")
    message = refused(*table, "methods=[grown]", *falling)
    assert f"{key}.cost.target: expected numbers of rows in rising" in message
