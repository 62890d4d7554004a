"""Responses brought in a file: what is read, how it becomes tokens, and what is refused."""

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from data_gen.prompts import Prompt
from data_gen.requests import make_requests
from data_gen.responses.external import (
    ExternalResponse,
    Generated,
    ResponseFile,
    response_from_row,
    response_ids,
    with_responses,
)
from decoding.models.loading import ModelPair
from runtime.errors import UserError
from tests.helpers.damage.refusals import refuses
from tests.helpers.data.datasets import SAMPLED
from tests.helpers.models.tiny_pair import EOS, VOCAB, tiny_pair
from tests.unit.decoding.models.test_loading import bytewise as byte_tokenizer

PROMPTS = [Prompt(f"p{n}", "toy", "", f"w{n + 1} w2 w3", chat=False) for n in range(4)]
NO_TEXT = r"line 2 has a response that is no text"
NO_IDS = r"line 2 has response_tokens that are no list of whole numbers"


@pytest.fixture(scope="module")
def pair() -> ModelPair:
    return tiny_pair()


def write(path: Path, *rows: Any) -> Path:
    text = "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    path.write_bytes(text.encode(errors="surrogateescape"))
    return path


def fetch(path: Path) -> dict[str, ExternalResponse]:
    return ResponseFile(str(path)).fetch(PROMPTS, SAMPLED, path.parent, ask=True)


def lines(**changed: Any) -> list[Any]:
    """A response to every prompt; that of p1 changed."""
    rows: list[Any] = [{"id": prompt.id, "response": "w5 w6"} for prompt in PROMPTS]
    rows[1] = {**rows[1], **changed}
    return rows


def test_text_and_ids_are_read_with_blank_lines_and_strangers(tmp_path, pair):
    rows = lines(response=None, response_tokens=[7, 8, EOS, 9])
    rows += ["", {"id": "other", "response": "w1"}]
    rows[2]["finish_reason"], rows[3]["finish_reason"] = "stop", "length"
    given = fetch(write(tmp_path / "a.jsonl", *rows))
    requests = make_requests(PROMPTS, pair, 20, 0.2, 0.2)
    read = [request.response for request in with_responses(requests, given, pair, 18)]
    expected = [[5, 6], [7, 8, EOS], [5, 6, EOS], [5, 6]]
    assert [each.tolist() for each in read if each is not None] == expected
    assert Generated().fetch(PROMPTS, SAMPLED, tmp_path, ask=True) is None
    unanswered = with_responses(requests, None, pair, 18)
    assert [request.response for request in unanswered] == [None] * len(PROMPTS)


def test_other_files_with_the_same_rows(tmp_path):
    path = tmp_path / "answers.json.gz"
    path.write_bytes(gzip.compress(json.dumps(lines()).encode("utf-8-sig")))
    assert list(fetch(path)) == [prompt.id for prompt in PROMPTS]
    numbered = write(tmp_path / "a.jsonl", {"id": 7, "response": "w5"})
    prompts = [Prompt("7", "toy", "", "w1 w2")]
    assert list(ResponseFile(str(numbered)).fetch(prompts, SAMPLED, tmp_path, ask=True)) == ["7"]
    table = write(tmp_path / "answers.csv", "id,response", "p0,w5")
    refuses(r"^responses\.path: .*answers\.csv is CSV, expected", fetch, table)
    refuses(r"^responses\.path: there is no", fetch, tmp_path / "none")


@pytest.mark.parametrize(
    ("content", "finished", "expected"),
    [
        ([3] * 30, True, [3] * 6),
        ([3, 4], True, [3, 4, EOS]),
        ([3, EOS, 4], True, [3, EOS]),
        ([EOS], False, [EOS]),
        ("", True, [EOS]),
        ("w3 unheard", False, [3, 1]),
    ],
)
def test_a_response_is_cut(content, finished, expected, pair):
    given = ExternalResponse("p1", content, finished, "x")
    assert response_ids(given, pair, 6).tolist() == expected


def chatting() -> ModelPair:
    """The tiny pair with w6, w7 and its eos as ends; a chat ends turns with w7."""
    pair = tiny_pair()
    turn = "{% for m in messages %}{{ m.role }} {{ m.content }} w7 {% endfor %}"
    pair.tokenizer.chat_template = turn
    return replace(pair, eos_ids=(EOS, 1, 6, 7))  # w1 is the unknown word too


STOP = {"finish_reason": "stop"}
STOPPED = {None: [3, 7], 6: [3, 6], 0: [3, EOS], 9: [3], "w4": [3], "w6": [3, 6], "unheard": [3]}


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"response": "w3", **STOP}, [3, 7]),
        *(({"response": "w3", **STOP, "stop_reason": why}, ids) for why, ids in STOPPED.items()),
        *(({"response": "w3", "finish_reason": reason}, [3]) for reason in ("length", None)),
        ({"response_tokens": [3], **STOP}, [3, 7]),
        ({"response_tokens": [3, 6], **STOP}, [3, 6]),
        ({"response_tokens": [3, 9], **STOP, "stop_reason": "w9"}, [3, 9]),
    ],
)
def test_an_answer_ends_as_the_chat_does_or_as_was_told(row, expected):
    response = response_from_row({"id": "p1", **row}, "x")
    assert response_ids(response, chatting(), 6).tolist() == expected


def test_special_tokens_spelled_in_a_text_are_ordinary_text():
    pair = replace(tiny_pair(), tokenizer=byte_tokenizer(), eos_ids=(258, 259))
    pair.target.vocab_size = 300
    text = ExternalResponse("p1", "a <end> b", True, "x")
    ids = response_ids(text, pair, 99).tolist()
    assert ids[-1] == 259 and not {258, 259} & {*ids[:-1]} and len(ids) == 10
    for spelled in ("a <end>", "a <eos>\n"):
        with pytest.raises(UserError, match=r"^x spells out the end token <e"):
            response_ids(ExternalResponse("p1", spelled, True, "x"), pair, 99)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("w3 </s> w4", "spells out the end token </s> in its text"),
        ("  ", "has a response without a token"),
        ([1, VOCAB], f"has token {VOCAB}, the vocabulary ends at 31"),
        ([-1], "has token -1, the vocabulary ends at 31"),
        ([10**30], f"has token {10**30}, the vocabulary ends at 31"),
    ],
)
def test_what_cannot_be_tokens_of_the_target_is_refused(content, says, pair):
    where = "responses.path: f line 2"
    with pytest.raises(UserError, match=rf"^{where} {says}"):
        response_ids(ExternalResponse("p1", content, False, where), pair, 6)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (["{"], r"line 1 is not JSON"),
        (["\udcff"], r"line 1 is not JSON"),
        (["[" * 100_000], r"line 1 is not JSON"),
        (["[1]"], r"line 1 is not a JSON object"),
        ([{"id": "p0"}], r"line 1 is no response \(it has id\)\. Write \{"),
        ([{}], r"line 1 is no response \(it has nothing\)"),
        ([{"response": "w1"}], r"line 1 is no response"),
        (lines(response_tokens=[3]), r"line 2 is no response \(it has id, response, response_tok"),
        *((lines(response=bad), NO_TEXT) for bad in (7, "w1 \ud800")),
        *((lines(response=None, response_tokens=bad), NO_IDS) for bad in ("3 4", [3, True])),
        (lines(finish_reason="tool_calls"), r"line 2 has finish_reason 'tool_calls'"),
        (lines(finish_reason="content_filter"), r"line 2 has finish_reason 'content_filter'"),
        (lines(finish_reason="stop", stop_reason=["w1"]), r"line 2 has finish_reason 'stop' and"),
        (lines(response=""), r"line 2 has an empty response"),
        (lines(response=None, response_tokens=[]), r"line 2 has an empty response"),
        (lines(id="p0"), r"line 2 answers p0 again \(line 1 did\)\. Remove one of them"),
        (lines(id="q"), r"a.jsonl has no response to p1 \(1 of 4 prompts lack one\)"),
        ([], r"a.jsonl has no response to p0 \(4 of 4 prompts lack one\)"),
    ],
)
def test_bad_files_are_refused_by_line(rows, message, tmp_path):
    path = write(tmp_path / "a.jsonl", *rows)
    refuses(f"^responses\\.path: .*{message}", fetch, path)
