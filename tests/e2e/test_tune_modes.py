"""The modes of scripts/tune.py from their command line, on tiny things: what=tree, with the tree
that it finds in scripts/evaluate.py; what=checkpoints on a sweep; what=overlapped."""

import json
import os
import re
import shutil
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf

import train
from decoding.structures.sequoia import Sequoia
from evaluation.overlapped.simulate import unequal_budgets
from evaluation.replay.collect import checkpoints
from evaluation.replay.tune_tree import Plan, expected_tokens, use
from scripts import evaluate, tune
from tests.helpers.models.eagles import FLAVOURS, SAYS, random_model, write_speculators
from tests.helpers.programs.programs import GREEDY, base, mode, models, refused, run, write_prompts
from tests.helpers.training.checkpoints import rewrite_checksum

tune_tree, collect, simulate = map(mode, (tune.tree, tune.checkpoints, tune.overlapped))
# what=tree ----------------------------------------------------------------------------------------


TREE = "trees/tiny.json"
SMALL = ("rows=[1,4]", "repeats=2", "max_depth=4")


@pytest.fixture
def planting(tiny_pair_dir: Path, here: Path) -> list[str]:
    write_prompts({"prompt": f"w{n} w{n + 1} w2"} for n in range(1, 9))
    few = ("split=all", "limit=4", "max_new_tokens=14")
    return [*base(tiny_pair_dir), *few, "structure=sequoia", f"structure.tree={TREE}"]


def grown(*arguments: str) -> tuple[dict[str, Any], str]:
    """A tree, and what was printed."""
    printed = run(tune_tree, *arguments)
    return json.loads(Path(TREE).read_text()), printed


def check_decoded(planting: list[str]) -> None:
    method = ("methods=[custom]", "verifier=rrsw", "stop=never", "repeats=1", "logger=none")
    printed = run(evaluate, *planting, *method, *GREEDY, "out=runs/x")
    assert "4 of 4 outputs equal plain" in printed


def test_a_tree_is_tuned_and_decoded_with(planting: list[str]) -> None:
    found, printed = grown(*planting, *SMALL, "max_nodes=9")
    nodes = len(found["parents"])
    assert re.search(
        f"Use (a tree of {nodes} nodes, {found['depth']} deep: "
        rf"|plain decoding: the best tree, of {nodes} nodes, is at 0\.)",
        printed,
    )
    assert re.search(r"\| tokens/target call, expected +\| ms/token, modelled \|", printed)
    assert f"| **{nodes}**" in printed and f"saved {TREE}" in printed
    assert os.listdir("trees") == ["tiny.json"]
    assert 1 <= nodes <= 9 and 1 <= found["depth"] <= 4
    acceptance = found["acceptance"]
    assert len(acceptance) == 8 and 0.2 < acceptance[0] < 1 and sum(acceptance) <= 1
    assert list(found["seconds_per_forward"]["target"]) == ["1", "4", "10"]
    assert found["pair"]["target"] and found["warp"]["temperature"] == 1.0
    assert re.match(r"python (\S*/)?tune\.py .*pair\.target=", found["command"])
    check_decoded(planting)
    same, _ = grown(*planting, *SMALL, "nodes=7", "max_children=2")
    assert len(same["parents"]) == 7 and same["acceptance"] == acceptance[:2], "the same draws"
    assert Sequoia(TREE).max_siblings <= 2


def test_a_tree_slower_than_plain_decoding_is_not_advised() -> None:
    plan = Plan([0, 0], 1, 2.0, 0.5)
    assert use(plan, 0.6) == "Use a tree of 2 nodes, 1 deep: 1.20 times plain decoding, modelled."
    slower = "Use plain decoding: the best tree, of 2 nodes, is at 0.80 times, modelled."
    assert use(plan, 0.4) == slower


def test_a_greedy_draft_has_one_candidate_a_position(planting: list[str]) -> None:
    """What is planned beyond it is worth nothing, and is left out when decoding."""
    found, _ = grown(*planting, *SMALL, *GREEDY, "nodes=5", "max_depth=2")
    first, *others = found["acceptance"]
    assert 0.2 < first <= 1 and not any(others) and found["seconds_per_forward"]
    assert len(found["parents"]) == 5 and 0 < found["modelled_seconds_per_token"] < 10
    tokens = expected_tokens(found["parents"], found["acceptance"])
    assert found["expected_tokens"] == pytest.approx(tokens)
    assert 1 + first <= tokens <= 1 + first + first**2 + 1e-9
    check_decoded(planting)


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("structure=chain", "structure: expected one that reads its `tree` from a file: structure"),
        ("nodes=9 max_depth=1", "nodes: no tree of 9 nodes has depth 1 and 8 children at most"),
        ("structure.tree=prompts.jsonl/x.json", "structure.tree: prompts.jsonl/x.json cannot"),
        ("pair.draft=nowhere/at/all", "pair.draft: no model in nowhere/at/all"),
    ],
)
def test_bad_settings_of_a_tree_end_with_one_line(
    argument: str, words: str, planting: list[str]
) -> None:
    given = planting[:-2] if argument == "structure=chain" else planting
    assert words in refused(tune_tree, *given, *SMALL, *argument.split())
    assert not Path(TREE).exists()


# what=checkpoints ---------------------------------------------------------------------------------


REPLAY = ("data=data/greedy", "cost=c10", "points=5", "warp=greedy")


def swept(name: str, *grid: str) -> str:
    """The folder of the checkpoints of a Hydra multirun."""
    shutil.rmtree(name, ignore_errors=True)
    quick = ("data=data/greedy", "trainer.epochs=1", "logger=none")
    run(train, "-m", *quick, *grid, f"out={name}")
    return f"folder={name}"


def cells(path: str) -> list[dict[str, str]]:
    """The rows of a table, by column."""
    header, _, *rows = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in Path(path).read_text().splitlines()
        if line.startswith("|")
    ]
    return [dict(zip(header, row, strict=True)) for row in rows]


@pytest.mark.slow
def test_a_sweep_of_heads_is_one_table(replaying: list[str]) -> None:
    folder = swept("heads", "predictor=specdecpp", "predictor.depth=0,1", "predictor.w_rej=1,6")
    printed = run(collect, folder, *REPLAY)
    assert "saved heads/table.md" in printed
    assert re.search(r"\nUse (plain decoding: |\S*predictor\.depth=\d\S* at )", printed)
    rows = cells("heads/table.md")
    assert [(row["depth"], row["w_rej"]) for row in rows] == [*product("01", "16")]
    # no column in which they are the same
    assert list(rows[0])[:4] == ["checkpoint", "depth", "w_rej", "nll"]
    for row in rows:
        metrics = json.loads(Path("heads", row["checkpoint"], "metrics.json").read_text())
        test = metrics["test"]["specdecpp"]
        assert row["ece"] == f"{test['ece']:.4f}"
        assert row["nll"] == f"{test['kl']:.4f}", "labels of a greedy target have no entropy"
        assert float(row["speed-up, modelled"].split()[0]) > 0 and row["threshold"]


@pytest.mark.slow
def test_inputs_by_number_of_prompts_is_one_table(replaying: list[str]) -> None:
    grid = ("predictor=value", "prompts=2,4", "predictor.inputs=[q_stats],[q_stats,depth]")
    run(collect, swept("inputs", *grid), *REPLAY)
    rows, read = cells("inputs/table.md"), ("q_stats depth", "q_stats")
    expected = [(names, prompts) for names in read for prompts in ("2", "4")]
    assert [(row["reads"], row["prompts"]) for row in rows] == expected
    (column,) = (name for name in rows[0] if name.startswith("survival, "))
    assert re.fullmatch(r"0\.\d{4}, [+-]0\.\d{4} \(.* to .*\)", rows[0][column])


@pytest.mark.slow
def test_a_sweep_of_layers_and_draft_lengths_is_one_table(replaying: list[str]) -> None:
    grid = ("predictor=hrad", "predictor.layers=[-1],[-3,-1],null", "predictor.gamma=2,3")
    folder = swept("layers", *grid)
    run(collect, folder, *REPLAY)
    rows = cells("layers/table.md")
    assert [row["gamma"] for row in rows] == ["2"] * 3 + ["3"] * 3
    for part in (rows[:3], rows[3:]):
        assert {row["layers"] for row in part} == {"-1", "-3 -1", "-4 -3 -2 -1"}
    assert all(float(row["speed-up, modelled"].split()[0]) > 0 for row in rows)
    run(collect, folder, *REPLAY, "thresholds=[0.2,0.9]")
    every = cells("layers/table.md")
    one, same, other = every[:3]
    assert one["checkpoint"] == same["checkpoint"] != other["checkpoint"]
    assert [row["threshold"] for row in every] == ["0.2", "0.9"] * 6
    printed = run(collect, folder, "data=null")
    assert re.match(r"\nLowest loss: \S*predictor\.gamma=\d", printed)
    alone = cells("layers/table.md")
    scores = ["nll", "brier", "ece", "auroc", "seconds"]
    assert list(alone[0]) == ["checkpoint", "layers", "gamma", *scores]
    assert [row["nll"] for row in alone] == [row["nll"] for row in rows]


def test_checkpoints_are_counted_as_people_do(tmp_path: Path) -> None:
    names = ["depth=0+w_rej=6", "depth=0+w_rej=12", "depth=2+w_rej=1", "depth=10+w_rej=1"]
    for name in reversed(names):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.json").touch()
    assert [folder.name for folder in checkpoints(tmp_path)] == names


def test_what_cannot_be_collected_ends_with_one_line(replaying: list[str], harvest: Path) -> None:
    shutil.copytree(harvest / "checkpoints", "broken", dirs_exist_ok=True)
    score = {"log_loss": [0.25, None, None]}
    whole = {"test": {}, "reliability": {"x": {"token": {"as trained": score}}}, "seconds": 3.0}
    for name in ("specdecpp", "hrad"):
        test = {name: {"brier": 0.5, "ece": 0.25, "auroc": None}}
        Path("broken", name, "metrics.json").write_text(json.dumps(whole | {"test": test}))
        rewrite_checksum(Path("broken", name))
    shutil.rmtree("broken/value", ignore_errors=True)
    printed = run(collect, "folder=broken", "data=null", "out=runs/new/table.md")
    best = [f"{name} with an nll of 0.2500 ({name})" for name in ("hrad", "specdecpp")]
    assert printed.startswith(f"\nLowest loss: {'; '.join(best)}.\n")
    row = cells("runs/new/table.md")[1]
    assert (row["auroc"], row["nll"]) == ("-", "0.2500")
    shutil.rmtree("runs/new")
    for unread in ("thresholds=[0.5]", "gamma_max=2", "choose=train", "cost=c10", "points=3"):
        message = refused(collect, "folder=broken", "data=null", unread)
        assert f"{unread.split('=')[0]}: expected nothing with data=null, which" in message
    message = refused(collect, "folder=broken", *REPLAY, "warp=default")
    assert "warp: data/greedy was harvested with" in message
    message = refused(collect, "folder=broken", *REPLAY, "~stop@rules.hrad")
    assert "rules.hrad: expected the stop rule that asks checkpoints of hrad, got none" in message
    message = refused(collect, "folder=broken", *REPLAY, "rules.hrad._target_=builtins.dict")
    assert "rules.hrad: expected a rule that can be replayed, got dict" in message
    for argument in ("[]", "[2]", "0.5"):
        message = refused(collect, "folder=broken", *REPLAY, f"thresholds={argument}")
        assert message.startswith("error: thresholds: ")
    better = json.dumps(whole | {"test": test}).replace("0.25", "0.15")
    for text, fits in ((better, False), ("{", False), ("{", True), (json.dumps(whole), True)):
        Path("broken/hrad/metrics.json").write_text(text)
        if fits:
            rewrite_checksum(Path("broken/hrad"))
        message = refused(collect, "folder=broken", "data=null")
        assert message.startswith("error: folder: broken/hrad") and "damaged" in message
    message = refused(collect, "folder=broken", *REPLAY)
    assert "folder: broken/hrad is incomplete or damaged" in message
    assert "folder: no checkpoints" in refused(collect, "folder=runs", *REPLAY)


# what=overlapped ----------------------------------------------------------------------------------


OUT = "runs/simulated.json"
TWO = ("methods=[pearl,specbranch]", "against=[pearl]")


@pytest.fixture
def simulating(harvest: Path, tiny_pair_dir: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.chdir(harvest)
    name = "pair.name=smollm2-eagle"  # what the harvest was made as
    asked = ["data=data/greedy", "gamma=3", "ratios=[4,10]", "points=4", f"out={OUT}"]
    pair = [*models(tiny_pair_dir), "pair.dtype=float64"]
    return [*pair, name, *GREEDY, "checkpoint=checkpoints/hrad", *asked]


def test_every_method_has_its_rows(simulating: list[str]) -> None:
    printed = run(simulate, *simulating, "judge_data=[data/greedy]", "pair.draft_mix=0.5")
    found = json.loads(Path(OUT).read_text())
    best = r"\nFastest over plain decoding, modelled: \w+.* for c = 4 \(.* times"
    best += r".*; .* for c = 10 \("
    assert re.search(best, printed)
    assert "\nSettings chosen on data/greedy, speeds of other prompts, of data/greedy;" in printed
    assert "## c = 10, gamma 3, 24 prompts" in printed and f"saved {OUT}" in printed
    assert "Unequal budgets" not in printed  # of gamma 3 at most 4 steps
    assert "Simulated draft: mixed with the target, pair.draft_mix=0.5" in printed
    assert re.match(r"python (\S*/)?tune\.py .*pair\.target=", found["command"])
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


def test_a_predictor_of_no_draft_length_fits_every_one(simulating: list[str]) -> None:
    custom = ("methods=[custom]", "against=[custom]", "stop=specdecpp")
    close = ("checkpoint=checkpoints/specdecpp", "ratios=[0.01,0.010000001]")
    printed = run(simulate, *simulating, *custom, *close)
    assert "plain decoding, modelled: nothing for c = 0.01 (custom at " in printed
    assert list(json.loads(Path(OUT).read_text())["cells"]) == ["0.01", "0.010000001"]


def test_branches_longer_than_a_target_call_are_named(simulating: list[str]) -> None:
    """Of the same gamma, a predictor's branch takes a step more; `gammas` makes them equal."""
    printed = run(simulate, *simulating, *TWO, "ratios=[2,3]")
    assert "speeds of the same prompts, so likely optimistic: judge_data=" in printed
    assert "lasts (2): pearl 3, specbranch 4. Equal ones:" in printed
    assert "+gammas.pearl=2 gammas.specbranch=1, with" in printed
    assert "lasts (3): specbranch 4. Equal ones: gammas.specbranch=2, with" in printed
    equal = ("ratios=[4]", "gamma=4", "gammas.specbranch=3")
    assert "Unequal budgets" not in run(simulate, *simulating, *TWO, *equal)
    line = refused(simulate, *simulating, *TWO, "gammas.specbranch=2")
    assert "gammas.specbranch: expected 3, the tokens that checkpoints/hrad was trained for" in line
    longer = SimpleNamespace(name="specbranch", branch_steps=2, gamma=1)
    cfg = OmegaConf.create({"gammas": {"specbranch": 1}})
    for c, ends in ((1.0, "specbranch 2."), (2.0, ""), (1.9, "specbranch 2.")):
        line = "".join(unequal_budgets(cfg, c, [longer]))  # no draft length makes it equal
        assert line.endswith(ends) and bool(line) == bool(ends) and "Equal ones" not in line


def test_a_draft_that_reads_its_target_cannot_run_beside_it(
    simulating: list[str], tmp_path: Path
) -> None:
    (tmp_path / "target_features.safetensors").touch()
    published = write_speculators(tmp_path / "eagle3", random_model(FLAVOURS["plain"]), SAYS)
    for draft in (tmp_path, published):
        line = refused(simulate, *simulating, f"pair.draft={draft}", "methods=[fixed,pearl]")
        assert "pair.draft: expected a draft that does not read its target's hidden" in line
    fixed = ("methods=[fixed]", "against=[fixed]")
    run(simulate, *simulating, f"pair.draft={tmp_path}", *fixed)


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("gamma=5", "gamma: expected less than the 5 tokens of the harvest's rounds, got 5"),
        ("candidates.specbranch=4", "candidates.specbranch: expected a whole number from 1 to 3"),
        ("+candidates.token=1", "candidates: expected names among fixed, adaedl"),
        ("+gammas.token=1", "gammas: expected names among fixed, adaedl"),
        ("+gammas.pearl=5", "gamma: expected less than the 5 tokens of the harvest's rounds"),
        ("structure=dyspec", "structure: expected decoding.structures.chain.Chain in"),
        ("stop=never methods=[custom,pearl,fixed]", "method.custom.stop: expected a rule that can"),
        ("engine=lookahead methods=[custom,pearl,fixed]", "method.custom.engine: expected serial,"),
        ("against=[token]", "against: expected names among fixed, adaedl"),
        ("warp=default", "warp: data/greedy was harvested with"),
        ("data=data/none", "data: "),
        ("pair.name=other", "pair: expected "),
        (
            "+method@method.cut=branches method.cut.structure.candidates=5 methods=[pearl,cut]"
            " against=[pearl]",
            "structure.candidates: expected at most 3, as many as a harvest records, got 5",
        ),
    ],
)
@pytest.mark.few(2, rest="slow")
def test_bad_settings_of_a_simulation_end_with_one_line(
    argument: str, words: str, simulating: list[str]
) -> None:
    methods = "methods=[fixed,adaedl,pearl,without_hrad]"
    if "candidates.specbranch" in argument:
        methods = "methods=[fixed,pearl,specbranch]"
    assert words in refused(simulate, *simulating, methods, *argument.split())
