"""Every YAML under conf/ is found, composed and, where it names a `_target_`, built: a new file
needs no new test."""

import inspect
import re
import shlex
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.errors import InstantiationException
from hydra.utils import get_object, instantiate
from omegaconf import DictConfig, OmegaConf

from runtime.errors import UserError
from runtime.settings.check import faults
from runtime.settings.kinds import Group
from tests.helpers.damage.hostile import CONF, PROGRAMS, ROOT, program_of
from tests.helpers.programs.programs import composed

SCRIPTS = {
    path.stem: path
    for folder in (ROOT, ROOT / "scripts", ROOT / "pairs", ROOT / "papers")
    for path in sorted(folder.glob("*.py"))
    if (CONF / f"{path.stem}.yaml").is_file()
}
OF_OTHERS = {  # they take the settings of another
    "papers/specbranch/energy.py": "evaluate",
    "papers/hsd/total_variation.py": "evaluate_expected",
}
FILES = sorted(path.relative_to(CONF) for path in CONF.rglob("*.yaml"))


def config_of(script: str, overrides: Sequence[str]) -> str:
    """Name the config of a command: ``what=`` may ask for another than its program's."""
    named = [one.removeprefix("what=") for one in overrides if one.startswith("what=")]
    own = OF_OTHERS.get(script, Path(script).stem)
    config = "_".join([own, *named])
    return config if config in PROGRAMS else own


NAMED = "org/mine"


@pytest.mark.parametrize(
    ("program", "key", "path"),
    [
        ("evaluate", "out", "runs/org%2Fmine-org%2Fmine-T1.0"),
        ("evaluate", "thresholds", "runs/org%2Fmine-thresholds-T1.0.json"),
        ("gen_data", "out", "data/org%2Fmine"),
        ("tune", "cost.file", "runs/org%2Fmine-cost-T1.0.json"),
        ("tune_tree", "structure.tree", "runs/sequoia-org%2Fmine-T1.0.json"),
        ("distill_draft", "chats.folder", "data/distill/org%2Fmine/chats"),
    ],
)
def test_a_name_with_a_slash_makes_no_folder(program: str, key: str, path: str) -> None:
    names = [f"{group}.name={NAMED}" for group in ("pair", "dataset") if group in groups(program)]
    assert OmegaConf.select(composed(program, *names), key) == path


def test_no_path_holds_a_name_as_it_is() -> None:
    """`file_name` makes a part of a path of it."""
    bare = re.compile(r"[\w-]+/[^#]*(?<!file_name:)\$\{\w+\.name\}")
    assert [str(path) for path in FILES if bare.search((CONF / path).read_text())] == []


@cache
def groups(program: str) -> dict[str, str]:
    """The config groups `program` chooses from, such as ``engine``, and the first place where each
    is used, such as ``engine@method.fixed.engine``."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        choices = compose(program, return_hydra_config=True).hydra.runtime.choices
    used = sorted((choice for choice in choices if not choice.startswith("hydra/")), reverse=True)
    return {choice.split("@")[0]: choice for choice in used}


CHOICES = [
    pytest.param(program, place, path.stem, id=f"{program}-{group}-{path.stem}")
    for program in PROGRAMS
    for group, place in groups(program).items()
    for path in sorted((CONF / group).glob("*.yaml"))
]


@cache
def description(program: str) -> type[Group]:
    """Of its settings."""
    return program_of(program).settings


def wrong(program: str, cfg: DictConfig, place: str = "") -> list[str]:
    """What the description has against `cfg` at `place`, or anywhere; values that are still to be
    given aside."""
    missing = OmegaConf.missing_keys(cfg)
    found = faults(description(program), OmegaConf.to_container(cfg, resolve=True))  # type: ignore[arg-type]
    return [str(one) for one in found if one.key not in missing and one.key.startswith(place)]


@pytest.mark.parametrize("program", PROGRAMS)
def test_program_has_its_script_and_resolves(program: str) -> None:
    assert program_of(program).config == program
    OmegaConf.resolve(composed(program))


def test_programs_share_their_default_pair() -> None:
    """What one writes, another reads: the pair's name is in file names. Only what simulates both
    models side by side has a draft that can run so."""
    pairs = {name: composed(name).pair.name for name in PROGRAMS if "pair" in groups(name)}
    assert pairs.pop("tune_overlapped") == "smollm2"
    assert set(pairs.values()) == {"smollm2-eagle"}


def test_side_by_side_goes_with_a_draft_that_can() -> None:
    for name in ("specbranch", "specbranch_branches", "specbranch_thresholds"):
        cfg = composed("evaluate", f"experiment={name}")
        assert cfg.pair.name == "smollm2"
        assert cfg.method.hrad.stop.checkpoint == "checkpoints/hrad-smollm2"
        other = composed("evaluate", f"experiment={name}", "pair=vicuna-68m-13b")
        assert other.pair.name == "vicuna-68m-13b"


@pytest.mark.parametrize("file", FILES, ids=str)
@pytest.mark.few(30, rest="slow")
def test_first_line_is_a_command_that_works(file: Path) -> None:
    lines = (CONF / file).read_text().splitlines()
    first = lines[lines[0] == "# @package _global_"]  # which Hydra wants at the top
    command = re.fullmatch(r"# (?:accelerate launch .*?|python) (\S+\.py)(?: -m)?(.*)", first)
    assert command, f"conf/{file} must start with the command that uses it"
    script, overrides = command.groups()
    assert (ROOT / script).is_file()
    composes(config_of(script, shlex.split(overrides)), *shlex.split(overrides))


@cache
def composes(program: str, *overrides: str) -> None:
    """Several files may name one command."""
    assert not wrong(program, composed(program, *overrides))


def documented(page: Path) -> list[str]:
    """Commands of a page, sweeps aside, on one line each; `mine` is a pair that its reader
    makes."""
    lines = page.read_text().replace("\\\n", " ").splitlines()
    found = [line[2:].split(" #")[0].split() for line in lines if line.startswith("$ python ")]
    once = [" ".join(words) for words in found if "-m" not in words]
    return [command.replace("pair=mine", "pair=smollm2") for command in once]


PAGES = [ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("papers/*/README.md")]
COMMANDS = sorted({command for page in PAGES for command in documented(page)})


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.few(20, rest="slow")
def test_commands_of_the_docs_compose(command: str) -> None:
    _, script, *overrides = shlex.split(command)
    assert (ROOT / script).is_file()
    OmegaConf.resolve(composed(config_of(script, overrides), *overrides))


TOGETHER = {"pair", "dataset", "warp", "structure", "verifier", "stop", "cost", "predictor"} | {
    *("trainer", "calibration", "responses", "features", "logger")
}
"""Groups whose options say nothing of one another: the n-th of each are composed together."""


@cache
def with_nth_options(program: str, number: int) -> tuple[DictConfig, dict[str, str]]:
    """And which they are, by place."""
    chosen = {}
    for group, place in groups(program).items():
        options = sorted((CONF / group).glob("*.yaml"))
        if group in TOGETHER and number < len(options):
            chosen[place] = options[number].stem
    return composed(program, *(f"{place}={option}" for place, option in chosen.items())), chosen


def with_option(program: str, place: str, option: str) -> DictConfig:
    group = place.split("@")[0]
    if group not in TOGETHER:
        return composed(program, f"{place}={option}")
    number = [path.stem for path in sorted((CONF / group).glob("*.yaml"))].index(option)
    cfg, chosen = with_nth_options(program, number)
    assert chosen[place] == option
    return cfg


@pytest.mark.parametrize(("program", "place", "option"), CHOICES)
@pytest.mark.few(40, rest="slow")
def test_option_composes_and_builds(
    program: str, place: str, option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for engine in ("VLLM_PYTHON", "LLAMA_SERVER"):  # none is started
        monkeypatch.setenv(engine, "none")
    cfg = with_option(program, place, option)
    if place == "experiment":
        assert option in cfg.out, "its settings are those of the program"
        assert not wrong(program, cfg)
        return
    key = place.split("@")[-1]
    node = OmegaConf.select(cfg, key)
    assert node is not None and not wrong(program, cfg, f"{key}.")
    if "_target_" not in node:
        return
    keys = {key for key in node if key not in ("_target_", "_partial_")}
    inspect.signature(get_object(node._target_)).bind_partial(**dict.fromkeys(keys))
    if OmegaConf.missing_keys(node):
        return
    try:
        assert instantiate(node) is not None
    except InstantiationException as error:  # what it reads, a checkpoint say, is not there yet
        assert isinstance(error.__cause__, UserError), error


def test_every_option_is_used_by_a_program() -> None:
    used = {group for program in PROGRAMS for group in groups(program)}
    launchers = Path("hydra/launcher")  # of every sweep
    folders = {file.parent for file in FILES}
    assert {str(folder) for folder in folders - {Path(), launchers}} <= used


def test_an_unknown_key_is_an_error() -> None:
    with pytest.raises(Exception, match="Could not override 'pair.targte'"):
        composed("build_pair", "pair.targte=x")


TEXTS = [*PAGES, *ROOT.glob("conf/**/*.yaml"), *ROOT.glob("scripts/*.py")]
GREEDY_COMMAND = re.compile(r"python scripts/(tune|evaluate)\.py ([^`\n#]*warp=greedy[^`\n#]*)")
HOLDERS = {
    "tune": ("rules.{}", "structures.{}"),
    "evaluate": ("method.{}.stop", "method.{}.structure"),
}


def greedy_commands() -> Iterator[tuple[str, str]]:
    for path in TEXTS:
        found = GREEDY_COMMAND.findall(re.sub(r"\\+\n\s*", "", path.read_text()))
        yield from (command for command in found if "what=" not in command[1])


@pytest.mark.parametrize(("program", "written"), sorted(set(greedy_commands())))
def test_a_greedy_command_names_checkpoints_of_its_own(program: str, written: str) -> None:
    cfg, default = composed(program, *shlex.split(written)), composed(program)
    for name in cfg.methods:
        for holder in HOLDERS[program]:
            key = f"{holder.format(name)}.checkpoint"
            found = OmegaConf.select(cfg, key)
            assert found is None or found != OmegaConf.select(default, key), key
