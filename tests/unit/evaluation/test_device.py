"""A device check on a pretend device: what agrees, what does not, and what a page says of it; the
memory of models without values."""

from dataclasses import asdict

import pytest
import torch
from numpy import ndarray
from omegaconf import OmegaConf
from transformers import LlamaConfig, LlamaForCausalLM

from decoding.models.kv_cache import SPARE
from decoding.models.loading import ModelPair
from evaluation.device import check
from evaluation.device.check import Agreement, chosen, on, skipped
from evaluation.device.memory import Account, Peak, Valueless, memory_page, peaks
from tests.helpers.damage.refusals import refuses
from tests.helpers.device.device_report import pair_on
from tests.helpers.device.pretend_device import pretend
from tests.invariant.test_harvest import GREEDY, RECIPE, some_requests

PROMPTS = [torch.tensor([3, 7, 1, 9, 4]), torch.tensor([5, 2])]
PLAIN_SPEED = {"rate": 20.0, "outside": 0.25}
TOKENS = 8
NOUGHT, INFINITE = torch.zeros(1), torch.full((2,), -float("inf"))
HIDDEN, LAYERS, HEADS, DIM, WIDE, LENGTH = 64, 6, 2, 16, 128, 3000


def broken(pair: ModelPair, side: str = "target", factor: float = -1.0) -> ModelPair:
    """One model's logits are turned around, or a little too sure."""
    head = getattr(pair, side).model.lm_head
    head.register_forward_hook(lambda *given: factor * given[-1])
    return pair


def decodes(engine: str, second: str = "cuda:0", **changes: object) -> Agreement:
    host, make = pair_on("cpu", "cpu"), check.ENGINES[engine]
    with pretend():
        device = pair_on("cuda:0", second)
        if changes:
            broken(device, **changes)  # type: ignore[arg-type]
        return check.decodes(host, device, make, PROMPTS, TOKENS)


@pytest.mark.parametrize("name", check.ENGINES)
@pytest.mark.few(1)
def test_a_device_that_computes_as_the_host_agrees(name):
    assert decodes(name, "cuda:1") == Agreement(4, 4, [], [])


@pytest.mark.parametrize("engine", ["plain", pytest.param("chain, block", marks=pytest.mark.slow)])
def test_a_device_that_computes_something_else_is_found(engine):
    found = decodes(engine, factor=-1.0)
    assert len(found.faults) >= 2 and "logits" in found.faults[0]
    assert found.equal < 4 and check.verdict({"x": found}).startswith("**")
    if engine == "plain":
        assert found.equal == 4 - len(found.faults) == 0, "what differs is not counted as equal"


@pytest.mark.parametrize(("side", "name"), [("draft", "q"), ("target", "p")])
@pytest.mark.parametrize("engine", ["chain, block", "SpecBranch, in turn"])
@pytest.mark.slow
def test_probabilities_are_compared_where_tokens_may_be_equal(engine, side, name):
    """A little too sure, which turns few draws."""
    found = decodes(engine, side=side, factor=1.05)
    assert any(f"{name} of draft token" in fault for fault in found.faults)


@pytest.mark.parametrize("recipe", [RECIPE, GREEDY])
@pytest.mark.few(1)
def test_records_are_compared(recipe):
    host, requests = pair_on("cpu", "cpu"), some_requests(3)
    with pretend():
        device = pair_on("cuda:0", "cuda:0")
        assert check.harvests(host, device, requests, recipe) == Agreement(3, 3, [], [])
        device.draft.model.model.norm.register_forward_hook(lambda *given: 1.1 * given[-1])
        found = check.harvests(host, device, requests, GREEDY)
    assert found.faults and not found.equal


def packed(value: float) -> ndarray:
    """A hidden state as a harvest stores it."""
    return torch.full((3,), value, dtype=torch.bfloat16).view(torch.int16).numpy()


@pytest.mark.parametrize(
    ("value", "host", "expected"),
    [
        (torch.tensor([1.0, 100.0]), torch.tensor([1.0, 101.0]), 1 / 101),
        (torch.zeros(2), torch.zeros(3), float("inf")),
        (torch.zeros(0), torch.zeros(0), 0.0),
        (NOUGHT / 0, NOUGHT, float("inf")),
        (NOUGHT, NOUGHT / 0, float("inf")),
        (-INFINITE, torch.ones(2), float("inf")),
        (INFINITE, INFINITE, 0.0),
        (NOUGHT / 0, NOUGHT / 0, 0.0),
        (packed(float("nan")), packed(1.0), float("inf")),
        (3, 3, 0.0),
        ("a", "b", float("inf")),
    ],
)
def test_distances(value, host, expected):
    assert check.distance(value, host) == pytest.approx(expected)


def test_differences_are_named_and_speeds_have_the_time_outside_the_models():
    assert check.first_difference([1, 2], [1, 3]) == "token 1: 2 for 3"
    assert check.first_difference([1, 2], [1]) == "2 tokens for 1"
    pair = pair_on("cpu", "cpu")
    pair.draft.reads_target = True  # nothing runs on threads of its own
    speeds = check.decoding_speeds(pair, None, PROMPTS, TOKENS, 1)
    assert set(speeds) == set(check.TIMED)
    assert all(each["rate"] > 0 and 0 < each["outside"] < 1 for each in speeds.values())


def test_the_peak_of_each_gpu_is_counted(monkeypatch):
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 5)
    devices = [torch.device("cuda:0"), torch.device("cpu")]
    assert check.peak_memory(devices, lambda: None) == {"cuda:0": 5}


def test_the_devices_that_are_checked(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert chosen(None, None) == ("cuda:0", "cuda:1")
    assert chosen("cuda:1", None) == ("cuda:1", "cuda:0")
    for other in ("cuda:7", "mps", "auto", "disk"):
        message = f"device: expected cuda:0 or cuda:1 or cpu, got {other}"
        refuses(message, chosen, other, None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    refuses("device: torch sees no GPU here", chosen, None, None)
    refuses("second: expected cpu, got cuda:1", chosen, "cpu", "cuda:1")
    assert chosen("cpu", None) == ("cpu", None)
    pair = pair_on("cpu", "cpu")
    lines = skipped(pair, "cpu", None)
    assert [line.split(":")[0] for line in lines] == ["two devices", "memory"]
    pair.draft.reads_target = True
    assert skipped(pair, "cpu", "cpu")[0].startswith("SpecBranch, in turn and side by side: ")


def test_each_model_is_timed_in_its_own_dtype():
    cfg = OmegaConf.create({"dtype": "auto", "target_dtype": "bfloat16", "draft_dtype": "float32"})
    pair = on(cfg, "cuda:0", "cuda:1")
    assert (pair.target_device, pair.draft_device) == ("cuda:0", "cuda:1")
    assert (pair.dtype, pair.target_dtype, pair.draft_dtype) == ("auto", "bfloat16", "float32")
    pair = on(cfg, "cpu", "cpu", "float64")
    assert {pair.dtype, pair.target_dtype, pair.draft_dtype} == {"float64"}


def test_a_page_says_what_was_found_the_answer_first():
    equal = {"plain": Agreement(1, 3, ["greedy, token 3: a tie"], ["a fault"])}
    facts = {
        "device": "cuda:0 (some GPU)",
        "command": "python scripts/check_device.py",
        "setup": {"threads": 2},
        "agreement": {name: asdict(each) for name, each in equal.items()},
        "speeds": {"generate": {"rate": 10.0, "outside": None}, "plain": PLAIN_SPEED},
        "memory": {"cuda:0": 3 * 10**9},
        "skipped": ["two devices: this machine has no second GPU"],
        "verdict": check.verdict(equal),
    }
    text = check.page(facts)
    assert text.splitlines()[2].startswith("**1 faults**")
    for part in ("1 of 3", "- plain: a fault", "a tie", "25%", "3.00", "no second GPU",
                 "Attach this page"):  # fmt: skip
        assert part in text
    assert check.verdict({}) == "Equal to the host."
    text = check.page({**facts, "setup": {}, "speeds": {}, "memory": {}})
    assert "1 of 3" in text and not any(part in text for part in ("Speed", "Memory", "\n\n\n"))


def model(layers: int = LAYERS) -> LlamaForCausalLM:
    config = LlamaConfig(
        hidden_size=HIDDEN,
        num_hidden_layers=layers,
        num_attention_heads=HIDDEN // DIM,
        num_key_value_heads=HEADS,
        head_dim=DIM,
        intermediate_size=WIDE,
        vocab_size=100,
        max_position_embeddings=2 * LENGTH,
    )
    with torch.device("meta"):
        return LlamaForCausalLM(config).eval().requires_grad_(False)


def test_an_account_is_what_is_alive():
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


def test_what_the_host_reads_is_one():
    with Valueless():
        x = torch.empty(2, device="meta")
        assert x.tolist() == [1, 1] and float(x[0]) == 1 and not bool((x > 0).any())
        assert x.cpu().sum() == 2 and x.to("cpu", torch.float64).dtype == torch.float64
        assert x.to(torch.float64).device.type == "meta"


@pytest.mark.parametrize("recipe", [RECIPE, GREEDY])
@pytest.mark.slow
def test_a_decode_and_a_harvest_by_hand(recipe):
    [found] = peaks(model(), model(1), recipe, [LENGTH])
    layers = len(recipe.layers.of("target_hidden"))
    assert found.all_states == (LAYERS + 1) * LENGTH * HIDDEN * 4
    assert found.asked == layers * LENGTH * HIDDEN * 4
    row = 2 * (LAYERS + 1) * HEADS * DIM * 4  # keys and values
    positions = 2 * 2 * LENGTH * 8
    assert row * LENGTH <= found.caches <= row * (LENGTH + SPARE) + positions + 4096
    at_work = 3 * LENGTH * WIDE * 4 + 4 * LENGTH * HIDDEN * 4  # in a feed-forward part
    assert found.caches < found.decode <= found.caches + found.asked + at_work
    assert found.harvest > found.caches
    text = memory_page([Peak(1024, *[10**9] * 5)], [2 * 10**9, 10**8])
    assert "(2.0 and 0.1 GB)" in text and text.count("1.00") == 5 and "1,024" in text
