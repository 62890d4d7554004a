import json
import time

import pytest

from decoding.trace import STAGES, RoundTrace, Stopwatch, Trace, read_traces, write_traces
from runtime.json_lines import sealed
from tests.helpers.damage.refusals import refuses


def trace() -> Trace:
    seconds = dict(zip(STAGES, (0.1, 0.5, 0.0, 0.01, 0.02, 0.03), strict=True))
    rounds = [
        RoundTrace([4, 5], [0, 1], [0.5, 0.25], 1, 1, [4, 7], [0.9], 2, seconds),
        RoundTrace([], [], [], 0, 0, [1], [], 0, seconds),
    ]
    return Trace(3, [4, 7, 1], rounds, 0.2, 1.6, prompt_id="a/1", dataset="a", method="fixed")


def test_traces_survive_a_file(tmp_path):
    path = tmp_path / "traces.jsonl"
    write_traces(path, [trace(), trace()])
    assert read_traces(path) == [trace(), trace()]
    assert [file.name for file in tmp_path.iterdir()] == ["traces.jsonl"]
    assert trace().stages["target"] == 1.0 and trace().decode_seconds == pytest.approx(1.4)


def test_a_bad_line_is_named(tmp_path):
    path = tmp_path / "traces.jsonl"
    line = sealed(trace().to_dict())
    for bad in (
        line[:40],
        b"\xff",
        b"[" * 100_000,
        b"3",
        line.replace(b"1.6", b"1.7"),
        line.replace(b"0.25", b"0.75"),
        json.dumps(trace().to_dict()).encode(),
        *(
            sealed(trace().to_dict() | wrong)
            for wrong in (
                {"seconds": float("nan")},
                {"seconds": float("inf")},
                {"seconds": "1.6"},
                {"tokens": [1.5]},
                {"rounds": [{}]},
                {"rounds": [{**trace().to_dict()["rounds"][0], "seconds": {}}]},
                {"more": 1},
            )
        ),
    ):
        path.write_bytes(line + b"\n" + bad + b"\n")
        refuses("traces.jsonl:2", read_traces, path)


def test_stopwatch_gives_each_moment_to_one_stage():
    start, watch = time.perf_counter(), Stopwatch()
    with watch.stage("stop"):
        with watch.stage("draft"):
            time.sleep(0.02)
        time.sleep(0.01)
    lap = watch.lap()
    assert lap["draft"] >= 0.02 and 0.01 <= lap["stop"] < 0.02 + lap["draft"] and lap["target"] == 0
    assert sum(lap.values()) <= time.perf_counter() - start
    assert watch.lap()["draft"] == 0
