from evaluation.lossless import Difference
from evaluation.tables import lossless_lines, markdown

WRONG = "a\x1b[2J\u2028\n\u202e\x9b"


def test_names_cannot_drive_the_terminal() -> None:
    """Of datasets, prompts and methods."""
    difference = Difference(WRONG, 1, 2, 3, 0.5)
    said = [*lossless_lines({"fixed": [difference]}, 1), *markdown([WRONG], [[WRONG]]).split("\n")]
    assert all(line.isprintable() for line in said) and len(said) == 5
