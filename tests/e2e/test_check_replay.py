"""scripts/check_replay.py from its command line on a tiny harvest."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from decoding.stopping.rollout_table import RolloutTable
from evaluation.replay.read import read_table
from scripts import check_replay
from tests.programs import base, refused, run


def test_check_replay(
    replaying: list[str],
    tiny_pair_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
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
    replaying: list[str],
    tiny_pair_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A table that is wrong in one way."""

    def wrong(*given: Any) -> RolloutTable:
        table = read_table(*given)
        return replace(
            table,
            **{name: np.full_like(getattr(table, name), value) for name, value in changed.items()},
        )

    monkeypatch.setattr(check_replay, "read_table", wrong)
    others = [f"settings.{name}=[]" for name in ("fixed", "adaedl", "specdecpp", "hrad")]
    with pytest.raises(SystemExit) as exit_code:
        run(
            check_replay,
            monkeypatch,
            *base(tiny_pair_dir)[:3],
            *others,
            "settings.confidence=[0.2]",
            "limit=6",
        )
    assert exit_code.value.code
    printed = capsys.readouterr().out
    assert f"between {between}: NO NEAR TIE" in printed and "6 of 6" not in printed


def test_check_replay_has_no_excuse_where_the_rounds_agree(
    replaying: list[str],
    tiny_pair_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    original = check_replay.counted
    monkeypatch.setattr(check_replay, "counted", lambda trace: original(trace) | {"forwards": -1.0})
    only = [
        *(f"settings.{name}=[]" for name in ("confidence", "adaedl", "specdecpp", "hrad")),
        "settings.fixed=[2]",
    ]
    with pytest.raises(SystemExit) as exit_code:
        run(
            check_replay,
            monkeypatch,
            *base(tiny_pair_dir)[:3],
            *only,
            "limit=1",
            "out=runs/check.json",
        )
    assert (
        exit_code.value.code and "between rounds that agree: NO NEAR TIE" in capsys.readouterr().out
    )


def test_check_replay_refuses_what_it_cannot_check(
    replaying: list[str],
    harvest: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    heads = [f"rules.{name}.checkpoint=checkpoints/{name}" for name in ("specdecpp", "hrad")]
    assert "limit: 0 is no whole number" in refused(
        check_replay, monkeypatch, capsys, *heads, "limit=0"
    )
    empty = [
        f"settings.{name}=[]" for name in ("fixed", "confidence", "adaedl", "specdecpp", "hrad")
    ]
    assert "settings: no rule has a threshold" in refused(check_replay, monkeypatch, capsys, *empty)
    assert "out: data is a folder" in refused(check_replay, monkeypatch, capsys, *heads, "out=data")


def test_check_replay_wants_the_dtype_of_the_harvest(
    replaying: list[str],
    tiny_pair_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Its own default is float32, the harvest is in float64."""
    heads = [f"rules.{name}.checkpoint=checkpoints/{name}" for name in ("specdecpp", "hrad")]
    message = refused(check_replay, monkeypatch, capsys, *base(tiny_pair_dir)[:2], *heads)
    assert "pair.dtype: torch.float32 here, torch.float64 in the harvest" in message
