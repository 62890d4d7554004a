"""The plug-ins of the guide, written down as it says, decode."""

import re
from pathlib import Path

import pytest

import predictors
import train
from decoding.trace import read_traces
from scripts import evaluate, gen_data
from tests.helpers.programs.programs import SPLITS, run

GUIDE = (Path(__file__).parents[2] / "docs" / "guides" / "plugins.md").read_text()
FILES = re.findall(r'```(?:python|yaml) title="(\S+)"\n(.*?)```', GUIDE, re.DOTALL)


SHORT = ("max_new_tokens=12", "split=all", "logger=none", "repeats=1", "limit=4")
GREEDY = ("warp=greedy", "draft_warp.temperature=0")


@pytest.fixture
def common(tmp_path: Path, tiny_pair_dir: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """The plug-ins lie in the working directory; arguments that find them, and a pair."""
    for name, text in FILES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(
        predictors, "__path__", [*predictors.__path__, str(tmp_path / "predictors")]
    )
    pair = (f"pair.{side}={tiny_pair_dir / side}" for side in ("target", "draft"))
    return ("--config-dir", "conf", *pair, "pair.dtype=float64", "dataset=sums")


def test_the_plugins_of_the_guide_decode(common: tuple[str, ...]) -> None:
    parts = ("stop=impatient", "structure=short", "verifier=at_most")
    run(evaluate, *common, *GREEDY, "methods=[custom]", *parts, *SHORT, "out=runs/x")
    plain, custom = (
        read_traces(Path(f"runs/x/traces-{name}.jsonl")) for name in ("autoregressive", "custom")
    )
    assert [trace.tokens for trace in custom] == [trace.tokens for trace in plain]
    assert max(round_.accepted for trace in custom for round_ in trace.rounds) == 1


@pytest.mark.slow
def test_the_predictor_of_the_guide_learns_and_decodes(common: tuple[str, ...]) -> None:
    small = ("max_new_tokens=12", "gamma=5", "anchors.stride=1", "out=data/sums")
    run(gen_data, *common, *small, *SPLITS)
    learn = ("predictor=sure", "trainer=specdecpp", "trainer.epochs=2", "data=data/sums")
    run(train, "--config-dir", "conf", *learn, "logger=none")
    asked = ("methods=[custom]", "stop=specdecpp", "stop.checkpoint=checkpoints/sure")
    run(evaluate, *common, *SPLITS, *asked, *SHORT, "out=runs/x")
    rounds = [
        round_
        for trace in read_traces(Path("runs/x/traces-custom.jsonl"))
        for round_ in trace.rounds
    ]
    assert any(round_.predicted for round_ in rounds)
