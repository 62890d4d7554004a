"""A plug-in is known by its file alone: no other file of the program names a predictor, a stop
rule, a verifier, a structure or a dataset, by its class or by its config's name."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = [
    *("runtime", "predictors", "decoding", "data_gen", "drafts", "evaluation", "serving"),
    *("reports", "scripts"),
]
FILES = [ROOT / "train.py", *(path for name in PACKAGES for path in (ROOT / name).rglob("*.py"))]
GROUPS = ("predictor", "stop", "verifier", "structure", "dataset")
WORDS = {
    "block",
    "chain",
    "confidence",
    "fixed",
    "grown",
    "lookup",
    "never",
    "parallel",
    "product",
} | {
    *("sources", "hub", "jsonl", "token", "tree"),
    *("branch_point", "value"),  # the shape of a draft; what any variable may be called
}
"""Names of configs that are English words, columns or shapes as well: as strings they say
nothing."""
MADE_OF = {
    # rules that are another one in an overlapped engine, before its tokens are drawn
    "decoding/stopping/confidence.py": {"ConfidenceBefore"},
    "decoding/stopping/never.py": {"ConfidenceBefore"},
    # the engine's own candidates have no draft probabilities
    "decoding/engines/lookahead.py": {"PointMassVerifier"},
    # the decode that others are compared with, or that costs are measured on
    "evaluation/baselines/plain_harvest.py": {"Chain", "Fixed", "TokenVerifier"},
    "evaluation/baselines/side_by_side.py": {
        *("BranchPoint", "ConfidenceBefore", "PointMassVerifier")
    },
    # one of every kind, to be compared between a device and the host
    "evaluation/device/agreement.py": {
        *("BlockVerifier", "BranchPoint", "Chain", "Confidence", "DySpecHeap", "Never"),
        *("RrswVerifier", "TokenVerifier"),
    },
    "evaluation/device/memory.py": {"Chain", "Never", "TokenVerifier"},
    "evaluation/replay/decoding.py": {"Chain", "Never", "TokenVerifier"},
    # what is taken where nobody chose
    "decoding/stopping/hrad.py": {"Confidence"},
    "serving/generate.py": {"Chain", "Confidence", "TokenVerifier"},
}
"""Files that make one particular thing of others. They call its class; which one they were given,
nobody asks (`test_nobody_asks_which_plugin_it_is`)."""
PAPERS = ROOT / "reports" / "figures"
"""Figures that reproduce a figure of one method's paper may say whose."""


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


class Plugin(NamedTuple):
    group: str
    name: str
    file: Path
    kind: str


def plugins() -> list[Plugin]:
    """All of the configs: group, name, and the file and class (or function) of the
    ``_target_``."""
    found = []
    for group in GROUPS:
        for path in sorted((ROOT / "conf" / group).glob("*.yaml")):
            module, kind = yaml.safe_load(path.read_text())["_target_"].rsplit(".", 1)
            found.append(Plugin(group, path.stem, ROOT / f"{module.replace('.', '/')}.py", kind))
    return found


PLUGINS = plugins()


def bodies(node: ast.AST) -> list[ast.stmt]:
    """Statements under a module, a class or a function; lambdas have one expression."""
    body = getattr(node, "body", [])
    return body if isinstance(body, list) else []


def said(path: Path) -> Iterator[tuple[int, str]]:
    """Identifiers of a file and the strings in it that are no docstrings, with their lines."""
    tree = ast.parse(path.read_text())
    texts = {
        id(statement.value)
        for node in ast.walk(tree)
        for statement in bodies(node)
        if isinstance(statement, ast.Expr)
    }
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=word) | ast.Attribute(attr=word) | ast.alias(name=word):
                yield node.lineno, word
            case ast.Constant(value=str(word)) if id(node) not in texts:
                yield node.lineno, word


def foreign(path: Path) -> dict[str, set[str]]:
    """By what it is called in code: the files of each plug-in, but for those of this file."""
    words: dict[str, set[str]] = {}
    for plugin in PLUGINS:
        if plugin.file != path:
            words.setdefault(plugin.kind, set()).add(name(plugin.file))
            if plugin.name not in WORDS:
                words.setdefault(plugin.name, set()).add(name(plugin.file))
    own = {w for plugin in PLUGINS if plugin.file == path for w in (plugin.kind, plugin.name)}
    return {word: files for word, files in words.items() if word not in own}


@pytest.mark.parametrize("path", [path for path in FILES if PAPERS not in path.parents], ids=name)
def test_no_plugin_is_named_outside_its_file(path: Path) -> None:
    others = foreign(path).keys() - MADE_OF.get(name(path), set())
    assert [f"line {line}: {word}" for line, word in said(path) if word in others] == []


def asked(path: Path) -> Iterator[str]:
    """Classes in ``isinstance``, ``issubclass`` and patterns."""
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Call(func=ast.Name(id="isinstance" | "issubclass"), args=[_, kinds]):
                yield from (part.id for part in ast.walk(kinds) if isinstance(part, ast.Name))
            case ast.MatchClass(cls=ast.Name(id=kind)):
                yield kind


@pytest.mark.parametrize("path", FILES, ids=name)
def test_nobody_asks_which_plugin_it_is(path: Path) -> None:
    assert not {plugin.kind for plugin in PLUGINS} & set(asked(path))


def test_what_is_excused_is_there() -> None:
    for file, words in MADE_OF.items():
        assert words <= {word for _, word in said(ROOT / file)}


def test_every_group_is_seen() -> None:
    assert {plugin.group for plugin in PLUGINS} == set(GROUPS)
    assert all(plugin.file.is_file() for plugin in PLUGINS)


def test_the_walk_sees_names_and_strings(tmp_path: Path) -> None:
    file = tmp_path / "x.py"
    file.write_text(
        '"""hrad"""\nfrom a.b import C\ndef f(x):\n    """D"""\n'
        '    match x:\n        case E():\n            return "g", h.I\n'
    )
    assert {word for _, word in said(file)} >= {"C", "E", "g", "I"}
    assert not {word for _, word in said(file)} & {"hrad", "D"}
    assert list(asked(file)) == ["E"]
