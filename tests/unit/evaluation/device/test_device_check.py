"""A device check on a pretend device: what agrees, what does not, and what a page says of it."""

from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from numpy import ndarray
from omegaconf import OmegaConf

from decoding.models.loading import ModelPair
from decoding.sampling import Warp
from evaluation.device import agreement, check, speeds
from evaluation.device.check import chosen, on, skipped
from runtime.errors import UserError
from tests.helpers.device.device_report import pair_on
from tests.helpers.device.pretend_device import pretend
from tests.invariant.test_harvest import GREEDY, RECIPE, some_requests

PROMPTS = [torch.tensor([3, 7, 1, 9, 4]), torch.tensor([5, 2])]
TOKENS = 8
NOUGHT = torch.zeros(1)


def packed(value: float) -> ndarray:
    """A hidden state as a harvest stores it."""
    return torch.full((3,), value, dtype=torch.bfloat16).view(torch.int16).numpy()


@pytest.mark.parametrize("name", agreement.ENGINES)
@pytest.mark.few(1)
def test_a_device_that_computes_as_the_host_agrees(name: str) -> None:
    host, make = pair_on("cpu", "cpu"), agreement.ENGINES[name]
    with pretend():
        there = pair_on("cuda:0", "cuda:1")
        found = agreement.decodes(host, there, make, PROMPTS, TOKENS)
    assert found == agreement.Agreement(4, 4, [], [])


def broken(pair: ModelPair) -> ModelPair:
    """Its target's logits are turned around."""
    pair.target.model.lm_head.register_forward_hook(lambda *given: -given[-1])
    return pair


@pytest.mark.slow
def test_a_device_that_computes_something_else_is_found() -> None:
    host, make = pair_on("cpu", "cpu"), agreement.ENGINES["chain, block"]
    with pretend():
        there = broken(pair_on("cuda:0", "cuda:0"))
        found = agreement.decodes(host, there, make, PROMPTS, TOKENS)
    assert len(found.faults) >= 2 and "logits" in found.faults[0]
    assert check.verdict({"x": asdict(found)}).startswith("**")


@pytest.mark.parametrize(("side", "name"), [("draft", "q"), ("target", "p")])
@pytest.mark.parametrize("engine", ["chain, block", "SpecBranch, in turn"])
@pytest.mark.slow
def test_probabilities_are_compared_where_tokens_may_be_equal(
    engine: str, side: str, name: str
) -> None:
    """A little too sure, which turns few coins."""
    host, make = pair_on("cpu", "cpu"), agreement.ENGINES[engine]
    with pretend():
        there = pair_on("cuda:0", "cuda:0")
        getattr(there, side).model.lm_head.register_forward_hook(lambda *given: 1.05 * given[-1])
        found = agreement.decodes(host, there, make, PROMPTS, TOKENS)
    assert any(f"{name} of draft token" in fault for fault in found.faults)


def test_outputs_that_differ_are_not_counted_as_equal() -> None:
    host, make = pair_on("cpu", "cpu"), agreement.ENGINES["plain"]
    with pretend():
        there = broken(pair_on("cuda:0", "cuda:0"))
        found = agreement.decodes(host, there, make, PROMPTS, TOKENS)
    assert found.equal == 4 - len(found.faults) == 0


@pytest.mark.parametrize("recipe", [RECIPE, GREEDY])
@pytest.mark.few(1)
def test_records_are_compared(recipe: agreement.HarvestSettings) -> None:
    host, requests = pair_on("cpu", "cpu"), some_requests(3)
    with pretend():
        found = agreement.harvests(host, pair_on("cuda:0", "cuda:0"), requests, recipe)
    assert found == agreement.Agreement(3, 3, [], [])


@pytest.mark.slow
def test_other_records_are_found() -> None:
    host, requests = pair_on("cpu", "cpu"), some_requests(3)
    with pretend():
        there = pair_on("cuda:0", "cuda:0")
        there.draft.model.model.norm.register_forward_hook(lambda *given: 1.1 * given[-1])
        found = agreement.harvests(host, there, requests, GREEDY)
    assert found.faults and not found.equal


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [
        (torch.tensor([1.0, 100.0]), torch.tensor([1.0, 101.0]), 1 / 101),
        (torch.zeros(2), torch.zeros(3), float("inf")),
        (torch.zeros(0), torch.zeros(0), 0.0),
        (NOUGHT / 0, NOUGHT, float("inf")),
        (NOUGHT, NOUGHT / 0, float("inf")),
        (torch.tensor([float("inf")]), torch.ones(1), float("inf")),
        (torch.full((2,), -float("inf")), torch.full((2,), -float("inf")), 0.0),
        (NOUGHT / 0, NOUGHT / 0, 0.0),
        (packed(float("nan")), packed(1.0), float("inf")),
        (3, 3, 0.0),
        ("a", "b", float("inf")),
    ],
)
def test_distances(ours: object, theirs: object, expected: float) -> None:
    assert agreement.distance(ours, theirs) == pytest.approx(expected)


def test_differences_are_named() -> None:
    assert agreement.first_difference([1, 2], [1, 3]) == "token 1: 2 for 3"
    assert agreement.first_difference([1, 2], [1]) == "2 tokens for 1"


@pytest.mark.slow
def test_speeds_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 5)
    with pretend():
        pair = pair_on("cuda:0", "cuda:0")
        pair.draft.reads_target = True  # nothing runs on threads of its own
        devices = [pair.target.device, torch.device("cpu")]
        found = speeds.decoding_speeds(pair, None, PROMPTS, TOKENS, 1, Warp(0.0))
        pair.draft.reads_target = False
        memory = speeds.peak_memory(
            devices, lambda: speeds.harvest_speed(pair, some_requests(3), GREEDY, 1)
        )
    assert set(found) == set(speeds.TIMED) and memory == {"cuda:0": 5}
    assert all(each.rate > 0 and 0 <= each.outside <= 1 for each in found.values())


def test_time_in_forwards_is_that_of_the_engine_alone() -> None:
    """Plain decoding leaves the draft as an engine before it left it."""
    pair = pair_on("cpu", "cpu")
    pair.draft._clock._seconds = 1e6
    found = speeds.decoding_speeds(pair, None, PROMPTS, TOKENS, 1, Warp(0.0))
    assert 0 < found["plain"].outside < 1


def test_a_host_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(UserError, match="device: torch sees no GPU here"):
        chosen(None, None)
    with pytest.raises(UserError, match="second: expected cpu, got cuda:1"):
        chosen("cpu", "cuda:1")
    assert chosen("cpu", None) == ("cpu", None)
    lines = skipped(pair_on("cpu", "cpu"), "cpu", None)
    assert [line.split(":")[0] for line in lines] == ["two devices", "memory"]
    pair = pair_on("cpu", "cpu")
    pair.draft.reads_target = True
    assert skipped(pair, "cpu", "cpu")[0].startswith("SpecBranch, in turn and side by side: ")


def test_the_devices_that_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert chosen(None, None) == ("cuda:0", "cuda:1")
    assert chosen("cuda:1", None) == ("cuda:1", "cuda:0")
    for other in ("cuda:7", "mps", "auto", "disk"):
        message = f"device: expected cuda:0 or cuda:1 or cpu, got {other}"
        with pytest.raises(UserError, match=message):
            chosen(other, None)


def test_each_model_is_timed_in_its_own_dtype() -> None:
    cfg = OmegaConf.create({"dtype": "auto", "target_dtype": "bfloat16", "draft_dtype": "float32"})
    found = on(cfg, "cuda:0", "cuda:1")
    sides = [found.model(side) for side in ("target", "draft")]
    assert [(side.dtype, side.device) for side in sides] == [
        ("bfloat16", "cuda:0"),
        ("float32", "cuda:1"),
    ]
    same = on(cfg, "cpu", "cpu", "float64")
    assert {same.model(side)[2:4] for side in ("target", "draft")} == {("cpu", "float64")}


def test_a_page_says_what_was_found(tmp_path: Path) -> None:
    found = {
        "device": "cuda:0 (some GPU)",
        "command": "python scripts/check_device.py",
        "setup": {"threads": 2},
        "agreement": {
            "plain": asdict(agreement.Agreement(1, 3, ["greedy, token 3: a tie"], ["a fault"]))
        },
        "speeds": {
            "generate": speeds.Speed(10.0).to_dict(),
            "plain": speeds.Speed(20.0, 0.25).to_dict(),
        },
        "memory": {"cuda:0": 3 * 10**9},
        "skipped": ["two devices: this machine has no second GPU"],
    }
    found["verdict"] = check.verdict(found["agreement"])
    text = check.page(found)
    for part in ("1 of 3", "- plain: a fault", "a tie", "25%", "3.00", "no second GPU",
                 "**1 faults**", "Attach this page"):  # fmt: skip
        assert part in text
    assert check.verdict({}) == "Equal to the host."
    text = check.page({**found, "setup": {}, "speeds": {}, "memory": {}})
    assert "1 of 3" in text and not any(part in text for part in ("Speed", "Memory", "\n\n\n"))
