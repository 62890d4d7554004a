"""What a simulation of engines changes in the settings of a method, its engine's parts included."""

from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra

from evaluation.overlapped.simulate import configured

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("name", ["fixed", "custom", "specbranch"])
def test_the_engine_has_the_draft_length_and_the_checkpoint_of_the_run(name):
    GlobalHydra.instance().clear()
    settings = ["stop=specdecpp", "gamma=7", "checkpoint=checkpoints/other"]
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        method = configured(compose("tune_overlapped", settings), name)
    for parts in (method, method.engine):
        assert parts.structure.gamma_max == 7
        assert parts.stop.get("gamma", 7) == 7
        assert parts.stop.get("checkpoint", "checkpoints/other") == "checkpoints/other"
