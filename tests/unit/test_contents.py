"""What a report shows: without evidence each figure names what it needs, and the guide says how to read it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from data_gen.contents import Entry, contents
from decoding.figures.evidence import Evidence
from decoding.figures.figure import Missing

GUIDE = " ".join((Path(__file__).parents[2] / "docs/guide.md").read_text().split())
ENTRIES = contents(Evidence())
WITHOUT_EVIDENCE = {"Acceptance of two candidates on toy laws", "Attention mask of a tree before and after reordering"}


def lacking(entry: Entry) -> Iterator[str]:
    for builder in entry.builders:
        try:
            builder()
        except Missing as missing:
            yield str(missing)


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.title)
def test_each_says_what_it_needs(entry: Entry) -> None:
    needs = list(lacking(entry))
    assert len(needs) == (entry.title not in WITHOUT_EVIDENCE)
    assert all(text.startswith("needs ") and "python " in text for text in needs)


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.title)
def test_the_guide_says_how_to_read_it(entry: Entry) -> None:
    assert f"### {entry.section} " in GUIDE and f"**{entry.title}**" in GUIDE


def test_titles_are_told_apart_and_sections_in_one_piece() -> None:
    assert len({entry.title for entry in ENTRIES}) == len(ENTRIES)
    sections = [entry.section for entry in ENTRIES]
    changes = [section for section, before in zip(sections, ["", *sections], strict=False) if section != before]
    assert len(changes) == len(set(sections))
