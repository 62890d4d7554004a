"""Files with several writers, and a folder that takes one."""

import errno
import json
import re
import signal
import time
from pathlib import Path

import pytest
from safetensors.numpy import save_file

from runtime.errors import UserError
from runtime.files import (
    checked_folder,
    file_name,
    only_writer,
    refuse_foreign,
    refuse_foreign_file,
    table_beside,
    write_atomically,
    write_json,
)
from tests.helpers.damage.refusals import refuses
from tests.helpers.programs.processes import die, end, forked, wait_for

NAMES = ["a", "org/mine", "org%2Fmine", "..", ".", "%2E.", "a+b", "ü", "x" * 400, "x" * 401, "a b"]


def test_two_writers_of_one_file_never_break_each_other(tmp_path):
    path = tmp_path / "same.json"

    def write(letter: str) -> None:
        for _ in range(150):
            write_json(path, [letter] * 2000)

    children = [forked(lambda letter=letter: write(letter)) for letter in "ab"]
    assert [child.wait() for child in children] == [0, 0]
    assert len(set(json.loads(path.read_text()))) == 1 and list(tmp_path.iterdir()) == [path]


def test_what_a_killed_writer_left_is_cleared_and_that_of_a_living_one_is_not(tmp_path):
    path = tmp_path / "a.json"

    def slow(temporary: Path) -> None:
        temporary.write_bytes(b"half")
        time.sleep(60)

    def dying(temporary: Path) -> None:
        temporary.write_bytes(b"half")
        die()

    assert forked(lambda: write_atomically(path, dying)).wait() == -signal.SIGKILL
    assert len(list(tmp_path.iterdir())) == 1
    living = forked(lambda: write_atomically(path, slow))
    wait_for(tmp_path, f".a.json.*-{living.pid}.tmp")
    write_json(path, 1)
    names = [re.sub(r"\.\w{6}-", ".", path.name) for path in tmp_path.iterdir()]
    assert sorted(names) == [f".a.json.{living.pid}.tmp", "a.json"]
    end(living)


def test_a_folder_has_one_writer(tmp_path):
    def hold() -> None:
        with only_writer(tmp_path / "out"):
            (tmp_path / "begun").touch()
            time.sleep(60)

    child = forked(hold)
    wait_for(tmp_path, "begun")
    says = r"^out: another process is making \S+/out\. Wait for it, or choose another"
    refuses(says, only_writer(tmp_path / "out").__enter__)
    with only_writer(tmp_path / "other"):
        pass
    end(child)
    with only_writer(tmp_path / "out"):  # free with its death, though the file is there
        assert (tmp_path / ".out.lock").exists()
    assert not list(tmp_path.glob(".*.lock"))


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.ELOOP, errno.ESTALE, None])
def test_what_cannot_be_written_names_its_key_and_a_remedy(tmp_path, code):
    def failing(temporary: Path) -> None:
        raise OSError(code, "broken") if code else OSError("broken")

    remedy = "Free some space" if code == errno.ENOSPC else "Choose another place, or mend this one"
    says = rf"^cost.file: \S+/a.json cannot be written \(broken\)\. {remedy}"
    refuses(says, write_atomically, tmp_path / "a.json", failing, key="cost.file")
    (tmp_path / "file").touch()
    says = r"^cost.file: \S+/file/a.json cannot be written \(File exists\)\. Choose another"
    refuses(says, write_json, tmp_path / "file" / "a.json", 1, key="cost.file")


@pytest.mark.parametrize("value", [".", "..", "sub/..", "~", "/"])
def test_where_one_works_or_lives_is_no_place_for_a_result(value, tmp_path, monkeypatch):
    for name in ("home/me", "work/here/sub"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "work/here/mark.json").touch()
    monkeypatch.setenv("HOME", str(tmp_path / "home/me"))
    monkeypatch.chdir(tmp_path / "work/here")
    with pytest.raises(UserError, match=r"^out: \S+ is the current folder, the home folder or one"):
        refuse_foreign(Path(value).expanduser(), "mark.json")


@pytest.mark.parametrize(
    ("content", "other"),
    [
        (["thesis.txt"], "thesis.txt"),
        (["results.json", "table.md"], "results.json"),
        (["config.json", "model.safetensors"], "config.json"),
        (["target/config.json"], "target"),
        (["mark.json", "nested/harvest/plan.json"], "nested/harvest/plan.json"),
        ([], None),
        (["mark.json", "anything.png"], None),
        (["mark.json", "templates/tool.jinja"], None),
        ([".mark.json.abcdef-123.tmp"], None),
    ],
)
def test_a_folder_is_foreign_without_the_mark_or_with_a_result_in_it(content, other, tmp_path):
    folder = tmp_path / "out"
    folder.mkdir()
    for name in content:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    if other is None:
        return refuse_foreign(folder, "other.json", "mark.*")
    said = rf"^key: \S+/out holds something else, which would be lost: {other}\. Choose another k"
    refuses(f"{said}ey=", refuse_foreign, folder, "other.json", "mark.*", key="key")


def test_any_name_gives_a_file_name_of_its_own(tmp_path):
    assert file_name("smollm2-eagle_1.0") == "smollm2-eagle_1.0"
    assert file_name("org/mine") == "org%2Fmine" and file_name("..") == "%2E."
    for name in NAMES:
        (tmp_path / file_name(name)).touch()
    assert len(list(tmp_path.iterdir())) == len(NAMES)
    assert not list(tmp_path.glob(".*"))
    assert file_name("a", "b") == "a+b" != file_name("a+b")


@pytest.mark.parametrize("value", ["/", "//", "/x/.."])
def test_a_folder_where_none_can_be_made_is_refused(value):
    says = rf"^out: {value} is no folder of its own\. Choose another out=<folder>$"
    refuses(says, checked_folder, "out", value)
    with pytest.raises(UserError, match="out: /proc/x cannot be made, /proc is no folder to write"):
        refuse_foreign(Path("/proc/x"), "marker")


def test_a_file_of_something_else_is_not_replaced(tmp_path):
    own, page = tmp_path / "own.json", tmp_path / "page.md"
    own.write_text('{"command": "python scripts/tune.py"}')
    page.write_text("| a |\n\n<!-- draftpredict tune what=checkpoints -->\n")
    save_file({}, tmp_path / "own.st", {"command": '"python scripts/tune.py"'})
    for name, content in {
        "other.json": '{"model_type": "llama"}',
        "note.json": '{"command": "true", "note": "run python scripts/tune.py"}',
        "list.json": '["python scripts/tune.py"]',
        "README.md": "Run\n\n    python scripts/tune.py\n",
        "above.md": "<!-- python scripts/tune.py -->\ntext",
        "empty": "",
    }.items():
        (tmp_path / name).write_text(content)
    save_file({}, tmp_path / "other.st", {"note": "python scripts/tune.py"})
    (tmp_path / "link").symlink_to(own)
    (tmp_path / "loop").symlink_to("loop")
    for mine in (own, page, tmp_path / "own.st", tmp_path / "new" / "own.json"):
        refuse_foreign_file(mine, "tune")
    texts = ("other.json", "note.json", "list.json", "README.md", "above.md", "empty", "other.st")
    for name in (*texts, "link", "loop", "new"):
        with pytest.raises(UserError, match=r"^key: \S+ holds something else, which would be lost"):
            refuse_foreign_file(tmp_path / name, "tune", "key")
    with pytest.raises(UserError, match=r"^key: \S+ (cannot be made|holds something else)"):
        refuse_foreign_file(own / "below", "tune", "key")
    with pytest.raises(UserError, match="^key: /dev/null holds something else"):
        refuse_foreign_file(Path("/dev/null"), "", "key")


def test_a_table_is_beside_its_file_and_replaces_no_other(tmp_path):
    out = tmp_path / "run.1"
    table = table_beside(out)
    assert table.name == "run.1.parquet" and table_beside(tmp_path / "a.json").name == "a.parquet"
    table.touch()
    refuses(r"^out: \S+/run.1.parquet, the table beside \S+, holds something", table_beside, out)
    out.touch()
    assert table_beside(out) == table
    refuses(r"^out: expected the name of a JSON file, got \S+\.parquet, which", table_beside, table)
