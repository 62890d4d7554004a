"""A tiny greedy harvest that replay can be tried on, and a small evaluation."""

from pathlib import Path

import pytest

from data_gen.storage.dataset import Harvest
from predictors.inputs import Inputs
from scripts import gen_data
from tests.helpers.programs.programs import GREEDY, SPLITS, base, odd_and_even, run, write_prompts
from tests.helpers.training.checkpoints import write_checkpoint

WIDTH = 24  # of a hidden state
FEW = "split=all limit=4 max_new_tokens=14 repeats=2 tried.fixed.stop.gamma=[1,3] tried_prompts=1"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, in which the test runs."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="session")
def harvest(tiny_pair_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with prompts, a greedy harvest of them, and untrained checkpoints made for it:
    H-RAD's reads two of the four harvested layers."""
    folder = tmp_path_factory.mktemp("harvest")
    prompts = [{"prompt": f"w{n} w{n + 1} w2", "id": f"p{n}"} for n in range(1, 25)]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_prompts(prompts)
        small = ("max_new_tokens=12", "gamma=5", "anchors.stride=1", "out=data/greedy", *SPLITS)
        run(gen_data, *base(tiny_pair_dir), *GREEDY, *small)
    made = Harvest.open(folder / "data/greedy")
    data = {"folder": "data/greedy", **made.origin}
    context = {**made.context, "provenance": {"data": data}}
    reads = {"specdecpp": Inputs([-1]), "hrad": Inputs((), [-3, -1], token=True)}
    for (name, inputs), dim in zip(reads.items(), (WIDTH, 3 * WIDTH), strict=True):
        write_checkpoint(
            folder / "checkpoints" / name, name, dim, gamma=3, inputs=inputs, context=context
        )
    return folder


@pytest.fixture
def replaying(harvest: Path, tiny_pair_dir: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Of a program that replays it, run in its folder."""
    monkeypatch.chdir(harvest)
    for path in (harvest / "runs").glob("*"):
        path.unlink()
    some = "methods=[fixed,confidence,product,confidence_before,adaedl,specdecpp,hrad]"
    return [*base(tiny_pair_dir), *GREEDY, "data=data/greedy", "points=10", *SPLITS, some]


@pytest.fixture
def evaluating(tiny_pair_dir: Path, here: Path) -> list[str]:
    """Of a small evaluation in a folder of its own: a tiny pair, six prompts, few tokens."""
    write_prompts(odd_and_even(6))
    return [*base(tiny_pair_dir), *FEW.split(), "logger=none", "out=runs/x"]
