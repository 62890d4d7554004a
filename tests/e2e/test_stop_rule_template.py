"""A stop rule from outside the tree, one module and one YAML: tuned by replay, replay = decode, and
decoded with."""

import json
from pathlib import Path
from textwrap import dedent

import pytest

from decoding.trace import read_traces
from scripts import evaluate, tune
from tests.programs import GREEDY, SPLITS, base, run

STOP_RULE = (
    """
    import numpy as np

    from decoding.stopping.base import TunableRule
    from decoding.stopping.policy import Policy


    class Doubt(TunableRule):
        \"\"\"Stop once the product of the draft's highest probabilities is below `threshold`.\"\"\"

        def __init__(self, threshold):
            super().__init__()
            self.threshold = threshold

        def should_stop(self, step):
            highest = step.unwarped_q().max().item()
            self.predicted.append((self.predicted[-1] if self.predicted else 1.0) * highest)
            return self.predicted[-1] < self.threshold

        def policy(self, table):
            return Policy(np.cumprod(table.max_q, axis=-1), ahead=True)
    """,
    """
    _target_: doubt_rule.Doubt
    threshold: 0.1
    """,
)
NAMED = ("--config-dir", "conf", "+stop@rules.doubt=doubt", "methods=[doubt]", "cost=c10")


@pytest.fixture
def arguments(replaying: list[str], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    code, config = (dedent(text).lstrip() for text in STOP_RULE)
    Path("doubt_rule.py").write_text(code)
    Path("conf/stop").mkdir(parents=True, exist_ok=True)
    Path("conf/stop/doubt.yaml").write_text(config)
    monkeypatch.syspath_prepend(Path.cwd())
    return [*NAMED, *replaying]


def test_it_is_tuned_and_decoded_with(
    arguments: list[str],
    tiny_pair_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as exit_code:
        run(tune, monkeypatch, *arguments, "check=true", "check_prompts=4")
    assert not exit_code.value.code
    assert capsys.readouterr().out.count("4 of 4 prompts equal") == 3

    run(tune, monkeypatch, *arguments, "out=runs/doubt.json")
    found = json.loads(Path("runs/doubt.json").read_text())
    assert found["rules"]["doubt"]["setting"] == "threshold"
    chosen = found["results"]["chosen"]["rules"]["doubt"]["threshold"]

    small = ("split=test", "limit=2", "repeats=1", "max_new_tokens=8", "logger=none", "out=runs_d")
    parts = ("methods=[custom]", "stop=doubt", f"stop.threshold={chosen}")
    run(evaluate, monkeypatch, *NAMED[:2], *base(tiny_pair_dir), *GREEDY, *SPLITS, *small, *parts)
    plain, custom = (
        read_traces(Path(f"runs_d/traces-{name}.jsonl")) for name in ("autoregressive", "custom")
    )
    assert [trace.tokens for trace in custom] == [trace.tokens for trace in plain]
    assert any(round_.predicted for trace in custom for round_ in trace.rounds)
