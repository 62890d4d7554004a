"""scripts/tune.py from its command line on a tiny harvest, and scripts/evaluate.py with the thresholds it found."""

import hashlib
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hydra.core.global_hydra import GlobalHydra

from data_gen.rollout_table import read_table
from decoding.machine import processor
from decoding.rollouts import RolloutTable
from predictors.features import FeatureSpec
from scripts import check_replay, collect, evaluate, gen_data, tune
from tests.checkpoints import write_checkpoint

GREEDY = ("warp=greedy", "draft_warp.temperature=0")
METHODS = ["fixed", "confidence", "confidence_before", "adaedl", "specdecpp", "hrad"]
WIDTH = 24  # of a hidden state
FILE = "runs/smollm2-thresholds-T0.0.json"


@pytest.fixture(scope="module")
def harvest(tiny_pair_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with prompts, a greedy harvest of them, and untrained checkpoints made for it: H-RAD's reads two of the
    four harvested layers."""
    folder = tmp_path_factory.mktemp("harvest")
    prompts = [{"prompt": f"w{n} w{n + 1} w2", "id": f"p{n}"} for n in range(1, 25)]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, prompts)))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        small = ("max_new_tokens=12", "gamma=5", "anchors.stride=1", "out=data/greedy", *SPLITS)
        run(gen_data, patch, *base(tiny_pair_dir), *GREEDY, *small)
    manifest = json.loads((folder / "data/greedy/manifest.json").read_text())
    context = {key: manifest[key] for key in ("pair", "warp", "draft_warp")}
    digest = hashlib.sha256((folder / "data/greedy/manifest.json").read_bytes()).hexdigest()
    context["provenance"] = {"data": {"folder": "data/greedy", "sha256": digest}}
    for name, layers in (("specdecpp", [-1]), ("hrad", [-3, -1])):
        spec = replace(FeatureSpec.from_dict(manifest["features"][name]), layers=layers)
        dim = spec.dim(WIDTH, WIDTH)
        write_checkpoint(folder / "checkpoints" / name, name, dim, gamma=3, features=spec, context=context)
    return folder


SPLITS = ("splits.calibration=0.3", "splits.test=0.3")


def base(pair: Path) -> list[str]:
    return [
        *(f"pair.{side}={pair / side}" for side in ("target", "draft")),
        *("pair.dtype=float64", "dataset=jsonl", "dataset.path=prompts.jsonl", "dataset.chat=false"),
    ]


@pytest.fixture
def arguments(harvest: Path, tiny_pair_dir: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.chdir(harvest)
    for path in (harvest / "runs").glob("*"):
        path.unlink()
    return [*base(tiny_pair_dir), *GREEDY, "data=data/greedy", "points=10", *SPLITS, f"out={FILE}"]


def run(program: Any, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    GlobalHydra.instance().clear()
    monkeypatch.setattr("sys.argv", [f"{program.__name__.rpartition('.')[2]}.py", *arguments])
    program.main()


def refused(program: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as exit_code:
        run(program, monkeypatch, *arguments)
    assert exit_code.value.code == 2
    message = capsys.readouterr().err.strip().splitlines()[-1]
    assert message.startswith("error: ")
    return message


def evaluated(pair: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> dict[str, Any]:
    """The configuration an evaluation ran with."""
    small = ("split=test", "limit=2", "repeats=1", "max_new_tokens=8", "gammas=[2]", "logger=none", "out=runs_x")
    run(evaluate, monkeypatch, *base(pair), *GREEDY, *SPLITS, *small, *arguments)
    config: dict[str, Any] = json.loads(Path("runs_x/results.json").read_text())["run"]["config"]
    return config


def test_tune_then_evaluate(
    arguments: list[str], tiny_pair_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tune, monkeypatch, *arguments, "cost=c10")
    printed, found = capsys.readouterr().out, json.loads(Path(FILE).read_text())
    assert "oracle of SpecDec++, drafts of any length: " in printed and sum(found["oracle_calls"]) > 0
    assert (
        "## cost chosen (c10)" in printed
        and "predictions cost nothing here" in printed
        and "its frontier dominates" in printed
        and f"saved {FILE}" in printed
    )
    assert set(found["results"]) == {"chosen", "a100", "c4", "c5", "c10", "c15"}
    assert found["results"]["chosen"] == found["results"]["c10"]
    chosen = found["results"]["chosen"]["rules"]
    assert sorted(chosen) == sorted(METHODS)
    for choice in chosen.values():
        assert 0 < choice["interval"][0] <= choice["speedup"] <= choice["interval"][1]
        assert choice["speedup"] <= found["results"]["chosen"]["oracle_speedup"] and choice["regret"] >= 0
    assert (
        found["gamma"] == 5 and found["max_new_tokens"] == 12 and found["rules"]["hrad"]["setting"] == "confidence.eps"
    )

    method = evaluated(tiny_pair_dir, monkeypatch)["method"]
    printed = capsys.readouterr().out
    assert f"thresholds: {FILE}, for cost c10, whose advice is: " in printed
    assert method["confidence"]["stop"]["eps"] == chosen["confidence"]["threshold"]
    assert method["adaedl"]["stop"]["threshold"] == chosen["adaedl"]["threshold"]
    assert method["specdecpp"]["stop"]["threshold"] == chosen["specdecpp"]["threshold"]
    assert method["hrad"]["stop"]["confidence"]["eps"] == chosen["hrad"]["threshold"]
    assert "confidence: method.confidence.stop.eps=" in printed and "modelled" in printed


def test_what_is_given_wins_and_what_does_not_fit_is_left_out(
    arguments: list[str], tiny_pair_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tune, monkeypatch, *arguments, "cost=c10", "methods=[confidence,hrad]")
    only = "methods=[confidence,hrad]"
    method = evaluated(tiny_pair_dir, monkeypatch, only, "method.confidence.stop.eps=0.123")["method"]
    assert method["confidence"]["stop"]["eps"] == 0.123
    assert "confidence: method.confidence.stop.eps=0.123, as given" in capsys.readouterr().out
    assert (
        evaluated(tiny_pair_dir, monkeypatch, only, "thresholds=null")["method"]["hrad"]["stop"]["confidence"]["eps"]
        == 0.2
    )
    assert "thresholds" not in capsys.readouterr().out
    found = json.loads(Path(FILE).read_text())
    found["rules"]["hrad"]["checkpoint"] = "another"
    setup = {key: {"target": "other", "draft": "other"} for key in ("hardware", "dtypes")}
    Path(FILE).write_text(json.dumps(found | {"measured_on": setup | {"threads": torch.get_num_threads()}}))
    evaluated(tiny_pair_dir, monkeypatch, only)
    printed = capsys.readouterr().out
    assert "hrad: checkpoints/hrad is not the checkpoint it was tuned with, thresholds left out" in printed
    assert f"warning: {FILE} was tuned on another machine: hardware other, here " in printed
    assert "; dtypes other, here torch.float64. Tune anew: python scripts/tune.py " in printed
    Path(FILE).write_text(json.dumps(found | {"warp": {"temperature": 0.5, "top_k": 0, "top_p": 1.0}}))
    evaluated(tiny_pair_dir, monkeypatch, only)
    assert f"thresholds: those of {FILE} are for another warp, left out" in capsys.readouterr().out
    Path(FILE).write_text("{}")
    message = refused(evaluate, monkeypatch, capsys, *base(tiny_pair_dir), *GREEDY, *SPLITS, only, "logger=none")
    assert "thresholds: " in message and "python scripts/tune.py" in message
    message = refused(
        evaluate, monkeypatch, capsys, *base(tiny_pair_dir), *GREEDY, *SPLITS, only, "thresholds=nowhere.json"
    )
    assert "thresholds: nowhere.json" in message


def test_the_test_split_is_that_of_the_harvest(
    arguments: list[str], tiny_pair_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tune, monkeypatch, *arguments, "cost=c10", "methods=[confidence]")
    small = (*base(tiny_pair_dir), *GREEDY, "logger=none", "out=runs_x", *SPLITS)
    message = refused(evaluate, monkeypatch, capsys, *small, "methods=[hrad]", "splits.test=0.2")
    assert "splits.test: 0.2 here, 0.3 in data/greedy, on which checkpoints/hrad was trained" in message
    message = refused(evaluate, monkeypatch, capsys, *small, "methods=[confidence]", "splits.calibration=0.2")
    assert f"splits.calibration: 0.2 here, 0.3 in data/greedy, on which thresholds={FILE} was tuned" in message
    assert "Set splits.calibration=0.3" in message
    evaluated(tiny_pair_dir, monkeypatch, "methods=[hrad]", "splits.test=0.2", "split=all")


def test_costs_are_measured_saved_and_read_again(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ("cost.limit=3", "cost.max_new_tokens=8", "cost.gammas=[1,3]")
    run(tune, monkeypatch, *arguments, "cost=measure", *small)
    printed, first = capsys.readouterr().out, json.loads(Path(FILE).read_text())
    assert "N_draft" in printed and "R^2" in printed
    saved = json.loads(Path("runs/smollm2-cost-T0.0.json").read_text())
    assert saved["regression"]["rows"] == 3 * (1 + 2 + 5) and saved["pair"]["target"]
    assert set(saved["seconds"]["calls"]) == set(METHODS) - {"fixed"}
    setup = saved["measured_on"]
    assert setup["threads"] == torch.get_num_threads() and setup["hardware"]["draft"] == processor()
    assert setup["dtypes"] == {"target": "torch.float64", "draft": "torch.float64"} and setup["versions"]["torch"]
    run(tune, monkeypatch, *arguments[:-1], "cost=measured")
    again = json.loads(Path(FILE).read_text())
    assert again["results"]["chosen"] == first["results"]["chosen"]
    assert again["measured_on"] == first["measured_on"] == setup
    saved["pair"]["draft"] = "another"
    Path("runs/smollm2-cost-T0.0.json").write_text(json.dumps(saved))
    message = refused(tune, monkeypatch, capsys, *arguments, "cost=measured")
    assert "cost.file: runs/smollm2-cost-T0.0.json belongs to another draft" in message


def test_thresholds_for_another_machine_get_their_own_file(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tune, monkeypatch, *arguments[:-1], "cost=a100", "methods=[fixed]")
    assert json.loads(Path(FILE.replace(".json", "-a100.json")).read_text())["cost"] == "a100"
    assert not Path(FILE).exists()


def test_collect_shows_what_checkpoints_differ_in(
    arguments: list[str], harvest: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    scores = {name: 0.25 for name in ("kl", "brier", "ece", "auroc")}
    for number, name in enumerate(("specdecpp", "hrad")):
        folder = Path("sweep") / str(number)
        shutil.copytree(harvest / "checkpoints" / name, folder)
        (folder / "metrics.json").write_text(json.dumps({"test": {name: scores}, "seconds": 3.0}))
    run(collect, monkeypatch, "folder=sweep", "data=data/greedy", "cost=c10", "points=5")
    lines = Path("sweep/table.md").read_text().splitlines()
    assert len(lines) == 4 and lines[0].startswith("| checkpoint | predictor | layers |") and "w_rej" in lines[0]
    assert lines[2].startswith("| 0 | specdecpp | -1 |") and "0.2500" in lines[2] and "tie_blocks" in lines[0]
    assert "saved sweep/table.md" in capsys.readouterr().out
    metrics = Path("sweep/0/metrics.json")
    metrics.write_text(json.dumps({"test": {"specdecpp": scores | {"auroc": None}}, "seconds": 3.0}))
    run(collect, monkeypatch, "folder=sweep", "data=data/greedy", "cost=c10", "points=5", "out=runs/new/table.md")
    assert "| 0.2500 | - | 3 |" in Path("runs/new/table.md").read_text()
    shutil.rmtree("runs/new")
    metrics.write_text("{}")
    message = refused(collect, monkeypatch, capsys, "folder=sweep", "data=data/greedy", "cost=c10")
    assert "folder: sweep/0 is incomplete or damaged" in message
    assert "folder: no checkpoints" in refused(
        collect, monkeypatch, capsys, "folder=runs", "data=data/greedy", "cost=c10"
    )


def test_where_drafting_costs_too_much_the_advice_is_not_to(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tune, monkeypatch, *arguments, "cost=c4", "cost.draft=9", "methods=[fixed,confidence]")
    assert "## cost chosen (c4): do not speculate; oracle 1.00x" in capsys.readouterr().out


def test_check_replay(
    arguments: list[str], tiny_pair_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pair = base(tiny_pair_dir)[:3]
    heads = [f"rules.{name}.checkpoint=checkpoints/{name}" for name in ("specdecpp", "hrad")]
    with pytest.raises(SystemExit) as exit_code:
        run(check_replay, monkeypatch, *pair, *heads, "limit=4", "out=runs/check.json")
    assert not exit_code.value.code
    assert capsys.readouterr().out.count("4 of 4 prompts equal") == 15
    rows = json.loads(Path("runs/check.json").read_text())["fixed 4"]
    assert [row["equal"] for row in rows] == [True] * 4 and rows[0]["decoded"]["tokens"] > 0


@pytest.mark.parametrize(
    ("changed", "between"),
    [
        ({"accepted": 0, "tokens": 31}, "draft's tokens"),
        ({"confidence": 0.0}, "value and threshold"),
        ({"confidence": 0.199}, "value and threshold"),
        ({"accepted": 0}, "target's tokens"),
    ],
)
def test_check_replay_says_what_differs(
    changed: dict[str, float],
    between: str,
    arguments: list[str],
    tiny_pair_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A table that is wrong in one way."""

    def wrong(*given: Any) -> RolloutTable:
        table = read_table(*given)
        return replace(table, **{name: np.full_like(getattr(table, name), value) for name, value in changed.items()})

    monkeypatch.setattr(check_replay, "read_table", wrong)
    others = [f"settings.{name}=[]" for name in ("fixed", "adaedl", "specdecpp", "hrad")]
    with pytest.raises(SystemExit) as exit_code:
        run(check_replay, monkeypatch, *base(tiny_pair_dir)[:3], *others, "settings.confidence=[0.2]", "limit=6")
    assert exit_code.value.code
    printed = capsys.readouterr().out
    assert f"between {between}: NO NEAR TIE" in printed and "6 of 6" not in printed


def test_check_replay_has_no_excuse_where_the_rounds_agree(
    arguments: list[str], tiny_pair_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    original = check_replay.counted
    monkeypatch.setattr(check_replay, "counted", lambda trace: original(trace) | {"forwards": -1.0})
    only = [*(f"settings.{name}=[]" for name in ("confidence", "adaedl", "specdecpp", "hrad")), "settings.fixed=[2]"]
    with pytest.raises(SystemExit) as exit_code:
        run(check_replay, monkeypatch, *base(tiny_pair_dir)[:3], *only, "limit=1", "out=runs/check.json")
    assert exit_code.value.code and "between rounds that agree: NO NEAR TIE" in capsys.readouterr().out


def test_check_replay_refuses_what_it_cannot_check(
    arguments: list[str], harvest: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    heads = [f"rules.{name}.checkpoint=checkpoints/{name}" for name in ("specdecpp", "hrad")]
    assert "limit: 0 is no whole number" in refused(check_replay, monkeypatch, capsys, *heads, "limit=0")
    empty = [f"settings.{name}=[]" for name in ("fixed", "confidence", "adaedl", "specdecpp", "hrad")]
    assert "settings: no rule has a threshold" in refused(check_replay, monkeypatch, capsys, *empty)
    assert "out: data is a folder" in refused(check_replay, monkeypatch, capsys, *heads, "out=data")


def test_a_checkpoint_for_other_features_is_refused(
    arguments: list[str], harvest: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree("checkpoints", "others", dirs_exist_ok=True)
    config = json.loads(Path("others/hrad/config.json").read_text())
    given = ["rules.specdecpp.checkpoint=others/specdecpp", "rules.hrad.checkpoint=others/hrad"]
    for changed, words in (
        ({"layers": [-5, -1]}, "reads layers that replay lacks: [-5, -1] are not some of the harvested layers [-4, -3"),
        ({"embedding": False}, "was trained with features.embedding=False"),
    ):
        Path("others/hrad/config.json").write_text(json.dumps(config | {"features": config["features"] | changed}))
        for program, others in ((tune, [*arguments, "cost=c4"]), (check_replay, [])):
            message = refused(program, monkeypatch, capsys, *others, *given)
            assert f"rules.hrad.checkpoint: others/hrad {words}" in message


def test_two_rules_of_one_kind_with_different_checkpoints_are_refused(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree("checkpoints/specdecpp", "other", dirs_exist_ok=True)
    second = ["+stop@rules.second=acceptance", "methods=[specdecpp,second]", "cost=c4"]
    run(tune, monkeypatch, *arguments, *second)
    calibration = json.loads(Path("other/calibration.json").read_text())
    Path("other/calibration.json").write_text(json.dumps(calibration | {"offset": [0.0, 1.0]}))
    message = refused(tune, monkeypatch, capsys, *arguments, *second, "rules.second.checkpoint=other")
    assert "rules: two AcceptanceStop differ in checkpoint" in message


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("methods=[fastest]", "methods: ['fastest']"),
        ("points=0", "points: 0"),
        ("rules.hrad.confidence.eps=2", "stop.eps: 2"),
        ("gamma_max=9", "gamma_max: 9 is more than the 5 harvested"),
        ("max_new_tokens=99", "max_new_tokens: 99"),
        ("warp.temperature=1", "warp: data/greedy was harvested with"),
        ("data=nowhere", "data: nowhere"),
        ("cost=measured", "cost.file: no measured cost"),
        ("cost.gammas=[]", "cost.gammas: []"),
        ("choose=dev", "choose: 'dev'"),
        ("choose=all", "choose: 'all'"),
        ("judge=calibration", "judge: calibration is what thresholds are chosen on"),
        ("out=data", "out: data is a folder"),
        ("gamma_max=2", "rules.hrad.checkpoint: checkpoints/hrad drafts gamma=3 tokens, rounds of 2"),
        ("rules.hrad.checkpoint=nowhere", "rules.hrad.checkpoint: no checkpoint"),
    ],
)
def test_bad_settings_end_with_one_line(
    argument: str,
    words: str,
    arguments: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    cost = () if argument.startswith("cost") else ("cost=c4",)
    assert words in refused(tune, monkeypatch, capsys, *arguments, *cost, argument)
    assert not Path(FILE).exists()
