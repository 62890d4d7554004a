"""Bad input of every kind ends with one line that names the key and says what to do."""

import json
import os
import re
import shutil
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest
import torch
from hydra.core.global_hydra import GlobalHydra
from safetensors.torch import load_file, save_file

import train
from data_gen.storage.dataset import Harvest
from runtime.json_files import write_checksummed
from scripts import evaluate, gen_data
from tests.helpers.data.harvests import PAIR
from tests.helpers.models.tiny_pair import save_tiny_pair
from tests.helpers.training.checkpoints import write_checkpoint

ROOT = Path(__file__).parents[2]
SCRIPTS: dict[str, ModuleType] = {
    "train.py": train,
    **{
        f"{folder}/{path.name}": import_module(f"{folder}.{path.stem}")
        for folder in ("scripts", "pairs", "papers")
        for path in sorted((ROOT / folder).glob("*.py"))
        if (ROOT / "conf" / f"{path.stem}.yaml").is_file()
    },
}


class Case(NamedTuple):
    """damage: what is done to the files of the workplace first."""

    wrong: str
    script: str
    arguments: list[str]
    damage: Callable[[], object] | None = None


def write(path: str, text: str) -> Callable[[], object]:
    def damage() -> None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(text)

    return damage


def edit(path: str, **changes: object) -> Callable[[], object]:
    return lambda: Path(path).write_text(
        json.dumps({**json.loads(Path(path).read_text()), **changes})
    )


def cut(path: str) -> Callable[[], object]:
    return lambda: os.truncate(path, Path(path).stat().st_size // 2)


def nan_weights() -> None:
    path = "checkpoints/specdecpp/model.safetensors"
    save_file({name: values * torch.nan for name, values in load_file(path).items()}, path)


HARVEST, TRAIN, EVALUATE, TUNE = (
    "scripts/gen_data.py",
    "train.py",
    "scripts/evaluate.py",
    "scripts/tune.py",
)
SHARD = "data/toy/rounds-00000.parquet"
REPORT, TRACE = "scripts/report.py", "runs/toy/traces-specdecpp.jsonl"
THEIR_SETTINGS = "method.prompt_lookup.engine.settings"
PROMPT_LOOKUP = ("methods=[prompt_lookup]", "~tried.prompt_lookup")
CASES = [
    # settings of a harvest
    Case("gamma 0", HARVEST, ["gamma=0"]),
    Case("a word for a number", HARVEST, ["gamma=abc"]),
    Case("a switch for a number", HARVEST, ["batch_size=true"]),
    Case("half a position", HARVEST, ["anchors.stride=1.5"]),
    Case("a seed that is none", HARVEST, ["seed=false"]),
    Case("more mixing than there is", HARVEST, ["mixing=1.5"]),
    Case("negative temperature", HARVEST, ["warp.temperature=-1"]),
    Case("top-p above 1", HARVEST, ["warp.top_p=1.5"]),
    Case("negative top-k", HARVEST, ["draft_warp.top_k=-3"]),
    Case(
        "shares that leave nothing to train on",
        HARVEST,
        ["splits.calibration=0.6", "splits.test=0.5"],
    ),
    Case("no layers", HARVEST, ["inputs.draft_layers=[]"]),
    Case("layers that do not exist", HARVEST, ["inputs.target_layers=[99]"]),
    Case("layers that the draft does not have", HARVEST, ["inputs.draft_layers=[-99]"]),
    Case("a word for a switch", HARVEST, ["features.stored=maybe"]),
    Case("a key that does not exist", HARVEST, ["gama=3"]),
    Case("a group that does not exist", HARVEST, ["pair=nobody"]),
    Case("a response longer than the context", HARVEST, ["max_new_tokens=500"]),
    Case("a number for a folder", HARVEST, ["out=5"]),
    Case("no folder", HARVEST, ["out=null"]),
    Case("a folder with too long a name", HARVEST, [f"out={'x' * 300}"]),
    # pair and prompts
    Case("no such model", HARVEST, ["pair.target=nowhere/at/all"]),
    Case("no such folder", HARVEST, ["pair.draft=./none"]),
    Case("no such dtype", HARVEST, ["pair.dtype=float12"]),
    Case("a GPU where there is none", HARVEST, ["pair.draft_device=cuda:0"]),
    Case("a number for a file of tokens", HARVEST, ["pair.draft_vocabulary=5"]),
    Case("a context of one token", HARVEST, ["pair.max_length=1"]),
    Case("two vocabularies", HARVEST, [], lambda: write_other_tokenizer()),
    Case(
        "a model without its weights",
        HARVEST,
        [],
        lambda: Path("pair/draft/model.safetensors").unlink(),
    ),
    Case("a model cut short", HARVEST, [], cut("pair/target/model.safetensors")),
    Case("no such prompts", HARVEST, ["dataset.path=none.jsonl"]),
    Case(
        "a line that is no JSON",
        HARVEST,
        [],
        write("prompts.jsonl", '{"prompt": "w1 w2"}\n{"prompt": \n'),
    ),
    Case("a line of too many brackets", HARVEST, [], write("prompts.jsonl", "[" * 100_000)),
    Case("half a character", HARVEST, [], write("prompts.jsonl", r'{"prompt": "w1 \ud800"}')),
    Case(
        "a password in an address",
        HARVEST,
        ["responses=server", "responses.model=m", "responses.url=http://me:secret@host/v1"],
    ),
    Case("an object without the field", HARVEST, ["dataset.field=question"]),
    Case("an empty prompt file", HARVEST, [], write("prompts.jsonl", "")),
    Case(
        "a prompt of one token",
        HARVEST,
        [],
        write("prompts.jsonl", '{"prompt": "w1"}\n{"prompt": "w2"}\n{"prompt": "w3"}\n'),
    ),
    Case(
        "two prompts with one id",
        HARVEST,
        [],
        write("prompts.jsonl", '{"id": "a", "prompt": "w1 w2"}\n' * 3),
    ),
    Case("two prompts to split three ways", HARVEST, ["dataset.limit=2"]),
    Case("a limit of no prompts", HARVEST, ["dataset.limit=0"]),
    Case("the folder of another harvest", HARVEST, ["out=data/toy", "gamma=3"]),
    # training
    Case("no such harvest", TRAIN, ["data=data/none"]),
    Case("a harvest that is not finished", TRAIN, ["data=data/begun"]),
    Case("a manifest that is no JSON", TRAIN, [], write("data/toy/manifest.json", "{")),
    Case(
        "a harvest of an older version",
        TRAIN,
        [],
        write("data/toy/manifest.json", '{"schema_version": 2}'),
    ),
    Case("a manifest with a changed number", TRAIN, [], edit("data/toy/manifest.json", gamma=9)),
    Case("a shard cut short", TRAIN, [], cut("data/toy/mixed-00000.parquet")),
    Case("a missing shard", TRAIN, [], lambda: Path("data/toy/mixed-00000.parquet").unlink()),
    Case("rounds shorter than the classes", TRAIN, ["predictor=hrad", "predictor.gamma=30"]),
    Case("layers that were not harvested", TRAIN, ["predictor.layers=[-7]"]),
    Case("an unknown context", TRAIN, ["predictor.context=both"]),
    Case("a negative depth", TRAIN, ["predictor.depth=-1"]),
    Case("no epochs", TRAIN, ["trainer.epochs=0"]),
    Case("a learning rate of nothing", TRAIN, ["trainer.lr=0"]),
    Case("all prompts held out", TRAIN, ["trainer.validation_fraction=1"]),
    Case("drift on a harvest that is not there", TRAIN, ["drift=[data/none]"]),
    Case("an unknown calibration", TRAIN, ["calibration=beta"]),
    Case("a folder of something else to write to", TRAIN, ["out=pair"]),
    Case("a number for a folder to write to", TRAIN, ["out=5"]),
    Case("the root to write to", TRAIN, ["out=/"]),
    Case("too long a name to write to", TRAIN, [f"out=checkpoints/{'x' * 300}"]),
    Case("a word for a seed", TRAIN, ["seed=abc"]),
    Case("a seed below 0", TRAIN, ["seed=-1"]),
    # evaluation
    Case("no such method", EVALUATE, ["methods=[best]"]),
    Case("a folder to write to that is none", EVALUATE, ["out=5"]),
    Case("no folder to write to", EVALUATE, ["out="]),
    Case("no such checkpoint", EVALUATE, ["method.specdecpp.stop.checkpoint=checkpoints/none"]),
    Case("a checkpoint cut short", EVALUATE, [], cut("checkpoints/specdecpp/model.safetensors")),
    Case("a checkpoint of NaN", EVALUATE, [], nan_weights),
    Case(
        "a checkpoint whose card is no JSON",
        EVALUATE,
        [],
        write("checkpoints/specdecpp/config.json", "no"),
    ),
    Case("a checkpoint of another pair", EVALUATE, [], lambda: checkpoint(Path(), pair=PAIR)),
    Case("a checkpoint for another temperature", EVALUATE, ["warp.temperature=0.5"]),
    Case("a checkpoint that is a number", EVALUATE, ["method.specdecpp.stop.checkpoint=5"]),
    Case("no repeats", EVALUATE, ["repeats=0"]),
    Case("no prompts", EVALUATE, ["limit=0"]),
    Case("no prompts to choose on", EVALUATE, ["tried_prompts=0"]),
    Case("one value to try", EVALUATE, ["methods=[fixed]", "tried.fixed.stop.gamma=4"]),
    Case("something else to try", EVALUATE, ["methods=[fixed]", "+tried.fixed.stop.gama=[4]"]),
    Case("no such switch", EVALUATE, ["verbose=figures"]),
    Case("nothing to compare with", EVALUATE, ["against.fixed=fixed"]),
    Case(
        "a number for settings",
        EVALUATE,
        [*PROMPT_LOOKUP, "method.prompt_lookup.engine.settings=5"],
    ),
    Case(
        "copies of no tokens",
        EVALUATE,
        [*PROMPT_LOOKUP, f"{THEIR_SETTINGS}.prompt_lookup_num_tokens=0"],
    ),
    Case(
        "a schedule of none",
        EVALUATE,
        ["methods=[assisted]", "method.assisted.engine.settings.num_assistant_tokens_schedule=x"],
    ),
    Case(
        "a lossy setting",
        EVALUATE,
        ["methods=[assisted]", "+method.assisted.engine.settings.assistant_ensemble_weight=0.5"],
    ),
    Case("no such split", EVALUATE, ["split=dev"]),
    Case("no such thresholds", EVALUATE, ["thresholds=none.json"]),
    Case("thresholds that are no JSON", EVALUATE, ["thresholds=bad.json"], write("bad.json", "{")),
    Case(
        "a rule for other candidates",
        EVALUATE,
        ["methods=[custom]", "structure=specinfer", "verifier=rrsw"],
    ),
    # tuning and tables
    Case("a round at every eighth position only", TUNE, ["data=data/toy"]),
    Case("no such rule", TUNE, ["methods=[best]"]),
    Case("no points", TUNE, ["points=0"]),
    Case("a draft that costs less than nothing", TUNE, ["cost.draft=-1"]),
    Case("drafts longer than the harvested rounds", TUNE, ["gamma_max=30"]),
    Case("a number for a file", TUNE, ["out=5"]),
    Case("no file", TUNE, ["out="]),
    Case("no such benchmark", "papers/benchmark.py", ["what=all"]),
    Case("positions left out", "papers/benchmark.py", ["harvest.stride=4"]),
    Case("a tree of no nodes", "scripts/tune.py", ["what=tree", "nodes=0"]),
    Case("no responses to count", "pairs/draft_vocabulary.py", ["data=null"]),
    Case("one size for several", "pairs/draft_vocabulary.py", ["sizes=5"]),
    Case("nothing to collect", "scripts/tune.py", ["what=checkpoints", "folder=none"]),
    Case(
        "nowhere to put the table",
        "scripts/tune.py",
        ["what=checkpoints", "folder=checkpoints", "out=5"],
    ),
    Case(
        "a number for a folder to collect",
        "scripts/tune.py",
        ["what=checkpoints", "out=table.md", "folder=5"],
    ),
    # report
    Case("no such folder to report on", REPORT, ["run=none"]),
    Case("a folder without a run", REPORT, ["run=pair"]),
    Case("a number for folders", REPORT, ["run=5"]),
    Case("a report in the folder of a run", REPORT, ["out=runs/toy"]),
    Case("results cut short", REPORT, [], write("runs/toy/results.json", '{"metrics": ')),
    Case("results with a word for a number", REPORT, [], lambda: garbled_results()),
    Case("results without plain decoding", REPORT, [], lambda: results_without_baseline()),
    Case("a trace that is no JSON", REPORT, [], write(TRACE, '{"tokens": [')),
    Case("a method without its traces", REPORT, [], lambda: Path(TRACE).unlink()),
    Case("texts of tokens that are no JSON", REPORT, [], write("runs/toy/vocabulary.json", "{")),
    Case("a harvest without one of its shards", REPORT, ["run=data"], lambda: Path(SHARD).unlink()),
    Case(
        "a manifest cut short", REPORT, ["run=data"], write("data/toy/manifest.json", '{"pair": ')
    ),
    Case(
        "a checkpoint that was changed",
        REPORT,
        ["run=checkpoints"],
        edit("checkpoints/specdecpp/config.json", dim=9),
    ),
]


def write_other_tokenizer() -> None:
    path = Path("pair/draft/tokenizer.json")
    path.write_text(path.read_text().replace('"w7"', '"seven"'))


def garbled_results() -> None:
    path = Path("runs/toy/results.json")
    results = json.loads(path.read_text())
    write_checksummed(path, {**results, "requests": dict.fromkeys(results["requests"], "many")})


def results_without_baseline() -> None:
    path = Path("runs/toy/results.json")
    results = json.loads(path.read_text())
    del results["requests"]["autoregressive"]
    write_checksummed(path, results)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pair, prompts, a harvest of it, one of every position, one that was only begun, a
    checkpoint, an evaluation."""
    folder = tmp_path_factory.mktemp("workplace")
    save_tiny_pair(folder / "pair")
    lines = [json.dumps({"id": f"p{n}", "prompt": f"w{n + 1} w{n + 2} w{n + 3}"}) for n in range(9)]
    (folder / "prompts.jsonl").write_text("\n".join(lines))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        command(patch, HARVEST, ["out=data/toy", *SMALL])
        gen_data.main()
        command(patch, HARVEST, ["out=data/rounds", "anchors.stride=1", *SMALL])
        gen_data.main()
    shutil.copytree(folder / "data" / "toy", folder / "data" / "begun")
    (folder / "data" / "begun" / "manifest.json").unlink()
    checkpoint(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        command(patch, EVALUATE, ["out=runs/toy", "limit=1", "repeats=1"])
        evaluate.main()
    return folder


def checkpoint(folder: Path, **changes: object) -> None:
    """Trained on the harvest, or on one that differs in this."""
    manifest = Harvest.open(folder / "data" / "toy").manifest.written
    context = {key: manifest[key] for key in ("pair", "warp", "draft_warp")} | changes
    write_checkpoint(folder / "checkpoints" / "specdecpp", "specdecpp", 24, context=context)


SMALL = ("gamma=4", "inputs.draft_layers=[-1]")
OWN = {
    HARVEST: [
        "max_new_tokens=12",
        "dataset=jsonl",
        "dataset.path=prompts.jsonl",
        "dataset.chat=false",
    ],
    TRAIN: ["data=data/toy", "logger=none", "out=checkpoints/new"],
    EVALUATE: [
        *("dataset=jsonl", "dataset.path=prompts.jsonl", "dataset.chat=false", "logger=none"),
        *("methods=[specdecpp]", "max_new_tokens=12"),
    ],
    TUNE: ["data=data/rounds", "cost=c4", "methods=[fixed]"],
    REPORT: ["run=runs", "out=report", "logger=none"],
}


def command(monkeypatch: pytest.MonkeyPatch, script: str, arguments: list[str]) -> None:
    """What the shell would pass; of two values for a key the last one holds."""
    GlobalHydra.instance().clear()
    pair = (
        [f"pair.{side}=pair/{side}" for side in ("target", "draft")]
        if script in (HARVEST, EVALUATE)
        else []
    )
    mode = any(argument.startswith("what=") for argument in arguments)  # which has its own settings
    own = [] if mode else OWN.get(script, [])
    given = {argument.split("=")[0]: argument for argument in [*pair, *own, *arguments]}
    monkeypatch.setattr("sys.argv", [script, *given.values()])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.wrong.replace(" ", "-"))
@pytest.mark.few(16)
def test_bad_input_is_one_line_and_nothing_is_written(
    case: Case,
    files: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path if case.damage else files
    monkeypatch.chdir(folder)
    if case.damage:
        shutil.copytree(files, tmp_path, dirs_exist_ok=True)
        case.damage()
    before = contents(folder)
    command(monkeypatch, case.script, case.arguments)
    with pytest.raises(SystemExit) as ending:
        SCRIPTS[case.script].main()
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert ending.value.code == 2 and line.startswith("error: "), line
    for argument in case.arguments[-1:]:
        assert set(argument.split("=")[0].split(".")) & set(re.split(r"\W+", line)), (
            "it names the key"
        )
    assert contents(folder) == before


def contents(folder: Path) -> dict[str, int]:
    """Of all files but what Hydra logs of every run."""
    found = {path.relative_to(folder): path for path in folder.rglob("*") if path.is_file()}
    return {
        str(name): hash(path.read_bytes())
        for name, path in found.items()
        if name.parts[0] != "outputs"
    }
