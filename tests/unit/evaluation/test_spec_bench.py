"""Answers in the layout of Spec-Bench, from traces that are known by hand."""

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from decoding.trace import Trace
from evaluation import spec_bench
from tests.helpers.evaluation.evaluations import chain, plain, trace


def answered(prompt: str, seconds: float) -> Trace:
    return trace([chain(2, 2), chain(2, 0)], seconds, prompt)


def test_turns_are_of_one_question_and_repeats_are_choices(tmp_path):
    """Read as evaluation/speed.py reads it: the first choice of every line."""
    once = [
        answered("q#turn1", 1.0),
        answered("q#turn2", 3.0),
        replace(plain(2, 5.0, "r"), category="qa"),
    ]
    again = [replace(each, seconds=9.0) for each in once]
    tokenizer = SimpleNamespace(decode=lambda tokens, **_: "é" * len(tokens))
    pair: Any = SimpleNamespace(name="pair", tokenizer=tokenizer)
    spec_bench.write(tmp_path / "answers", {"org/m": [*once, *again]}, pair)
    (file,) = (tmp_path / "answers").iterdir()
    question, other = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
    assert (question["question_id"], question["category"]) == ("q", "toy"), "the name of the set"
    assert (other["question_id"], other["category"]) == ("r", "qa")
    first, second = question["choices"]
    assert first == {
        "index": 0,
        "turns": ["éééé", "éééé"],
        "decoding_steps": [2, 2],
        "new_tokens": [4, 4],
        "wall_time": [1.0, 3.0],
        "accept_lengths": [3, 1, 3, 1],
    }
    assert second["wall_time"] == [9.0, 9.0] and len(other["choices"]) == 2
    assert question.keys() >= {"answer_id", "model_id", "tstamp"}
