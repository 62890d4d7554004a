"""Programs with both models on a pretend device print and write what they do on the host."""

from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from transformers import PreTrainedModel

from decoding.models import loading
from decoding.settings import ModelSettings
from decoding.trace import read_traces
from serving.generate import speculate
from tests.helpers.device.pretend_device import Counts, pretend
from tests.helpers.evaluation.evaluating import run, write_checkpoints
from tests.helpers.models.tiny_pair import tiny_models
from tests.helpers.programs.programs import GREEDY

DEVICES = ("pair.target_device=cuda:0", "pair.draft_device=cuda:0")
WARPS = {"greedy": (0.0, GREEDY), "sampled": (1.0, ())}
METHODS = ("autoregressive", "confidence", "specdecpp", "hrad")


@pytest.fixture
def counts() -> Iterator[Counts]:
    """Of a device that `from_pretrained` loads models to."""
    plain = loading.load_plain

    def load(settings: ModelSettings) -> PreTrainedModel:
        return plain(settings._replace(device="cpu")).to(settings.device)  # type: ignore[arg-type]

    with (
        patch.object(loading, "load_plain", load),
        patch("torch.cuda.get_device_name", lambda _: "a pretend device"),
        pretend() as found,
    ):
        yield found


@pytest.mark.parametrize("name", WARPS)
@pytest.mark.slow
def test_evaluation(name: str, evaluating: list[str], request: pytest.FixtureRequest) -> None:
    temperature, warp = WARPS[name]
    write_checkpoints(evaluating, {"temperature": temperature, "top_k": 0, "top_p": 1.0})
    small = (*evaluating, *warp, f"methods=[{','.join(METHODS)}]", "repeats=1", "split=test")
    run(*small)
    counts: Counts = request.getfixturevalue("counts")
    run(*small, *DEVICES, "out=runs/there")
    assert counts.bytes["to host"], "nothing was on the device"
    assert "a pretend device" in Path("runs/there/results.json").read_text()
    for method in METHODS:
        theirs, ours = (
            [trace.tokens for trace in read_traces(folder / f"traces-{method}.jsonl")]
            for folder in (Path("runs/x"), Path("runs/there"))
        )
        assert ours == theirs and ours[0], method


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.slow
def test_inside_generate(sampled: bool, request: pytest.FixtureRequest) -> None:
    prompt = torch.tensor([[3, 7, 1, 9, 4]])
    asked = {"max_new_tokens": 20, "do_sample": sampled, "custom_generate": speculate}

    def output(device: str) -> torch.Tensor:
        torch.manual_seed(0)
        target, draft = (model.to(device) for model in tiny_models())
        found: torch.Tensor = target.generate(prompt.to(device), draft=draft, **asked)
        return found.cpu()

    expected = output("cpu")
    request.getfixturevalue("counts")
    assert torch.equal(output("cuda:0"), expected)
