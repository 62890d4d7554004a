"""tune.py what=tree from its command line on a tiny pair, and scripts/evaluate.py with the tree
it found."""

import json
import os
from pathlib import Path

import pytest

from decoding.structures.sequoia import Sequoia
from evaluation.replay.tune_tree import expected_tokens
from scripts import evaluate, tune
from tests.helpers.programs.programs import mode, refused, run

tune_tree = mode(tune.tree)

TREE = "trees/tiny.json"


@pytest.fixture(autouse=True)
def somewhere_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def base(tiny_pair_dir: Path, tmp_path: Path) -> list[str]:
    prompts = [{"prompt": f"w{n} w{n + 1} w2"} for n in range(1, 9)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, prompts)))
    return [
        *(f"pair.{side}={tiny_pair_dir / side}" for side in ("target", "draft")),
        *(
            "pair.dtype=float64",
            "dataset=jsonl",
            "dataset.path=prompts.jsonl",
            "dataset.chat=false",
        ),
        *(
            "split=all",
            "limit=4",
            "max_new_tokens=14",
            "structure=sequoia",
            f"structure.tree={TREE}",
        ),
    ]


SMALL = ("rows=[1,4]", "repeats=2", "max_depth=4")


def test_tune_then_evaluate(base: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    run(tune_tree, *base, *SMALL, "max_nodes=9")
    printed, artefact = capsys.readouterr().out, json.loads(Path(TREE).read_text())
    assert (
        "tokens/target call, expected | ms/token, modelled" in printed
        and f"saved {TREE}" in printed
    )
    assert os.listdir("trees") == ["tiny.json"]
    assert 1 <= len(artefact["parents"]) <= 9 and 1 <= artefact["depth"] <= 4
    acceptance = artefact["acceptance"]
    assert len(acceptance) == 8 and 0.2 < acceptance[0] < 1 and sum(acceptance) <= 1
    assert list(artefact["seconds_per_forward"]["target"]) == ["1", "4", "10"]
    assert artefact["pair"]["target"] and artefact["warp"]["temperature"] == 1.0
    assert artefact["command"].startswith("python scripts/tune.py pair.target=")

    methods = (
        "methods=[custom]",
        "verifier=rrsw",
        "stop=never",
        "repeats=1",
        "logger=none",
        "out=runs/x",
    )
    run(evaluate, *base, *methods, "warp=greedy", "draft_warp.temperature=0")
    assert "4 of 4 outputs equal autoregressive" in capsys.readouterr().out


def test_tune_with_a_greedy_draft(base: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """It has one candidate a position; what is planned beyond that is worth nothing and is left out
    when decoding."""
    greedy = ("warp=greedy", "draft_warp.temperature=0")
    run(tune_tree, *base, *SMALL, *greedy, "nodes=5", "max_depth=2")
    artefact = json.loads(Path(TREE).read_text())
    first, *others = artefact["acceptance"]
    assert 0.2 < first <= 1 and not any(others) and artefact["seconds_per_forward"]
    assert len(artefact["parents"]) == 5 and 0 < artefact["modelled_seconds_per_token"] < 10
    assert artefact["expected_tokens"] == pytest.approx(
        expected_tokens(artefact["parents"], [first, *others])
    )
    assert 1 + first <= artefact["expected_tokens"] <= 1 + first + first**2 + 1e-9

    methods = (
        "methods=[custom]",
        "verifier=rrsw",
        "stop=never",
        "repeats=1",
        "logger=none",
        "out=runs/x",
    )
    run(evaluate, *base, *methods, *greedy)
    assert "4 of 4 outputs equal autoregressive" in capsys.readouterr().out


def test_nodes_and_children_can_be_fixed(base: list[str]) -> None:
    run(tune_tree, *base, *SMALL, "nodes=7", "max_children=2")
    artefact = json.loads(Path(TREE).read_text())
    assert len(artefact["parents"]) == 7 and len(artefact["acceptance"]) == 2
    assert Sequoia(TREE).max_siblings <= 2


def test_the_same_seed_measures_the_same_acceptance(base: list[str]) -> None:
    found = []
    for _ in range(2):
        run(tune_tree, *base, *SMALL, "nodes=3")
        found.append(json.loads(Path(TREE).read_text())["acceptance"])
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        (
            "structure=chain",
            "structure: expected one that reads its `tree` from a file: structure=sequoia, got",
        ),
        ("nodes=0", "nodes: expected a whole number from 1 to 1024 or null, got 0"),
        ("max_children=x", "max_children: expected a whole number from 1 to 1024, got 'x'"),
        ("repeats=2.5", "repeats: expected a whole number from 1 on, got 2.5"),
        (
            "rows=[0,2]",
            "rows: expected a list of different whole numbers from 1 on, such as [1,2,4], got [0, ",
        ),
        (
            "rows=3",
            "rows: expected a list of different whole numbers from 1 on, such as [1,2,4], got 3",
        ),
        ("split=dev", "split: expected train, calibration, test or all, got 'dev'"),
        ("limit=0", "limit: expected a whole number from 1 on or null, got 0"),
        (
            "structure.tree=prompts.jsonl/tree.json",
            "structure.tree: prompts.jsonl/tree.json cannot",
        ),
        ("pair.draft=nowhere/at/all", "pair.draft: no model in nowhere/at/all"),
        ("structure.tre=x", "tre"),
    ],
)
def test_bad_settings_end_with_one_line(argument: str, words: str, base: list[str]) -> None:
    given = [
        value
        for value in base
        if argument != "structure=chain" or not value.startswith("structure")
    ]
    assert words in refused(tune_tree, *given, *SMALL, argument)
    assert not Path(TREE).exists()


def test_a_size_no_tree_has_is_refused(base: list[str]) -> None:
    message = refused(tune_tree, *base, "rows=[1]", "repeats=1", "nodes=9", "max_depth=1")
    assert "nodes: no tree of 9 nodes has depth 1 and 8 children at most" in message


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ("structure=specinfer", "verifier=rrsw", "stop=never"),
            "structure, verifier: SpecInfer draws siblings by iid",
        ),
        (
            ("structure=tree", "structure.widths=[3]", "verifier=spechub", "stop=never"),
            "structure, verifier: WidthTree",
        ),
        (
            ("structure=dyspec", "verifier=rrs", "stop=never"),
            "structure, verifier: DySpecHeap draws siblings",
        ),
        (
            ("structure=tree", "verifier=rrs", "stop=fixed"),
            "structure, stop: WidthTree asks no stop rule",
        ),
        (
            ("structure=sequoia", "verifier=rrsw", "stop=never"),
            "structure.tree: runs/sequoia-smollm2-eagle-T1.0.json is missing",
        ),
    ],
)
@pytest.mark.few(2)
def test_evaluate_refuses_what_does_not_go_together_before_it_decodes(
    arguments: tuple[str, ...], words: str, base: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*args: object) -> None:
        raise AssertionError("decoded")

    monkeypatch.setattr("evaluation.evaluate.decode", never)
    common = [value for value in base if not value.startswith("structure")]
    message = refused(evaluate, *common, "methods=[custom]", "logger=none", *arguments)
    assert words in message
