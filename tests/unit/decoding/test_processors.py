"""Warps with processors: their settings, what records say of them, and who takes none."""

from typing import Any

import pytest
import torch

from decoding.engines.autoregressive import AutoregressiveEngine
from decoding.processors import Processed, processed
from decoding.sampling import Sampler, Warp
from evaluation.baselines.generate import warp_settings
from evaluation.baselines.llamacpp import LlamaCppEngine
from evaluation.baselines.vllm import sampling_of
from tests.contract.engines import toy_pair
from tests.helpers.damage.refusals import refuses

TEXT = torch.tensor([2, 0, 1])
LOGITS = torch.tensor([0.5, 1.0, -2.0, 0.3], dtype=torch.float64)


def probs(warp: Warp) -> list[float]:
    return warp.within(1, [3, 9]).after(lambda: TEXT).probs(LOGITS).tolist()


def test_without_processors_it_is_our_own_warp() -> None:
    assert processed(0.7, 3, 0.9) == Warp(0.7, 3, 0.9)


def test_what_each_setting_does() -> None:
    assert probs(processed(bias={3: 9.0}))[3] > 0.99
    assert probs(processed(banned=[1, 2]))[1:3] == [0, 0]
    assert probs(processed(repetition_penalty=1.5))[3] > probs(Warp())[3]
    taken = torch.tensor([0.4 + 0.3, 0.4 + 0.3, 0, 0])  # the prompt is [2]
    of_output = processed(presence_penalty=0.4, frequency_penalty=0.3)
    assert probs(of_output) == pytest.approx((LOGITS - taken).softmax(-1).tolist())
    assert probs(processed(min_new_tokens=3))[3] == 0 < probs(processed(min_new_tokens=2))[3]
    assert probs(processed(forced=[0, 1, 2], banned=[2])) == [0, 0, 1, 0]
    assert probs(processed(forced=[0, 1])) == probs(Warp())
    assert probs(processed(no_repeat_ngram_size=1))[:3] == [0, 0, 0]
    assert probs(processed(min_p=0.9)).count(0.0) == 3
    assert probs(processed(typical_p=0.1)).count(0.0) == 3
    assert probs(processed(0.0, repetition_penalty=9.0)) == [0, 0, 0, 1]
    whole = probs(processed(0.5, min_p=1e-9))
    assert whole == pytest.approx(probs(Warp(0.5)))


def test_records_say_what_it_was_made_with_whatever_it_was_asked() -> None:
    warp = processed(bias={3: 1.0}, repetition_penalty=1.1)
    before = warp.to_dict()
    probs(warp)
    assert warp.to_dict() == before != processed(bias={3: 2.0}, repetition_penalty=1.1).to_dict()
    assert len(str(before)) < 500


FAULTS: list[tuple[str, dict[str, Any]]] = [
    ("^warp: expected temperature >= 0, .* top_p in", {"top_p": 0.0, "min_p": 0.1}),
    ("^warp.typical_p: expected 1 at temperature 0", {"temperature": 0.0, "typical_p": 0.5}),
    ("^warp.bias: expected numbers", {"bias": {1: float("nan")}}),
    ("^warp.bias: expected numbers", {"bias": {1: -float("inf")}}),
]


@pytest.mark.parametrize(("says", "asked"), FAULTS)
def test_settings_that_say_nothing_are_refused(says: str, asked: dict[str, Any]) -> None:
    refuses(says, processed, **asked)


@pytest.mark.parametrize(
    "asked", [{"banned": [3]}, {"banned": [-1]}, {"bias": {3: 1.0}}, {"forced": [3]}]
)
def test_tokens_that_the_model_lacks_are_refused(asked: dict[str, Any]) -> None:
    decoder = AutoregressiveEngine(toy_pair(3, 5), processed(**asked))
    refuses(
        "^warp.banned, warp.bias, warp.forced: expected tokens",
        decoder.decode,
        TEXT,
        2,
        Sampler.seeded(0),
    )


def test_other_engines_take_none() -> None:
    for temperature in (0.0, 1.0):
        warp = processed(temperature, repetition_penalty=1.2)
        assert isinstance(warp, Processed)
        for make in (
            lambda: warp_settings(warp),
            lambda: sampling_of(warp, frozenset(), 3),
            lambda: LlamaCppEngine(None, warp, frozenset()),  # type: ignore[arg-type]
        ):
            refuses(r"^warp: other engines take temperature, top_k and top_p alone", make)
