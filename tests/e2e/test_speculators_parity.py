"""Our logits of EAGLE-3 drafts are those of speculators' own model, for every combination of flags.

It needs other versions than ours, so it has an environment of its own, made once and kept; without
a package index the test is skipped."""

import os
import subprocess
import sys
import venv
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from decoding.models.cached_lm import CachedLM
from decoding.models.eagle.published import Flavour
from decoding.pair import open_pair
from tests.helpers.models.eagles import SAYS, random_model, write_speculators
from tests.helpers.models.tiny_pair import save_tiny_pair, tiny_models

pytestmark = pytest.mark.full
PACKAGES = ["speculators==0.9.0", "transformers<=5.19", "torch==2.13.0"]
CUDA_ONLY = ["torchvision", "torchaudio"]  # come along, and break where torch is a CPU's
CACHE = Path(os.environ.get("DRAFTPREDICT_CACHE", "~/.cache/draftpredict")).expanduser()
SCRIPT = Path(__file__).parents[1] / "helpers" / "models" / "speculators_reference.py"
STEPS = 4
TEXT = torch.randint(1, 32, (12,), generator=torch.Generator().manual_seed(3))
COMBINATIONS = list(
    product(
        (False, True),  # norm_before_residual
        (None, "norm_before_fc", "fc_norm"),
        (False, True),  # norm_output
        (False, True),  # Qwen3's layers
        (1, 2),  # layers
        (None, SAYS),  # a draft vocabulary
        (False, True),  # biases
    )
)


def python() -> Path:
    """Of an environment with speculators."""
    folder = CACHE / "speculators-0.9.0"
    found = folder / "bin" / "python"
    if not (folder / "ready").exists():
        venv.create(folder, with_pip=True, clear=not folder.is_symlink())
        pip = [str(found), "-m", "pip", "-q"]
        made = subprocess.run([*pip, "install", *PACKAGES], capture_output=True, text=True)
        if made.returncode:
            pytest.skip(f"no {PACKAGES[0]}: {made.stderr.strip().splitlines()[-1]}")
        subprocess.run([*pip, "uninstall", "-y", *CUDA_ONLY], check=True, capture_output=True)
        (folder / "ready").touch()
    return found


def drafts(folder: Path, states: torch.Tensor) -> list[Path]:
    """One of each combination, with inputs; row r holds token r + 1 and the states at r."""
    made = []
    for number, (residual, fused, output, qwen, layers, says, bias) in enumerate(COMBINATIONS):
        norms = {fused: True} if fused else {}
        flavour = Flavour((1, 2, 3), norm_before_residual=residual, norm_output=output, **norms)
        model = random_model(flavour, layers=layers, qwen=qwen, attention_bias=bias).float()
        place = write_speculators(folder / str(number), model, says)
        hidden = states[:-1, :-1].flatten(1)[None].contiguous()
        inputs = {"hidden": hidden, "tokens": TEXT[None, 1:].contiguous()}
        save_file(inputs, place / "inputs.safetensors")
        made.append(place)
    return made


@torch.no_grad()
def ours(pair_folder: Path, draft: Path) -> torch.Tensor:
    """[STEPS, rows, V]: row r of step k, whose last k tokens are drafted."""
    pair = open_pair(str(pair_folder / "target"), str(draft), dtype="float32")
    rows = len(TEXT) - STEPS
    found = torch.zeros(STEPS, rows, 32)
    for row in range(rows):
        pair.target.reset()
        pair.draft.reset()
        pair.target.forward(TEXT[: row + 1])
        found[0, row] = pair.draft.forward(TEXT[: row + 2]).logits[-1]
        for step in range(1, STEPS):
            drafted = TEXT[row + 1 + step]
            found[step, row] = pair.draft.forward(drafted[None]).logits[-1]
    return found


def test_logits_are_those_of_speculators(tmp_path: Path) -> None:
    reference = python()
    pair = save_tiny_pair(tmp_path / "pair")
    target = CachedLM(tiny_models()[0].float())
    target.record((1, 2, 3))
    target.forward(TEXT)
    folders = drafts(tmp_path, target.states[: len(TEXT)])
    quiet = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": "", "TORCHDYNAMO_DISABLE": "1"}
    run = [str(reference), "-P", str(SCRIPT), *map(str, folders)]
    done = subprocess.run(run, capture_output=True, text=True, env=quiet)
    assert done.returncode == 0, done.stderr[-2000:]
    differences = []
    for folder, combination in zip(folders, COMBINATIONS, strict=True):
        says = torch.arange(32) if combination[-2] is None else combination[-2]
        expected = load_file(folder / "logits.safetensors")["logits"]
        found = ours(pair, folder)[..., says]
        difference = (found - expected[:, : found.shape[1]]).abs().max()
        differences.append(float(difference))
        assert difference < 1e-4, (combination, difference)
    print(f"{len(differences)} drafts, largest difference {max(differences):.1e}", file=sys.stderr)
