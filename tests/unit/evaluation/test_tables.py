from evaluation.lossless import Difference
from evaluation.tables import lossless_lines, markdown, simulated

WRONG = "a\x1b[2J\u2028\n\u202e\x9b"


def test_names_cannot_drive_the_terminal() -> None:
    """Of datasets, prompts and methods."""
    difference = Difference(WRONG, 1, 2, 3, 0.5)
    said = [*lossless_lines({"fixed": [difference]}, 1), *markdown([WRONG], [[WRONG]]).split("\n")]
    assert all(line.isprintable() for line in said) and len(said) == 5


def test_speeds_of_a_draft_that_stands_for_another_say_so() -> None:
    assert simulated({}) == simulated({"draft_mix": 1, "bits": None}) == []
    (rounded,), (mixed,) = simulated({"bits": 5}), simulated({"draft_mix": 0.4})
    assert rounded.startswith("Simulated draft: the target with weights of 5 bits. It takes")
    assert mixed.startswith("Simulated draft: mixed with the target, pair.draft_mix=0.4. It takes")
    (both,) = simulated({"bits": 5, "draft_mix": 0.4})
    assert "5 bits, mixed with the target" in both and "measured times say nothing" in both
