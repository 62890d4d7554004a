"""A new predictor is one module and one YAML, in a folder of its own: it learns from a harvest that
knows nothing of it, is calibrated, and comes back from its checkpoint."""

import json
import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

from predictors.base import load_predictor
from predictors.inputs import Inputs

ROOT = Path(__file__).parents[2]
MODULE = '''
    """Acceptance of a drawn token from the draft's own numbers and from how it fared so far."""

    from dataclasses import dataclass, field
    from functools import partial
    from typing import ClassVar

    import torch
    from torch import nn

    from predictors.calibration import Calibration
    from predictors.inputs import Inputs
    from predictors.specdecpp import kept_depths
    from predictors.training.batches import Items
    from predictors.training.losses import weighted_soft_bce
    from predictors.training.resampling import hold_out_prompts


    @dataclass
    class Fared:
        name: ClassVar[str] = "fared"
        when: ClassVar[str] = "token"
        kind: ClassVar[str] = "rounds"
        columns: ClassVar[tuple[str, ...]] = ("known", "drafted", "accepted", "accept_prob")
        reads: ClassVar[Inputs] = Inputs(q_stats=True, history=True)
        classes: ClassVar[tuple[str, ...]] = ("reject", "accept")
        label: ClassVar[str] = "min(1, p / q) of a drawn token"
        caveat: ClassVar[str] = "None."
        gamma: ClassVar[None] = None
        offset: ClassVar[tuple[float, ...]] = ()

        width: int = 8
        inputs: Inputs = field(init=False)
        calibration: Calibration = field(default=Calibration(), init=False)
        head: nn.Module = field(init=False)

        def samples(self, records):
            return kept_depths(records)

        def build(self, dim):
            return nn.Sequential(nn.Linear(dim, self.width), nn.SiLU(), nn.Linear(self.width, 2))

        def fit(self, records, inputs, trainer):
            x, s, group = records["inputs"], records["accept_prob"], records["group"]
            held = hold_out_prompts(group, trainer.validation_fraction, trainer.seed)
            torch.manual_seed(trainer.seed)
            self.inputs, self.head = inputs, self.build(x.shape[1])
            loss = partial(weighted_soft_bce, w_rej=1.0)
            trainer.train(self.head, Items(x[~held], s[~held]), Items(x[held], s[held]), loss, loss)
            return self

        def targets(self, records):
            s = records["accept_prob"]
            return torch.stack([1 - s, s], dim=-1)

        @torch.inference_mode()
        def predict_proba(self, x):
            return self.calibration.apply(self.head(x))[:, 1]


    PREDICTOR = Fared
'''
CONFIG = """
    _target_: predictors.fared.Fared
    width: 4
"""


@pytest.fixture
def plugin(tmp_path: Path) -> Path:
    """A folder with the two files, and nothing else."""
    for path, text in (("predictors/fared.py", MODULE), ("conf/predictor/fared.yaml", CONFIG)):
        (tmp_path / path).parent.mkdir(parents=True)
        (tmp_path / path).write_text(dedent(text).lstrip())
    return tmp_path


def test_a_predictor_from_outside_trains_calibrates_and_loads(
    plugin: Path, harvest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, out = harvest / "data" / "greedy", plugin / "checkpoint"
    settings = [f"data={data}", f"out={out}", "trainer.epochs=2", "logger=none"]
    subprocess.run(
        [sys.executable, ROOT / "train.py", "--config-dir", "conf", "predictor=fared", *settings],
        cwd=plugin,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{plugin}"},
        check=True,
        capture_output=True,
        timeout=300,
    )
    config = json.loads((out / "config.json").read_text())
    assert Inputs.from_dict(config["inputs"]) == Inputs(q_stats=True, history=True)
    assert config["predictor"] == "fared" and config["dim"] == 7
    metrics = json.loads((out / "metrics.json").read_text())
    assert {"fared", "fared, before calibration", "base rate"} <= metrics["test"].keys()
    assert "prefix all" in next(iter(metrics["reliability"].values()))

    import predictors

    monkeypatch.setattr(predictors, "__path__", [*predictors.__path__, str(plugin / "predictors")])
    loaded = load_predictor(out)
    assert loaded.when == "token" and loaded.calibration.rows > 0
