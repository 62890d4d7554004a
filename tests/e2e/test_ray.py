"""scripts/gen_data.py on a cluster of two nodes, whose processes are killed: the records of one
process, bit by bit."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import Mock

import psutil
import pytest

from decoding.trace import read_traces
from papers.specbranch import energy
from scripts import evaluate, tune
from tests.helpers.programs.programs import models, refused, run, write_prompts
from tests.invariant.test_interrupted_harvest import assert_same

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
SETTINGS = (
    "gamma=3 batch_size=4 max_new_tokens=24 anchors.stride=1 dataset=jsonl dataset.chat=false"
    " pair.dtype=float64 pair.name=tiny"
).split()
PROMPTS = 96


@pytest.fixture(scope="module")
def asked(tiny_pair_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    texts = (f"w{n % 29 + 1} w{n % 31 + 1} w{n % 7 + 1}" for n in range(PROMPTS))
    write_prompts(({"prompt": text} for text in texts), str(path))
    return [*SETTINGS, *models(tiny_pair_dir), f"dataset.path={path}"]


def begun(asked: list[str], out: Path, *more: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(ROOT / "scripts/gen_data.py"), *asked, f"out={out}", *more],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
    )


def done(process: subprocess.Popen[str]) -> str:
    printed, _ = process.communicate(timeout=1800)
    assert process.returncode == 0, printed
    return printed


@pytest.fixture(scope="module")
def original(asked: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("original") / "data"
    done(begun(asked, out))
    return out


@pytest.mark.parametrize("count", [1, 3])
def test_several_workers_make_the_records_of_one(
    asked: list[str], original: Path, tmp_path: Path, count: int
) -> None:
    printed = done(begun(asked, tmp_path / "data", "workers=ray", f"workers.count={count}"))
    assert f"{PROMPTS} prompts labelled" in printed and printed.count("saved ") == 1
    assert_same(tmp_path / "data", original)


def test_the_time_of_all_prompts_is_told(asked: list[str], tmp_path: Path) -> None:
    time_of_all = done(begun(asked, tmp_path / "none", "workers=ray", "estimate=true"))
    assert "minutes with 2 processes like the one that tried" in time_of_all


RAY = ("workers=ray", "workers.count=2", "workers.cpus=1")


def test_a_comparison_decodes_what_one_process_decodes(
    evaluating: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    few = (*evaluating, "methods=[confidence]", "warp.temperature=1", "out=runs/x")
    outputs = []
    for more in ((), RAY):
        run(evaluate, *few, *more)
        paths = [Path(f"runs/x/traces-{name}.jsonl") for name in ("autoregressive", "confidence")]
        outputs.append([[trace.tokens for trace in read_traces(path)] for path in paths])
        shutil.rmtree("runs/x")
    assert outputs[0] == outputs[1]
    monkeypatch.setattr(energy, "meter", Mock())
    assert "workers: energy is counted in this process" in refused(energy, *few, *RAY)


def test_thresholds_are_those_that_one_process_chooses(replaying: list[str]) -> None:
    found = []
    for more in ((), RAY):
        run(tune, *replaying, "cost=c10", "out=runs/x.json", *more)
        found.append(json.loads(Path("runs/x.json").read_text())["results"])
    assert found[0] == found[1]


@pytest.fixture
def cluster() -> Iterator[Any]:
    from ray.cluster_utils import Cluster

    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    nodes.add_node(num_cpus=1)
    yield nodes
    nodes.shutdown()


def running(what: str) -> list[psutil.Process]:
    """Processes of this test's actors that are at `what`: make, or do."""
    found = list[psutil.Process]()
    for each in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            found += [each] if f"ray::_Actor{what}" in " ".join(each.cmdline()) else []
    return found


@pytest.mark.parametrize("kills", [4, pytest.param(20, marks=pytest.mark.full)])
def test_killed_at_random_nothing_is_lost_or_doubled(
    asked: list[str], original: Path, tmp_path: Path, cluster: Any, kills: int
) -> None:
    """Processes one after another, and then a node, which another takes the place of."""
    out, random = tmp_path / "data", Random(2)
    given = [f"workers.address={cluster.address}", "workers.count=2", "workers.retries=30"]
    process, killed = begun(asked, out, "workers=ray", *given), 0
    while killed < kills and process.poll() is None:
        time.sleep(random.uniform(0, 0.1))
        at = ".make" if killed < 2 else ".do"  # while models are loaded, and at work
        if killed == kills // 2:
            cluster.remove_node(next(iter(cluster.worker_nodes)), allow_graceful=False)
            cluster.add_node(num_cpus=1)
            killed += 1
        elif found := running(at):
            random.choice(found).kill()
            killed += 1
    printed = done(process)
    print(f"{killed} kills, {printed.count('its task is done again')} tasks done again")
    assert "its task is done again" in printed
    assert_same(out, original)
