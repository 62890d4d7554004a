from pathlib import Path

import pytest

from runtime.errors import UserError
from serving.schedule import Range, Schedule, read_schedule, write_schedule


def test_sizes_in_between_draft_as_the_next_larger_one() -> None:
    found = Schedule.at({8: 2, 1: 5, 2: 5, 32: 0})
    assert found.ranges == (Range(1, 2, 5), Range(3, 8, 2), Range(9, 32, 0))
    assert found.longest == 5


@pytest.mark.parametrize(
    "ranges",
    [(), ((2, 4, 5),), ((1, 4, 5), (6, 8, 2)), ((1, 4, 5), (4, 8, 2)), ((1, 0, 1),), ((1, 4, -1),)],
)
def test_other_ranges_are_refused(ranges: tuple[tuple[int, int, int], ...]) -> None:
    with pytest.raises(UserError, match="^schedule: expected ranges"):
        Schedule(tuple(Range(*one) for one in ranges))


def test_a_file_comes_back(tmp_path: Path) -> None:
    path, schedule = tmp_path / "schedule.json", Schedule.at({4: 5, 8: 2})
    write_schedule(path, schedule, "python scripts/tune.py batch=[4,8]", {"tokens/s": [1.5, 2.0]})
    assert read_schedule(path.rename(tmp_path / "renamed.json")) == schedule


def test_a_person_may_write_ranges_alone(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text('{"ranges": [[1, 4, 5], [5, 8, 0]]}')
    assert read_schedule(path).ranges == (Range(1, 4, 5), Range(5, 8, 0))


@pytest.mark.parametrize(
    "text", ["", "[]", '{"ranges": [[1, 4, "5"]]}', '{"ranges": []}', '{"ranges": [[1, 4, -5]]}']
)
def test_a_damaged_file_is_refused_in_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(UserError) as error:
        read_schedule(tmp_path / "x.json")
    assert str(error.value).startswith("schedule:") and "\n" not in str(error.value)
