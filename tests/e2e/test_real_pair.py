"""The embedded pair, built into the user's own cache: what no tiny model can show."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir

from data_gen.prompts import Prompt
from data_gen.prompts.render import prompt_ids
from decoding.models import ModelPair, load_pair

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def pair() -> ModelPair:
    subprocess.run([sys.executable, "scripts/build_pair.py"], cwd=ROOT, check=True)
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return load_pair(compose("build_pair").pair)


def answer(pair: ModelPair, text: str, tokens: int) -> torch.Tensor:
    """Greedy continuation by the target, prompt included."""
    ids = prompt_ids(Prompt("q", "test", "qa", text), pair.tokenizer, 500)
    return pair.target.model.generate(ids[None], max_new_tokens=tokens, do_sample=False)[0]


def test_target_answers_and_stops(pair: ModelPair) -> None:
    ids = answer(pair, "What is the capital of France?", 32)
    assert "Paris" in pair.tokenizer.decode(ids)
    assert ids[-1] in pair.eos_ids


def test_every_digit_is_a_token_of_its_own(pair: ModelPair) -> None:
    tokens = pair.tokenizer.convert_ids_to_tokens(pair.tokenizer("x\n    12")["input_ids"])
    assert tokens == ["x", "ĊĠĠĠĠ", "1", "2"]


def test_draft_agrees_with_the_target_on_its_answers(pair: ModelPair) -> None:
    ids = answer(pair, "Explain how a refrigerator moves heat from the inside to the outside.", 128)[None]
    with torch.no_grad():
        p, q = (lm.model(ids).logits[0, 60:].softmax(-1) for lm in (pair.target, pair.draft))
    assert torch.minimum(p, q).sum(-1).mean() > 0.3
