"""Which hidden states leave a model: the layers and positions somebody reads, whatever the prompt's
length."""

from pathlib import Path

import pytest
import torch

from decoding.engines.serial import SerialEngine
from decoding.interfaces import LMOutput
from decoding.models.loading import ModelPair
from decoding.sampling import Sampler, Warp
from decoding.stopping.confidence import Confidence
from decoding.stopping.hrad import HRADStop
from decoding.stopping.specdecpp import SpecDecPPStop
from decoding.structures.chain import Chain
from decoding.verifiers.token import TokenVerifier
from predictors.inputs import Inputs
from runtime.errors import UserError
from tests.helpers.models.tiny_pair import tiny_pair
from tests.helpers.training.checkpoints import write_checkpoint

WIDTH, LAYERS = 24, (-3, -1)


@pytest.fixture
def pair() -> ModelPair:
    return tiny_pair()


def noted(lm: object, monkeypatch: pytest.MonkeyPatch) -> list[LMOutput]:
    """What each call of this model returns from now on."""
    outputs, forward = list[LMOutput](), lm.forward

    def noting(*args, **kwargs) -> LMOutput:
        outputs.append(forward(*args, **kwargs))
        return outputs[-1]

    monkeypatch.setattr(lm, "forward", noting)
    return outputs


@pytest.mark.parametrize("length", [5, 60])
def test_prefill_returns_one_position_for_hrad(
    pair: ModelPair, length: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = Inputs((), LAYERS, token=True)
    checkpoint = write_checkpoint(
        tmp_path / "hrad", "hrad", (len(LAYERS) + 1) * WIDTH, inputs=reads
    )
    stop, outputs = HRADStop(checkpoint, Confidence(0.3)), noted(pair.target, monkeypatch)
    engine = SerialEngine(pair, Chain(4), stop, TokenVerifier(), Warp(), Warp())
    trace = engine.decode([1 + place % 30 for place in range(length)], 20, Sampler.seeded(1))
    prefill, *rounds = outputs
    assert prefill.hidden.shape == (len(LAYERS), 1, WIDTH) and len(prefill.logits) == 0
    assert prefill.hidden.untyped_storage().nbytes() == prefill.hidden.nbytes
    drafted = [len(round_.draft_tokens) + 1 for round_ in trace.rounds]
    assert [output.hidden.shape for output in rounds] == [(2, n, WIDTH) for n in drafted]


def test_a_head_on_the_draft_gets_the_layer_it_reads(
    pair: ModelPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = write_checkpoint(tmp_path / "head", "specdecpp", WIDTH)
    stop, outputs = (
        SpecDecPPStop(checkpoint, 0.9, (1, 5), "paper"),
        noted(pair.draft, monkeypatch),
    )
    target = noted(pair.target, monkeypatch)
    engine = SerialEngine(pair, Chain(5), stop, TokenVerifier(), Warp(), Warp())
    engine.decode(range(1, 31), 20, Sampler.seeded(1))
    assert outputs[0].hidden is None, "nobody reads the prompt's"
    assert {output.hidden.shape for output in outputs[1:]} == {(1, 1, WIDTH)}
    assert all(output.hidden is None for output in target)


def test_layers_and_rows_are_those_of_all(pair: ModelPair) -> None:
    tokens = torch.arange(1, 12)
    every = pair.target.forward(tokens, hidden=range(-5, 0)).hidden
    for layers in ((-1,), (-4, -2), (-2, -4), (-5, -1)):
        for rows in ("all", "last", [3], [7, 0, 2]):
            pair.target.reset()
            some = pair.target.forward(tokens, hidden=layers, hidden_rows=rows).hidden
            index = slice(None) if rows == "all" else [-1] if rows == "last" else rows
            assert torch.equal(some, every[list(layers)][:, index])


def test_more_layers_than_the_model_has_are_refused(pair: ModelPair) -> None:
    with pytest.raises(UserError, match=r"^inputs: expected .* -5 to -1, got \[-6, -1\]"):
        pair.target.forward(torch.arange(3), hidden=(-6, -1))
