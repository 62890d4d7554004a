"""Plug-ins from outside the tree, one module and one YAML each and no other edit: harvested,
trained, calibrated, tuned (replay included) and decoded with, by the programs everybody uses. They
are the examples of docs/guides/plugins.md; its predictor reads two inputs of the catalogue."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

import predictors
import train
from decoding.trace import RoundTrace, read_traces
from scripts import evaluate, gen_data, tune
from tests.helpers.programs.programs import GREEDY, SPLITS, models, run

GUIDE = (Path(__file__).parents[2] / "docs" / "guides" / "plugins.md").read_text()
FILES = re.findall(r'```(?:python|yaml) title="(\S+)"\n(.*?)```', GUIDE, re.DOTALL)
LEARNED = "checkpoints/sure"
TUNED = ("+stop@rules.impatient=impatient", "methods=[impatient,specdecpp]", "cost=c10")
PARTS = ("methods=[custom]", "structure=short", "verifier=at_most")


@pytest.fixture
def common(here: Path, tiny_pair_dir: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Arguments that find the plug-ins, which lie in the working directory, and a pair."""
    for name, text in FILES:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text)
    monkeypatch.syspath_prepend(here)
    paths = [*predictors.__path__, str(here / "predictors")]
    monkeypatch.setattr(predictors, "__path__", paths)
    pair = [*models(tiny_pair_dir), "pair.dtype=float64"]
    return ["--config-dir", "conf", *pair, "dataset=sums", *GREEDY, *SPLITS]


def read(path: str) -> Any:
    return json.loads(Path(path).read_text())


def decoded(common: list[str], *arguments: str) -> list[RoundTrace]:
    """Rounds of the custom method, whose output is the target's."""
    small = ("max_new_tokens=12", "split=test", "limit=4", "repeats=1", "logger=none", "out=runs/x")
    run(evaluate, *common, *PARTS, *small, *arguments)
    plain, custom = (
        read_traces(Path(f"runs/x/traces-{name}.jsonl")) for name in ("autoregressive", "custom")
    )
    assert [trace.tokens for trace in custom] == [trace.tokens for trace in plain]
    return [round_ for trace in custom for round_ in trace.rounds]


def test_plugins_go_through_every_program(
    common: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    harvest = ("max_new_tokens=12", "gamma=5", "anchors.stride=1", "out=data/sums")
    run(gen_data, *common, *harvest)
    assert read("data/sums/manifest.json")["prompts"]["count"] == 24

    learn = ("predictor=sure", "trainer=specdecpp", "trainer.epochs=2", "data=data/sums")
    run(train, *common[:2], *learn, "logger=none")
    assert read(f"{LEARNED}/calibration.json")["method"] == "temperature"

    replayed = [*common, *TUNED, "data=data/sums", "points=10"]
    replayed.append(f"rules.specdecpp.checkpoint={LEARNED}")
    with pytest.raises(SystemExit) as exit_code:
        run(tune, *replayed, "check=true", "check_prompts=3")
    assert not exit_code.value.code
    assert capsys.readouterr().out.count("3 of 3 prompts equal") == 6
    run(tune, *replayed, "out=runs/tuned.json")
    found = read("runs/tuned.json")["results"]["chosen"]["rules"]

    at = f"stop.threshold={found['impatient']['threshold']}"
    rounds = decoded(common, "stop=impatient", at)
    assert max(round_.accepted for round_ in rounds) == 1

    at = f"stop.threshold={found['specdecpp']['threshold']}"
    asked = ("stop=specdecpp", f"stop.checkpoint={LEARNED}", at, "out=runs/x")
    assert any(round_.predicted for round_ in decoded(common, *asked))
