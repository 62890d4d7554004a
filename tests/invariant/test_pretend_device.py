"""The pretend device refuses and counts what CUDA would; on it, or on two, everything draws and
decodes what it does on the host, and every predictor learns what it learns there."""

import json
import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from decoding.draft import Draft, RoundContext
from decoding.draft_tree import DraftTree
from decoding.engines.batched import Asked, BatchedEngine
from decoding.engines.lookahead import LookaheadEngine
from decoding.engines.overlapped import OverlappedEngine
from decoding.engines.serial import SerialEngine
from decoding.models.cached_lm import CachedLM
from decoding.models.eagle.published import Flavour, PublishedDraft
from decoding.models.loading import ModelPair
from decoding.picking import DevicePool
from decoding.sampling import Sampler, Warp, top_tokens
from decoding.stopping.confidence import Confidence
from decoding.stopping.never import Never
from decoding.stopping.specdecpp import SpecDecPPStop
from decoding.structures.branch_point import BranchPoint
from decoding.structures.chain import Chain
from decoding.trace import Stopwatch, Trace
from decoding.verification import WarpedRows
from decoding.verifiers.block import BlockVerifier
from decoding.verifiers.hsd_released import HsdReleased
from decoding.verifiers.rrsw import RrswVerifier
from decoding.verifiers.token import TokenVerifier
from runtime.errors import UserError
from tests.contract.engines import ALONE, ASKING, STOP_CASES, Case, Engine, engine, stop_rule
from tests.contract.rules import load
from tests.helpers.data.harvests import write_harvest
from tests.helpers.device.device_report import (
    ENGINES,
    GAMMA,
    PROMPT,
    WARPS,
    PerRound,
    chain,
    decoded,
    harvested,
    head,
    pair_on,
    per_label,
    per_round,
)
from tests.helpers.device.pretend_device import Counts, Pretend, pretend
from tests.helpers.models.eagles import FLAVOURS, SAYS, random_model
from tests.helpers.models.tiny_pair import CONFIG, EOS, tiny_models, tiny_tokenizer
from tests.helpers.training.pretend_training import NAMES, trained
from tests.invariant.test_harvest import GREEDY, RECIPE
from tests.invariant.test_joined import assert_same

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
    "into the host": lambda x: torch.ones(3, 4).add_(x),
    "a product": lambda x: x @ torch.ones(4, 3),
    "a product with two devices": lambda x: x @ x.to("cuda:1").T,
    "joined": lambda x: torch.cat([x, torch.ones(3, 4)]),
    "an index": lambda x: x.gather(1, torch.zeros(3, 1).long()),
    "a mask of attention": lambda x: torch.nn.functional.scaled_dot_product_attention(
        *[x[None, None]] * 3, attn_mask=torch.zeros(3, 3)
    ),
    "values by index": lambda x: x.__setitem__(torch.tensor([0, 1]), torch.ones(2, 4)),
    "the host by index": lambda x: torch.ones(3)[torch.tensor([0], device="cuda:0")],
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


# Decodes ------------------------------------------------------------------------------------------


BOUNDED = [
    pytest.param(engine, warp, second, marks=[] if quick else [pytest.mark.full])
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
    each = per_round(trace, counts)
    assert all(value <= bound for value, bound in zip(each, AT_MOST[engine], strict=True)), each


@pytest.mark.parametrize("engine", [each for each in ENGINES if each != "SpecBranch, in turn"])
@pytest.mark.few(2)
def test_many_requests_wait_as_often_as_one(engine: str) -> None:
    """Where their rounds are alike; else at most .6 times as often as one after another."""

    def at_once(device: str, *seeds: int) -> tuple[list[list[int]], int]:
        """Return the tokens, and how often the host waited."""
        pair = pair_on(device, device)
        batch = BatchedEngine(ENGINES[engine](pair, WARPS["T = .7, p = .9"]), len(seeds))
        list(batch.decode([Asked(PROMPT, 6, Sampler.seeded(2))]))
        counts = Counts() if Pretend.counts is None else Pretend.counts
        before = counts.copy()
        found = dict(batch.decode([Asked(PROMPT, 16, Sampler.seeded(seed)) for seed in seeds]))
        waits = counts.since(before).synchronisations.total()
        return [found[number].tokens for number in range(len(seeds))], waits

    seeds = range(4)
    expected, _ = at_once("cpu", *seeds)
    with pretend():
        alone = [at_once("cuda:0", seed) for seed in seeds]
        found, waits = at_once("cuda:0", *seeds)
        _, alike = at_once("cuda:0", *[seeds[0]] * 4)
    assert found == expected == [tokens for [tokens], _ in alone]
    assert alike <= 1.12 * alone[0][1] and waits < 0.6 * sum(each for _, each in alone)


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


def test_a_host_tensor_mixed_in_is_caught() -> None:
    with pretend():
        pair = pair_on("cuda:0", "cuda:0")
        pair.target._positions = pair.target._positions.cpu()
        with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
            decoded(pair, "chain x token", Warp())


FAULTS: dict[str, tuple[str, Callable]] = {
    "an item per number": ("lm_head", lambda states: [row.amax().item() for row in states[0]]),
    "a hidden state copied to the host": ("model.norm", lambda states: states.cpu()),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_the_target_breaks_a_bound(name: str) -> None:
    where, look = FAULTS[name]
    with pretend():
        pair = pair_on("cuda:0", "cuda:0")
        module = pair.target.model.get_submodule(where)
        module.register_forward_hook(lambda *given: [look(given[2])] and None)
        each = per_round(*decoded(pair, "chain x token", Warp()))
    bounds = AT_MOST["chain x token"]
    assert not all(value <= bound for value, bound in zip(each, bounds, strict=True))


@pytest.mark.parametrize("side", ["target", "draft"])
@pytest.mark.parametrize("rule", [TokenVerifier(), BlockVerifier()])
@pytest.mark.parametrize("warp", [Warp(), Warp(0.0)])
def test_logits_that_are_no_numbers_are_refused(
    side: str, rule: TokenVerifier | BlockVerifier, warp: Warp
) -> None:
    with pretend():
        pair = spoiled(pair_on("cuda:0", "cuda:0"), side, 3)
        engine = SerialEngine(pair, Chain(GAMMA), Never(), rule, warp, Warp())
        with pytest.raises(UserError, match="NaN or infinite logits"):
            engine.decode([3, 7, 1], 20, Sampler.seeded(1))


UNIFORM = (0.0, 0.25, 0.5, 0.75, 1 - 2.0**-53)


@pytest.mark.parametrize(
    "masses", [[1.0], [0.0, 1.0], [1.0, 0.0], [0.2, 0.0, 0.3, 0.0], [3.0, 0.0, 4.0], [1e-30, 0.0]]
)
def test_no_token_of_probability_0_is_drawn(masses: list[float]) -> None:
    with pretend():
        drawn = {DevicePool(torch.tensor(masses, device="cuda:0")).pick(u).token for u in UNIFORM}
    assert drawn <= {token for token, mass in enumerate(masses) if mass > 0}


def test_nor_where_a_sum_made_in_parts_rises_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parallel sums round each part in its own way, so they may step at a 0."""
    uneven = torch.tensor([0.25, 0.25 + 2.0**-30, 0.5, 1.0, 1.0 + 2.0**-30], dtype=torch.float64)
    monkeypatch.setattr(Tensor, "cumsum", lambda *_, **__: uneven.to("cuda:0"))
    with pretend():
        pool = DevicePool(torch.tensor([0.25, 0.0, 0.25, 0.5, 0.0], device="cuda:0"))
        assert pool.pick(0.25).token in (0, 2) and pool.pick(1 - 2.0**-50).token == 3


def test_nothing_is_drawn_from_nothing() -> None:
    with pretend(), pytest.raises(AssertionError, match="at least one token"):
        DevicePool(torch.zeros(3, device="cuda:0")).pick(0.5)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("warp", [Warp(0.0), Warp(), Warp(0.7, 0, 0.9), Warp(0.7, 3)])
def test_a_row_that_is_no_distribution_is_nan_throughout(warp: Warp, bad: float) -> None:
    with pretend():
        row = warp.probs(torch.tensor([1.0, bad, 0.0, 2.0]).to("cuda:0"))
        assert row.isnan().all()
        with pytest.raises(UserError, match="NaN or infinite logits"):
            DevicePool(row).pick(0.5)
        with pytest.raises(UserError, match="NaN or infinite logits"):
            next(top_tokens(row, Sampler.seeded(0)))


def spoiled(pair: ModelPair, side: str, forward: int = 2) -> ModelPair:
    """One row of that forward is NaN."""
    calls = 0

    def spoil(_: object, __: object, logits: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == forward:
            logits = logits.clone()
            logits[:, 0] = math.nan
        return logits

    getattr(pair, side).model.lm_head.register_forward_hook(spoil)
    return pair


@pytest.mark.parametrize(
    ("name", "side"),
    [
        ("token-{}-chain", "target"),
        ("block-{}-chain", "target"),
        ("parallel-{'rule': 'block'}-parallel_paths", "target"),
        ("point_mass-{}-reranked", "draft"),
    ],
)
def test_nan_ends_in_one_line_as_on_the_host(name: str, side: str, tmp_path: Path) -> None:
    def decode_on(device: str) -> None:
        pair = spoiled(pair_on(device, device), side)
        made = engine(pair, CASES[name], tmp_path, None, Warp(0.8), Warp(0.8))
        with pytest.raises(UserError, match="NaN or infinite logits"):
            made.decode(PROMPT, 12, Sampler.seeded(4))

    decode_on("cpu")
    with pretend():
        decode_on("cuda:0")


def test_q_of_copied_and_of_drawn_tokens_keep_their_order() -> None:
    """Copied ones are on the host where no model has been asked before."""
    with pretend():
        lm = pair_on("cuda:0", "cuda:0").draft
        lm.output_device = lm.device
        tree = DraftTree(lm, RoundContext(torch.tensor(PROMPT), 9), Warp(), Stopwatch())
        row = tree.copy(0, 7)
        drawn = tree.draw(row)
        tree.copy(drawn, 3)
        q = tree.q(row)[tree.token[1]].item()
        assert tree.drawn == [1.0, pytest.approx(q), 1.0]


@pytest.mark.parametrize("name", ["rrs", "rrsw", "point_mass", "spechub"])
def test_nan_beside_the_accepted_path_comes_into_no_record(name: str) -> None:
    q, logits = torch.full((3,), 1 / 3), torch.zeros(4, 3)
    logits[0, 0] = 99.0  # so that the first child is accepted
    logits[2] = math.nan
    with pretend():
        rows = [row.to("cuda:0") for row in (q, 0 * q, q, 0 * q)]
        p = WarpedRows(logits.to("cuda:0"), Warp())
        with pytest.raises(UserError, match="NaN or infinite logits"):
            load(name).verify(Draft([0, 0, 2], [0, 1, 0], rows), p, Sampler.seeded(0))


WARP = Warp(0.8, 0, 0.95)
PLACES = [("cuda:0", "cuda:0"), ("cuda:0", "cuda:1")]
ALL_ON_ONE = [PLACES[0], pytest.param(PLACES[1], marks=pytest.mark.full)]
CASES = {f"{case.rule}-{case.rule_values}-{case.builds}": case for (case,) in
         (param.values for param in [*ASKING, *ALONE])}  # fmt: skip
on_host = cache(lambda: pair_on("cpu", "cpu"))


def same(
    make: Callable[[ModelPair], Engine],
    places: tuple[str, str],
    made: Callable[[str, str], ModelPair] = pair_on,
) -> Counts:
    expected = decode(make(made("cpu", "cpu")))
    with pretend() as counts:
        found = decode(make(made(*places)))
    assert found.tokens == expected.tokens and found.tokens
    drafts = ([each.draft_tokens for each in trace.rounds] for trace in (found, expected))
    assert next(drafts) == next(drafts)
    assert counts.bytes["to host"], "nothing was on the device"
    return counts


def decode(engine: Engine) -> Trace:
    return engine.decode(PROMPT, 12, Sampler.seeded(4))


@pytest.mark.slow
@pytest.mark.parametrize("places", ALL_ON_ONE)
@pytest.mark.parametrize("name", CASES)
def test_every_structure_with_every_verifier(
    name: str, places: tuple[str, str], tmp_path: Path
) -> None:
    case: Case = CASES[name]
    same(lambda pair: engine(pair, case, tmp_path, None, WARP, WARP), places)


@pytest.mark.slow
@pytest.mark.parametrize("places", ALL_ON_ONE)
@pytest.mark.parametrize(("stop", "values"), STOP_CASES)
def test_every_stop_rule(stop: str, values: dict, places: tuple[str, str], tmp_path: Path) -> None:
    case = CASES["token-{}-chain"]
    rule = lambda: stop_rule(stop, tmp_path, values, 3, CONFIG.hidden_size)  # noqa: E731
    same(lambda pair: engine(pair, case, tmp_path, rule(), WARP, WARP), places)


RELEASED = Chain(4), Never(), HsdReleased(allow_lossy=True), Warp(0.8), Warp(0.8)
OTHERS: dict[str, Callable[[ModelPair], Engine]] = {
    "HSD as released": lambda pair: SerialEngine(pair, *RELEASED),
    "lookahead": lambda pair: LookaheadEngine(pair, 3, 3, 3, True, WARP),
    "overlapped, in turn": lambda pair: overlapped(pair, False),
    "overlapped, side by side": lambda pair: overlapped(pair, True),
}


def overlapped(pair: ModelPair, overlap: bool) -> OverlappedEngine:
    """In turn, or each model in a thread and a stream of its own."""
    parts = BranchPoint(3, 2), Confidence(0.4), TokenVerifier(), RrswVerifier(), WARP, WARP
    return OverlappedEngine(pair, *parts, overlap=overlap)


@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize(
    "name", ["HSD as released", *(pytest.param(n, marks=pytest.mark.slow) for n in [*OTHERS][1:])]
)
def test_other_engines(name: str, places: tuple[str, str]) -> None:
    same(OTHERS[name], places)


def published_on(flavour: Flavour) -> Callable[[str, str], ModelPair]:
    def made(target: str, draft: str) -> ModelPair:
        lm = CachedLM(tiny_models()[0].requires_grad_(False).float().to(target))
        model = random_model(flavour, says=len(SAYS)).float().to(draft)
        draft_lm = PublishedDraft(model, lm, vocabulary=SAYS)
        return ModelPair(lm, draft_lm, tiny_tokenizer(), "tiny", (EOS,))

    return made


@pytest.mark.slow
@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("name", FLAVOURS)
def test_published_drafts(name: str, places: tuple[str, str]) -> None:
    chain_of = lambda pair: ENGINES["chain x token"](pair, WARP)  # noqa: E731
    counts = same(chain_of, places, published_on(FLAVOURS[name]))
    between = counts.bytes["between"] > 0
    assert between == (places[0] != places[1]), "the target's states go to the draft"


# Per rollout token that is labelled, as it is today: upper bounds of bytes to the host, bytes to
# the device, and waits.
HARVESTS = {
    "sampled": (RECIPE, (290, 170, 4.0)),
    "greedy": (GREEDY, (240, 85, 2.4)),
    "greedy, draft sampled": (replace(RECIPE, warp=GREEDY.warp), (290, 170, 4.0)),
}


@pytest.mark.slow
@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("name", HARVESTS)
def test_a_harvest_has_the_hosts_records(name: str, places: tuple[str, str]) -> None:
    recipe, bounds = HARVESTS[name]
    expected, _ = harvested(on_host(), recipe)
    with pretend():
        found, counts = harvested(pair_on(*places), recipe)
    for kind, rows in expected.items():
        assert_same(found[kind], rows, within=1e-4)
    each = per_label(found, counts)
    assert all(value <= bound for value, bound in zip(each, bounds, strict=True)), each


def predicted(stop: SpecDecPPStop, device: str) -> list[list[float]]:
    trace = chain(pair_on(device, device), Warp(), stop).decode(PROMPT, 12, Sampler.seeded(1))
    return [round_.predicted for round_ in trace.rounds]


@pytest.mark.slow
def test_engines_on_several_devices_share_a_predictor_that_changes() -> None:
    stop = head("paper")
    for factor in (1.0, -3.0):
        with torch.no_grad():
            for weights in stop.predictor.head.parameters():
                weights.mul_(factor)
        expected = predicted(stop, "cpu")
        with pretend():
            found = [predicted(stop, device) for device in ("cuda:0", "cuda:1", "cuda:0")]
        assert found[0] == found[1] == found[2]
        for one, other in zip(found[0], expected, strict=True):  # another forward, float32
            assert one == pytest.approx(other, abs=1e-4)
        assert {each.device.type for each in stop.predictor.head.parameters()} == {"cpu"}


@pytest.fixture(scope="module")
def harvest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_harvest(tmp_path_factory.mktemp("harvest"))


@pytest.fixture(scope="module")
def there(harvest: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the device learned."""
    out = tmp_path_factory.mktemp("device")
    program = [sys.executable, "-m", "tests.helpers.training.pretend_training"]
    subprocess.run([*program, str(harvest), str(out)], check=True)
    return out


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.slow
def test_training_is_the_hosts(name: str, harvest: Path, there: Path) -> None:
    predictor, trainer = trained(name, harvest)
    found = json.loads((there / f"{name}.json").read_text())
    assert found["moved"], "nothing was on the device"
    assert found["waits"] <= 20 * trainer.epochs, "some of every epoch, none of every step"
    assert found["history"] == [pytest.approx(row, rel=1e-5) for row in trainer.history]
    weights = load_file(there / f"{name}.safetensors")
    torch.testing.assert_close(dict(predictor.head.state_dict()), weights)
