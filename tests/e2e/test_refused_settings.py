"""Settings that were once taken, or ended in a traceback: one line that names the key, before
anything is loaded or written."""

import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

from tests.helpers.damage.hostile import PROGRAMS, program_of
from tests.helpers.programs.programs import refused

HARVEST, EVALUATE, TUNE, TRAIN = "gen_data", "evaluate", "tune", "train"
SWITCH = "expected true or false, got"
CUSTOM = "methods=[custom]"


def words_for_switches() -> list[tuple[str, str, str]]:
    words = ("no", "off", "n", "yes", "'false'", "0", "null", "[]")
    return [
        (HARVEST, f"pair.trust_remote_code={word}", f"pair.trust_remote_code: {SWITCH}")
        for word in words
    ]


SETTINGS = [
    *words_for_switches(),
    (HARVEST, "verify=no", f"verify: {SWITCH} 'no'"),
    (HARVEST, "dataset.chat=no", f"dataset.chat: {SWITCH} 'no'"),
    (EVALUATE, "verbose=off", f"verbose: {SWITCH} 'off'"),
    (TUNE, "check=n", f"check: {SWITCH} 'n'"),
    (TRAIN, "predictor.tie_blocks=no", f"predictor.tie_blocks: {SWITCH} 'no'"),
    (HARVEST, "splits.calibration=nan", "splits.calibration: expected a number above 0"),
    (HARVEST, "splits.test=abc", "splits.test: expected a number"),
    (HARVEST, "mixing=abc", "mixing: expected a number"),
    (HARVEST, "pair.max_length=abc", "pair.max_length: expected a whole number"),
    (HARVEST, "warp.top_k=1.5", "warp.top_k: expected a whole number"),
    (HARVEST, "warp.top_p=1e-46", "warp.top_p: expected a number from 1e-06 to 1"),
    (HARVEST, "warp.temperature=abc", "warp.temperature: expected"),
    (HARVEST, "draft_warp.temperature=nan", "draft_warp.temperature: expected"),
    (HARVEST, "dataset.limit=1.5", "dataset.limit: expected a whole number"),
    (EVALUATE, "methods=null", "methods: expected a list"),
    (EVALUATE, "thresholds=5", "thresholds: expected a path"),
    (EVALUATE, "method.adaedl.stop.threshold=abc", "method.adaedl.stop.threshold: expected"),
    (TUNE, "points=100000", "points: expected a whole number from"),
    (EVALUATE, "method.fixed.stop.gamma=1.5", "method.fixed.stop.gamma: expected a whole"),
    (EVALUATE, "method.adaedl.stop.step=nan", "method.adaedl.stop.step: expected a number"),
    (EVALUATE, "method.adaedl.stop.rate_memory=5", "method.adaedl.stop.rate_memory: expected"),
    (EVALUATE, "method.confidence.stop.threshold=nan", "method.confidence.stop.threshold:"),
    (EVALUATE, "method.specdecpp.stop.bounds=5", "method.specdecpp.stop.bounds: expected"),
    (TRAIN, "predictor.layers=[-1.5]", "predictor.layers: expected"),
    (TRAIN, "predictor.layers=[-1,-1]", "predictor.layers: expected"),
    (HARVEST, "inputs.target_layers=[-1,-1]", "inputs.target_layers: expected"),
    *((one, f"seed={seed}", "seed: expected a whole number from 0")
      for one in (HARVEST, EVALUATE, TUNE, TRAIN) for seed in ("abc", "-1", 2**64, "true")),
]  # fmt: skip
PARTS = [  # of the custom method, by their own keys
    (["structure=dyspec", "structure.budget=100000"], "structure.budget: expected a whole"),
    (["stop.eps=nan"], "Could not override 'stop.eps'"),
    (["+stop.eps=nan"], "stop.eps: expected"),
    (["stop=confidence", "+stop.eps=abc"], "stop.eps: expected one of threshold"),
    (["stop=confidence", "stop.threshold=nan"], "stop.threshold: expected a number from 0"),
    (["stop=specdecpp", "stop.bounds=5"], "stop.bounds: expected"),
    (["dataset=jsonl", "dataset.path=null"], "dataset.path: expected a path, got null"),
    (["structure=lookup", "structure.gamma=0"], "structure.gamma: expected a whole number"),
]
LINES = [
    (HARVEST, ["warp=null"], "warp: expected a choice, got null"),
    (HARVEST, ["dataset=5"], "dataset: expected a choice, got 5"),
    (HARVEST, ["-m", "warp=default,null"], "warp: expected a choice, got null"),
    (EVALUATE, ["engine=null"], "engine: expected a choice, got null"),
    (TRAIN, ["predictor=true"], "predictor: expected a choice, got true"),
    (TUNE, ["cost=null"], "cost: expected a choice, got null"),
    (HARVEST, ["pair=smollm2_rounded", "pair.bits=9"], "pair.bits: expected a whole number from 2"),
    (HARVEST, ["pair=smollm2_rounded", "pair.group=null"], "pair.group: expected a whole number"),
    (
        *(HARVEST, ["pair=smollm2_rounded", "pair.bits=null"]),
        "pair.bits: expected a whole number, for pair.group=64 rounds the draft's",
    ),
    (
        *(HARVEST, ["pair.draft_mix=0"]),
        "pair.draft_mix: expected a number above 0, at most 1, got 0. Write e.g. pair.draft_mix=1",
    ),
    (HARVEST, ["pair.draft_mix=1.5"], "pair.draft_mix: expected a number above 0"),
    (HARVEST, ["pair=smollm2_mixed", "pair.draft_mix=nan"], "pair.draft_mix: expected a number"),
    (HARVEST, ["pair.draft_mix=x"], "pair.draft_mix: expected a number above 0"),
    (TRAIN, ["prompts=1"], "prompts: expected a whole number from 2 on or null, got 1"),
    (
        *(TRAIN, ["predictor.inputs=q_stats"]),
        "predictor.inputs: expected a list of different names, such as [a,b], got 'q_stats'. Write"
        " e.g. predictor.inputs=[q_stats]",
    ),
    (
        *(TRAIN, ["predictor.inputs="]),
        "predictor.inputs: expected a list of different names, such as [a,b], got ''. --help says",
    ),
    (TUNE, ["predictor=value"], "predictor: expected a setting of this program, got another one"),
    (HARVEST, ["=5"], "=5: expected a choice, got 5"),
    (HARVEST, ["--resolve"], "command line: --resolve belongs to --cfg"),
    (HARVEST, ["-m", "-r"], "command line: only one of"),
    (HARVEST, ["--shell-completion"], "command line: --shell-completion is not supported"),
    (HARVEST, ["--experimental-rerun=x"], "command line: --experimental-rerun reads pickles"),
    (HARVEST, ["gamma=2", "-m", "seed=1,2"], "command line: expected settings in one place"),
    (HARVEST, ["hydra.run.dir=/proc/x"], "hydra.run.dir: /proc/x cannot be made"),
    (HARVEST, ["out='~/h'"], "out: expected a path, with no ~"),
    (HARVEST, [f"out={'a/' * 3000}"], "out: expected a path"),
    (HARVEST, ["+responses.api_key=PLANTED"], "responses.api_key: expected one of no settings"),
    (EVALUATE, ["+structure._partial_=true"], "structure._partial_: expected false"),
    (EVALUATE, ["+tried.custom.stop.gamma=[2,3]"], "tried.custom: expected a method that"),
]


@pytest.mark.parametrize(
    ("program", "arguments", "says"),
    [
        *((program, [override], says) for program, override, says in SETTINGS),
        *((EVALUATE, [CUSTOM, *overrides], says) for overrides, says in PARTS),
        *LINES,
    ],
    ids=str,
)
@pytest.mark.few(12)
def test_what_is_wrong_is_refused_before_anything_is_written(
    program: str, arguments: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    line = refused(_module(program), *arguments)
    assert line.startswith(f"error: {says}") and "PLANTED" not in line, line
    assert list(tmp_path.iterdir()) == []


def test_all_jobs_of_a_sweep_are_checked_before_the_first_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    line = refused(_module(TRAIN), "-m", "predictor.depth=0,1,abc")
    assert line.startswith("error: predictor.depth: expected a whole number")
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
@pytest.mark.few(3)
def test_no_model_library_is_loaded_before_settings_are_checked(
    program: str, argument: str, tmp_path: Path
) -> None:
    asked = program_of(program)
    what = [f"what={asked.what}"] if asked.what else []
    command = [sys.executable, "-c", PROGRAM, str(asked.script), *what, argument]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout.strip().splitlines()[-1] == "[]", done.stderr
    assert "Traceback" not in done.stderr


def _module(name: str) -> ModuleType:
    return import_module("train" if name == "train" else f"scripts.{name}")
