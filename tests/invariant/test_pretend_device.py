"""The pretend device refuses and counts what CUDA would, and decodes as the host does."""

from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor

from decoding.engines.serial import SerialEngine
from decoding.models.cached_lm import CachedLM
from decoding.sampling import Sampler, Warp
from decoding.stopping.never import Never
from decoding.structures.chain import Chain
from decoding.verifiers.block import BlockVerifier
from decoding.verifiers.token import TokenVerifier
from runtime.errors import UserError
from tests.helpers.device.device_report import (
    ENGINES,
    GAMMA,
    WARPS,
    PerRound,
    decoded,
    pair_on,
    per_round,
)
from tests.helpers.device.pretend_device import pretend

ROW = 32 * 4  # bytes of the logits of a row
AT_MOST = {  # per round; between two devices, rows of q and what H-RAD reads of the target
    "autoregressive": PerRound(33, 1, 0, 1.1, 0),
    "chain x token": PerRound(310, 45, ROW, 7, 1.9),
    "chain x block": PerRound(340, 47, GAMMA * ROW, 7, 1.95),
    "confidence": PerRound(140, 33, ROW, 5.1, 4),
    "SpecDec++, order of the paper": PerRound(205, 30, ROW, 7.3, 3.7),
    "SpecDec++, order of the code": PerRound(280, 43, ROW, 8.3, 3.1),
    "H-RAD": PerRound(150, 32, 170, 6, 5.3),
    "SpecBranch, in turn": PerRound(390, 20, 210, 11.5, 7.9),
    "DySpec tree of 8 x RRSw": PerRound(770, 320, 8 * ROW, 17, 2.3),
    "tree 2-2-1 x RRSw": PerRound(970, 560, 8 * ROW, 26, 2.7),
    "tree 2-2 x SpecHub": PerRound(515, 260, 4 * ROW, 14.5, 3.4),
    "sources": PerRound(80, 40, 0.3 * ROW, 4, 2),
    "2 paths of 3 x block": PerRound(480, 290, 4.1 * ROW, 22, 3.7),
}
QUICK = ("autoregressive", "chain x token")


def on_device(device: str = "cuda:0") -> Tensor:
    return torch.arange(12.0).view(3, 4).to(device)


MIXED: dict[str, Callable[[Tensor], object]] = {
    "a sum": lambda x: x + torch.ones(3, 4),
    "a sum in place": lambda x: x.add_(torch.ones(3, 4)),
    "into the host": lambda x: torch.ones(3, 4).add_(x),
    "a product": lambda x: x @ torch.ones(4, 3),
    "a product with two devices": lambda x: x @ x.to("cuda:1").T,
    "joined": lambda x: torch.cat([x, torch.ones(3, 4)]),
    "joined with a number": lambda x: torch.stack([x[0, 0], torch.tensor(1.0)]),
    "an index": lambda x: x.gather(1, torch.zeros(3, 1).long()),
    "embedded": lambda x: torch.nn.functional.embedding(torch.tensor([1]), x),
    "a mask": lambda x: x.masked_fill(torch.ones(3, 4) > 0, 0.0),
    "a mask of attention": lambda x: torch.nn.functional.scaled_dot_product_attention(
        *[x[None, None]] * 3, attn_mask=torch.zeros(3, 3)
    ),
    "values by index": lambda x: x.__setitem__(torch.tensor([0, 1]), torch.ones(2, 4)),
    "the host by index": lambda x: torch.ones(3)[torch.tensor([0], device="cuda:0")],
    "its number with the host": lambda x: x.sum() * torch.ones(3),
    "a generator": lambda x: torch.rand(2, device="cuda:0", generator=torch.Generator()),
    "a product of integers": lambda x: x.long() @ x.long().T,
    "another device by index": lambda x: x[torch.tensor([0], device="cuda:1")],
}
MODES = [torch.no_grad, torch.inference_mode]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", MIXED)
def test_what_cuda_refuses_is_refused(name: str, mode: Callable) -> None:
    with pretend(), mode(), pytest.raises(RuntimeError, match="device|'cuda'|_cuda"):
        MIXED[name](on_device())


@pytest.mark.parametrize("mode", MODES)
def test_numpy_needs_a_copy_to_the_host(mode: Callable) -> None:
    with pretend(), mode():
        for convert in (Tensor.numpy, lambda x: x.__array__()):
            with pytest.raises(TypeError, match=r"can't convert cuda:0 .* to numpy"):
                convert(on_device())
        assert on_device().cpu().numpy().sum() == 66


COUNTED: dict[str, tuple[Callable[[Tensor], object], dict[str, int]]] = {
    "a number of the host": (lambda x: x * torch.tensor(2.0), {}),
    "arithmetic": (lambda x: (x + x).softmax(-1).argmax(-1).view(-1).contiguous(), {}),
    "written in place": (lambda x: x.narrow(0, 1, 1).copy_(x[:1]).T.contiguous(), {}),
    "factories": (lambda x: (torch.zeros(3, device="cuda:0"), torch.empty_like(x)), {}),
    "item": (lambda x: x.sum().item(), {"item": 1}),
    "int, float, bool, format": (
        lambda x: (int(x[0, 0]), float(x[0, 0]), bool(x.any()), f"{x.sum():.1f}"),
        {"item": 4},
    ),
    "tolist": (lambda x: x.tolist(), {"tolist": 1}),
    "to the host": (lambda x: (x.cpu(), x.to("cpu", torch.float64)), {"copy": 2}),
    "to the device": (lambda x: torch.ones(4).to(x), {"copy": 1}),
    "between devices": (lambda x: x.to("cuda:1"), {}),
    "made of a list": (lambda x: torch.tensor([1, 2], device="cuda:0"), {"tensor": 1}),
    "indices of the host": (lambda x: x[torch.tensor([0, 2])], {"indices of the host": 1}),
    "indices of a device": (lambda x: x[torch.arange(2, device="cuda:0")], {}),
    "a mask as index": (lambda x: x[x > 3], {"mask as index": 1}),
    "nonzero": (lambda x: x.nonzero(), {"nonzero": 1}),
    "equal": (lambda x: torch.equal(x, x), {"equal": 1}),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", COUNTED)
def test_what_the_host_waits_for_is_counted(name: str, mode: Callable) -> None:
    run, expected = COUNTED[name]
    with pretend() as counts, mode():
        x = on_device()
        before = counts.copy()
        run(x)
        assert counts.since(before).synchronisations == expected


def test_bytes_are_those_of_what_is_copied() -> None:
    with pretend() as counts, torch.no_grad():
        x = on_device()
        x.cpu(), x[0].tolist(), x.to("cuda:1")
        assert counts.bytes == {"to device": 48, "to host": 64, "between": 48}
        assert counts.transfers == {"to device": 1, "to host": 2, "between": 1}


def test_a_layer_moves_as_on_cuda() -> None:
    torch.manual_seed(0)
    layer, x = torch.nn.Linear(4, 2).requires_grad_(False), torch.ones(3, 4)
    expected = layer(x)
    with pretend():
        found = layer.to("cuda:1")(x.to("cuda:1"))
        assert found.device == layer.weight.device == torch.device("cuda:1")
        assert torch.equal(found.cpu(), expected)


# Decodes ------------------------------------------------------------------------------------------


BOUNDED = [
    pytest.param(engine, warp, second, marks=[] if quick else [pytest.mark.slow])
    for engine in ENGINES
    for warp, second in product(WARPS, ("cuda:0", "cuda:1"))
    for quick in [engine in QUICK or (warp, second) == ("T = .7, p = .9", "cuda:1")]
]


@pytest.mark.parametrize(("engine", "warp", "second"), BOUNDED)
@pytest.mark.few(4)
def test_tokens_are_the_hosts_within_bounds(engine: str, warp: str, second: str) -> None:
    expected, _ = decoded(pair_on("cpu", "cpu"), engine, WARPS[warp])
    with pretend():
        trace, counts = decoded(pair_on("cuda:0", second), engine, WARPS[warp])
    assert trace.tokens == expected.tokens
    assert [each.accepted for each in trace.rounds] == [each.accepted for each in expected.rounds]
    assert all(held(per_round(trace, counts), AT_MOST[engine])), per_round(trace, counts)


def test_a_prompt_may_lie_on_the_device() -> None:
    prompt = torch.tensor([3, 7, 1])
    with pretend():
        pair = pair_on("cuda:0", "cuda:0")
        engine = SerialEngine(pair, Chain(GAMMA), Never(), TokenVerifier(), Warp(), Warp())
        expected = engine.decode(prompt, 20, Sampler.seeded(1)).tokens
        found = engine.decode(prompt.to("cuda:0"), 20, Sampler.seeded(1)).tokens
    assert found == expected


@pytest.mark.parametrize("places", [("cpu", "cuda:0"), ("cuda:0", "cpu")])
@pytest.mark.parametrize(
    "engine", ["chain x block", "SpecDec++, order of the paper", "SpecBranch, in turn", "sources"]
)
@pytest.mark.few(2)
def test_one_model_may_be_on_the_host(engine: str, places: tuple[str, str]) -> None:
    warp = WARPS["T = .7, p = .9"]
    expected, _ = decoded(pair_on("cpu", "cpu"), engine, warp, 14)
    with pretend():
        trace, counts = decoded(pair_on(*places), engine, warp, 14)
    assert trace.tokens == expected.tokens and counts.bytes["to host"]


def held(found: PerRound, bounds: PerRound) -> tuple[bool, ...]:
    return tuple(value <= bound for value, bound in zip(found, bounds, strict=True))


def planted(fault: Callable[[CachedLM], object]) -> tuple[bool, ...]:
    """Which bounds of `PerRound` hold with a fault in the target."""
    with pretend():
        pair = pair_on("cuda:0", "cuda:0")
        fault(pair.target)
        trace, counts = decoded(pair, "chain x token", Warp())
    return held(per_round(trace, counts), AT_MOST["chain x token"])


def test_a_host_tensor_mixed_in_is_caught() -> None:
    def fault(target: CachedLM) -> None:
        target._positions = target._positions.cpu()

    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        planted(fault)


@pytest.mark.slow
def test_an_item_per_vocabulary_row_is_caught() -> None:
    def look(_: object, __: object, logits: Tensor) -> None:
        [row.amax().item() for row in logits[0]]

    hooked = planted(lambda target: target.model.lm_head.register_forward_hook(look))
    assert hooked[1:3] == (True, True) and not any(hooked[3:]), "waits"


@pytest.mark.slow
def test_a_hidden_state_copied_to_the_host_is_caught() -> None:
    def look(_: object, __: object, states: Tensor) -> None:
        states.cpu()

    hooked = planted(lambda target: target.model.model.norm.register_forward_hook(look))
    assert not hooked[0], "bytes to the host"


@pytest.mark.parametrize("side", ["target", "draft"])
@pytest.mark.parametrize("rule", [TokenVerifier(), BlockVerifier()])
@pytest.mark.parametrize("warp", [Warp(), Warp(0.0)])
def test_logits_that_are_no_numbers_are_refused(
    side: str, rule: TokenVerifier | BlockVerifier, warp: Warp
) -> None:
    def spoil(_: object, __: object, logits: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) == 3:
            logits = logits.clone()
            logits[:, 0] = float("nan")  # the other rows are as they were
        return logits

    calls: list[int] = []
    with pretend():
        pair = pair_on("cuda:0", "cuda:0")
        getattr(pair, side).model.lm_head.register_forward_hook(spoil)
        engine = SerialEngine(pair, Chain(GAMMA), Never(), rule, warp, Warp())
        with pytest.raises(UserError, match="NaN or infinite logits"):
            engine.decode([3, 7, 1], 20, Sampler.seeded(1))
