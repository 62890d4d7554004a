"""What a report shows: without artifacts each figure names what it needs, and the docs say how to
read it."""

import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import pytest

from reports.artifacts import Artifacts, Evaluation
from reports.figure import Entry, Figure, Missing
from reports.report import built, figure_registry, how_to_read
from reports.runs import by_setting
from tests.helpers.damage.refusals import refuses
from tests.helpers.evaluation.evaluations import chain, evaluation, method, plain, trace

ROOT = Path(__file__).parents[3]
GUIDES = {"reports.figures": "docs/figures.md", "papers": "papers/figures.md"}
LISTED = figure_registry([*GUIDES])
ENTRIES = [entry for _, entry in LISTED]
WITHOUT_INPUT = {
    "Acceptance of two candidates on toy distributions",
    "Acceptance of up to ten candidates",
    "Attention mask of a tree before and after reordering",
    "Blocks of the attention mask by tree size and prefix",
    "SpecHub's theorems, counted",
    "The greedy tree against the best",
}


def lacking(entry: Entry) -> Iterator[str]:
    for builder in entry.builders(Artifacts()):
        try:
            builder()
        except Missing as missing:
            yield str(missing)


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.title)
@pytest.mark.few(8, rest="slow")
def test_each_says_what_it_needs(entry):
    needs = list(lacking(entry))
    assert len(needs) == (entry.title not in WITHOUT_INPUT)
    assert all(text.startswith("needs ") and "python " in text for text in needs)


def test_the_docs_say_how_to_read_each():
    """Made by: python -m reports.report <package> > <page>"""
    for package, page in GUIDES.items():
        assert (ROOT / page).read_text() == how_to_read([package])


def test_a_package_in_the_working_directory_has_figures_a_missing_one_none(tmp_path, monkeypatch):
    (tmp_path / "my_figures").mkdir()
    (tmp_path / "my_figures/__init__.py").write_text('SECTION = "Mine"\n')
    (tmp_path / "my_figures/one.py").write_text("FIGURES = [1]\n")
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    missing = ["no_such_package", "no.such_package", "reports.figures.speed.x"]
    assert figure_registry([*missing, "my_figures"]) == [("Mine", 1)]
    for name in ("my_figures.one", ".x", "", "__main__"):
        refuses(f"figures: expected packages, got '{name}'", figure_registry, [name])


def test_titles_are_told_apart_and_sections_in_one_piece():
    assert len({entry.title for entry in ENTRIES}) == len(ENTRIES)
    sections = [section for section, _ in LISTED]
    changes = [section for section, _ in groupby(sections)]
    assert len(changes) == len(set(sections))


def test_what_a_figure_adds_stands_behind_what_its_kind_says():
    figure = Figure("x", "X", "ours", "exact", "1", [], how_to_read="Here 3.")
    entry = Entry("X", "Low is good.", lambda artifacts: [])
    assert built(entry, lambda: figure).how_to_read == "Low is good. Here 3."


def decoded(name: str = "toy", draft: float = 1, threads: int = 1, accepted: int = 1) -> Evaluation:
    """Three tokens drafted by a fixed length."""
    traces = {"autoregressive": [plain(4)], "token_3": [trace([chain(3, accepted)])]}
    fixed = method("serial", "chain", "token", "fixed", stop={"gamma": 3})
    found = evaluation({"token_3": fixed}, traces)
    found.config["draft_warp"] = {"temperature": draft}
    sides = {"target": "cpu", "draft": "cpu"}
    machine = {"hardware": sides, "dtypes": sides, "threads": threads}
    found.results["run"] |= {"pair": {"name": name, "target": name}, **machine}
    return found


def test_two_pairs_are_never_in_one_table():
    found = [decoded("one", accepted=1), decoded("two", accepted=2), decoded("one", accepted=1)]
    fits = "Acceptance fitted to accepted lengths"
    (entry,) = (entry for entry in ENTRIES if entry.title == fits)
    figures = [build() for build in entry.builders(Artifacts(found))]
    assert [figure.title.rpartition(" (")[2] for figure in figures] == ["one)", "two)"]
    assert [figure.column("a") for figure in figures] == [[0.5], [2 / 3]]


def test_settings_are_told_apart_by_what_differs():
    found = by_setting([decoded(), decoded(draft=0.5), decoded(threads=2)])
    machine = "cpu, cpu, threads: "
    told = [f"{machine}1", f"{machine}1; draft at T = 0.5", f"{machine}2"]
    assert [words for words, _ in found] == told
    assert by_setting([decoded(), decoded()])[0][0] == "" and by_setting([]) == [("", [])]


def test_titles_say_that_a_draft_is_simulated():
    mixed = decoded("one")
    mixed.config["pair"] = {"draft_mix": 0.4}
    said = "simulated draft, measured times say nothing of speed"
    assert [told for told, _ in by_setting([mixed])] == [said]
    assert [told for told, _ in by_setting([mixed, decoded("two")])] == [f"one; {said}", "two"]
