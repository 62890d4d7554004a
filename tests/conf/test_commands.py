"""Commands that the docs, the configs and the programs name: a greedy target takes checkpoints of
its own."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*ROOT.glob("docs/**/*.md"), *ROOT.glob("papers/*/README.md")]
TEXTS = [ROOT / "README.md", *PAGES, *ROOT.glob("conf/**/*.yaml"), *ROOT.glob("scripts/*.py")]
COMMAND = re.compile(r"python scripts/(tune|evaluate)\.py ([^`\n#]*warp=greedy[^`\n#]*)")
HOLDERS = {
    "tune": ("rules.{}", "structures.{}"),
    "evaluate": ("method.{}.stop", "method.{}.structure"),
}


def greedy_commands() -> Iterator[tuple[str, str]]:
    for path in TEXTS:
        found = COMMAND.findall(re.sub(r"\\+\n\s*", "", path.read_text()))
        yield from (command for command in found if "what=" not in command[1])


def composed(program: str, *overrides: str) -> DictConfig:
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return compose(program, list(overrides))


@pytest.mark.parametrize(("program", "written"), sorted(set(greedy_commands())))
def test_a_greedy_command_names_checkpoints_of_its_own(program: str, written: str) -> None:
    cfg, default = composed(program, *shlex.split(written)), composed(program)
    for name in cfg.methods:
        for holder in HOLDERS[program]:
            key = f"{holder.format(name)}.checkpoint"
            found = OmegaConf.select(cfg, key)
            assert found is None or found != OmegaConf.select(default, key), key
