"""The pages: short where they must be, dated where they must be, none without a place in the
site."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
DECISIONS = sorted(DOCS.glob("decisions/0*.md"))


def test_results_are_short_and_say_first_what_works() -> None:
    text = (DOCS / "results.md").read_text()
    assert len(text.split()) <= 2000
    first = text.split("\n\n")[1]
    assert "pays" in first and ("no " in first or "not" in first)


@pytest.mark.parametrize("page", DECISIONS, ids=lambda page: page.stem)
def test_a_decision_has_status_and_date(page: Path) -> None:
    number = int(page.stem[:4])
    text = page.read_text()
    assert text.startswith(f"# {number}. ")
    assert re.search(r"^Status: \w+ · \d{4}-\d\d-\d\d", text, re.MULTILINE)
    assert f"]({page.name})" in (DOCS / "decisions" / "index.md").read_text()


def test_lab_notes_are_dated_oldest_first() -> None:
    headings = re.findall(r"^## (.*)", (ROOT / "papers/lab-notes.md").read_text(), re.MULTILINE)
    dates = [heading[:10] for heading in headings]
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\d", date) for date in dates)
    assert dates == sorted(dates)


def test_every_page_is_in_the_site() -> None:
    listed = set(re.findall(r"[\w/.-]+\.md", (ROOT / "mkdocs.yml").read_text()))
    assert listed == {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}


def test_links_between_pages_lead_somewhere() -> None:
    for page in [ROOT / "README.md", *DOCS.rglob("*.md"), *(ROOT / "papers").rglob("*.md")]:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
