"""Interleaving, seeds, losslessness evidence and tables, without a model."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tqdm import tqdm

from data_gen.requests import Request
from decoding.models.table_lm import TableLM
from decoding.sampling import Sampler
from decoding.trace import STAGES, RoundTrace, Span, StageTrace, Trace
from evaluation.decode import Plan, Traces, alternating, decode, request_seed, run
from evaluation.journal import Journal
from evaluation.lossless import (
    TOLERANCE,
    Difference,
    difference_lines,
    greedy_differences,
    near_tie,
)
from runtime.errors import UserError
from runtime.json_lines import with_checksum

REQUESTS = [
    Request(f"p{n}", "odd" if n % 2 else "even", torch.tensor([n]), "test") for n in range(3)
]


class Recorder:
    """An engine that writes down when it was asked for what."""

    def __init__(self, name: str, log: list[tuple[str, int]]) -> None:
        self.name, self.log = name, log

    def decode(self, prompt_ids: torch.Tensor, max_new_tokens: int, sampler: Sampler) -> Trace:
        self.log.append((self.name, int(prompt_ids)))
        return trace([sampler.draw(torch.ones(100)).token])


def trace(tokens: list[int]) -> Trace:
    rounds = [
        RoundTrace([], [], [], 0, 0, [token], [], 0, dict.fromkeys(STAGES, 0.0)) for token in tokens
    ]
    return Trace(1, tokens, rounds, 0.0, 1.0, prompt_id="p0")


def test_methods_take_turns_and_share_seeds(tmp_path: Path) -> None:
    log: list[tuple[str, int]] = []
    seen: list[Trace] = []
    engines = {name: Recorder(name, log) for name in "ab"}
    traces = compare(engines, tmp_path, seen.append)
    assert log[:6] == [("a", 0), ("b", 0), ("b", 1), ("a", 1), ("a", 2), ("b", 2)]
    assert log[6:8] == [("b", 0), ("a", 0)]  # the next repeat starts with the other
    assert len(seen) == 12
    assert [t.tokens for t in traces["a"]] == [t.tokens for t in traces["b"]]
    assert {t.seed for t in traces["a"][:3]}.isdisjoint(t.seed for t in traces["a"][3:])
    assert traces["a"][2].prompt_id == "p2" and traces["a"][5].method == "a"
    assert request_seed(0, REQUESTS[0], 0) != request_seed(1, REQUESTS[0], 0)


def compare(engines: dict[str, Any], folder: Path, advance: Callable[[Trace], None]) -> Traces:
    with Journal(folder / "x.resume", Trace) as journal:
        return run(engines, REQUESTS, Plan(2, 4, 5), journal, "methods", advance)


def test_an_interrupted_comparison_goes_on_where_it_was(tmp_path: Path) -> None:
    """Also when the last line was half written; turns are taken up whole."""
    whole = compare(
        {name: Recorder(name, []) for name in "ab"}, tmp_path / "whole", lambda trace: None
    )

    def stop(trace: Trace) -> None:
        seen.append(trace)
        if len(seen) == 6:
            raise KeyboardInterrupt

    seen: list[Trace] = []
    with pytest.raises(KeyboardInterrupt):
        compare({name: Recorder(name, []) for name in "ab"}, tmp_path, stop)
    with (tmp_path / "x.resume").open("a") as file:
        file.write('{"key": "methods/0/2", "tra')
    log: list[tuple[str, int]] = []
    assert (
        compare({name: Recorder(name, log) for name in "ab"}, tmp_path, lambda trace: None) == whole
    )
    assert log[:2] == [("a", 2), ("b", 2)] and len(log) == 8
    with Journal(tmp_path / "x.resume", Trace) as journal:
        assert journal.resumed == 6
        with pytest.raises(UserError, match="out: another run"):
            Journal(tmp_path / "x.resume", Trace)
        journal.remove()
    assert not (tmp_path / "x.resume").exists()


def test_a_journal_keeps_time_lines(tmp_path: Path) -> None:
    whole = trace([4])
    whole.rounds[0].overlap = StageTrace(
        "branch", 1, 2, 3, 0, [[1]], 2, 1, [Span("draft", "keep", 0.25, 0.5, 3)]
    )
    with Journal(tmp_path / "x.resume", Trace) as journal:
        journal.add("a", {"b": whole})
    with Journal(tmp_path / "x.resume", Trace) as journal:
        assert journal.turns == {"a": {"b": whole}}


@pytest.mark.parametrize("line", ["{}", '{"key": "a", "found": []}', "[1", "[" * 100_000])
@pytest.mark.parametrize("seal", [False, True])
def test_a_damaged_journal_is_named(line: str, seal: bool, tmp_path: Path) -> None:
    whole = with_checksum(line[:-1].encode()) if seal else line.encode()
    (tmp_path / "x.resume").write_bytes(whole + b"\n")
    with pytest.raises(UserError, match="out: .*x.resume is damaged in line 1"):
        Journal(tmp_path / "x.resume", Trace)


def test_every_digit_of_a_journal_counts(tmp_path: Path) -> None:
    """But for the last line of a run that was killed as it wrote it."""
    path = tmp_path / "x.resume"
    with Journal(path, Trace) as journal:
        for key in "abc":
            journal.add(key, {"m": trace([4, 17])})
    content = path.read_bytes()
    for place, byte in enumerate(content):
        if chr(byte).isdigit():
            changed = content[:place] + bytes([byte ^ 1]) + content[place + 1 :]
            path.write_bytes(changed)
            line = content[:place].count(b"\n") + 1
            with pytest.raises(UserError, match=f"^out: .*damaged in line {line} .* Remove that"):
                Journal(path, Trace)
            assert path.read_bytes() == changed, "nothing is lost"
    whole = content.splitlines(keepends=True)
    path.write_bytes(b"".join(whole[:2]) + whole[2][:-1])
    with Journal(path, Trace) as journal:
        assert list(journal.turns) == ["a", "b"]
        journal.add("c", {"m": trace([4, 17])})
    assert path.read_bytes() == content


def constant_lm(logits: list[float]) -> Any:
    return TableLM(lambda context: torch.tensor(logits, dtype=torch.float64).softmax(0))


def test_a_near_tie_is_excused_and_a_real_difference_is_not() -> None:
    prompt = [torch.tensor([0])]
    for gap, excused in ((TOLERANCE / 2, True), (0.1, False)):
        (found,) = greedy_differences(
            constant_lm([1.0 + gap, 1.0, 0]), prompt, [trace([2, 1])], [trace([2, 0])]
        )
        assert (found.position, found.baseline_token, found.token) == (1, 0, 1)
        assert abs(found.gap - gap) < 1e-6 and found.excused == excused
    (longer,) = greedy_differences(constant_lm([0, 0, 0]), prompt, [trace([2, 1])], [trace([2])])
    assert not longer.excused  # one goes on where the other has ended
    assert greedy_differences(constant_lm([0, 0]), prompt, [trace([1])], [trace([1])]) == []


@pytest.mark.parametrize(
    ("logit", "dtype", "limit"),
    [
        (20.0, torch.float32, TOLERANCE),
        (20.0, torch.bfloat16, 0.25),
        (0.5, torch.bfloat16, 2**-6),
        (-9, torch.float16, 2**-6),
    ],
)
def test_a_near_tie_is_two_steps_of_the_dtype(
    logit: float, dtype: torch.dtype, limit: float
) -> None:
    assert near_tie(logit, dtype) == pytest.approx(limit) and near_tie(logit, dtype) >= limit


def test_a_tie_of_bfloat16_is_none_of_float32() -> None:
    lm, prompt = constant_lm([1.01, 1.0, 0]), [torch.tensor([0])]
    for dtype, excused in ((torch.float32, False), (torch.bfloat16, True)):
        (found,) = greedy_differences(lm, prompt, [trace([1])], [trace([0])], dtype)
        assert found.excused == excused


def test_lossless_lines_say_which_and_why() -> None:
    tie, wrong = Difference("p1", 4, 7, 8, 1e-5), Difference("p2", 0, 7, 9, 0.5)
    text = "\n".join(difference_lines({"a": [], "b": [tie], "c": [tie, wrong]}, 5))
    assert "a: 5 of 5 outputs equal autoregressive decoding (equal)" in text
    assert "b: 4 of 5" in text and "near tie" in text and "1.0e-05" in text
    assert "c: 3 of 5 outputs equal autoregressive decoding (NOT LOSSLESS on 1)" in text


def test_neighbours_of_the_list_do_not_follow_each_other() -> None:
    assert alternating(["a", "b", "c", "x"]) == ["a", "c", "b", "x"]
    assert alternating(["a", "b", "x"]) == ["a", "x", "b"] and alternating([]) == []


def test_progress_needs_no_bar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TQDM_DISABLE=1 measures no elapsed time."""
    monkeypatch.setattr("evaluation.decode.tqdm", lambda **settings: tqdm(disable=True, **settings))
    with Journal(tmp_path / "x.resume", Trace) as journal:
        traces = decode({"a": Recorder("a", [])}, REQUESTS, Plan(1, 4, 5), journal, "methods")
    assert len(traces["a"]) == 3
