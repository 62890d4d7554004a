"""The trace viewer in a browser: what it shows is what the trace holds, by keys and by pointer."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page

from reports.artifacts import Evaluation
from reports.viewer.rounds import MARKS, UNKNOWN, Rule, rounds, summary
from reports.viewer.viewer import fragment
from tests.helpers.decoding.traces import chain, plain, tree
from tests.helpers.reports.browser import REMEDY, executable, launched, opened
from tests.helpers.reports.viewing import (
    NASTY,
    PAGE,
    TEXTS,
    Viewer,
    branching,
    evaluation,
    scored,
    shown,
    timed,
    written,
)

pytestmark = pytest.mark.skipif(executable() is None, reason=REMEDY)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with launched() as found:
        yield found


@pytest.fixture(scope="module")
def evaluations() -> list[Evaluation]:
    branchy = tree([0, 1, 2, 1, 0, 5, 6], row=5, accepted=1)
    walk = [timed(branchy, 1), timed(tree([0, 0], row=0, accepted=0), 2)]
    first = {
        "autoregressive": [[plain(4), plain(9)]] * 2,
        "specdecpp": [scored(), scored()[:4]],
        "dyspec": [walk] * 2,
    }
    second = {"autoregressive": [[plain(4)]], "hrad": [branching()]}
    return [
        evaluation("first", first, {"specdecpp": "specdecpp.SpecDecPPStop"}),
        evaluation("second", second, {"hrad": "hrad.HRADStop"}),
    ]


@pytest.fixture(scope="module")
def path(evaluations: list[Evaluation], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("viewer"), *evaluations)


@pytest.fixture
def page(browser: Browser, path: Path) -> Iterator[Page]:
    with opened(browser, path) as found:
        yield found


# What it shows ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("run", "method", "prompt", "rule"),
    [
        (0, "specdecpp", 0, Rule("predicted acceptance")),
        (0, "dyspec", 1, UNKNOWN),
        (0, "autoregressive", 0, UNKNOWN),
        (1, "hrad", 0, Rule(picks_class=True)),
    ],
)
def test_every_round_of_a_trace(
    page: Page, evaluations: list[Evaluation], run: int, method: str, prompt: int, rule: Rule
) -> None:
    one = evaluations[run]
    viewer = Viewer(page).pick(f"{one.folder.name} (T = 1)", method, prompt)
    found, text = rounds(one.traces[method][prompt], rule), "Once upon a time" * (prompt == 0)
    for number, round_ in enumerate(found, 1):
        assert viewer.round == number and viewer.summary == summary(round_, number, len(found))
        drafted = [(MARKS[node.fate], shown(node.token)) for node in round_.drafted]
        committed = [(MARKS[token.origin], shown(token.token)) for token in round_.committed]
        assert (viewer.chips("draft"), viewer.chips("committed")) == (drafted, committed)
        text += "".join(TEXTS[token.token] for token in round_.committed)
        assert viewer.text == text
        viewer.press("ArrowRight")
    assert viewer.round == len(found), "there is nothing after the last round"


def test_branches_stand_below_each_other(page: Page) -> None:
    """As rows and columns of the grid: candidates 5 and 10 in the second, what follows 5 on its
    line."""
    Viewer(page).pick("second (T = 1)", "hrad")
    places = "one => [one.textContent.slice(1), one.style.gridColumnStart, one.style.gridRowStart]"
    found = page.eval_on_selector_all("#viewer-draft button", f"all => all.map({places})")
    places = {4: "11", 5: "21", 10: "22", 7: "31", 8: "41", 11: "32"}
    assert found == [[shown(token), *place] for token, place in places.items()]


def test_numbers_on_hover_and_focus(page: Page) -> None:
    viewer = Viewer(page).pick()
    first, second, third, _ = page.locator("#viewer-draft button").all()
    first.hover()
    numbers = "position 1 of the draft; q 0.500; p 0.750; predicted acceptance 0.900"
    expected = f'" w4" (token 4), accepted; {numbers}'
    assert page.inner_text("#viewer-detail") == expected
    second.focus()
    numbers = "position 2 of the draft; q 0.500; p 0.125; predicted acceptance 0.800"
    assert page.inner_text("#viewer-detail").endswith(f"rejected; {numbers}")
    third.focus()
    for words in ("rolled back", "p not read by the verifier"):
        assert words in page.inner_text("#viewer-detail")
    assert viewer.detail("#viewer-committed button >> nth=0") == expected
    residual = '" w9" (token 9), residual: no draft token'
    assert viewer.detail("#viewer-committed button >> nth=1") == residual
    assert viewer.detail("#viewer-text i >> nth=0") == f"Round 1: {expected}"
    viewer.pick("second (T = 1)", "hrad")
    assert viewer.detail("#viewer-draft button >> nth=3").endswith(
        "retained; position 3 of the draft; q not recorded; p not read by the verifier; class some"
    )


def test_time_line(page: Page) -> None:
    """Draft from 1 to 1.5, target from 1.25 to 2, the next round begins at 2.5; the request ends at
    4."""
    Viewer(page).pick("second (T = 1)", "hrad")
    bars = (
        "all => all.map(one => [one.textContent, parseFloat(one.style.left),"
        " parseFloat(one.style.width)])"
    )
    found = page.eval_on_selector_all("#viewer-bars .viewer-bar", bars)
    assert [name for name, *_ in found] == ["draft stage", "branch stage", "verify"]
    assert [left for _, left, _ in found] == pytest.approx([0, 100 / 6, 100 / 6], abs=0.01)
    assert [width for *_, width in found] == pytest.approx([100 / 6, 100 / 6, 50], abs=0.01)
    lanes = [one.inner_text() for one in page.locator(".viewer-lane > span").all()]
    assert lanes == ["draft: idle 67 %", "target: idle 50 %"]
    page.hover("#viewer-bars .viewer-bar >> nth=2")
    assert page.inner_text("#viewer-job") == "target: verify, 750.0 ms, 2 rows"


def test_the_whole_request_is_painted(page: Page) -> None:
    """Both lanes, and bubbles between: the target is idle at first, the draft at the end of a
    round."""
    Viewer(page).pick("second (T = 1)", "hrad")
    pixels = """(one, places) => {
      const all = one.getContext("2d").getImageData(0, 0, one.width, one.height).data;
      const row = (y) => Math.floor(y * one.height) * one.width;
      const first = ([x, y]) => 4 * (row(y) + Math.floor(x * one.width));
      return places.map((place) => [...all.slice(first(place), first(place) + 4)]);
    }"""
    places = [[0.05, 0.25], [0.2, 0.75], [0.03, 0.75], [0.3, 0.25]]
    draft, target, idle, idle_draft = page.eval_on_selector("#viewer-canvas", pixels, places)
    assert draft[3] == target[3] == 255 and draft != target and idle[3] == idle_draft[3] == 0


def test_a_token_is_text_and_nothing_else(page: Page) -> None:
    viewer = Viewer(page).pick()
    viewer.press("End")
    assert NASTY in viewer.text and page.locator("#viewer img").count() == 0


def test_without_texts_there_are_ids(browser: Browser, tmp_path: Path) -> None:
    one = evaluation("bare", {"fixed": [[chain([4], 0, 9)]]}, {})
    (tmp_path / "page.html").write_text(PAGE.format(fragment([one], {})), encoding="utf-8")
    with opened(browser, tmp_path / "page.html") as page:
        assert page.inner_text("#viewer-committed") == "◆[9]" and not page.is_visible("#viewer-run")


# Finding one's way --------------------------------------------------------------------------------


def test_keys_buttons_and_slider(page: Page) -> None:
    viewer = Viewer(page).pick()
    seen = []
    for key in "ArrowLeft ArrowRight PageDown PageUp PageUp End PageDown Home".split():
        viewer.press(key)
        seen.append(viewer.round)
    assert seen == [1, 2, 12, 2, 1, 15, 15, 1]
    seen = []
    for button in ("last", "next", "back", "back", "first", "next"):
        page.click(f"#viewer-{button}")
        seen.append(viewer.round)
    assert seen == [15, 15, 14, 13, 1, 2]
    page.fill("#viewer-slider", "7")
    assert viewer.round == 7 and viewer.summary.startswith("Round 7 of 15")
    page.focus("#viewer-slider")
    viewer.press("ArrowRight")
    assert viewer.round == 8, "its own key, once"


def test_a_click_goes_to_a_round(page: Page) -> None:
    viewer = Viewer(page).pick()
    page.click("#viewer-text i:has-text('w3') >> nth=2")
    assert viewer.round == 9
    assert page.locator(".viewer-now").inner_text() == f"{TEXTS[6]}{TEXTS[7]}{TEXTS[3]}"
    box = page.locator("#viewer-canvas").bounding_box()
    assert box
    page.click("#viewer-canvas", position={"x": box["width"] - 3, "y": 5})
    assert viewer.round == 15
    page.click("#viewer-canvas", position={"x": 3, "y": 5})
    assert viewer.round == 1


def test_another_prompt_and_another_run(page: Page) -> None:
    viewer = Viewer(page).pick()
    viewer.press("End")
    viewer.pick(prompt=1)
    assert viewer.round == 1 and viewer.summary.startswith("Round 1 of 4")
    assert page.locator("#viewer-method option:checked").inner_text() == "specdecpp", "it stays"
    viewer.pick("second (T = 1)", "hrad")
    assert page.locator("#viewer-prompt option").count() == 1
    assert viewer.summary.startswith("Round 1 of 2: class some")


def test_keys_work_from_a_token(page: Page) -> None:
    """A token that goes away with its round leaves the focus in the viewer."""
    viewer = Viewer(page).pick()
    page.focus("#viewer-draft button >> nth=1")
    viewer.press("ArrowRight")
    viewer.press("ArrowRight")
    assert viewer.round == 3


# How it looks -------------------------------------------------------------------------------------

CONTRAST = """() => {
  const linear = (value) => value <= 0.03928 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
  const channel = (value) => linear(value / 255);
  const light = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
  const colour = (text) => text.match(/[\\d.]+/g).map(Number);
  const behind = (one) => {
    const found = colour(getComputedStyle(one).backgroundColor);
    if (found.length < 4 || found[3] > 0) return found;
    return one.parentElement ? behind(one.parentElement) : null;
  };
  const page = matchMedia("(prefers-color-scheme: dark)").matches ? [20, 24, 28] : [255, 255, 255];
  const texts = "#viewer :is(p, h3, b, button, select, i, .viewer-chip, .viewer-bar, .viewer-soft)";
  return [...document.querySelectorAll(texts)].map((one) => {
    const pair = [light(colour(getComputedStyle(one).color)), light(behind(one) || page)];
    return [one.className || one.tagName, (Math.max(...pair) + 0.05) / (Math.min(...pair) + 0.05)];
  });
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1200])
def test_legible_and_no_wider_than_the_window(
    browser: Browser, path: Path, scheme: str, width: int
) -> None:
    size = {"width": width, "height": 800}
    with opened(browser, path, color_scheme=scheme, viewport=size) as page:
        for run, method in (("first", "specdecpp"), ("first", "dyspec"), ("second", "hrad")):
            Viewer(page).pick(f"{run} (T = 1)", method)
            assert page.evaluate("document.scrollingElement.scrollWidth") <= width
            assert [(name, ratio) for name, ratio in page.evaluate(CONTRAST) if ratio < 4.5] == []


def test_for_those_who_do_not_see_it(page: Page) -> None:
    viewer = Viewer(page).pick()
    assert page.get_attribute("#viewer-summary", "aria-live") == "polite"
    slider = page.get_by_role("slider", name="Round")
    assert slider.get_attribute("aria-valuetext") == "round 1 of 15"
    for name in ("First round", "Previous round", "Next round", "Last round"):
        assert page.get_by_role("button", name=name).count() == 1
    for name in ("Run", "Prompt", "Method"):
        assert page.get_by_role("combobox", name=name).count() == 1
    assert page.get_by_role("button", name="w4, accepted").count() == 2
    assert len({mark for mark, _ in viewer.chips("draft")}) == 3, "told apart without colour"


# How fast -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "most"), [("chain", 100), ("tree", 400)])
def test_a_step_touches_its_round_alone(
    browser: Browser, tmp_path: Path, kind: str, most: int
) -> None:
    """Of 2,000 tokens. Prints milliseconds of a step, its layout included; what is asserted is the
    work it makes: nodes of the page that change, which the size of a round decides and not the
    length of the text."""
    wide = tree([0] + [1] * 30 + [0] * 29, row=1, accepted=1)
    one = chain([4, 6, 7, 8], 1, 9) if kind == "chain" else wide
    long = [timed(one, number) for number in range(1000)]
    path = written(tmp_path, evaluation("long", {"fixed": [long]}, {}))
    with opened(browser, path) as page:
        assert page.locator("#viewer-text i").count() == 2000
        steps = page.evaluate("""() => {
              const root = document.getElementById("viewer"), took = [], touched = [];
              const watch = new MutationObserver(() => {});
              const all = { subtree: true, childList: true, attributes: true, characterData: true };
              watch.observe(root, all);
              const below = (node) => node.querySelectorAll ? node.querySelectorAll("*").length : 0;
              const size = (node) => 1 + below(node);
              const sum = (numbers) => numbers.reduce((total, one) => total + one, 0);
              const press = (key) => {
                const start = performance.now();
                root.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
                document.body.getBoundingClientRect();
                took.push(performance.now() - start);
                const records = watch.takeRecords();
                touched.push(sum(records.map((one) => 1 + sum([...one.addedNodes].map(size)))));
              };
              for (let i = 0; i < 200; i++) press("ArrowRight");
              return { milliseconds: sum(took) / 200, nodes: Math.max(...touched.slice(1)) };
            }""")
        print(json.dumps(steps), re.sub(r"\s+", " ", page.inner_text("#viewer-summary")))
        assert page.inner_text("#viewer-place") == "201 / 1000"
        assert 0 < steps["nodes"] < most
