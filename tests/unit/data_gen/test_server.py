"""Asking a server for responses: what is asked, what is tried again, what is kept, what is refused,
and the log of them: torn, damaged, somebody else's."""

import asyncio
import itertools
import json
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from data_gen.prompts import Prompt
from data_gen.responses.external import GoingOn, ResponseFile, asked_on, fetched
from data_gen.responses.log import NAME, open_log
from data_gen.responses.server import Later, Servers, pause
from decoding.processors import processed
from runtime.errors import UserError
from tests.helpers.damage.refusals import refuses
from tests.helpers.data.answer_stub import NUCLEUS, PROMPTS, fetch, rows, server, stub_server
from tests.helpers.data.datasets import GREEDY, SAMPLED
from tests.helpers.models.tiny_pair import tiny_tokenizer

CHATS = [Prompt(prompt.id, "toy", "", prompt.text) for prompt in PROMPTS]
PASSING = ["500", "503", "429", "408", "hang", "reset", "short", "garbage", "deep", "no choices"]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers are asked again at once."""
    monkeypatch.setattr("data_gen.responses.server.PAUSE", 0.01)


def answered(folder: Path, replies: dict[str, str] | None = None, **how: Any) -> Any:
    """What a stub server answers, "ok" but to the prompts that `replies` names."""
    said = replies or {}
    with stub_server(lambda text, attempt: said.get(text, "ok")) as stub:
        return fetch(stub.url, folder, **how)


def test_what_is_asked_and_kept(tmp_path):
    with stub_server() as stub:
        given = fetch(stub.url, tmp_path, extra={"min_p": 0})
    texts = {name: answer.content for name, answer in given.items()}
    assert texts == {p.id: f"w5 {p.text}" for p in PROMPTS}
    assert all(answer.finished for answer in given.values())
    assert set(stub.paths) == {"/v1/completions"} and set(stub.keys) == {None}
    assert 2 <= stub.most <= 4
    body = next(body for body in stub.bodies if body["prompt"] == PROMPTS[3].text)
    seeds = {body["seed"] for body in stub.bodies}
    assert len(seeds) == len(PROMPTS) and all(0 <= seed < 2**31 for seed in seeds)
    apart = [b - a for a, b in itertools.pairwise(sorted(seeds))]
    assert min(apart) > 1000, "a server that counts from its seed gives no two answers one number"
    fields = {"model": "tiny", "temperature": 0.7, "top_p": 0.9, "max_tokens": 18, "min_p": 0}
    assert {**body, "seed": 0} == {**fields, "seed": 0, "prompt": "w4 w2"}
    again = ResponseFile(str(tmp_path / NAME)).fetch(PROMPTS, NUCLEUS, tmp_path, ask=True)
    assert {name: answer.content for name, answer in again.items()} == texts


def test_several_servers_share_and_a_dead_one_is_left_out_and_named(tmp_path, capsys):
    with stub_server() as first, stub_server() as second:
        dead = "http://127.0.0.1:9/v1"
        given = fetch([first.url, dead, second.url], tmp_path)
        assert {name: answer.content for name, answer in given.items()} == {
            prompt.id: f"w5 {prompt.text}" for prompt in PROMPTS
        }
        assert first.bodies and second.bodies
        assert len(first.bodies) + len(second.bodies) == len(PROMPTS)
        assert len(fetch([dead, first.url], tmp_path / "none", retries=0)) == len(PROMPTS)
    assert f"responses.url: {dead} is left out, it fails" in capsys.readouterr().err
    refuses("gave no response", fetch, [dead, dead.replace("9", "10")], tmp_path / "x", retries=1)


def test_what_says_nothing_about_a_server_leaves_none_out(capsys):
    """A new day, a server that is busy, and many requests lost at once, which count as one."""

    async def fail(servers: Servers, error: Exception, at_once: int) -> None:
        async def one() -> None:
            with suppress(type(error)):
                async with servers.least_busy({"b"}):
                    await asyncio.sleep(0.01)
                    raise error

        await asyncio.gather(*(one() for _ in range(at_once)))

    async def tried() -> None:
        servers = Servers(["a", "b"], 4, str)
        await fail(servers, Later("a new day"), 4)
        await fail(servers, httpx.ConnectError("gone"), 4)
        await fail(servers, httpx.ConnectError("gone"), 1)
        assert servers.alive == ["a", "b"]
        await fail(servers, httpx.ConnectError("gone"), 1)
        assert servers.alive == ["b"]

    asyncio.run(tried())
    assert "a is left out, it fails (gone). Others: 1" in capsys.readouterr().err


def test_a_chat_is_asked_as_one(tmp_path):
    chats = [Prompt("c", "toy", "", " w1 w2 ", "w9")]
    with stub_server() as stub:
        fetch(stub.url + "/", tmp_path, SAMPLED, chats)
    assert stub.paths == ["/v1/chat/completions"]
    assert stub.bodies[0]["messages"] == [{"role": "user", "content": "w9\n\n w1 w2 "}]
    assert stub.bodies[0]["top_k"] == 20, "an extension that the usual servers know"


def test_a_conversation_goes_on_from_the_answers(tmp_path):
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    called = {"role": "assistant", "content": "", "tool_calls": [call]}
    tool = {"type": "function", "function": {"name": "f"}}
    before = [{"role": "user", "content": "w8"}, called, {"role": "tool", "content": "w9"}]
    later = [[{"role": "user", "content": text}] for text in ("w2", "w3")]
    chat = Prompt("c#turn2", "toy", "", "w1", earlier=before, then=later, tools=[tool])
    with stub_server() as stub:
        tokenizer = tiny_tokenizer()
        tokenizer.chat_template = (
            "{% for m in messages %}{{ m.content }} {{ m.tool_calls }} {{ tools }}{% endfor %}"
        )
        source, on = server(stub.url), GoingOn(list, lambda: tokenizer, tuple, 18, 90)
        asked, given = fetched(source, [chat], SAMPLED, tmp_path, True, on)
        again, _ = fetched(source, [chat], SAMPLED, tmp_path, True, on)
    assert asked == again and len(stub.bodies) == 3
    assert [prompt.id for prompt in asked] == list(given or ()) == ["c#turn2", "c#turn3", "c#turn4"]
    last = stub.bodies[2]
    texts_asked = [message["content"] for message in last["messages"]]
    assert texts_asked == ["w8", "", "w9", "w1", "w5 w1", "w2", "w5 w2", "w3"]
    assert last["messages"][1]["tool_calls"][0]["function"]["arguments"] == '{"x": 1}'
    assert last["tools"] == [tool]


def test_processors_are_asked_of_no_server(tmp_path):
    says = "^warp: other engines take temperature, top_k and top_p alone"
    penalised = replace(SAMPLED, warp=processed(repetition_penalty=1.1))
    refuses(says, fetch, "http://127.0.0.1:1/v1", tmp_path, penalised)


def test_template_arguments_are_sent_and_kept_apart(tmp_path):
    chats = [Prompt("c", "toy", "", "w1", template={"enable_thinking": False})]
    same = {"chat_template_kwargs": {"enable_thinking": False}}
    with stub_server() as stub:
        fetch(stub.url, tmp_path, SAMPLED, chats, extra=same)
        assert stub.bodies[0]["chat_template_kwargs"] == {"enable_thinking": False}
        for other in ({"enable_thinking": True}, {}):
            says = r"^responses\.extra\.chat_template_kwargs: .* Set dataset\.template"
            with pytest.raises(UserError, match=says):
                fetch(stub.url, tmp_path, SAMPLED, chats, extra={"chat_template_kwargs": other})
        for change, says in (
            ({"template": {"enable_thinking": True}}, "was asked for with chat_template_kwargs.en"),
            ({"rendering": "of another template"}, "answers another text of the prompt c"),
        ):
            refuses(says, fetch, stub.url, tmp_path, SAMPLED, [replace(chats[0], **change)])
    assert len(stub.bodies) == 1


def test_answers_keep_the_date_that_their_prompts_told(tmp_path, monkeypatch):
    dated = [replace(prompt, date="2026-01-01") for prompt in PROMPTS[:2]]
    for day, asked in (("2026-01-01", dated[:1]), ("2026-01-02", dated)):
        monkeypatch.setattr("data_gen.responses.server.today", lambda day=day: day)
        with stub_server() as stub:
            given = fetch(stub.url, tmp_path, prompts=asked)
        assert len(stub.bodies) == 1
    days = [prompt.date for prompt in asked_on(dated, given)]
    assert days == ["2026-01-01", "2026-01-02"]
    assert [prompt.date for prompt in asked_on(PROMPTS[:2], given)] == [None, None]


@pytest.mark.parametrize(
    "extra",
    [
        *({"temperature": 0.5}, {"Temperature": 0.5}, {"top_p": 0.5}, {"topP": 0.5}, {"top_k": 20}),
        *({"min_p": 0.1}, {"typical_p": 0.9}, {"max_tokens": 5}, {"max_completion_tokens": 5}),
        *({"model": "other"}, {"stop": ["."]}, {"stop_token_ids": [3]}, {"n": 2}, {"best_of": 2}),
        *({"stream": True}, {"logit_bias": {"5": 10}}, {"ignore_eos": True}, {"min_tokens": 3}),
        *({"repetition_penalty": 1.1}, {"presence_penalty": 1}, {"frequency_penalty": 1}),
        *({"seed": 1}, {"seed": None}, {"prompt": "w9"}, {"messages": []}, {"echo": True}),
        {"guided_regex": "a"},
        *({"response_format": {"type": "json_object"}}, {"structured_outputs": {"regex": "a"}}),
        *({"bad_words": ["a"]}, {"use_beam_search": True}, {"length_penalty": 2}, {"grammar": "a"}),
        *({"logits_processors": ["a"]}, {"truncate_prompt_tokens": 3}, {"mirostat": 2}),
        *({"add_special_tokens": False}, {"chat_template": "{{ 1 }}"}, {"n_predict": 3}),
        *({"allowed_token_ids": [1]}, {"reasoning_effort": "low"}, {"tools": []}, {"lora": []}),
        *({"add_generation_prompt": False}, {"continue_final_message": True}, {"suffix": "x"}),
        *({"extra_body": {"top_k": 20}}, {"sampling_params": {"temperature": 0.5}}),
        *({"generation_config": '{"do_sample": true, "top_k": 20}'}, {"temperature": None}),
        *({"a": [{"b": {"repetition-penalty": 1.1}}]}, {"no_repeat_ngram_size": 2}),
        *({"greedy": True}, {"decoding_method": "greedy"}, {"system": "be brief"}, {"end_id": 3}),
        *({"prefill": "x"}, {"format": "json"}, {"instructions": "x"}, {"provider": {"only": []}}),
    ],
    ids=lambda extra: next(iter(extra)),
)
@pytest.mark.few(12, rest="slow")
def test_fields_that_change_the_answers_are_refused_by_name(extra, tmp_path):
    with pytest.raises(UserError, match=rf"^responses\.extra\.{next(iter(extra))}[.:]") as error:
        fetch("http://127.0.0.1:1/v1", tmp_path, extra=extra)
    assert "\n" not in str(error.value) and not (tmp_path / NAME).exists()


def test_fields_that_leave_the_answers_alone_are_sent(tmp_path):
    extra = {
        **{"return_token_ids": True, "logprobs": 1, "min_p": 0.0, "repetition_penalty": 1.0},
        **{"top_k": -1, "temperature": 0.7, "stop": None, "cache_prompt": False, "user": "me"},
        **{"generation_config": '{"do_sample": true, "top_k": 0}', "priority": 1, "n": 1},
        **{"response_format": {"type": "text"}, "include_stop_str_in_output": False},
        **{"skip_special_tokens": False, "metadata": {"model": "a note"}, "request_id": "r"},
    }
    with stub_server() as stub:
        fetch(stub.url, tmp_path, prompts=PROMPTS[:1], extra=extra)
    assert stub.bodies[0].items() >= extra.items()


def test_greedy_asks_for_temperature_0(tmp_path):
    with stub_server() as stub:
        fetch(stub.url, tmp_path, GREEDY)
    assert {(body["temperature"], body["top_p"]) for body in stub.bodies} == {(0.0, 1.0)}


@pytest.mark.parametrize("failure", [*PASSING, "a list", "abort", "unfinished"])
def test_failures_that_pass_are_tried_again(failure, tmp_path):
    fails = {PROMPTS[2].text: 2, PROMPTS[7].text: 2}

    def behave(text: str, attempt: int) -> str:
        if attempt < fails.get(text, 0):
            return failure
        return "twice" if text == PROMPTS[4].text else "ok"

    with stub_server(behave) as stub:
        given = fetch(stub.url, tmp_path)
    assert {*given} == {row["id"] for row in rows(tmp_path)} == {prompt.id for prompt in PROMPTS}
    assert len(rows(tmp_path)) == len(PROMPTS)
    assert stub.tries == {prompt.text: fails.get(prompt.text, 0) + 1 for prompt in PROMPTS}


FOUR_TRIES = "gave no response to p5 in 4 tries"
NO_IDS = "gives token_ids to p5 that are no list of whole numbers"
STAYING = {
    "500": rf"{FOUR_TRIES} \(status 500: went wrong: 500 None\)\. Check the server",
    "garbage": rf"{FOUR_TRIES} \(not a completion: <html>busy</html>\)",
    "abort": rf"{FOUR_TRIES} \(finish_reason abort\)",
    "content_filter": rf"{FOUR_TRIES} \(finish_reason content_filter\)",
    "unfinished": rf"{FOUR_TRIES} \(finish_reason None\)",
    "an object": rf"{FOUR_TRIES} \(finish_reason \{{'type': 'stop'\}}\)",
    "hang": rf"{FOUR_TRIES} \(TimeoutError\)",
    "reset": FOUR_TRIES,
    "404": "refuses p5 with status 404: went wrong: 404 None. Check responses.url, responses.model",
    "401": "refuses p5 with status 401",
    "307": "refuses p5 with status 307",
    "empty": r"gives an empty response to p5 \(finish_reason length\)",
    "null": "gives an empty response to p5",
    "half": r"gives a response to p5 that is no text \(it holds half a character\)",
    "named ids": rf"{NO_IDS}\. Leave out responses\.extra",
    "real ids": NO_IDS,
    "one id": NO_IDS,
    "thinks": "takes reasoning or tool calls out of its response to p5",
}


@pytest.mark.parametrize("failure", STAYING)
def test_failures_that_stay_are_said_in_a_line_and_nothing_is_lost(failure, tmp_path):
    bad, message = PROMPTS[5].text, STAYING[failure]
    patience = 1.0 if failure == "hang" else 30  # seconds; a busy machine answers late
    with stub_server(lambda text, attempt: failure if text == bad else "ok") as stub:
        with pytest.raises(UserError, match=f"^responses\\.url: .*{message}") as error:
            fetch(stub.url, tmp_path, prompts=CHATS, concurrency=1, timeout=patience)
    assert "\n" not in str(error.value)
    assert stub.tries[bad] == (4 if "4 tries" in message else 1)
    assert [row["id"] for row in rows(tmp_path)] == [prompt.id for prompt in PROMPTS[:5]]
    with stub_server() as stub:
        fetch(stub.url, tmp_path, prompts=CHATS, timeout=30)
    assert stub.tries == {prompt.text: 1 for prompt in PROMPTS[5:]}, "only what is missing"
    assert sorted(row["id"] for row in rows(tmp_path)) == sorted(prompt.id for prompt in PROMPTS)


def test_a_server_that_is_not_there(tmp_path):
    with stub_server() as stub:
        pass
    says = r"^responses\.url: http://127.0.0.1:\d+/v1/completions gave no response to p0"
    refuses(says, fetch, stub.url, tmp_path, concurrency=1)


def test_what_a_response_says_and_what_stopped_it(tmp_path):
    kinds = ["ended", "ids", "cut", "stop string", "an end", "matched", "no reason"]
    replies = {prompt.text: kind for prompt, kind in zip(PROMPTS, kinds, strict=False)}
    with stub_server(lambda text, attempt: replies.get(text, "ok")) as stub:
        given = fetch(stub.url, tmp_path)
    found = [(given[f"p{n}"].content, given[f"p{n}"].finished) for n in range(3)]
    assert found == [("", True), ([5, 6, 0], True), ("w5 w3 w2", False)]
    assert [given[f"p{n}"].stopped_by for n in range(3, 7)] == ["w6", 7, 7, None]
    assert fetch(stub.url, tmp_path) == given, "read again"


def test_token_ids_are_all_that_the_target_said_whatever_a_parser_takes_out(tmp_path):
    replies = {prompt.text: "calls with ids" for prompt in CHATS}
    given = answered(tmp_path, replies, prompts=CHATS[:3])
    assert [(each.content, each.finished) for each in given.values()] == [([5, 0], True)] * 3


def test_the_key_is_sent_and_never_written(tmp_path, monkeypatch):
    monkeypatch.setenv("TINY_KEY", "sesame")
    with stub_server(lambda text, attempt: "403" if text == PROMPTS[9].text else "ok") as stub:
        with pytest.raises(UserError, match="status 403: went wrong: 403 Bearer ") as error:
            fetch(stub.url, tmp_path, key_variable="TINY_KEY", concurrency=1)
    assert set(stub.keys) == {"Bearer sesame"}
    assert "sesame" not in str(error.value) + (tmp_path / NAME).read_text()


@pytest.mark.parametrize(
    "key",
    ["sk-sesame\r", "sk-sesame\n", "sk sesame", "sk-sésame", "sk-sesame\u2019", "sk-sesame\x7f"],
)
def test_a_key_that_cannot_be_sent_is_refused_and_never_shown(key, monkeypatch):
    monkeypatch.setenv("TINY_KEY", key)
    says = r"^responses\.key_variable: TINY_KEY holds blanks, line ends"
    with pytest.raises(UserError, match=says) as error:
        server("http://127.0.0.1:8000/v1", key_variable="TINY_KEY")
    assert "same" not in str(error.value)


@pytest.mark.parametrize("blanks", [0, 170])
def test_the_key_is_masked_wherever_it_is_said(blanks, tmp_path, monkeypatch):
    monkeypatch.setenv("TINY_KEY", "sesame" * 6)

    async def fail(*rest: Any, **more: Any) -> None:
        raise httpx.LocalProtocolError(f"Illegal header {'-' * blanks}b'Bearer {'sesame' * 6}'")

    monkeypatch.setattr(httpx.AsyncClient, "post", fail)
    with pytest.raises(UserError, match=r"in 4 tries \(Illegal header -*b'Bearer \*") as error:
        fetch("http://127.0.0.1:1/v1", tmp_path, key_variable="TINY_KEY", concurrency=1)
    assert "sesame" not in str(error.value)


def test_answers_to_other_questions_do_not_mix_and_an_estimate_asks_for_nothing(tmp_path):
    other = [Prompt("p0", "toy", "", "w9", chat=False), *PROMPTS[1:]]
    with stub_server() as stub:
        with pytest.raises(UserError, match=r"^estimate: 20 responses are still to be asked from"):
            server(stub.url).fetch(PROMPTS, NUCLEUS, tmp_path, ask=False)
        assert not stub.bodies
        fetch(stub.url, tmp_path)
        for how, says in (
            ({"recipe": GREEDY}, r"^out: .* was asked for with temperature=0.7, here "),
            ({"extra": {"min_p": 0}}, r"asked for with min_p=None, here 0\. Choose another out"),
            ({"prompts": other}, r"line \d+ answers another text of the prompt p0\. "),
        ):
            with pytest.raises(UserError, match=says):
                fetch(stub.url, tmp_path, **how)  # type: ignore[arg-type]
        kept = server(stub.url).fetch(PROMPTS, NUCLEUS, tmp_path, ask=False)
        assert len(kept) == len(stub.bodies) == 20


def test_a_second_process_waits_and_asks_for_nothing(tmp_path):
    """The first one is on its last answer."""
    with stub_server() as stub:
        fetch(stub.url, tmp_path)
    *lines, last = (tmp_path / NAME).read_bytes().splitlines(keepends=True)
    (tmp_path / NAME).write_bytes(b"".join(lines))
    program = (
        "import fcntl, sys, time; file = open(sys.argv[1], 'ab'); fcntl.lockf(file,"
        " fcntl.LOCK_EX)\nprint('locked', flush=True); time.sleep(0.5);"
        " file.write(sys.argv[2].encode()); file.flush()"
    )
    command = [sys.executable, "-c", program, str(tmp_path / NAME), last.decode()]
    first = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert first.stdout is not None and first.stdout.readline() == b"locked\n"
    with stub_server() as stub, first:
        assert len(fetch(stub.url, tmp_path)) == len(PROMPTS)
    assert not stub.bodies


def test_a_key_that_is_not_set_and_a_folder_that_cannot_be_made_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"^responses\.key_variable: "):
        server("http://127.0.0.1:8000/v1", key_variable="NOT_SET_ANYWHERE")
    (tmp_path / "file").write_text("")
    says = r"^out: .*/file/answers.jsonl cannot be written \(.*\)\. Choose another out"
    refuses(says, fetch, "http://127.0.0.1:1/v1", tmp_path / "file")


def test_pauses_grow_up_to_a_limit(monkeypatch):
    monkeypatch.setattr("data_gen.responses.server.PAUSE", 1.0)
    for attempt, longest in enumerate([1, 2, 4, 8, 16, 32, 60, 60]):
        assert longest / 2 <= pause(attempt) <= longest


def test_interrupted_runs_keep_what_arrived(tmp_path):
    seen: list[str] = []

    def behave(text: str, attempt: int) -> str:
        seen.append(text)
        return "ok" if len(seen) <= 6 else "hang"

    with stub_server(behave) as stub, pytest.raises(UserError):
        fetch(stub.url, tmp_path, concurrency=2, timeout=1.0, retries=0)
    assert len(rows(tmp_path)) == 6


def test_a_torn_last_line_is_asked_again(tmp_path):
    answered(tmp_path)
    whole = (tmp_path / NAME).read_bytes()
    lost = json.loads(whole.splitlines()[-1])["id"]
    for torn in (whole[:-1], whole[:-40], whole[: whole[:-1].rfind(b"\n") + 2]):
        (tmp_path / NAME).write_bytes(torn)
        with stub_server() as stub:
            fetch(stub.url, tmp_path)
        names = [row["id"] for row in rows(tmp_path)]
        assert len(stub.bodies) == 1 and names[-1] == lost and len(names) == len(PROMPTS)


@pytest.mark.parametrize(
    "content",
    [
        '{"id": "p0", "response": "mine"}',
        "notes of mine",
        '{"asked": {"model": "other"}, "id": "p0"',
        '{"id": "p0", "response": "mine"}\n{"id": "p1", "response": "last"}',
    ],
)
def test_a_file_of_somebody_else_is_left_as_it_is(content, tmp_path):
    (tmp_path / NAME).write_text(content)
    says = r"answers\.jsonl " + ("" if "\n" in content else "ends with what is none of its lines")
    refuses(says, fetch, "http://127.0.0.1:1/v1", tmp_path)
    assert (tmp_path / NAME).read_text() == content


@pytest.mark.parametrize(
    "bad", [{"response": ""}, {"response": "\ud800"}, {"response_tokens": ["5"]}, {}]
)
def test_what_could_not_be_read_again_is_not_written(bad, tmp_path):
    with open_log(tmp_path, {}) as log:
        log.append(PROMPTS[0], {"response": "w5"})
        refuses(r"^responses\.url: .*line 2 ", log.append, PROMPTS[1], bad)
    with open_log(tmp_path, {}) as log:
        assert list(log.responses) == ["p0"]


def asked_as(line: str, asked: Any) -> str:
    return json.dumps({**json.loads(line), "asked": asked})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda lines: [*lines[:3], "{", *lines[4:]], "line 4 is not JSON"),
        (lambda lines: [*lines, lines[0]], r"line 21 answers p\d+ again"),
        (lambda lines: [*lines[:3], "[" * 100_000, *lines[4:]], "line 4 is not JSON"),
        (lambda lines: [*lines[:3], asked_as(lines[3], ["model"])], "line 4 is damaged"),
        (lambda lines: [*lines[:3], asked_as(lines[3], None)], "line 4 is damaged"),
        (lambda lines: [*lines[:3], lines[3].replace("w5", "w6"), *lines[4:]], "line 4 is damaged"),
        (lambda lines: ["{}", *lines], "line 1 is no response"),
    ],
)
def test_a_damaged_log_is_refused_by_line(change, message, tmp_path):
    answered(tmp_path)
    content = change((tmp_path / NAME).read_text().splitlines())
    (tmp_path / NAME).write_text("\n".join(content) + "\n")
    refuses(rf"^responses\.url: .*{message}", answered, tmp_path)
