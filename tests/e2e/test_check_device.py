"""scripts/check_device.py from its command line, the host checked against itself."""

import json
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from evaluation.device import check
from scripts import check_device
from tests.helpers.models.stateful import stateful
from tests.helpers.models.tiny_pair import CONFIG, tiny_tokenizer
from tests.helpers.programs import programs
from tests.helpers.programs.programs import JSONL, models, write_prompts

SMALL = "device=cpu max_new_tokens=6 repeats=1 harvest.max_new_tokens=6 harvest.gamma=3".split()
PAGE = Path("runs/device/device.md")


@pytest.fixture(autouse=True)
def workplace(here: Path) -> None:
    write_prompts(3)


def run(pair: Path, *arguments: str) -> str:
    return programs.run(check_device, *SMALL, *JSONL, *models(pair), *arguments)


def refused(pair: Path, *arguments: str) -> str:
    return programs.refused(check_device, *SMALL, *JSONL, *models(pair), *arguments)


def test_the_host_agrees_with_itself(tiny_pair_dir: Path) -> None:
    printed = run(tiny_pair_dir)
    assert "Equal to the host." in printed and "side by side" in printed
    found = json.loads(Path("runs/device/device.json").read_text())
    assert found["agreement"] and not any(e["faults"] for e in found["agreement"].values())
    assert set(found["speeds"]) >= {"generate", "plain", "side by side", "harvest, labels"}
    assert PAGE.read_text() in printed
    assert "machine" not in found["setup"], "a page that is sent around names no machine"


def test_a_difference_ends_in_one_line(
    tiny_pair_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what was compared is kept where the rest does not fit."""
    fault = check.Agreement(0, 1, [], ["another token"])
    monkeypatch.setattr(check, "agreed", lambda *_: {"plain": fault})
    message = refused(tiny_pair_dir)
    assert message.startswith("error: device: it differs from the host. See runs/device")
    assert "another token" in PAGE.read_text()

    full = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB\nmore")
    monkeypatch.setattr(check, "measure", Mock(side_effect=full))
    message = refused(tiny_pair_dir)
    assert "error: harvest.batch_size: CUDA out of memory. Tried to allocate 9 GiB. L" in message
    text = PAGE.read_text()
    assert "speeds and memory: the check ended before" in text and "plain, in float32" in text


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("device=null", "device: torch sees no GPU here"),
        ("device=tpu", "device: expected a device such as cpu or cuda:0"),
        ("second=3", "second: expected a device such as cpu or cuda:0"),
        ("second=cuda:9", "second: expected cpu, got cuda:9"),
        ("memory=[9999]", "memory: 10008 tokens with the response, of"),
        ("memory=[0]", "memory: expected a list of different whole numbers from 1 on"),
        ("memory=[1]", "memory: expected prompts of at least 2 tokens, got 1. Give longer"),
    ],
)
def test_bad_input_is_one_line(argument: str, message: str, tiny_pair_dir: Path) -> None:
    assert message in refused(tiny_pair_dir, argument)


def test_a_pair_with_states_is_refused_in_one_line(tiny_pair_dir: Path) -> None:
    """Before the first engine, some of which draft trees."""
    model = stateful("Lfm2", vocab_size=CONFIG.vocab_size)
    model.save_pretrained("recurrent")
    tiny_tokenizer().save_pretrained("recurrent")
    message = refused(tiny_pair_dir, "pair.draft=recurrent")
    assert message.startswith("error: pair.draft: expected one path of one text")


@pytest.mark.slow
def test_memory_needs_configs_alone(tiny_pair_dir: Path, tmp_path: Path) -> None:
    for side in ("target", "draft"):
        (tmp_path / side).mkdir()
        config = (tiny_pair_dir / side / "config.json").read_text()
        (tmp_path / side / "config.json").write_text(config)
    printed = run(tmp_path, "memory=[20,40]")
    assert "modelled" in printed and "| 20 " in printed and "| 40 " in printed
    assert not Path("runs").exists()
    (tmp_path / "draft" / "target_features.safetensors").touch()
    message = refused(tmp_path, "memory=[20]")
    assert message.startswith("error: memory: this draft reads its target's states")
