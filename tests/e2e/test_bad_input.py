"""Bad input of every kind ends with one line that names the key and says what to do. Settings of
the wrong kind or out of range: tests/conf/test_hostile_settings.py."""

import json
import os
import re
import shutil
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

from data_gen.storage.dataset import Harvest
from runtime.cli import modules
from runtime.json_files import write_checksummed
from tests.helpers.data.harvests import PAIR
from tests.helpers.models.tiny_pair import save_tiny_pair
from tests.helpers.programs import programs
from tests.helpers.programs.programs import JSONL, models, write_prompts
from tests.helpers.training.checkpoints import write_checkpoint

PROMPTS, MANIFEST, SHARD = "prompts.jsonl", "data/toy/manifest.json", "data/toy/mixed-00000.parquet"
CHECKPOINT, RESULTS = "checkpoints/specdecpp", "runs/toy/results.json"
TRACE = "runs/toy/traces-specdecpp.jsonl"
Damage = Callable[[], object]


def write(path: str, text: str) -> Damage:
    return lambda: Path(path).write_text(text)


def edit(path: str, **changes: object) -> Damage:
    return lambda: write(path, json.dumps({**json.loads(Path(path).read_text()), **changes}))()


def cut(path: str) -> Damage:
    return lambda: os.truncate(path, Path(path).stat().st_size // 2)


def remove(path: str) -> Damage:
    return lambda: Path(path).unlink()


def results(**changes: object) -> Damage:
    """Numbers of requests are changed, and sealed again."""

    def damage() -> None:
        whole = json.loads(Path(RESULTS).read_text())
        counts = {**whole["requests"], **changes}
        counts = {name: count for name, count in counts.items() if count is not None}
        write_checksummed(Path(RESULTS), {**whole, "requests": counts})

    return damage


def nan_weights() -> None:
    path = f"{CHECKPOINT}/model.safetensors"
    save_file({name: values * torch.nan for name, values in load_file(path).items()}, path)


def other_tokenizer() -> None:
    path = Path("pair/draft/tokenizer.json")
    path.write_text(path.read_text().replace('"w7"', '"seven"'))


LOSSY = "+method.assisted.engine.settings.assistant_ensemble_weight=0.5"
LINE = '{"id": "a", "prompt": "w1 w2"}\n'
GIVEN: dict[str, list[tuple[str, str] | tuple[str, str, Damage]]] = {
    "gen_data": [
        ("shares that leave nothing to train on", "splits.calibration=0.6 splits.test=0.5"),
        ("layers that do not exist", "inputs.target_layers=[99]"),
        ("layers that the draft does not have", "inputs.draft_layers=[-99]"),
        ("a group that does not exist", "pair=nobody"),
        ("a response longer than the context", "max_new_tokens=500"),
        ("a folder with too long a name", f"out={'x' * 300}"),
        ("no such folder", "pair.draft=./none"),
        ("a GPU where there is none", "pair.draft_device=cuda:0"),
        ("two vocabularies", "", other_tokenizer),
        ("a model without its weights", "", remove("pair/draft/model.safetensors")),
        ("a model cut short", "", cut("pair/target/model.safetensors")),
        ("a line that is no JSON", "", write(PROMPTS, LINE + '{"prompt": \n')),
        ("a line of too many brackets", "", write(PROMPTS, "[" * 100_000)),
        ("half a character", "", write(PROMPTS, r'{"prompt": "w1 \ud800"}')),
        ("an object without the field", "dataset.field=question"),
        ("an empty prompt file", "", write(PROMPTS, "")),
        ("prompts of one token", "", write(PROMPTS, '{"prompt": "w1"}\n{"prompt": "w2"}\n' * 2)),
        ("two prompts with one id", "", write(PROMPTS, LINE * 3)),
        ("two prompts to split three ways", "dataset.limit=2"),
        ("the folder of another harvest", "out=data/toy gamma=3"),
    ],
    "train": [
        ("a harvest that is not finished", "data=data/begun"),
        ("a manifest that is no JSON", "", write(MANIFEST, "{")),
        ("a harvest of an older version", "", write(MANIFEST, '{"schema_version": 2}')),
        ("a manifest with a changed number", "", edit(MANIFEST, gamma=9)),
        ("a shard cut short", "", cut(SHARD)),
        ("a missing shard", "", remove(SHARD)),
        ("rounds shorter than the classes", "predictor=hrad predictor.gamma=30"),
        ("no epochs", "trainer.epochs=0"),
        ("a folder of something else to write to", "out=pair"),
        ("the root to write to", "out=/"),
        ("too long a name to write to", f"out=checkpoints/{'x' * 300}"),
    ],
    "evaluate": [
        ("no folder to write to", "out="),
        ("a checkpoint cut short", "", cut(f"{CHECKPOINT}/model.safetensors")),
        ("a checkpoint of NaN", "", nan_weights),
        ("a checkpoint whose card is no JSON", "", write(f"{CHECKPOINT}/config.json", "no")),
        ("a checkpoint of another pair", "", lambda: checkpoint(Path(), pair=PAIR)),
        ("a checkpoint for another temperature", "warp.temperature=0.5"),
        ("a lossy setting", f"methods=[assisted] {LOSSY}"),
        ("no such thresholds", "thresholds=none.json"),
        ("thresholds that are no JSON", "thresholds=bad.json", write("bad.json", "{")),
    ],
    "tune": [
        ("a round at every eighth position only", "data=data/toy"),
        ("no file", "out="),
        ("a tree of no nodes", "what=tree nodes=0"),
        ("nothing to collect", "what=checkpoints folder=none"),
        ("nowhere to put the table", "what=checkpoints folder=checkpoints out=5"),
    ],
    "benchmark": [("no such benchmark", "what=all"), ("positions left out", "harvest.stride=4")],
    "draft_vocabulary": [
        ("no responses to count", "data=null"),
        ("one size for several", "sizes=5"),
    ],
    "report": [
        ("no such folder to report on", "run=none"),
        ("a folder without a run", "run=pair"),
        ("a report in the folder of a run", "out=runs/toy"),
        ("results cut short", "", write(RESULTS, '{"metrics": ')),
        ("results with a word for a number", "", results(specdecpp="many")),
        ("results without plain decoding", "", results(autoregressive=None)),
        ("a trace that is no JSON", "", write(TRACE, '{"tokens": [')),
        ("a method without its traces", "", remove(TRACE)),
        ("texts of tokens that are no JSON", "", write("runs/toy/vocabulary.json", "{")),
        ("a harvest without a shard", "run=data", remove("data/toy/rounds-00000.parquet")),
        ("a manifest cut short", "run=data", write(MANIFEST, '{"pair": ')),
        ("a changed checkpoint", "run=checkpoints", edit(f"{CHECKPOINT}/config.json", dim=9)),
    ],
}


class Case(NamedTuple):
    """damage: what is done to the files of the workplace first."""

    program: str
    wrong: str
    arguments: list[str]
    damage: Damage | None = None


CASES = [
    Case(program, wrong, words.split(), *damage)
    for program, cases in GIVEN.items()
    for wrong, words, *damage in cases
]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pair, prompts, a harvest of it, one of every position, one that was only begun, a
    checkpoint, an evaluation."""
    folder = tmp_path_factory.mktemp("workplace")
    save_tiny_pair(folder / "pair")
    small = ["gamma=4", "inputs.draft_layers=[-1]"]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_prompts(9)
        run("gen_data", ["out=data/toy", *small])
        run("gen_data", ["out=data/rounds", "anchors.stride=1", *small])
        shutil.copytree("data/toy", "data/begun", ignore=shutil.ignore_patterns("manifest.json"))
        checkpoint(folder)
        run("evaluate", ["out=runs/toy", "limit=1", "repeats=1"])
    return folder


def checkpoint(folder: Path, **changes: object) -> None:
    """Trained on the harvest, or on one that differs in this."""
    manifest = Harvest.open(folder / "data/toy").manifest.written
    context = {key: manifest[key] for key in ("pair", "warp", "draft_warp")} | changes
    write_checkpoint(folder / CHECKPOINT, "specdecpp", 24, context=context)


TEXTS = f"{' '.join(JSONL)} max_new_tokens=12"
MODELS = " ".join(models(Path("pair")))
USUAL = {
    "gen_data": f"{MODELS} {TEXTS}",
    "train": "data=data/toy logger=none out=checkpoints/new",
    "evaluate": f"{MODELS} {TEXTS} logger=none methods=[specdecpp]",
    "tune": "data=data/rounds cost=c4 methods=[fixed]",
    "report": "run=runs out=report logger=none",
}


def run(program: str, arguments: list[str]) -> None:
    """With its usual settings, unless it is a mode; of two values for a key the last one holds."""
    mode = any(argument.startswith("what=") for argument in arguments)
    usual = [] if mode else USUAL.get(program, "").split()
    given = {argument.split("=")[0]: argument for argument in [*usual, *arguments]}
    programs.run(import_module(modules()[program]), *given.values())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.wrong.replace(" ", "-"))
@pytest.mark.few(16, rest="slow")
def test_bad_input_is_one_line_and_nothing_is_written(
    case: Case, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    folder = tmp_path if case.damage else files
    monkeypatch.chdir(folder)
    if case.damage:
        shutil.copytree(files, tmp_path, dirs_exist_ok=True)
        case.damage()
    before = contents(folder)
    with pytest.raises(SystemExit) as ending:
        run(case.program, case.arguments)
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert ending.value.code == 2 and line.startswith("error: "), line
    for argument in case.arguments[-1:]:
        key = argument.split("=")[0].split(".")
        assert set(key) & set(re.split(r"\W+", line)), "it names the key"
    assert contents(folder) == before


def contents(folder: Path) -> dict[str, int]:
    """Return a hash of every file but what Hydra logs of every run."""
    found = {path.relative_to(folder): path for path in folder.rglob("*") if path.is_file()}
    return {
        str(name): hash(path.read_bytes())
        for name, path in found.items()
        if name.parts[0] != "outputs"
    }
