"""vLLM beside us: as an engine, as costs by requests at once, and as a source of responses; a
program pretends to be it."""

import json
from pathlib import Path

import pytest
import torch

from data_gen.prompts import Prompt
from data_gen.responses.external import ExternalResponse, with_responses
from data_gen.responses.vllm import Vllm
from data_gen.settings import HarvestSettings
from decoding.sampling import Sampler, Warp
from evaluation.baselines import vllm
from predictors.features.layers import RecordedLayers
from tests.helpers.damage.refusals import refuses
from tests.helpers.models.tiny_pair import save_tiny_pair, tiny_pair
from tests.helpers.programs.pretend_vllm import pretend_vllm


@pytest.fixture
def models(tmp_path: Path) -> dict:
    folder = save_tiny_pair(tmp_path / "pair")
    sides = {side: str(folder / side) for side in ("target", "draft")}
    return {**sides, "target_dtype": "auto", "draft_dtype": "auto", "max_length": 64}


def test_an_engine_says_what_vllm_says(models: dict, tmp_path: Path) -> None:
    python = str(pretend_vllm(tmp_path))
    speculation = {"method": "draft_model", "model": "draft", "num_speculative_tokens": 2}
    facts = {"proposer": None, "requests": 4, "warp": Warp(0.0), "pair": tiny_pair()}
    engine = vllm.served(models, python, speculation, eos_ids=frozenset({0}), **facts)
    trace = engine.decode(torch.tensor([3, 4]), 6, Sampler.seeded(0))
    assert trace.tokens == [1, 2, 3, 4, 5, 6] and len(trace.rounds) == 3
    said = engine.serve([[3, 4], [1]], [0, 0], 4, 2)
    assert said["tokens"] == [[1, 2, 3, 4], [2, 3, 4, 5]] and said["accepted_tokens"] == 4
    facts |= {"proposer": str(tmp_path / "none.json")}
    gone = (models, python, speculation)
    refuses("engine.proposer: .* is not there", vllm.served, *gone, eos_ids=frozenset(), **facts)


def test_costs_by_requests_at_once(models: dict, tmp_path: Path) -> None:
    python = str(pretend_vllm(tmp_path))
    costs = vllm.measured_batches(models, python, [1, 4], [1, 2, 4], 20)
    assert (costs.requests, costs.rows) == ([1, 4], [1, 2, 3, 5])
    assert costs.target(4, 12) == pytest.approx(0.01 + 0.001 * 4 * 3)
    assert costs.target(1, 1) == pytest.approx(0.011)
    alone = vllm.measured_cost(models, python, [1, 2, 4], 20)
    assert alone.autoregressive == pytest.approx(0.011)
    broken = (models | {"target": "broken"}, python, None, None, 1, Warp(0.0), tiny_pair())
    refuses(r"engine: vLLM failed \(ValueError: no such model\)", vllm.served, *broken, frozenset())


# Responses ---------------------------------------------------------------------------------------

SETTINGS = HarvestSettings(2, 0, 5, 4, 0.1, 1, Warp(0.7), Warp(), RecordedLayers([-1], [-1]))
PROMPTS = [Prompt(f"p{n}", "some", "none", f"w{n} w2 w3", chat=False) for n in range(1, 8)]


def test_responses_are_kept_where_vllm_ends_and_asked_for_once(
    models: dict, tmp_path: Path
) -> None:
    def fetched(dies: int, ask: bool = True) -> dict[str, ExternalResponse]:
        source = Vllm(str(pretend_vllm(tmp_path, dies)), models["target"], "auto", 64, 2)
        return source.fetch(PROMPTS, SETTINGS, tmp_path / "out", ask)

    refuses(r"responses: vLLM failed \(RuntimeError: out of memory\)", fetched, 4)
    kept = (tmp_path / "out/answers.jsonl").read_text().splitlines()
    assert [json.loads(line)["id"] for line in kept] == ["p1", "p2", "p3", "p4"]
    refuses("estimate: 3 responses are still to be asked", fetched, 0, ask=False)
    found = fetched(4)
    assert list(found) == [prompt.id for prompt in PROMPTS]
    assert found["p1"].content == [7, 1, 2, 3, 4] and not found["p1"].finished
    nowhere = Vllm("none", models["target"], "auto", 64, 2)
    refuses("responses.python: .*make vllm", nowhere.fetch, PROMPTS, SETTINGS, tmp_path / "b", True)


def test_another_prompt_than_ours_is_refused() -> None:
    from data_gen.requests import Request

    pair, request = tiny_pair(), Request("p", "some", torch.tensor([3, 4, 5]), "all")
    same = ExternalResponse("p", [7, 8], False, "line 1", asked=[3, 4, 5])
    assert with_responses([request], {"p": same}, pair, 5)[0].response is not None
    other = ExternalResponse("p", [7, 8], False, "line 1", asked=[3, 9, 5])
    wrong = "line 1: the prompt p was asked with other tokens than ours, from token 1 on"
    refuses(wrong, with_responses, [request], {"p": other}, pair, 5)
