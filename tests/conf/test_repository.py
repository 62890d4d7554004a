"""The repository: pages are short where they must be, dated where they must be, and have a place in
the site; the Python of the README and of the guide to generate runs as it stands; imports point one
way, as the contracts in pyproject.toml say, and training reads shards only."""

import ast
import re
from pathlib import Path

import pytest
from importlinter.cli import EXIT_STATUS_SUCCESS, lint_imports

from tests.helpers.models.tiny_pair import save_tiny_pair

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
DECISIONS = sorted(DOCS.glob("decisions/0*.md"))
README = (ROOT / "README.md").read_text()
GUIDE = (ROOT / "docs/guides/generate.md").read_text()
BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)
PYTHON = [*BLOCK.findall(README), *BLOCK.findall(GUIDE)[:1]]


def test_results_are_short_and_say_first_what_works() -> None:
    text = (DOCS / "results.md").read_text()
    assert len(text.split()) <= 2000
    first = text.split("\n\n")[1]
    assert "pays" in first and ("no " in first or "not" in first)


@pytest.mark.parametrize("page", DECISIONS, ids=lambda page: page.stem)
def test_a_decision_has_status_and_date(page: Path) -> None:
    number = int(page.stem[:4])
    text = page.read_text()
    assert text.startswith(f"# {number}. ")
    assert re.search(r"^Status: \w+ · \d{4}-\d\d-\d\d", text, re.MULTILINE)
    assert f"]({page.name})" in (DOCS / "decisions" / "index.md").read_text()


def test_lab_notes_are_dated_oldest_first() -> None:
    headings = re.findall(r"^## (.*)", (ROOT / "papers/lab-notes.md").read_text(), re.MULTILINE)
    dates = [heading[:10] for heading in headings]
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\d", date) for date in dates)
    assert dates == sorted(dates)


def test_every_page_is_in_the_site() -> None:
    listed = set(re.findall(r"[\w/.-]+\.md", (ROOT / "mkdocs.yml").read_text()))
    assert listed == {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}


def test_links_between_pages_lead_somewhere() -> None:
    for page in [ROOT / "README.md", *DOCS.rglob("*.md"), *(ROOT / "papers").rglob("*.md")]:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_readme_is_short() -> None:
    assert len(README.split()) <= 1000


def test_the_python_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a toy pair in place of the embedded one."""
    folder = save_tiny_pair(tmp_path / ".cache" / "draftpredict" / "smollm2")
    monkeypatch.setenv("HOME", str(tmp_path))
    names: dict = {}
    for code in PYTHON:
        exec(compile(code.replace("/path/to/models", str(folder)), "README.md", "exec"), names)
    assert names["output"].shape[1] > names["inputs"].input_ids.shape[1]
    assert re.search(r"w\d+(.|\n)* \d\.\d+\n", capsys.readouterr().out)


def test_the_python_is_ten_lines() -> None:
    assert len(PYTHON) == 2
    for code in PYTHON:
        assert len([line for line in code.splitlines() if line.strip()]) <= 10


def test_the_contracts_are_kept() -> None:
    contracts = str(ROOT / "pyproject.toml")
    assert lint_imports(config_filename=contracts, no_cache=True) == EXIT_STATUS_SUCCESS


def test_training_reads_the_dataset_and_nothing_else_of_the_harvest() -> None:
    nodes = ast.walk(ast.parse((ROOT / "train.py").read_text()))
    modules = {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}
    later = ("data_gen.", "decoding.", "evaluation.", "serving.", "reports.", "scripts.")
    reading = {"samples", "storage.dataset", "storage.mapped", "storage.shards"}
    assert {name for name in modules if name.startswith(later)} <= {
        *(f"data_gen.{name}" for name in reading),
        "decoding.settings",
        "reports.trained",  # pictures for its run
    }
