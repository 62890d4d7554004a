"""The plug-ins of the guide, written down as it says, decode."""

import re
from pathlib import Path

import pytest

from decoding.trace import read_traces
from scripts import evaluate
from tests.programs import run

GUIDE = (Path(__file__).parents[2] / "docs" / "guides" / "plugins.md").read_text()
FILES = re.findall(r'```(?:python|yaml) title="(\S+)"\n(.*?)```', GUIDE, re.DOTALL)


def test_the_plugins_of_the_guide_decode(
    tmp_path: Path, tiny_pair_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in FILES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    pair = [f"pair.{side}={tiny_pair_dir / side}" for side in ("target", "draft")]
    parts = ("dataset=sums", "stop=impatient", "structure=short", "verifier=at_most")
    run(
        *(evaluate, monkeypatch, "--config-dir", "conf", *pair, "pair.dtype=float64"),
        *("methods=[custom]", *parts, "warp=greedy", "draft_warp.temperature=0"),
        *("max_new_tokens=12", "repeats=1", "limit=4", "split=all", "logger=none", "out=runs/x"),
    )
    plain, custom = (
        read_traces(Path(f"runs/x/traces-{name}.jsonl")) for name in ("autoregressive", "custom")
    )
    assert [trace.tokens for trace in custom] == [trace.tokens for trace in plain]
    assert max(round_.accepted for trace in custom for round_ in trace.rounds) == 1
