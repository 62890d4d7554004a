"""Settings that were once taken, or ended in a traceback: one line that names the key, before
anything is loaded or written."""

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from tests.helpers.damage.hostile import PROGRAMS, program_of
from tests.helpers.programs.programs import refused

HARVEST, EVALUATE, TUNE, TRAIN = "gen_data", "evaluate", "tune", "train"
ROUNDED = "pair=smollm2_rounded"
NAMES = "predictor.inputs: expected a list of different names, such as [a,b], got"
LINES = [
    (HARVEST, ["pair.trust_remote_code=no"], "pair.trust_remote_code: expected true or false, got"),
    (TRAIN, ["predictor.tie_blocks=no"], "predictor.tie_blocks: expected true or false, got 'no'"),
    (HARVEST, ["splits.calibration=nan"], "splits.calibration: expected a number above 0"),
    (HARVEST, ["draft_warp.temperature=nan"], "draft_warp.temperature: expected"),
    (EVALUATE, ["methods=null"], "methods: expected a list"),
    (EVALUATE, ["method.fixed.stop.gamma=1.5"], "method.fixed.stop.gamma: expected a whole"),
    (EVALUATE, ["method.specdecpp.stop.bounds=5"], "method.specdecpp.stop.bounds: expected"),
    (TUNE, ["points=100000"], "points: expected a whole number from"),
    *((one, [f"seed={2**64}"], "seed: expected a whole number from 0")
      for one in (HARVEST, EVALUATE, TUNE, TRAIN)),
    # of the custom method, by their own keys
    (EVALUATE, ["stop.eps=nan"], "Could not override 'stop.eps'"),
    (EVALUATE, ["+stop.eps=nan"], "stop.eps: expected"),
    (EVALUATE, ["stop=confidence", "+stop.eps=abc"], "stop.eps: expected one of threshold"),
    (EVALUATE, ["stop=confidence", "stop.threshold=nan"], "stop.threshold: expected a number"),
    (EVALUATE, ["dataset=jsonl", "dataset.path=null"], "dataset.path: expected a path, got null"),
    (EVALUATE, ["+structure._partial_=true"], "structure._partial_: expected false"),
    (EVALUATE, ["+tried.custom.stop.gamma=[2,3]"], "tried.custom: expected a method that"),
    (HARVEST, ["warp=null"], "warp: expected a choice, got null"),
    (HARVEST, ["dataset=5"], "dataset: expected a choice, got 5"),
    (HARVEST, ["-m", "warp=default,null"], "warp: expected a choice, got null"),
    (TRAIN, ["predictor=true"], "predictor: expected a choice, got true"),
    (HARVEST, ["=5"], "=5: expected a choice, got 5"),
    (TUNE, ["predictor=value"], "predictor: expected a setting of this program, got another one"),
    (HARVEST, [ROUNDED, "pair.bits=9"], "pair.bits: expected a whole number from 2"),
    (HARVEST, [ROUNDED, "pair.group=null"], "pair.group: expected a whole number"),
    (HARVEST, [ROUNDED, "pair.bits=null"], "pair.bits: expected a whole number, for pair.group=64"),
    (HARVEST, ["pair.draft_mix=0"], "pair.draft_mix: expected a number above 0, at most 1, got 0."),
    (HARVEST, ["pair=smollm2_mixed", "pair.draft_mix=nan"], "pair.draft_mix: expected a number"),
    (TRAIN, ["prompts=1"], "prompts: expected a whole number from 2 on or null, got 1"),
    (TRAIN, ["predictor.inputs="], f"{NAMES} ''. --help says"),
    (
        *(TRAIN, ["predictor.inputs=q_stats"]),
        f"{NAMES} 'q_stats'. Write e.g. predictor.inputs=[q_stats]",
    ),
    (HARVEST, ["--resolve"], "command line: --resolve belongs to --cfg"),
    (HARVEST, ["-m", "-r"], "command line: only one of"),
    (HARVEST, ["--shell-completion"], "command line: --shell-completion is not supported"),
    (HARVEST, ["--experimental-rerun=x"], "command line: --experimental-rerun reads pickles"),
    (HARVEST, ["gamma=2", "-m", "seed=1,2"], "command line: expected settings in one place"),
    (HARVEST, ["hydra.run.dir=/proc/x"], "hydra.run.dir: /proc/x cannot be made"),
    (HARVEST, ["out='~/h'"], "out: expected a path, with no ~"),
    (HARVEST, [f"out={'a/' * 3000}"], "out: expected a path"),
    (HARVEST, ["+responses.api_key=PLANTED"], "responses.api_key: expected one of no settings"),
    # all jobs of a sweep are checked before the first begins
    (TRAIN, ["-m", "predictor.depth=0,1,abc"], "predictor.depth: expected a whole number"),
]  # fmt: skip


@pytest.mark.parametrize(("program", "arguments", "says"), LINES, ids=str)
@pytest.mark.few(12, rest="slow")
def test_what_is_wrong_is_refused_before_anything_is_written(
    program: str, arguments: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    module = import_module("train" if program == "train" else f"scripts.{program}")
    line = refused(module, *arguments)
    assert line.startswith(f"error: {says}") and "PLANTED" not in line, line
    assert list(tmp_path.iterdir()) == []


PROGRAM = """
import sys
from runpy import run_path
sys.argv = sys.argv[1:]
try:
    run_path(sys.argv[0], run_name="__main__")
except SystemExit as stop:
    print(stop.code)
print(sorted({"torch", "transformers", "datasets", "wandb", "sklearn"} & set(sys.modules)))
"""


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("argument", ["--help", "pair.dtype=abc", "out=5"])
@pytest.mark.few(3, rest="slow")
def test_no_model_library_is_loaded_before_settings_are_checked(
    program: str, argument: str, tmp_path: Path
) -> None:
    asked = program_of(program)
    what = [f"what={asked.what}"] if asked.what else []
    command = [sys.executable, "-c", PROGRAM, str(asked.script), *what, argument]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout.strip().splitlines()[-1] == "[]", done.stderr
    assert "Traceback" not in done.stderr
