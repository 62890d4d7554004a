import sys
import unicodedata

from runtime.text import printable


def test_nothing_that_drives_a_terminal_is_left() -> None:
    """Controls of either set, line and paragraph separators, directions of writing."""
    every = "".join(map(chr, range(sys.maxunicode + 1)))
    kinds = {unicodedata.category(c) for c in printable(every)}
    assert not kinds & {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
    assert printable("a\x1b[2J\u2028\u202eb") == "a�[2J��b"


def test_text_stays_as_it_is() -> None:
    assert printable("Grüße, 世界 🙂 a_b") == "Grüße, 世界 🙂 a_b"
    assert printable("a\n\tb", "\n\t") == "a\n\tb" and printable("a\nb") == "a�b"
