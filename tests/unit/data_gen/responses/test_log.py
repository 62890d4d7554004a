"""The log of a server's responses: torn, damaged, somebody else's."""

import json
from pathlib import Path
from typing import Any

import pytest

from data_gen.responses.log import NAME, open_log
from runtime.errors import UserError
from tests.helpers.data.answer_stub import stub_server
from tests.helpers.data.answering import PROMPTS, asked_as, fetch, rows


def test_a_torn_last_line_is_asked_again(tmp_path: Path) -> None:
    with stub_server() as stub:
        fetch(stub.url, tmp_path)
    whole = (tmp_path / NAME).read_bytes()
    lost = json.loads(whole.splitlines()[-1])["id"]
    for torn in (whole[:-1], whole[:-40], whole[: whole[:-1].rfind(b"\n") + 2]):
        (tmp_path / NAME).write_bytes(torn)
        with stub_server() as stub:
            fetch(stub.url, tmp_path)
        assert len(stub.bodies) == 1
        assert [row["id"] for row in rows(tmp_path)][-1] == lost and len(rows(tmp_path)) == len(
            PROMPTS
        )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"id": "p0", "response": "mine"}', r"ends with what is none of its lines"),
        ("notes of mine", r"ends with what is none of its lines"),
        ('{"asked": {"model": "other"}, "id": "p0"', r"ends with what is none of its lines"),
        ('{"id": "p0", "response": "mine"}\n{"id": "p1", "response": "last"}', r"answers\.jsonl "),
    ],
)
def test_a_file_of_somebody_else_is_left_as_it_is(
    content: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / NAME).write_text(content)
    with pytest.raises(UserError, match=message):
        fetch("http://127.0.0.1:1/v1", tmp_path)
    assert (tmp_path / NAME).read_text() == content


@pytest.mark.parametrize(
    "answer", [{"response": ""}, {"response": "\ud800"}, {"response_tokens": ["5"]}, {}]
)
def test_what_could_not_be_read_again_is_not_written(
    answer: dict[str, Any], tmp_path: Path
) -> None:
    with open_log(tmp_path, {}) as log:
        log.append(PROMPTS[0], {"response": "w5"})
        with pytest.raises(UserError, match=r"^responses\.url: .*line 2 "):
            log.append(PROMPTS[1], answer)
    with open_log(tmp_path, {}) as log:
        assert list(log.responses) == ["p0"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda lines: [*lines[:3], "{", *lines[4:]], r"^responses\.url: .*line 4 is not JSON"),
        (lambda lines: [*lines, lines[0]], r"^responses\.url: .*line 21 answers p\d+ again"),
        (
            lambda lines: [*lines[:3], "[" * 100_000, *lines[4:]],
            r"^responses\.url: .*line 4 is not JSON",
        ),
        (
            lambda lines: [*lines[:3], asked_as(lines[3], ["model"])],
            r"^responses\.url: .*line 4 is damaged",
        ),
        (
            lambda lines: [*lines[:3], asked_as(lines[3], None)],
            r"^responses\.url: .*line 4 is damaged",
        ),
        (
            lambda lines: [*lines[:3], lines[3].replace("w5", "w6"), *lines[4:]],
            r"^responses\.url: .*line 4 is damaged",
        ),
        (lambda lines: ["{}", *lines], r"^responses\.url: .*line 1 is no response"),
    ],
)
def test_a_damaged_log_is_refused_by_line(change: Any, message: str, tmp_path: Path) -> None:
    with stub_server() as stub:
        fetch(stub.url, tmp_path)
        content = change((tmp_path / NAME).read_text().splitlines())
        (tmp_path / NAME).write_text("\n".join(content) + "\n")
        with pytest.raises(UserError, match=message):
            fetch(stub.url, tmp_path)
