"""The trace viewer: what became of every token of a trace, and when, worked out by hand; and what
its fragment of HTML holds. Whether it works is for a browser to say (tests/e2e/test_viewer.py)."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from decoding.trace import STAGES, RoundTrace, Span, StageTrace, Trace
from evaluation.token_texts import Vocabulary
from reports.artifacts import Evaluation
from reports.viewer.rounds import (
    MARKS,
    MEANINGS,
    UNKNOWN,
    Bar,
    Committed,
    Round,
    Rule,
    rounds,
    rule_of,
    summary,
)
from reports.viewer.viewer import PROMPT_END, PROMPTS, fragment
from tests.helpers.decoding.traces import chain, overlapped, plain, tree

NASTY = "</script><script>alert(1)</script><!-- \u2028 &amp; \"'"


def of(*found: RoundTrace, rule: Rule = UNKNOWN) -> list[Round]:
    return rounds(Trace(3, [], list(found), prefill_seconds=1.0, seconds=9.0), rule)


def fates(found: Round) -> list[str]:
    return [node.fate for node in found.drafted]


CHAIN = chain([4, 5, 6, 7], accepted=1, last=9)
ENDED = replace(chain([4, 0], accepted=2, last=9), tokens=[4, 0])  # nothing comes after the end
REFUSED = overlapped([4], [[6, 7], [8]], row=1, tokens=[4, 9], outcome=1)
LATER = overlapped([4, 5], [[6, 7], [8]], row=1, tokens=[4, 9], outcome=1)
ROLLED = "rolled back"


@pytest.mark.parametrize(
    ("round_", "drafted", "committed"),
    [
        (CHAIN, ["accepted", "rejected", ROLLED, ROLLED], ["accepted", "residual"]),
        (chain([4, 5], accepted=2, last=9), ["accepted"] * 2, ["accepted"] * 2 + ["bonus"]),
        (plain(8), [], ["plain"]),
        (ENDED, ["accepted"] * 2, ["accepted"] * 2),
        (tree([0, 0, 2, 0], 0, 0), ["rejected", "rejected", ROLLED, "rejected"], ["residual"]),
        (REFUSED, ["accepted", "rejected", "rejected", ROLLED], ["accepted", "residual"]),
        (LATER, ["accepted", "rejected", ROLLED, ROLLED, ROLLED], ["accepted", "residual"]),
    ],
)
def test_what_became_of_each_token(round_, drafted, committed):
    (found,) = of(round_)
    assert fates(found) == drafted
    assert [token.origin for token in found.committed] == committed
    assert [token.token for token in found.committed] == round_.tokens


def test_a_tree():
    """Rows: 1 and 5 at depth 1; 2 and 4 after 1; 3 after 2; 6 after 5. The path ends at row 5."""
    found = of(tree([0, 1, 2, 1, 0, 5, 6], row=5, accepted=1))[0]
    assert fates(found) == ["branch"] * 4 + ["accepted", "rejected", "rolled back"]
    assert [node.depth for node in found.drafted] == [1, 2, 3, 2, 1, 2, 3]
    assert [node.line for node in found.drafted] == [0, 0, 0, 1, 2, 2, 2]


def test_p_q_and_predictions_are_those_of_the_trace():
    numbers = {"draft_q": [0.5, 0.25, 1.0], "draft_p": [0.75, 0.125, None]}
    round_ = replace(chain([4, 5, 6], accepted=1, last=9), **numbers)
    predicted = replace(round_, predicted=[0.9, 0.8, 0.7, 0.1])
    (found,) = of(predicted, rule=Rule("draft's highest probability"))
    numbers = [(node.q, node.p, node.predicted) for node in found.drafted]
    assert numbers == [(0.5, 0.75, 0.9), (0.25, 0.125, 0.8), (1.0, None, 0.7)]
    assert found.unused == [0.1] and found.outcome is None
    assert [node.p for node in of(replace(round_, draft_p=[]))[0].drafted] == [None] * 3


def test_a_class_is_no_prediction_of_a_token():
    round_ = replace(chain([4, 5], accepted=0, last=9), predicted=[2.0])
    (found,) = of(round_, rule=Rule(picks_class=True))
    assert found.outcome == 2 and not found.unused
    assert [node.predicted for node in found.drafted] == [None, None]


def test_an_accepted_branch_is_retained_as_far_as_it_is_pending_next():
    """Pending 4; candidates 5 and 6, grown to 5 7 8 and 6 9; 5 is accepted, and 7 pending next."""
    first = overlapped(pending=[4], branches=[[5, 7, 8], [6, 9]], row=2, tokens=[4, 5], outcome=1)
    second = overlapped(pending=[7], branches=[[3]], row=0, tokens=[2], outcome=2, stage="branch")
    one, two = of(first, second)
    assert [node[:5] for node in one.drafted] == [
        (4, 0, 1, 0, "accepted"),
        (5, 1, 2, 0, "accepted"),
        (6, 1, 2, 1, "branch"),
        (7, 2, 3, 0, "retained"),
        (8, 4, 4, 0, "wasted"),
        (9, 3, 3, 1, "branch"),
    ]
    assert [token.origin for token in one.committed] == ["accepted", "accepted"]
    assert one.outcome == 1 and one.stage == "draft"
    assert fates(two) == ["rejected", "rolled back"] and two.committed == [Committed(2, "residual")]


def test_nothing_is_retained_at_the_end_or_after_a_new_draft_stage():
    first = overlapped([], [[5, 7]], row=1, tokens=[5], outcome=None, stage="pre_verify")
    assert fates(of(first)[0]) == ["accepted", "wasted"]
    fresh = overlapped(pending=[7], branches=[], row=1, tokens=[7], outcome=1)
    one, two = of(first, fresh)
    assert fates(one) == ["accepted", "wasted"] and fates(two) == ["accepted"]
    assert one.outcome is None


def test_stages_are_laid_end_to_end():
    seconds = {"draft": 0.25, "target": 0.5, "sample": 0.125, "verify": 0.0625, "other": 0.0625}
    seconds["stop"] = 0.0
    first, second = of(*(replace(one, seconds=seconds) for one in (chain([4], 1, 9), plain(8))))
    assert first.bars == [
        Bar("draft", "draft", 1.0, 1.25, None),
        Bar("rest", "sample", 1.25, 1.375, None),
        Bar("target", "target", 1.375, 1.875, None),
        Bar("rest", "verify", 1.875, 1.9375, None),
        Bar("rest", "other", 1.9375, 2.0, None),
    ]
    assert (first.start, first.end, second.start, second.end) == (1.0, 2.0, 2.0, 3.0)
    assert (first.idle("draft"), first.idle("target")) == (0.75, 0.5)


def test_spans_are_when_they_were():
    spans = [Span("draft", "draft stage", 1.5, 2.0, 3), Span("target", "verify", 2.0, 4.0, 4)]
    later = [Span("target", "verify", 5.0, 7.0, 1), Span("draft", "branch stage", 5.5, 6.0, 2)]
    first, second = of(
        overlapped(pending=[4], branches=[[5]], row=2, tokens=[4, 5], outcome=1, spans=spans),
        overlapped(pending=[], branches=[[5]], row=1, tokens=[5], outcome=1, spans=later),
    )
    assert (first.start, first.end, second.start, second.end) == (1.0, 5.0, 5.0, 9.0)
    assert first.bars[1] == Bar("target", "verify", 2.0, 4.0, 4)
    assert (first.idle("draft"), first.idle("target")) == (3.5, 2.0)
    assert (second.idle("draft"), second.idle("target")) == (3.5, 2.0)
    assert second.uses("draft") and not second.uses("rest")


def test_summary():
    seconds = dict.fromkeys(STAGES, 0.0) | {"draft": 0.25, "target": 0.75}
    said = [0.9, 0.8, 0.7, 0.125]
    round_ = replace(chain([4, 5, 6], accepted=1, last=9), seconds=seconds, predicted=said)
    assert summary(of(round_, rule=Rule("entropy bound"))[0], 2, 7) == (
        "Round 2 of 7: 3 drafted: 1 accepted, 1 rejected, 1 rolled back; the stop rule ended it"
        " at 0.125; 2 committed: 1 accepted, 1 residual; 1000.0 ms; draft idle 750.0 ms; target"
        " idle 250.0 ms"
    )
    assert "nothing drafted; 1 committed: 1 plain" in summary(of(plain(8))[0], 1, 1)
    some = of(overlapped(pending=[4], branches=[[5]], row=2, tokens=[4, 5], outcome=1))[0]
    assert summary(some, 1, 1).startswith("Round 1 of 1: class some; 2 drafted: 2 accepted; ")


def test_every_kind_has_a_mark_of_its_own():
    assert MARKS.keys() == MEANINGS.keys() and len(set(MARKS.values())) == len(MARKS)


@pytest.mark.parametrize(
    ("stop", "rule"),
    [
        ("hrad.HRADStop", Rule(picks_class=True)),
        ("adaedl.AdaEDL", Rule("entropy bound on acceptance")),
        ("fixed.Fixed", Rule()),
        ("gone.Gone", Rule()),
        (None, Rule()),
    ],
)
def test_the_rule_of_a_method(stop, rule):
    settings = {"stop": {"_target_": f"decoding.stopping.{stop}"}} if stop else {}
    assert rule_of(settings) == rule


def test_overlap_traces_need_no_rule_and_requests_no_rounds():
    stages = StageTrace("draft", 0, 0, 0, 0, [], 0, 0, [Span("target", "verify", 1.0, 2.0, 1)])
    found = of(replace(plain(8), overlap=stages, predicted=[0.0]))[0]
    assert found.outcome == 0 and found.drafted == []
    assert rounds(Trace(5, [], [], 0.1, 0.1)) == []


def request(number: int, method: str) -> Trace:
    rounds = [plain(4)] if method == "autoregressive" else [chain([4, 5], accepted=1, last=9)]
    tokens = [token for round_ in rounds for token in round_.tokens]
    return Trace(3, tokens, rounds, 1.0, 9.0, prompt_id=f"p{number}", dataset="a", method=method)


def evaluation(name: str = "x", prompts: int = 2, repeats: int = 1) -> Evaluation:
    config = {"repeats": repeats, "warp": {"temperature": 1.0}, "method": {}}
    methods = ("autoregressive", "confidence")
    traces = {m: [request(i, m) for _ in range(repeats) for i in range(prompts)] for m in methods}
    return Evaluation(Path("runs") / name, {"run": {"config": config}}, traces)


def data(html: str) -> Any:
    (found,) = re.findall('<script type="application/json" id="viewer-data">(.*?)</script>', html)
    return json.loads(found)


def test_tokens_cannot_leave_the_data():
    one = evaluation()
    html = fragment([one], {one.folder: Vocabulary({4: NASTY}, {"a": {"p0": NASTY}})})
    assert html.count("<script") == html.count("</script>") == 2
    run = data(html)["runs"][0]
    assert run["texts"] == {"4": NASTY, "5": "[5]", "9": "[9]"} | run["texts"]
    assert run["prompts"][0] == ["a p0", NASTY]


def test_the_numbers_of_a_round():
    run = data(fragment([evaluation()], {}))["runs"][0]
    names = [method["name"] for method in run["methods"]]
    assert names == ["confidence", "autoregressive"], "what drafts first"
    text, class_, drafted, committed, _, start, long = run["methods"][0]["requests"][0]["rounds"][0]
    assert text.startswith("Round 1 of 1: 2 drafted: 1 accepted, 1 rejected") and class_ is None
    assert drafted == [[4, 1, 0, 0, 0.5, None, None], [5, 2, 0, 1, 0.5, None, None]]
    assert committed == [[4, 0], [9, 6]]
    assert (start, long) == (1_000_000, 60_000)


def test_few_prompts_of_the_first_repeat_and_many_evaluations_share_the_page():
    many = evaluation(prompts=PROMPTS + 3, repeats=2)
    names = [name for name, _ in data(fragment([many], {}))["runs"][0]["prompts"]]
    assert names == [f"a p{i}" for i in range(PROMPTS)]
    few = data(fragment([evaluation(prompts=3, repeats=2)], {}))["runs"][0]
    assert [len(method["requests"]) for method in few["methods"]] == [3, 3]
    assert len(few["prompts"]) == 3
    html = fragment([evaluation(str(number), prompts=9) for number in range(6)], {})
    assert {len(run["prompts"]) for run in data(html)["runs"]} == {4} and "first 4 prompts" in html


def test_a_long_prompt_is_shown_from_its_end_and_nothing_as_nothing():
    one = evaluation(prompts=1)
    text = Vocabulary({}, {"a": {"p0": "a" * 1000 + "b" * PROMPT_END}})
    shown = data(fragment([one], {one.folder: text}))
    assert shown["runs"][0]["prompts"][0][1] == "b" * PROMPT_END
    assert fragment([], {}) == ""


def test_it_minds_its_own_names_and_fetches_nothing():
    html = fragment([evaluation()], {})
    names = " ".join(re.findall(r' (?:id|class)="([^"]*)"', html)).split()
    assert names and all(name.startswith("viewer") for name in names)
    assert not re.search(r" (?:src|href)=", html) and "http" not in html and "url(" not in html
