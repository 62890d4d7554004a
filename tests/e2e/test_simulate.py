"""scripts/tune.py what=overlapped from its command line on a tiny harvest."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from evaluation.overlapped.simulate import unequal_budgets
from scripts import tune
from tests.helpers.models.eagles import FLAVOURS, SAYS, random_model, write_speculators
from tests.helpers.programs.programs import GREEDY, base, mode, refused, run

simulate = mode(tune.overlapped)

OUT = "runs/simulated.json"


@pytest.fixture
def arguments(harvest: Path, tiny_pair_dir: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.chdir(harvest)
    models = [one for one in base(tiny_pair_dir) if one.startswith("pair.")]
    models.append("pair.name=smollm2-eagle")  # what the harvest was made as
    checkpoint = "checkpoint=checkpoints/hrad"
    asked = ["data=data/greedy", "gamma=3", "ratios=[4,10]", "points=4", f"out={OUT}"]
    return [*models, *GREEDY, checkpoint, *asked]


def test_every_method_has_its_rows(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    run(simulate, *arguments, "judge_data=[data/greedy]", "pair.draft_mix=0.5")
    printed, found = capsys.readouterr().out, json.loads(Path(OUT).read_text())
    assert "## c = 10, gamma 3, 24 prompts" in printed and f"saved {OUT}" in printed
    assert "Unequal budgets" not in printed  # of gamma 3 at most 4 steps
    assert "Simulated draft: mixed with the target, pair.draft_mix=0.5" in printed
    assert found["command"].startswith("python scripts/tune.py pair.target=")
    rows = found["cells"]["4"]
    assert {row["method"] for row in rows} == set(found["methods"])
    by_name = {(row["method"], row["tuned"]): row for row in rows}
    assert ("pearl", True) not in by_name and by_name["fixed", False]["value"] == 3
    value, low, high = by_name["pearl", False]["speedup"]
    assert 0 < low <= value <= high
    assert by_name["pearl", False]["over"]["pearl"]["speed"] == [1, 1, 1]
    for name in ("fixed", "adaedl", "specbranch"):
        assert by_name[name, True]["speedup"][0] >= by_name[name, False]["speedup"][0]
        assert by_name[name, True]["tokens_per_call"][0] > 1


def test_branches_longer_than_a_target_call_are_named(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the same gamma, a predictor's branch takes a step more; `gammas` makes them equal."""
    methods = "methods=[pearl,specbranch]"
    run(simulate, *arguments, methods, "against=[pearl]", "ratios=[2,3]")
    printed = capsys.readouterr().out
    assert "lasts (2): pearl 3, specbranch 4. Equal ones:" in printed
    assert "+gammas.pearl=2 gammas.specbranch=1, with" in printed
    assert "lasts (3): specbranch 4. Equal ones: gammas.specbranch=2, with" in printed
    equal = [methods, "against=[pearl]", "ratios=[4]", "gamma=4", "gammas.specbranch=3"]
    run(simulate, *arguments, *equal)
    assert "Unequal budgets" not in capsys.readouterr().out
    shorter = [*arguments, methods, "against=[pearl]", "gammas.specbranch=2"]
    line = refused(simulate, *shorter)
    assert "gammas.specbranch: expected 3, the tokens that checkpoints/hrad was trained for" in line


def test_a_draft_that_reads_its_target_cannot_run_beside_it(
    arguments: list[str], tmp_path: Path
) -> None:
    (tmp_path / "target_features.safetensors").touch()
    arguments = [*arguments, f"pair.draft={tmp_path}"]
    line = refused(simulate, *arguments, "methods=[fixed,pearl]")
    assert "pair.draft: expected a draft that does not read its target's hidden" in line
    run(simulate, *arguments, "methods=[fixed]", "against=[fixed]")
    published = write_speculators(tmp_path / "eagle3", random_model(FLAVOURS["plain"]), SAYS)
    again = [*arguments, f"pair.draft={published}", "methods=[fixed,pearl]"]
    line = refused(simulate, *again)
    assert "pair.draft: expected a draft that does not read its target's hidden" in line


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("gamma=5", "gamma: expected less than the 5 tokens of the harvest's rounds, got 5"),
        ("candidates.specbranch=4", "candidates.specbranch: expected a whole number from 1 to 3"),
        ("+candidates.token=1", "candidates: expected names among fixed, adaedl"),
        ("+gammas.token=1", "gammas: expected names among fixed, adaedl"),
        ("+gammas.pearl=5", "gamma: expected less than the 5 tokens of the harvest's rounds"),
        ("structure=dyspec", "structure: expected decoding.structures.chain.Chain in"),
        ("ratios=[]", "ratios: expected a list of different numbers above 0"),
        ("against=[token]", "against: expected names among fixed, adaedl"),
        ("warp=default", "warp: data/greedy was harvested with"),
        ("data=data/none", "data: "),
        ("pair.name=other", "pair: expected "),
        (
            "method.cut.structure.candidates=5",
            "structure.candidates: expected at most 3, as many as a harvest records, got 5",
        ),
    ],
)
@pytest.mark.few(2)
def test_bad_settings_end_with_one_line(argument: str, words: str, arguments: list[str]) -> None:
    methods = "methods=[fixed,adaedl,pearl,without_hrad]"
    if "specbranch" in argument:
        methods = "methods=[fixed,pearl,specbranch]"
    if "method.cut" in argument:
        arguments = [*arguments, "+method@method.cut=branches", "against=[pearl]"]
        methods = "methods=[pearl,cut]"
    assert words in refused(simulate, *arguments, methods, argument)


@pytest.mark.parametrize(("c", "says"), [(1.0, "specbranch 2."), (2.0, ""), (1.9, "specbranch 2.")])
def test_no_draft_length_is_named_where_none_is_equal(c: float, says: str) -> None:
    longer = SimpleNamespace(name="specbranch", branch_steps=2, gamma=1)
    cfg = OmegaConf.create({"gammas": {"specbranch": 1}})
    line = "".join(unequal_budgets(cfg, c, [longer]))
    assert line.endswith(says) and bool(line) == bool(says) and "Equal ones" not in line
