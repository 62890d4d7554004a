"""The trace viewer of a terminal: the rounds of one request, one after another."""

import os
from collections.abc import Iterator
from itertools import groupby
from typing import TextIO

from decoding.trace import Trace
from evaluation.token_texts import Vocabulary
from reports.viewer.rounds import (
    MARKS,
    MEANINGS,
    UNKNOWN,
    Bar,
    Drafted,
    Fate,
    Lane,
    Origin,
    Round,
    Rule,
    rounds,
    summary,
)
from runtime.text import printable

STYLES: dict[Fate | Origin, str] = {
    "accepted": "32",
    "rejected": "31;9",
    "rolled back": "90",
    "branch": "35",
    "retained": "34;1",
    "wasted": "90;3",
    "residual": "33;1",
    "bonus": "36;1",
    "plain": "0",
}
"""Colour codes of ANSI terminals; the marks say the same without them."""
BARS: dict[Lane, tuple[str, str]] = {
    "draft": ("█", "35"),
    "target": ("█", "32"),
    "rest": ("▒", "33"),
}
WIDTH, IDLE = 60, "·"
TEXT = "\n\t"  # what running text holds besides what is printed


def wants_colour(out: TextIO) -> bool:
    """Terminals do, unless NO_COLOR is set (no-color.org)."""
    return out.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def lines(
    trace: Trace, vocabulary: Vocabulary, colour: bool, rule: Rule = UNKNOWN
) -> Iterator[str]:
    """rule: what the values of its stop rule mean (`rounds.rule_of`)."""
    paint, said = _Paint(vocabulary, colour), printable(rule.says) or "predicted"
    found = rounds(trace, rule)
    name = printable(f"{trace.dataset} {trace.prompt_id}, {trace.method}")
    yield f"{name}: {len(trace.tokens)} tokens in {len(found)} rounds"
    yield from (f"  {paint.mark(kind)} {kind}: {meaning}" for kind, meaning in MEANINGS.items())
    for number, one in enumerate(found, 1):
        yield ""
        yield summary(one, number, len(found))
        yield from _draft(one, paint, said)
        yield f"  committed  {' '.join(paint.token(*token) for token in one.committed)}"
        yield from (f"  {lane:<9}  {paint.bar(one, lane)}" for lane in BARS if one.uses(lane))
    yield ""
    yield printable(vocabulary.prompt(trace), TEXT) + "".join(
        paint.plain(*token) for one in found for token in one.committed
    )


class _Paint:
    def __init__(self, vocabulary: Vocabulary, colour: bool) -> None:
        self.vocabulary, self.colour = vocabulary, colour

    def styled(self, text: str, style: str) -> str:
        return f"\x1b[{style}m{text}\x1b[0m" if self.colour and text else text

    def mark(self, kind: Fate | Origin) -> str:
        return self.styled(MARKS[kind], STYLES[kind])

    def token(self, token: int, kind: Fate | Origin) -> str:
        return self.styled(MARKS[kind] + _visible(self.vocabulary.text(token)), STYLES[kind])

    def plain(self, token: int, kind: Fate | Origin) -> str:
        """Of the running text."""
        return self.styled(printable(self.vocabulary.text(token), TEXT), STYLES[kind])

    def bar(self, found: Round, lane: Lane) -> str:
        block, style = BARS[lane]
        cells = _cells(found, [bar for bar in found.bars if bar.lane == lane])
        runs = ((busy, len(list(cells))) for busy, cells in groupby(cells))
        return "".join(
            self.styled(block * count, style) if busy else IDLE * count for busy, count in runs
        )


def _draft(found: Round, paint: _Paint, said: str) -> Iterator[str]:
    """A line per path, from where it leaves another one; its numbers below it, in the order of its
    tokens."""
    for number in sorted({node.line for node in found.drafted}):
        path = [node for node in found.drafted if node.line == number]
        indent = (
            "  drafted    " if number == 0 else "  " + "    " * (path[0].depth - 1) + "  or       "
        )
        yield indent + " ".join(paint.token(node.token, node.fate) for node in path)
        yield " " * len(indent) + "; ".join(_numbers(node, said) for node in path)


def _numbers(node: Drafted, said: str) -> str:
    values = {"q": node.q, "p": node.p, said: node.predicted}
    return (
        " ".join(f"{name} {value:.3g}" for name, value in values.items() if value is not None)
        or "-"
    )


def _cells(found: Round, bars: list[Bar]) -> list[bool]:
    """Which of WIDTH equal parts of the round have a job in their middle, or are where a shorter
    one is."""
    total = found.end - found.start or 1.0
    busy = [False] * WIDTH
    for bar in bars:
        first, last = (int((time - found.start) / total * WIDTH) for time in (bar.start, bar.end))
        for cell in range(min(first, WIDTH - 1), min(max(last, first + 1), WIDTH)):
            busy[cell] = True
    return busy


def _visible(text: str) -> str:
    """On one line: its white space is shown."""
    return printable(text.replace("\n", "↵").replace("\t", "⇥")).replace(" ", "␣")
