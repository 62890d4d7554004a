"""A damaged or forged file of any kind that people may edit ends in one line that names it."""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from decoding.cost import cost_table, read_cost, write_cost
from decoding.structures.sequoia import Sequoia, write_artefact
from decoding.trace import STAGES, RoundTrace, Trace, read_traces, write_traces
from evaluation import token_texts
from evaluation.decode import Journal
from evaluation.replay import thresholds
from runtime.errors import UserError
from runtime.json_files import Form, read_json, write_checksummed

SECONDS = dict.fromkeys(STAGES, 0.25)
TRACE = Trace(
    3, [4, 17], [RoundTrace([4], [0], [0.5], 1, 1, [4, 17], [0.75], 1, SECONDS)], 0.1, 1.5
)
COSTS = {
    "seconds": cost_table(0.25, {1: 1.5, 8: 2.5}, 1.25, {"hrad": 0.125}).to_dict(),
    "pair": {"target": "aa"},
    "command": "python scripts/tune.py cost=measure",
}
WARP = {"temperature": 0.5}
RESULT = {"threshold": 4.5, "speculate": True, "speedup": 1.5, "interval": [1.25, 1.75]}
TUNED = {
    "pair": {"target": "aa"},
    **{"warp": WARP, "draft_warp": WARP, "gamma": 8, "cost": "a100", "measured_on": None},
    "data": {"folder": "data/toy", "identity": "00"},
    "command": "python scripts/tune.py",
    "rules": {"fixed": {"setting": "gamma", "stop": {"gamma": None}, "checkpoint": None}},
    "results": {"chosen": {"advice": "fixed", "rules": {"fixed": RESULT}}},
}
TEXTS = token_texts.Vocabulary({4: "a", 17: "b"}, {"toy": {"p1": "w3"}})


class Kind(NamedTuple):
    """name: of the file; write: a whole one; read: what a program makes of it."""

    name: str
    write: Callable[[Path], object]
    read: Callable[[Path], Any]


def journal_with(path: Path) -> None:
    with Journal(path, Trace) as journal:
        journal.add("methods/0/0", {"fixed": TRACE})


def turns(path: Path) -> dict[str, Any]:
    with Journal(path, Trace) as journal:
        return dict(journal.turns)


KINDS = {
    "thresholds": Kind("t.json", lambda path: thresholds.write(path, TUNED), thresholds.read),
    "costs": Kind("c.json", lambda path: write_cost(path, COSTS), read_cost),
    "tree": Kind(
        "tree.json",
        lambda path: write_artefact(path, {"parents": [0, 0, 1], "command": "python"}),
        lambda path: Sequoia(path)._children,
    ),
    "vocabulary": Kind(
        token_texts.FILE,
        lambda path: token_texts.write(path.parent, TEXTS),
        lambda path: token_texts.read(path.parent),
    ),
    "traces": Kind("traces-x.jsonl", lambda path: write_traces(path, [TRACE] * 2), read_traces),
    "journal": Kind(".x.resume", journal_with, turns),
}
DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "cut": lambda content: content[: len(content) // 2] + b"\n",
    "the last byte but the end": lambda content: content[:-2] + b"\n",
    "empty object": lambda content: b"{}\n",
    "a list": lambda content: b"[]\n",
    "brackets": lambda content: b"[" * 100_000 + b"\n",
    "brackets in an object": lambda content: b'{"seconds": ' * 50_000 + b"\n",
    "closed brackets": lambda content: b'{"a": ' + b"[" * 500 + b"]" * 500 + b"}\n",
    "no UTF-8": lambda content: content.replace(b'"', b"\xff", 1),
    "zeros": lambda content: bytes(len(content) - 1) + b"\n",
    "half a character": lambda content: content.replace(b'": ', b'\\ud800": ', 1),
    "text for a number": lambda content: re.sub(rb"(\d+\.\d+|\d+)", rb'"\1"', content),
    "NaN": lambda content: re.sub(rb"\d+\.\d+|\d+", b"NaN", content),
    "infinite": lambda content: re.sub(rb"\d+\.\d+|\d+", b"1e999", content),
    "a long number": lambda content: re.sub(rb"\d+\.\d+|\d+", b"9" * 5000, content),
    "an unbalanced quote": lambda content: content.replace(b"a", b"'", 2).replace(b"e", b"'", 1),
}


def refused(kind: Kind, path: Path) -> None:
    with pytest.raises(UserError) as error:
        kind.read(path)
    said = str(error.value)
    assert "\n" not in said and path.name in said and len(said) < 500, said


@pytest.fixture
def path(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    kind = KINDS[request.node.callspec.params["kind"]]
    kind.write(tmp_path / kind.name)
    assert kind.read(tmp_path / kind.name)
    return tmp_path / kind.name


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.few(24, rest="slow")
def test_damage_ends_in_one_line(path: Path, kind: str, damage: str) -> None:
    content = path.read_bytes()
    path.write_bytes(DAMAGE[damage](content))
    assert path.read_bytes() != content
    refused(KINDS[kind], path)


@pytest.mark.parametrize("kind", KINDS)
def test_no_changed_digit_is_believed(path: Path, kind: str) -> None:
    content = path.read_bytes()
    for place, byte in enumerate(content):
        if chr(byte).isdigit():
            path.write_bytes(content[:place] + bytes([byte ^ 1]) + content[place + 1 :])
            refused(KINDS[kind], path)


TARGETS: list[Any] = ["fast", {"8": 1.0, "1": 0.5}, {"1": 1.0, "01": 0.5}, {"8": 1.0}]
FORGED: list[tuple[str, Mapping[str, Any]]] = [
    *(("thresholds", {"command": "python 'scripts/tune.py"}), ("thresholds", {"gamma": "8"})),
    *(("thresholds", {"gamma": True}), ("thresholds", {"measured_on": {"threads": 2}})),
    *(("thresholds", {"rules": {}}), ("thresholds", {"results": {}})),
    *(("costs", {"seconds": {"draft": draft, "target": 1.0}}) for draft in (-1.0, True)),
    *(("costs", {"seconds": {"draft": 1.0, "target": target}}) for target in TARGETS),
    *(("costs", {"pair": "aa"}), ("costs", {"mine": 1})),
    *(("tree", {"parents": [0, 2]}), ("tree", {"parents": [0, 0.0]})),
    ("tree", {"format_version": 2}),
]


@pytest.mark.parametrize(("kind", "change"), FORGED, ids=str)
def test_what_comes_after_the_checksum_is_looked_at(
    path: Path, kind: str, change: Mapping[str, Any]
) -> None:
    found = {**json.loads(path.read_text()), **change}
    write_checksummed(path, found, kind)
    refused(KINDS[kind], path)


def test_costs_and_trees_may_be_written_by_hand(tmp_path: Path) -> None:
    """Without command and checksum; what a program wrote has to lose both."""
    costs, tree = tmp_path / "c.json", tmp_path / "t.json"
    costs.write_text('{"seconds": {"draft": 1, "target": {"1": 4, "8": 5}}}')
    assert read_cost(costs).to_dict()["target"] == {"1": 4, "8": 5}
    tree.write_text('{"format_version": 1, "parents": [0, 0]}')
    assert Sequoia(tree).max_siblings == 2
    write_cost(costs, COSTS)
    edited = json.loads(costs.read_text())
    del edited["checksum"]
    costs.write_text(json.dumps(edited))
    refused(KINDS["costs"], costs)
    del edited["command"]
    costs.write_text(json.dumps(edited))
    assert read_cost(costs).draft == 0.25


def test_a_key_that_is_there_twice_is_said(tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text('{"seconds": {"draft": 1, "draft": 2, "target": 1}}')
    with pytest.raises(UserError, match="c.json is damaged .it has 'draft' twice"):
        read_cost(tmp_path / "c.json")


def test_keys_cannot_break_the_line(tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text(json.dumps({"a\nb\x1b[2J" * 9: 1}))
    with pytest.raises(UserError) as error:
        read_json(tmp_path / "c.json", Form, "out", "Mend it")
    assert "\n" not in str(error.value) and "\x1b" not in str(error.value)
