"""What one has to read at once is small: 15 modules in a folder, 300 lines in a file, 40 in a
function, 6 parameters, 100 columns."""

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = [
    "runtime",
    "predictors",
    "decoding",
    "data_gen",
    "drafts",
    "evaluation",
    "serving",
    "reports",
    "programs",
    "scripts",
]
FILES = [ROOT / "train.py", *(path for name in PACKAGES for path in (ROOT / name).rglob("*.py"))]
MODULES, LINES, BODY, PARAMETERS, COLUMNS = 15, 300, 40, 6, 100

Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(path: Path) -> Iterator[tuple[Function, bool]]:
    """Those of a file, and whether each is a method."""
    for node in ast.walk(ast.parse(path.read_text())):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, Function):
                yield child, isinstance(node, ast.ClassDef)


def parameters(function: Function, method: bool) -> int:
    """``self`` and ``cls`` are not counted."""
    given = function.args
    named = [*given.posonlyargs, *given.args, *given.kwonlyargs]
    decorators = [ast.unparse(decorator) for decorator in function.decorator_list]
    bound = method and "staticmethod" not in decorators
    return len(named) + bool(given.vararg) + bool(given.kwarg) - bound


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_folders() -> None:
    modules = Counter(path.parent for path in FILES if path.name != "__init__.py")
    assert {name(folder): n for folder, n in modules.items() if n > MODULES} == {}


@pytest.mark.parametrize("path", FILES, ids=name)
def test_files(path: Path) -> None:
    lines = path.read_text().splitlines()
    assert len(lines) <= LINES
    assert [number for number, line in enumerate(lines, 1) if len(line) > COLUMNS] == []


@pytest.mark.parametrize("path", FILES, ids=name)
def test_functions(path: Path) -> None:
    found = [
        (
            function.name,
            (function.end_lineno or 0) - function.lineno + 1,
            parameters(function, method),
        )
        for function, method in functions(path)
    ]
    assert [each for each in found if each[1] > BODY or each[2] > PARAMETERS] == []


def test_the_walk_counts_what_it_says(tmp_path: Path) -> None:
    file = tmp_path / "x.py"
    file.write_text(
        "class A:\n    def f(self, a, /, b, *c, d, **e):\n        return 1\n\n"
        "    @staticmethod\n    def g(a): ...\n\n\nasync def h(a):\n    def i(): ...\n"
    )
    found = {function.name: parameters(function, method) for function, method in functions(file)}
    assert found == {"f": 5, "g": 1, "h": 1, "i": 0}
