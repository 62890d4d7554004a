"""The report's page: the answer first, everything in it, nothing fetched, and text of any kind
stays text."""

import base64
import re
from pathlib import Path
from typing import Any

import pytest

from evaluation.methods import CHOSEN_HERE
from evaluation.page import times
from evaluation.table import SPEEDUP, compare
from reports.answer import Answer, answers
from reports.artifacts import Artifacts, Checkpoint, Evaluation
from reports.figure import Figure
from reports.page import MOST_ROWS, Lack, Section, Shown, cell, page
from reports.runs import SIMULATED
from runtime.intervals import Estimate
from tests.helpers.data.harvests import PAIR, WARP, described_as, write_harvest
from tests.helpers.evaluation.evaluations import chain, evaluation, method, plain, trace

SIDES = {"target": "cpu", "draft": "cpu"}
MACHINE = {"hardware": SIDES, "dtypes": SIDES, "threads": 1, "machine": "here"}
TOY = {"name": "toy", "target": "t"}
COMMAND = (
    "python scripts/evaluate.py pair=toy limit=4 out=runs/x 'tried.fixed.stop.gamma=[2]'"
    " experiment=specdecpp 'methods=[a,b]'"
)
PROMPTS = "abcd"
NASTY = '<script>alert("http://x")</script>'
PNG = b"\x89PNG picture"


def decoded(seconds: float = 0.5, prompts: str = PROMPTS, temperature: float = 1.0) -> Evaluation:
    """Plain decoding takes a second a prompt, `quick` this long, `slow` two."""
    traces = {
        "autoregressive": [plain(4, 1.0, prompt) for prompt in prompts],
        "quick": [trace([chain(3, 3)], seconds, prompt) for prompt in prompts],
        "slow": [trace([chain(3, 3)], 2.0, prompt) for prompt in prompts],
    }
    methods = {
        "quick": method("serial", "chain", "token", "confidence", stop={"threshold": 0.3}),
        "slow": method("serial", "chain", "token", "fixed", stop={"gamma": 3}),
    }
    made = {"method.quick.stop.checkpoint": {"sha256": {"config.json": "x"}}}
    said = {"lossless": ["outputs are equal"], "checkpoints": made}
    found = evaluation(methods, traces, temperature, **said)
    found.config["draft_warp"] = {"temperature": temperature}
    found.results["run"] |= {"pair": TOY, "command": COMMAND, **MACHINE}
    return found


def tuned(advice: str, **changes: Any) -> dict[str, Any]:
    usual = {
        "pair": TOY,
        **dict.fromkeys(("warp", "draft_warp"), {"temperature": 1.0}),
        "measured_on": {**MACHINE, "devices": SIDES},
        "results": {"chosen": {"advice": advice}},
        "chosen_on": "calibration",
        "data": {"folder": "data/toy"},
        "file": "runs/thresholds.json",
    }
    return {**usual, **changes}


def test_without_tuning_it_is_the_fastest_and_says_so():
    (answer,) = answers(Artifacts([decoded()]))
    assert answer.use.startswith("Use quick at 0.3: 2.00 times (2.00 to 2.00) plain")
    assert "4 prompts" in answer.why and f"{CHOSEN_HERE}. To choose on others: " in answer.why
    tune = "python scripts/tune.py pair=toy data=data/toy 'methods=[quick,slow]'."
    harvest = "python scripts/gen_data.py pair=toy anchors.stride=1 out=data/toy; "
    assert answer.why.endswith(harvest + tune)
    bars = [(bar.method, bar.settings, bar.chosen) for bar in answer.bars]
    assert bars == [("quick", "threshold 0.3", True), ("slow", "gamma 3", False)]
    assert [bar.speed.value for bar in answer.bars] == pytest.approx([2.0, 0.5])
    assert answer.command == "python scripts/evaluate.py pair=toy 'methods=[quick]'"
    assert answer.lossless == ["outputs are equal"] and answer.datasets == "toy"


def test_bars_and_answer_say_the_number_of_the_table():
    found = decoded()
    (answer,) = answers(Artifacts([found]))
    table, compared = found.summary["all"], compare(found.measurements)
    for bar in answer.bars:
        assert bar.speed == table[bar.method][SPEEDUP] == compared[bar.method]
        assert bar.tokens_per_second == table[bar.method]["tokens/s"].value
    assert times(answer.bars[0].speed) in answer.use


def test_it_says_that_a_draft_is_simulated():
    found = decoded()
    found.config["pair"] = {"bits": 5}
    (simulated,), (other,) = (answers(Artifacts([one])) for one in (found, decoded()))
    assert simulated.where == f"{other.where}; {SIMULATED}"


def test_where_nothing_with_a_draft_is_faster_it_is_plain_decoding():
    (answer,) = answers(Artifacts([decoded(seconds=1.5)]))
    assert answer.use.startswith("Use plain decoding")
    assert answer.command.endswith("'methods=[autoregressive]'")
    assert not any(bar.chosen for bar in answer.bars)
    found = decoded()
    found.results["methods"] = {
        name: {"settings": found.config["method"][name], "note": "", "speculates": name != "quick"}
        for name in ("quick", "slow")
    }
    (answer,) = answers(Artifacts([found]))
    assert answer.use.startswith("Use plain decoding")
    assert answer.bars[0].settings == "plain decoding: no draft is worth it"


def advised(advice: str, **changes: Any) -> Answer:
    found = decoded()
    found.results["run"]["devices"] = SIDES
    (answer,) = answers(Artifacts([found], thresholds=[tuned(advice, **changes)]))
    return answer


def test_tuning_on_other_prompts_decides():
    answer = advised("slow")
    assert answer.use.startswith("Use slow at 3: 0.50 times") and "slower" in answer.use
    assert "data/toy (runs/thresholds.json)" in answer.why
    answer = advised("do not speculate")
    assert answer.use.startswith("Use plain decoding") and "do not speculate" in answer.why


@pytest.mark.parametrize(
    "changes",
    [
        {"pair": {**TOY, "target": "other"}},
        {"warp": {"temperature": 0.0}},
        {"measured_on": None},
        {"measured_on": {**MACHINE, "devices": SIDES, "threads": 2}},
    ],
)
def test_tuning_of_something_else_does_not(changes):
    assert advised("slow", **changes).use.startswith("Use quick")


def test_what_is_not_told_apart_is_named():
    found = decoded()
    seconds = dict(zip(PROMPTS, (0.4, 0.6, 0.45, 0.55), strict=True))
    found.traces["slow"][:] = [trace([chain(3, 3)], seconds[p], p) for p in PROMPTS]  # type: ignore[index]
    (answer,) = answers(Artifacts([found]))
    assert answer.use.endswith(", no clear difference.")


def test_each_temperature_has_an_answer_from_its_largest_evaluation():
    few = decoded(prompts="ab", seconds=0.25)
    found = answers(Artifacts([decoded(), few, decoded(temperature=0.0)]))
    assert [answer.where.split(",")[1] for answer in found] == [" T = 1", " T = 0"]
    assert found[0].bars[0].speed.value == pytest.approx(2.0)
    assert answers(Artifacts()) == []


def test_calibration_is_that_of_the_checkpoints_decoded_with():
    stages = {"as trained": {"ece": [0.3, 0.2, 0.4]}, "calibrated": {"ece": [0.05, None, None]}}
    metrics = {"reliability": {"data/toy (test split)": {"token": stages}}}
    configs = [{"sha256": {"config.json": name}, "metrics": metrics} for name in "xy"]
    used, other = (Checkpoint(Path(f"ck/{name}"), c) for name, c in zip("xy", configs, strict=True))
    (answer,) = answers(Artifacts([decoded()], checkpoints=[other, used]))
    assert answer.calibration == [
        "x, data/toy (test split): predictions are off by 5.0 % on average, by 30.0 %"
        " (20.0-40.0) before calibration"
    ]


def a_figure(**changes: Any) -> Figure:
    usual: dict[str, Any] = {
        "name": "speedups",
        "title": "Speed",
        "source": "SpecDec++, table 1",
        "kind": "modelled",
        "n": "3 prompts",
        "interval": "95 %, over prompts",
        "how_to_read": "More is faster.",
        "records": [{"method": "hrad", "speed-up": 1.23456}, {"method": "plain", "speed-up": None}],
    }
    return Figure(**{**usual, **changes})


def one(figure: Figure, image: bytes | None = None, **rest: Any) -> str:
    shown = [Section("Speed", [Shown(figure, image)])]
    return page(rest.pop("artifacts", Artifacts()), shown, rest.pop("lacking", []), **rest)


def test_a_table_is_open_and_a_picture_s_values_fold_away():
    text = one(a_figure())
    assert "<details>" not in text and "<img" not in text
    assert "SpecDec++, table 1. Modelled; 3 prompts; 95 %, over prompts." in text
    assert '<span class="badge modelled">modelled</span>' in text and "More is faster." in text
    assert '<td class="number">1.235</td>' in text and '<td class="number">–</td>' in text
    assert 'href="speedups.csv"' in text and "speedups.png" not in text
    assert '<a href="#speedups">Speed</a>' in text and 'id="speedups"' in text
    text = one(a_figure(), PNG)
    assert f'src="data:image/png;base64,{base64.b64encode(PNG).decode()}"' in text
    assert 'href="speedups.png"' in text and "<details>" in text


def test_text_of_any_kind_stays_text():
    checkpoint = Checkpoint(Path(f"x/{NASTY}"), {"predictor": NASTY, "pair": {"name": NASTY}})
    artifacts = Artifacts(checkpoints=[checkpoint], left_alone={Path(NASTY): NASTY})
    texts = dict.fromkeys(("title", "how_to_read", "n"), NASTY)
    figure = a_figure(**texts, records=[{NASTY: NASTY, "b": 1}])
    text = one(figure, artifacts=artifacts, lacking=[Lack(NASTY, NASTY)])
    assert "<script" not in text and text.count("&lt;script&gt;") >= 10


def test_nothing_is_fetched():
    text = one(a_figure(), PNG, viewer="<p>the viewer</p>")
    assert "<p>the viewer</p>" in text
    links = r"""(?:src|href)\s*=\s*["']?\s*(?:https?:)?//"""
    assert not re.search(links, text) and "url(" not in text
    assert "default-src 'none'" in text


def test_links_of_any_name_lead_somewhere():
    """Folders of sweeps have percent signs in their names."""
    text = one(a_figure(name="depth=1+a%5B b"))
    assert 'id="depth=1+a%5B b"' in text
    assert 'href="#depth%3D1%2Ba%255B%20b"' in text and 'href="depth%3D1%2Ba%255B%20b.csv"' in text


def test_what_is_lacking_or_left_alone_is_said():
    artifacts = Artifacts(left_alone={Path("runs/old.json"): "nothing a report reads"})
    text = one(a_figure(), artifacts=artifacts, lacking=[Lack("Energy", "needs NVML")])
    assert "Not in this report" in text and "<dt>Energy</dt><dd>needs NVML</dd>" in text
    assert "<code>runs/old.json</code>: nothing a report reads" in text
    bare = one(a_figure())
    assert "Not in this report" not in bare and "Not read" not in bare and "viewer" not in bare


def test_long_tables_are_cut_and_say_so():
    text = one(a_figure(records=[{"n": number} for number in range(MOST_ROWS + 5)]))
    assert text.count("<tr>") == MOST_ROWS + 1
    assert f"The first {MOST_ROWS} of {MOST_ROWS + 5} rows" in text


def test_what_it_is_made_from_comes_last(tmp_path):
    harvest = described_as(
        write_harvest(tmp_path / "data" / "mine"),
        pair={**PAIR, "name": "mine"},
        warp={**WARP, "temperature": 0.5},
        command="python scripts/gen_data.py gamma=4",
        versions={"torch": "2.6"},
    )
    text = one(a_figure(), artifacts=Artifacts(harvests=[harvest]))
    assert "<title>Report: mine</title>" in text
    about = "temperature 0.5, 20 prompts"
    for words in ("data/mine", about, "python scripts/gen_data.py gamma=4", "torch 2.6"):
        assert words in text and text.index(words) > text.index("SpecDec++, table 1")


def test_cells_and_an_estimate_in_words():
    assert times(Estimate(1.5)) == "1.50 times"
    assert times(Estimate(1.5, 1.25, 1.75)) == "1.50 times (1.25 to 1.75)"
    shown = {None: "–", 3: "3", 2 / 3: "0.6667", "a": "a", 12345.6: "12346"}
    assert {value: cell(value) for value in shown} == shown


def test_the_answer_comes_first_and_pictures_before_tables():
    table, picture = Shown(a_figure(name="t"), None), Shown(a_figure(name="p"), PNG)
    found = decoded()
    found.results["run"]["date"] = "2026-01-01"
    found.config["pair"] = {"name": "toy"}
    text = page(Artifacts([found]), [Section("Speed", [table, picture])], [])
    marks = ['id="answer"', "2.00 times", "<nav", 'id="p"', 'id="t"', 'id="origins"']
    assert [text.index(mark) for mark in marks] == sorted(text.index(mark) for mark in marks)
    assert "python scripts/evaluate.py pair=toy" in text and "outputs are equal" in text
    assert "Nothing was decoded yet" in one(a_figure())
