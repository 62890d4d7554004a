import io
import re
from dataclasses import replace

import pytest

from decoding.trace import STAGES, RoundTrace, Trace
from evaluation.token_texts import Vocabulary
from reports.viewer.rounds import MARKS, UNKNOWN, Rule
from reports.viewer.terminal import WIDTH, lines, wants_colour
from tests.helpers.decoding.traces import chain, plain, tree

ZERO = dict.fromkeys(STAGES, 0.0)
TEXTS = Vocabulary({4: " the", 5: "\n", 6: " cat", 9: " dog", 8: "\x1b[2J"}, {("a", "1"): "Say:"})


def printed(
    *found: RoundTrace, colour: bool = False, rule: Rule = UNKNOWN, vocabulary: Vocabulary = TEXTS
) -> list[str]:
    tokens = [token for round_ in found for token in round_.tokens]
    trace = Trace(3, tokens, list(found), 1.0, 9.0, prompt_id="1", dataset="a", method="fixed")
    return list(lines(trace, vocabulary, colour, rule))


def test_a_round() -> None:
    round_ = replace(
        chain([4, 5, 6], accepted=1, last=9), draft_p=[0.75, 0.125, None], predicted=[0.25]
    )
    text = printed(
        replace(round_, seconds=ZERO | {"draft": 0.25, "target": 0.75}),
        rule=Rule("predicted acceptance"),
    )
    found = text[text.index("") + 1 :]
    assert text[0] == "a 1, fixed: 2 tokens in 1 rounds" and found[0].startswith(
        "Round 1 of 1: 3 drafted: 1 accepted"
    )
    assert found[1].split() == ["drafted", "✓␣the", "✗↵", "↩␣cat"]
    assert found[2].strip() == "q 0.5 p 0.75 predicted acceptance 0.25; q 0.5 p 0.125; q 0.5"
    assert found[3].split() == ["committed", "✓␣the", "◆␣dog"]
    assert found[4].split() == ["draft", "█" * (WIDTH // 4) + "·" * (3 * WIDTH // 4)]
    assert found[5].split() == ["target", "·" * (WIDTH // 4) + "█" * (3 * WIDTH // 4)]
    assert found[-1] == "Say: the dog"


def test_a_path_of_a_tree_has_a_line_below_its_parent() -> None:
    text = printed(tree([0, 1, 1], row=1, accepted=1), vocabulary=Vocabulary())
    first, second = [line for line in text if "[12]" in line or "[13]" in line]
    assert first.split() == ["drafted", "✓[11]", "✗[12]"] and second.split() == ["or", "✗[13]"]
    assert second.index("✗") >= first.index("✓") + 4


def test_colours_add_nothing_to_what_is_said() -> None:
    """The marks are there without them."""
    rounds_ = chain([4, 5, 6], accepted=1, last=9), plain(4)
    plainly, coloured = printed(*rounds_), printed(*rounds_, colour=True)
    assert "\x1b[32m✓␣the\x1b[0m" in "".join(coloured)
    assert [re.sub(r"\x1b\[[\d;]*m", "", line) for line in coloured] == plainly
    assert all(mark in "".join(plainly) for mark in MARKS.values())


def test_a_token_cannot_drive_the_terminal() -> None:
    assert "\x1b" not in "".join(printed(plain(8), replace(chain([8, 8], 1, 8)), colour=False))


def test_a_name_cannot_drive_the_terminal() -> None:
    """Of a prompt, a dataset or a method, which come from a file."""
    wrong = "\x1b[2J\u2028\u202e\x9b\n"
    trace = Trace(3, [4], [plain(4)], 1.0, 9.0)
    for name in ("prompt_id", "dataset", "method"):
        named = replace(trace, **{name: f"a{wrong}b"})
        first = next(lines(named, TEXTS, colour=False))
        assert first.isprintable() and "a" in first and "b" in first


@pytest.mark.parametrize(
    ("tty", "environment", "expected"),
    [
        (True, {}, True),
        (False, {}, False),
        (True, {"NO_COLOR": "1"}, False),
        (True, {"TERM": "dumb"}, False),
    ],
)
def test_colour_is_for_terminals_that_want_it(
    tty: bool, environment: dict[str, str], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    out = io.StringIO()
    monkeypatch.setattr(out, "isatty", lambda: tty)
    assert wants_colour(out) is expected
