"""The report's page: everything is in it, nothing is fetched, and text of any kind stays text."""

import base64
import re
from pathlib import Path
from typing import Any

import pytest

from reports.artifacts import Artifacts, Checkpoint
from reports.figure import Figure
from reports.page import MOST_ROWS, Lack, Section, Shown, cell, page
from tests.helpers.data.harvests import PAIR, WARP, described_as, write_harvest
from tests.unit.reports.test_answer import decoded

NASTY = '<script>alert("http://x")</script>'
PNG = b"\x89PNG picture"


def a_figure(**changes: Any) -> Figure:
    usual: dict[str, Any] = {
        "name": "speedups",
        "title": "Speed",
        "source": "SpecDec++, table 1",
        "kind": "modelled",
        "n": "3 prompts",
        "interval": "95 %, over prompts",
        "how_to_read": "More is faster.",
        "columns": ["method", "speed-up"],
        "rows": [["hrad", 1.23456], ["plain", None]],
    }
    return Figure(**{**usual, **changes})


def one(
    figure: Figure, image: bytes | None = None, artifacts: Artifacts | None = None, **rest: Any
) -> str:
    return page(
        artifacts or Artifacts(),
        [Section("Speed", [Shown(figure, image)])],
        rest.pop("lacking", []),
        **rest,
    )


def test_a_table_is_open_and_says_what_it_rests_on() -> None:
    text = one(a_figure())
    assert "<details>" not in text and "<img" not in text
    assert "SpecDec++, table 1. Modelled; 3 prompts; 95 %, over prompts." in text
    assert '<span class="badge modelled">modelled</span>' in text and "More is faster." in text
    assert '<td class="number">1.235</td>' in text and '<td class="number">–</td>' in text
    assert 'href="speedups.csv"' in text and "speedups.png" not in text
    assert '<a href="#speedups">Speed</a>' in text and 'id="speedups"' in text


def test_a_picture_is_in_the_page_and_its_values_fold_away() -> None:
    text = one(a_figure(), PNG)
    assert f'src="data:image/png;base64,{base64.b64encode(PNG).decode()}"' in text
    assert 'href="speedups.png"' in text and "<details>" in text


def test_text_of_any_kind_stays_text() -> None:
    checkpoint = Checkpoint(Path(f"x/{NASTY}"), {"predictor": NASTY, "pair": {"name": NASTY}})
    artifacts = Artifacts(checkpoints=[checkpoint], left_alone={Path(NASTY): NASTY})
    figure = a_figure(
        title=NASTY, how_to_read=NASTY, n=NASTY, columns=[NASTY, "b"], rows=[[NASTY, 1]]
    )
    text = one(figure, artifacts=artifacts, lacking=[Lack(NASTY, NASTY)])
    assert "<script" not in text and text.count("&lt;script&gt;") >= 10


def test_nothing_is_fetched() -> None:
    text = one(a_figure(), PNG, viewer="<p>the viewer</p>")
    assert "<p>the viewer</p>" in text
    assert (
        not re.search(r"""(?:src|href)\s*=\s*["']?\s*(?:https?:)?//""", text) and "url(" not in text
    )
    assert "default-src 'none'" in text


def test_links_of_any_name_lead_somewhere() -> None:
    """Folders of sweeps have percent signs in their names."""
    text = one(a_figure(name="depth=1+a%5B b"))
    assert 'id="depth=1+a%5B b"' in text
    assert 'href="#depth%3D1%2Ba%255B%20b"' in text and 'href="depth%3D1%2Ba%255B%20b.csv"' in text


def test_what_is_lacking_or_left_alone_is_said() -> None:
    artifacts = Artifacts(left_alone={Path("runs/old.json"): "nothing a report reads"})
    text = one(a_figure(), artifacts=artifacts, lacking=[Lack("Energy", "needs NVML")])
    assert "Not in this report" in text and "<dt>Energy</dt><dd>needs NVML</dd>" in text
    assert "<code>runs/old.json</code>: nothing a report reads" in text
    bare = one(a_figure())
    assert "Not in this report" not in bare and "Not read" not in bare and "viewer" not in bare


def test_long_tables_are_cut_and_say_so() -> None:
    text = one(a_figure(rows=[["x", number] for number in range(MOST_ROWS + 5)]))
    assert text.count("<tr>") == MOST_ROWS + 1
    assert f"The first {MOST_ROWS} of {MOST_ROWS + 5} rows" in text


def test_what_it_is_made_from_comes_last(tmp_path: Path) -> None:
    harvest = described_as(
        write_harvest(tmp_path / "data" / "mine"),
        pair={**PAIR, "name": "mine"},
        warp={**WARP, "temperature": 0.5},
        command="python scripts/gen_data.py gamma=4",
        versions={"torch": "2.6"},
    )
    text = one(a_figure(), artifacts=Artifacts(harvests=[harvest]))
    assert "<title>Report: mine</title>" in text
    for words in (
        "data/mine",
        "temperature 0.5, 20 prompts",
        "python scripts/gen_data.py gamma=4",
        "torch 2.6",
    ):
        assert words in text and text.index(words) > text.index("SpecDec++, table 1")


@pytest.mark.parametrize(
    ("value", "shown"), [(None, "–"), (3, "3"), (2 / 3, "0.6667"), ("a", "a"), (12345.6, "12346")]
)
def test_cells(value: Any, shown: str) -> None:
    assert cell(value) == shown


def test_the_answer_comes_first_and_pictures_before_tables() -> None:
    table, picture = Shown(a_figure(name="t"), None), Shown(a_figure(name="p"), PNG)
    found = decoded()
    found.results["run"]["date"] = "2026-01-01"
    found.config["pair"] = {"name": "toy"}
    text = page(Artifacts([found]), [Section("Speed", [table, picture])], [])
    marks = ['id="answer"', "2.00 times", "<nav", 'id="p"', 'id="t"', 'id="origins"']
    assert [text.index(mark) for mark in marks] == sorted(text.index(mark) for mark in marks)
    assert "python scripts/evaluate.py pair=toy" in text and "outputs are equal" in text
    assert "Nothing was decoded yet" in one(a_figure())
