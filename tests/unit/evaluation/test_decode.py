"""Interleaving, seeds, the journal and losslessness evidence, without a model."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tqdm import tqdm

from data_gen.requests import Request
from decoding.models.table_lm import TableLM
from decoding.processors import processed
from decoding.sampling import Sampler
from decoding.trace import Span, StageTrace, Trace
from evaluation.decode import Journal, Plan, Stage, Traces, alternating, decode, request_seed
from evaluation.lossless import (
    TOLERANCE,
    Difference,
    broken_invariants,
    difference_lines,
    greedy_differences,
    near_tie,
)
from runtime.json_lines import with_checksum
from tests.helpers.damage.refusals import refuses
from tests.helpers.evaluation.evaluations import chain, trace

REQUESTS = [Request(f"p{n}", ("even", "odd")[n % 2], torch.tensor([n]), "test") for n in range(3)]
RESUME = "x.resume"


def decoded(*tokens: int) -> Trace:
    rounds = [chain(0, 0) for _ in tokens]
    for round_, token in zip(rounds, tokens, strict=True):
        round_.tokens = [token]
    return trace(rounds, prompt="p0")


class Recorder:
    """An engine that writes down when it was asked for what, warm-ups aside; `stop` requests end
    with an interrupt."""

    def __init__(self, name: str, log: list[tuple[str, int]], stop: int = 99) -> None:
        self.name, self.log, self.stop = name, log, stop

    def decode(self, prompt_ids: torch.Tensor, max_new_tokens: int, sampler: Sampler) -> Trace:
        if max_new_tokens == 4:
            self.log.append((self.name, int(prompt_ids)))
        if len(self.log) > self.stop:
            raise KeyboardInterrupt
        return decoded(sampler.draw(torch.ones(100)).token)


def compared(folder: Path, log: list[tuple[str, int]], stop: int = 99) -> Traces:
    with Journal(folder / RESUME, Trace) as journal:
        engines = {name: Recorder(name, log, stop) for name in "ab"}
        return decode(Stage("methods", lambda: engines, REQUESTS, Plan(2, 4, 5)), journal)


def test_methods_take_turns_and_share_seeds(tmp_path):
    log: list[tuple[str, int]] = []
    traces = compared(tmp_path, log)
    assert log[:6] == [("a", 0), ("b", 0), ("b", 1), ("a", 1), ("a", 2), ("b", 2)]
    assert log[6:8] == [("b", 0), ("a", 0)] and len(log) == 12, "the next repeat: the other first"
    assert [t.tokens for t in traces["a"]] == [t.tokens for t in traces["b"]]
    assert {t.seed for t in traces["a"][:3]}.isdisjoint(t.seed for t in traces["a"][3:])
    assert traces["a"][2].prompt_id == "p2" and traces["a"][5].method == "a"
    assert request_seed(0, REQUESTS[0], 0) != request_seed(1, REQUESTS[0], 0)
    assert alternating(["a", "b", "c", "x"]) == ["a", "c", "b", "x"]
    assert alternating(["a", "b", "x"]) == ["a", "x", "b"] and alternating([]) == []


def test_an_interrupted_comparison_goes_on_where_it_was(tmp_path):
    whole = compared(tmp_path / "whole", [])
    with pytest.raises(KeyboardInterrupt):
        compared(tmp_path, [], stop=5)
    with (tmp_path / RESUME).open("a") as file:
        file.write('{"key": "methods/0/2", "tra')
    log: list[tuple[str, int]] = []
    assert compared(tmp_path, log) == whole
    assert log[:2] == [("a", 2), ("b", 2)] and len(log) == 8
    with Journal(tmp_path / RESUME, Trace) as journal:
        assert journal.resumed == 6
        refuses("out: another run", Journal, tmp_path / RESUME, Trace)
        journal.remove()
    assert not (tmp_path / RESUME).exists()


def test_progress_needs_no_bar(tmp_path, monkeypatch):
    """TQDM_DISABLE=1 measures no elapsed time."""
    monkeypatch.setattr("evaluation.decode.tqdm", lambda **settings: tqdm(disable=True, **settings))
    assert len(compared(tmp_path, [])["a"]) == 6


def test_a_journal_keeps_time_lines(tmp_path):
    whole = decoded(4)
    spans = [Span("draft", "keep", 0.25, 0.5, 3)]
    whole.rounds[0].overlap = StageTrace("branch", 1, 2, 3, 0, [[1]], 2, 1, spans)
    with Journal(tmp_path / RESUME, Trace) as journal:
        journal.add("a", {"b": whole})
    with Journal(tmp_path / RESUME, Trace) as journal:
        assert journal.turns == {"a": {"b": whole}}


@pytest.mark.parametrize("line", ["{}", '{"key": "a", "found": []}', "[1", "[" * 100_000])
@pytest.mark.parametrize("seal", [False, True])
def test_a_damaged_journal_is_named(line, seal, tmp_path):
    whole = with_checksum(line[:-1].encode()) if seal else line.encode()
    (tmp_path / RESUME).write_bytes(whole + b"\n")
    refuses("out: .*x.resume is damaged in line 1", Journal, tmp_path / RESUME, Trace)


def constant_lm(*logits: float) -> Any:
    return TableLM(lambda context: torch.tensor(logits, dtype=torch.float64).softmax(0))


@pytest.mark.parametrize(
    ("gap", "dtype", "excused"),
    [
        (TOLERANCE / 2, torch.float32, True),
        (0.1, torch.float32, False),
        (0.01, torch.float32, False),
        (0.01, torch.bfloat16, True),
        (TOLERANCE / 1e3, None, False),
    ],
)
def test_a_near_tie_is_excused_and_a_real_difference_is_not(gap, dtype, excused):
    lm, prompt = constant_lm(1.0 + gap, 1.0, 0), [torch.tensor([0])]
    (found,) = greedy_differences(lm, prompt, [decoded(2, 1)], [decoded(2, 0)], dtype)
    assert (found.position, found.baseline_token, found.token) == (1, 0, 1)
    assert abs(found.gap - gap) < 1e-7 and found.excused == excused
    penalised = processed(0.0, frequency_penalty=1.5)  # of the one token before
    given = lm, prompt, [decoded(0, 1)], [decoded(0, 0)], dtype
    (found,) = greedy_differences(*given, penalised)
    assert abs(found.gap - (gap - 1.5)) < 1e-6, "of what the processors leave"
    (longer,) = greedy_differences(constant_lm(0, 0, 0), prompt, [decoded(2, 1)], [decoded(2)])
    assert not longer.excused, "one goes on where the other has ended"
    assert greedy_differences(lm, prompt, [decoded(1)], [decoded(1)]) == []


@pytest.mark.parametrize(
    ("logit", "dtype", "limit"),
    [
        (20.0, torch.float32, TOLERANCE),
        (20.0, torch.bfloat16, 0.25),
        (0.5, torch.bfloat16, 2**-6),
        (-9, torch.float16, 2**-6),
    ],
)
def test_a_near_tie_is_two_steps_of_the_dtype(logit, dtype, limit):
    assert near_tie(logit, dtype) == pytest.approx(limit) and near_tie(logit, dtype) >= limit


def test_lossless_lines_say_which_and_why():
    tie, wrong = Difference("p1", 4, 7, 8, 1e-5), Difference("p2", 0, 7, 9, 0.5)
    text = "\n".join(difference_lines({"a": [], "b": [tie], "c": [tie, wrong]}, 5))
    assert "a: 5 of 5 outputs equal plain decoding (equal)" in text
    assert "b: 4 of 5" in text and "near tie" in text and "1.0e-05" in text
    assert "c: 3 of 5 outputs equal plain decoding (NOT LOSSLESS on 1)" in text


def test_invariants():
    sound = trace([chain(4, 3), chain(2, 0), chain(0, 0)])
    assert broken_invariants(sound, 6, frozenset({99})) == []
    assert broken_invariants(sound, 5, frozenset({99})) == ["longer than max_new_tokens"]
    assert broken_invariants(sound, 6, frozenset({5})) == ["goes on after EOS"]
    sound.rounds[0].draft_tokens[1] = 3
    fact = "a round commits other tokens than it accepted"
    assert broken_invariants(sound, 9, frozenset()) == [fact]
