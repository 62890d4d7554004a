"""Memory of models without values: what is counted, and that everything runs."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from data_gen.settings import HarvestSettings
from decoding.models.kv_cache import SPARE
from evaluation.device.check import memory_page
from evaluation.device.memory import Account, Peak, Valueless, peaks
from tests.invariant.test_harvest import GREEDY, RECIPE

HIDDEN, LAYERS, HEADS, DIM, WIDE, VOCABULARY = 64, 6, 2, 16, 128, 100
LENGTH = 3000


def model(layers: int = LAYERS) -> LlamaForCausalLM:
    config = LlamaConfig(
        hidden_size=HIDDEN,
        num_hidden_layers=layers,
        num_attention_heads=HIDDEN // DIM,
        num_key_value_heads=HEADS,
        head_dim=DIM,
        intermediate_size=WIDE,
        vocab_size=VOCABULARY,
        max_position_embeddings=2 * LENGTH,
    )
    with torch.device("meta"):
        return LlamaForCausalLM(config).eval().requires_grad_(False)


def test_an_account_is_what_is_alive() -> None:
    weights = torch.nn.Linear(4, 3, device="meta")
    with Account(weights) as account, torch.no_grad():
        x = torch.empty(10, 4, device="meta")
        assert account.alive == 160
        y = weights(x)[2:]
        assert account.alive == 160 + 120, "a view is no tensor of its own, nor are weights"
        del x
        assert account.alive == 120
        y.add_(1)
        del y
        assert (account.alive, account.peak) == (0, 280)


def test_what_the_host_reads_is_one() -> None:
    with Valueless():
        x = torch.empty(2, device="meta")
        assert x.tolist() == [1, 1] and float(x[0]) == 1 and not bool((x > 0).any())
        assert x.cpu().sum() == 2 and x.to("cpu", torch.float64).dtype == torch.float64
        assert x.to(torch.float64).device.type == "meta"


@pytest.mark.parametrize("recipe", [RECIPE, GREEDY])
@pytest.mark.slow
def test_a_decode_and_a_harvest_by_hand(recipe: HarvestSettings) -> None:
    target, draft = model(), model(1)
    [found] = peaks(target, draft, recipe, [LENGTH])
    layers = len(recipe.layers.of("target_hidden"))
    assert found.all_states == (LAYERS + 1) * LENGTH * HIDDEN * 4
    assert found.asked == layers * LENGTH * HIDDEN * 4
    row = 2 * (LAYERS + 1) * HEADS * DIM * 4  # keys and values
    positions = 2 * 2 * LENGTH * 8
    assert row * LENGTH <= found.caches <= row * (LENGTH + SPARE) + positions + 4096
    at_work = 3 * LENGTH * WIDE * 4 + 4 * LENGTH * HIDDEN * 4  # in a feed-forward part
    assert found.caches < found.decode <= found.caches + found.asked + at_work
    assert found.harvest > found.caches


def test_page() -> None:
    text = memory_page([Peak(1024, *[10**9] * 5)], [2 * 10**9, 10**8])
    assert "(2.0 and 0.1 GB)" in text and text.count("1.00") == 5 and "1,024" in text
