"""What a comparison says first, and its tables, from known figures."""

from typing import Any

import pandas as pd
import pytest

from evaluation.lossless import Difference, difference_lines
from evaluation.page import (
    answer,
    draft_table,
    labelled,
    legend,
    lossless_in_short,
    position_parts,
    simulated,
    speed_table,
    task_parts,
    verdict,
)
from evaluation.table import RATIOS, SPEEDUP, Row, markdown, summary, timed
from runtime.intervals import Estimate
from tests.helpers.evaluation.evaluations import PLAIN, chain, method, plain, trace

WRONG = "a\x1b[2J\u2028\n\u202e\x9b"
LABELS = {name: name for name in ("fixed", "hrad", "product")} | {"fixed": "fixed at 2"}


def row(low: float, high: float, **changes: float) -> Row:
    figures = {name: Estimate(changes.get(name, 0.5)) for name in RATIOS}
    return figures | {SPEEDUP: Estimate((low + high) / 2, low, high)}


def test_the_table_says_where_speculation_loses():
    rows = {
        "autoregressive": row(1, 1) | {SPEEDUP: Estimate(1.0)},
        "x": row(1.1, 1.3),
        "y": row(0.8, 0.9),
        "z": row(0.9, 1.1),
    }
    for one in rows.values():
        one["over x"] = Estimate(0.71, 0.7, 0.72)
    text = speed_table(rows, {"fixed": "x"})
    verdicts = [line.split("|")[-2].strip() for line in text.splitlines()[2:]]
    assert verdicts == ["-", "faster", "SLOWER", "no clear difference"]
    assert "1.20x (1.10 to 1.30)" in text and "0.71x (0.70 to 0.72)" in text
    assert "vs fixed (x)" in text and "stop rule time" in text
    assert "autoregressive" not in draft_table(rows)
    assert "plain decoding: no draft is worth it here" in speed_table(rows, {}, ["x"])
    assert verdict("x", row(1.1, 1.3) | {SPEEDUP: Estimate(1.2)}) == "few prompts"
    assert verdict("x", row(1.1, 1.3), None, 7) == "few prompts"


def test_drafts_of_which_nothing_is_accepted_are_no_plain_decoding():
    rejected = {"tokens/target call": 1.0, "drafted/round": 2.0}
    assert verdict("x", row(0.5, 0.6, **rejected)) == "SLOWER"
    assert verdict("x", row(0.5, 0.6, **rejected | {"drafted/round": 0})) == "does not speculate"


def test_figures_are_by_category_below_their_set():
    known, half = row(1.1, 1.3, **{"acceptance length": 0}), row(0.9, 1.0)
    methods = {"autoregressive": {"settings": PLAIN}, "x": {"settings": {}}}
    results: Any = {
        "methods": methods,
        "prompts": {"all": 9},
        "summary": {"all": {"autoregressive": known, "x": half}},
        "categories": {"toy": {"qa": {"prompts": 4, "summary": {"x": half}}}},
    }
    _, text = task_parts(results, "prompt")
    _, _, *lines = [[cell.strip() for cell in each.split("|")[1:-1]] for each in text.splitlines()]
    assert lines[0] == ["toy", "9", "plain decoding", "1.20x (1.10 to 1.30)", "0.5", "-", "0.50"]
    assert [each[:3] for each in lines[1:]] == [["toy", "9", "x"], ["toy - qa", "4", "x"]]
    assert task_parts(results | {"categories": {}}, "prompt") == []
    results["summary"] |= {"other": {"x": row(2.0, 2.3)}, "toy": {"x": half}}
    results["prompts"] |= {"other": 5, "toy": 4}
    _, text = task_parts(results, "prompt")
    _, _, *lines = [[cell.strip() for cell in each.split("|")[1:-1]] for each in text.splitlines()]
    assert [each[0] for each in lines] == ["other", "toy", "toy - qa", "mean of the sets"]
    assert lines[-1][1:5] == ["9", "x", "1.55x", "0.5"], "no interval: a set counts once"
    results["summary"]["toy"] = {"x": half | {"acceptance length": Estimate(0.0)}}
    assert task_parts(results, "prompt")[1].splitlines()[-1].split("|")[6].strip() == "-"


def test_acceptance_by_position_leaves_out_what_has_no_draft():
    none: Any = {"drafts": [], "judged_at": [], "judged": []}
    shares = {"drafts": [Estimate(0.5)], "judged_at": [Estimate(0.75, 0.5, 1)], "judged": [12]}
    long = {name: [each[0]] * 9 for name, each in shares.items()}
    text = "\n".join(position_parts({"p": none, "m": shares, "n": long}, {n: n for n in "pmn"}))
    assert "0.750 (0.500 to 1.000), n=12" in text and "| p " not in text
    assert "| 8 " in text and "| 9 " not in text
    assert position_parts({"p": none}, {"p": "p"}) == []


def measured(prompts: str = "abcdef", **seconds: float) -> pd.DataFrame:
    """Return rows of each policy by its seconds for eight tokens, prompts a little apart."""
    traces: dict[str, list[Any]] = {}
    for name, each in seconds.items():
        for n, prompt in enumerate(prompts):
            taken = each * (1 + n / 50)
            drafted = trace([chain(3, 3)] * 2, taken, prompt)
            decoded = plain(8, taken, prompt) if name == "autoregressive" else drafted
            traces.setdefault(name, []).append(decoded)
    return timed(traces)


def test_the_answer_is_what_to_use_and_how_sure():
    rows = measured(autoregressive=2.0, fixed=1.0, product=1.0, hrad=1.9)
    use, sure = answer(rows, LABELS, list(LABELS))
    best, others = use.split(". ", 1)
    assert best == "Use fixed at 2: 2.00 times (2.00 to 2.00) plain decoding"
    assert others == (
        "Beside fixed at 2: product is at 1.00x (1.00 to 1.00), no clear difference; hrad is at"
        " 0.53x (0.53 to 0.53), slower."
    )
    assert sure.startswith("Measured on 6 prompts, 1 repeat; ") and "judged on" in sure
    assert "Provisional: 6 is" in sure and "By repeat" not in sure
    for limit, remedy in ((6, "set limit=8 or more."), (9, "the test split has no more: take")):
        _, sure = answer(rows, LABELS, list(LABELS), config={"limit": limit})
        assert remedy in sure
    alone, _ = answer(measured(autoregressive=1.0), LABELS, [])
    assert alone.startswith("Nothing to choose")
    assert f"{summary(rows)['fixed'][SPEEDUP].value:.2f}" == "2.00", "the table says the same"


def test_the_answer_says_what_changes_from_repeat_to_repeat():
    for other, noisy in ((4, False), (9, True)):
        rows = measured("aabb", autoregressive=1.0, fixed=0.5)
        second = rows["repeat"] == 1
        rows.loc[second, "seconds"] *= other / 4
        rows.loc[second & (rows["policy"] == "fixed"), "seconds"] *= 2
        _, sure = answer(rows, LABELS, list(LABELS))
        assert "speed-up 1.00 to 2.00, plain decoding" in sure
        assert ("Warning: the speed of plain decoding itself differs by" in sure) == noisy


def test_the_answer_may_be_plain_decoding():
    rows = measured(autoregressive=1.0, fixed=2.0, hrad=4.0)
    use, _ = answer(rows, LABELS, list(LABELS))
    assert use.startswith("Use plain decoding: no method is shown to be faster here. The fastest")
    assert "fixed at 2, is at 0.50 times (0.50 to 0.50) its speed" in use
    advised, how = answer(rows, LABELS, list(LABELS), "hrad", "chosen by tuning")
    assert "Use hrad: 0.25 times" in advised and "That is slower: tune again" in advised
    assert "Beside hrad: fixed at 2 is at 2.00x (2.00 to 2.00), faster." in advised
    assert how.endswith("chosen by tuning.")
    none, _ = answer(rows, LABELS, list(LABELS), "do not speculate", "chosen by tuning")
    assert none.startswith("Use plain decoding")


@pytest.mark.parametrize(
    ("stop", "label"),
    [
        ({"threshold": 0.4}, "m at 0.4"),
        ({"threshold": 0.12345}, "m at 0.123"),
        ({"gamma": 3}, "m at 3"),
        ({"confidence": {"threshold": 0.2}}, "m at 0.2"),
        ({}, "m"),
        (None, "m"),
    ],
)
def test_a_method_is_called_with_its_number(stop, label):
    assert labelled("m", {"stop": stop}) == label


def test_the_legend_says_what_each_method_does():
    """A rule to tune, a structure that is no chain and an engine that is not serial say it, and
    where the rule's number comes from."""
    settings = {
        "autoregressive": PLAIN,
        "confidence": method("serial", "chain", "token", "confidence", stop={"threshold": 0.4}),
        "fixed": method("serial", "chain", "token", "fixed", stop={"gamma": 2}),
        "sources": method("serial", "sources", "token", "confidence", stop={"threshold": 0.3}),
        "paths": method("serial", "paths", "parallel", "never"),
    }
    methods = {name: {"settings": each, "note": ""} for name, each in settings.items()}
    methods["fixed"]["note"] = "stop.gamma=2, the fastest of 1, 2 on 4 calibration prompts"
    drawn = "Stop after drawing a token whose probability is below `threshold`. stop.threshold="
    text = legend(methods, "python scripts/evaluate.py method.sources.stop.threshold=0.3")
    assert text.splitlines() == [
        "- plain decoding (autoregressive): One target call, one token.",
        f"- confidence: {drawn}0.4, the default, not tuned.",
        "- fixed: Stop after `gamma` tokens (Leviathan et al. 2023). stop.gamma=2, the fastest of"
        " 1, 2 on 4 calibration prompts.",
        "- sources: Draw tokens until the text ends as it did before, then copy what followed."
        f" {drawn}0.3, as given.",
        "- paths: `paths` drafts of `gamma` tokens that share only the last committed token.",
    ]


def test_equal_outputs_are_one_line_and_names_cannot_drive_the_terminal():
    lines = ["hold", *difference_lines({"a": [], "b": []}, 3)]
    equal = "greedy: outputs of 2 methods equal plain decoding, every token"
    assert lossless_in_short(lines) == ["hold", equal]
    wrong = difference_lines({"a": [], "b": [Difference("p", 0, 7, 9, 0.5)]}, 3)
    assert lossless_in_short(wrong) == wrong
    lines = difference_lines({"fixed": [Difference(WRONG, 1, 2, 3, 0.5)]}, 1)
    lines += markdown([WRONG], [[WRONG]]).split("\n")
    assert all(line.isprintable() for line in lines) and len(lines) == 5


def test_speeds_of_a_draft_that_stands_for_another_say_so():
    assert simulated({}) == simulated({"draft_mix": 1, "bits": None}) == []
    (rounded,), (mixed,) = simulated({"bits": 5}), simulated({"draft_mix": 0.4})
    assert rounded.startswith("Simulated draft: the target with weights of 5 bits. It takes")
    assert mixed.startswith("Simulated draft: mixed with the target, pair.draft_mix=0.4. It takes")
    (both,) = simulated({"bits": 5, "draft_mix": 0.4})
    assert "5 bits, mixed with the target" in both and "measured times say nothing" in both
