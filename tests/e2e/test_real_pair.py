"""The embedded pairs, built into the user's own cache: what no tiny model can show."""

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from data_gen.prompts import Prompt, load_prompts
from data_gen.prompts.render import prompt_ids
from data_gen.requests import requests_of_split
from decoding.engines.autoregressive import AutoregressiveEngine
from decoding.engines.overlapped import OverlappedEngine
from decoding.engines.serial import SerialEngine
from decoding.models.loading import ModelPair, load_pair, pair_identity
from decoding.sampling import Sampler, Warp
from decoding.settings import Pair
from decoding.stopping.never import Never
from decoding.structures.branch_point import BranchPoint
from decoding.structures.lookup import Lookup
from decoding.verifiers.point_mass import PointMassVerifier
from decoding.verifiers.rrsw import RrswVerifier
from decoding.verifiers.token import TokenVerifier
from evaluation.lossless import greedy_differences
from predictors.base import load_predictor
from tests.helpers.programs.programs import composed
from tests.unit.decoding.engines.test_overlapped import ByTarget

ROOT = Path(__file__).resolve().parents[2]

PLAIN = ("pair.dtype=float32", "pair.draft_vocabulary=null")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def pair() -> ModelPair:
    subprocess.run([sys.executable, "pairs/build_pair.py"], cwd=ROOT, check=True)
    return load_pair(Pair.of(composed("build_pair", "pair=smollm2", *PLAIN).pair))


def test_the_default_draft_reads_its_target_and_says_frequent_tokens(pair: ModelPair) -> None:
    found = load_pair(Pair.of(composed("build_pair").pair))
    assert found.draft.reads_target
    assert pair_identity(found)["target"] == pair_identity(pair)["target"]
    assert found.draft.vocabulary is not None and 8192 <= len(found.draft.vocabulary) < 8200
    load_predictor(ROOT / "pairs/smollm2/value", expect={"pair": pair_identity(found)})


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
    question = "Explain how a refrigerator moves heat from the inside to the outside."
    ids = answer(pair, question, 128)
    with torch.no_grad():
        p, q = (lm.model(ids[None]).logits[0, 60:].softmax(-1) for lm in (pair.target, pair.draft))
    assert torch.minimum(p, q).sum(-1).mean() > 0.3


@pytest.fixture(scope="module", params=[12, pytest.param(50, marks=pytest.mark.full)])
def prompts(pair: ModelPair, request: pytest.FixtureRequest) -> list[torch.Tensor]:
    """So many starter prompts."""
    found = load_prompts(composed("evaluate").dataset)
    asked = requests_of_split(found, pair, 64, "all", {}, request.param)
    assert len(asked) == request.param
    return [each.tokens for each in asked]


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.full), 1.0])
def test_side_by_side_is_in_turn(
    pair: ModelPair, prompts: list[torch.Tensor], threads: None, temperature: float
) -> None:
    """Every model has one thread either way: another number of them rounds differently. Tokens are
    drawn in float64."""
    warp, rule = Warp(temperature), RrswVerifier() if temperature else PointMassVerifier()

    def decode(overlap: bool) -> list[list[int]]:
        torch.set_num_threads(2 if overlap else 1)
        parts = BranchPoint(4, 6), ByTarget(), TokenVerifier(), rule, warp, warp
        engine = OverlappedEngine(pair, *parts, overlap=overlap, eos_ids=frozenset(pair.eos_ids))
        return [engine.decode(ids, 16, Sampler.seeded(i)).tokens for i, ids in enumerate(prompts)]

    assert decode(overlap=True) == decode(overlap=False)


def test_greedy_is_autoregressive(pair: ModelPair, prompts: list[torch.Tensor]) -> None:
    """Token for token; without the forward in C++ but for near ties of the target's logits, which
    other row counts may round the other way."""
    greedy, eos_ids = Warp(0.0), frozenset(pair.eos_ids)
    parts = BranchPoint(4, 6), ByTarget(), TokenVerifier(), PointMassVerifier(), greedy, greedy
    plain = AutoregressiveEngine(pair, greedy, eos_ids)
    traces = [
        [engine.decode(ids, 24, Sampler.seeded(0)) for ids in prompts[:20]]
        for engine in (OverlappedEngine(pair, *parts, eos_ids=eos_ids), plain)
    ]
    differences = greedy_differences(
        pair.target, prompts[:20], *traces, None if pair.target.exact else torch.float32
    )
    assert all(each.excused for each in differences), differences


@pytest.mark.full
def test_gemma_copies_its_text_far_past_its_windows() -> None:
    """As `generate` goes on, but for near ties."""
    subprocess.run([sys.executable, "pairs/build_pair.py", "pair=gemma3"], cwd=ROOT, check=True)
    found = load_pair(Pair.of(composed("build_pair", "pair=gemma3", PLAIN[0]).pair))
    assert found.eos_ids == (1, 106) and found.target.vocab_size == 1 << 18
    text = " ".join(f"Ticket {n} costs {7 * n} pence." for n in range(1, 80))
    ids, greedy = torch.tensor(found.tokenizer(text)["input_ids"]), Warp(0.0)
    assert len(ids) > 512 + 64
    engine = SerialEngine(
        found, Lookup(3, 1, 8), Never(), TokenVerifier(), greedy, greedy, frozenset(found.eos_ids)
    )
    trace = engine.decode(ids, 48, Sampler.seeded(0))
    expected = found.target.model.generate(ids[None], max_new_tokens=48, do_sample=False)[0]
    plain = replace(trace, tokens=expected[len(ids) :].tolist())
    differences = greedy_differences(found.target, [ids], [trace], [plain])
    assert all(each.excused for each in differences), differences
    assert len(trace.rounds) < 40
