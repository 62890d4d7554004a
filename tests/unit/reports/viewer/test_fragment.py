"""What the viewer's fragment of HTML holds. Whether it works is for a browser to say
(tests/e2e/test_viewer.py)."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from decoding.trace import Trace
from evaluation.token_texts import Vocabulary
from reports.artifacts import Evaluation
from reports.viewer.viewer import PROMPT_END, PROMPTS, fragment
from tests.helpers.decoding.traces import chain, plain

NASTY = "</script><script>alert(1)</script><!-- \u2028 &amp; \"'"


def trace(number: int, method: str) -> Trace:
    rounds = [plain(4)] if method == "autoregressive" else [chain([4, 5], accepted=1, last=9)]
    tokens = [token for round_ in rounds for token in round_.tokens]
    return Trace(3, tokens, rounds, 1.0, 9.0, prompt_id=f"p{number}", dataset="a", method=method)


def evaluation(name: str = "x", prompts: int = 2, repeats: int = 1) -> Evaluation:
    config = {"repeats": repeats, "warp": {"temperature": 1.0}, "method": {}}
    methods = ("autoregressive", "confidence")
    traces = {m: [trace(i, m) for _ in range(repeats) for i in range(prompts)] for m in methods}
    return Evaluation(Path("runs") / name, {"run": {"config": config}}, traces)


def data(html: str) -> Any:
    found = re.search(
        r'<script type="application/json" id="viewer-data">(.*?)</script>', html, re.DOTALL
    )
    assert found
    return json.loads(found[1])


def test_tokens_cannot_leave_the_data() -> None:
    one = evaluation()
    html = fragment([one], {one.folder: Vocabulary({4: NASTY}, {("a", "p0"): NASTY})})
    assert html.count("<script") == html.count("</script>") == 2
    run = data(html)["runs"][0]
    assert (
        run["texts"]["4"] == NASTY
        and run["prompts"][0] == ["a p0", NASTY]
        and run["texts"]["5"] == "[5]"
    )


def test_the_numbers_of_a_round() -> None:
    run = data(fragment([evaluation()], {}))["runs"][0]
    assert [method["name"] for method in run["methods"]] == ["confidence", "autoregressive"], (
        "what drafts first"
    )
    text, class_, drafted, committed, _, start, long = run["methods"][0]["requests"][0]["rounds"][0]
    assert text.startswith("Round 1 of 1: 2 drafted: 1 accepted, 1 rejected") and class_ is None
    assert drafted == [[4, 1, 0, 0, 0.5, None, None], [5, 2, 0, 1, 0.5, None, None]]
    assert committed == [[4, 0], [9, 6]]
    assert (start, long) == (1_000_000, 60_000)


def test_few_prompts_of_the_first_repeat() -> None:
    many = evaluation(prompts=PROMPTS + 3, repeats=2)
    assert [name for name, _ in data(fragment([many], {}))["runs"][0]["prompts"]] == [
        f"a p{i}" for i in range(PROMPTS)
    ]
    few = data(fragment([evaluation(prompts=3, repeats=2)], {}))["runs"][0]
    assert len(few["prompts"]) == 3 and {len(method["requests"]) for method in few["methods"]} == {
        3
    }


def test_many_evaluations_share_the_page() -> None:
    html = fragment([evaluation(str(number), prompts=9) for number in range(6)], {})
    assert {len(run["prompts"]) for run in data(html)["runs"]} == {4} and "first 4 prompts" in html


def test_a_long_prompt_is_shown_from_its_end() -> None:
    one = evaluation(prompts=1)
    shown = data(
        fragment([one], {one.folder: Vocabulary({}, {("a", "p0"): "a" * 1000 + "b" * PROMPT_END})})
    )
    assert shown["runs"][0]["prompts"][0][1] == "b" * PROMPT_END


def test_nothing_to_show() -> None:
    assert fragment([], {}) == ""


class Names(HTMLParser):
    """Ids and classes, and what would be fetched."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.names += [name for key in ("id", "class") for name in (values.get(key) or "").split()]
        self.links += [values[key] or "" for key in ("src", "href") if key in values]


def test_it_minds_its_own_names_and_fetches_nothing() -> None:
    html, found = fragment([evaluation()], {}), Names()
    found.feed(html)
    assert found.names and all(name.startswith("viewer") for name in found.names)
    assert found.links == [] and "http" not in html and "url(" not in html
