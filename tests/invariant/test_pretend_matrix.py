"""On a pretend device, or two, everything decodes what it decodes on the host: structures with all
verifiers they take, stop rules, lookahead, published EAGLE drafts; and a harvest has the same
records."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from numpy import ndarray
from torch import Tensor

from decoding.engines.lookahead import LookaheadEngine
from decoding.engines.overlapped import OverlappedEngine
from decoding.models.cached_lm import CachedLM
from decoding.models.eagle.published import Flavour, PublishedDraft
from decoding.models.loading import ModelPair
from decoding.sampling import Sampler, Warp
from decoding.stopping.confidence import Confidence
from decoding.structures.branch_point import BranchPoint
from decoding.trace import Trace
from decoding.verifiers.rrsw import RrswVerifier
from decoding.verifiers.token import TokenVerifier
from tests.contract.engines import ALONE, ASKING, STOP_CASES, Case, Engine, engine, stop_rule
from tests.helpers.device.device_report import PROMPT, harvested, pair_on, per_label
from tests.helpers.device.device_report import decoded as decode_counted
from tests.helpers.device.pretend_device import pretend
from tests.helpers.models.eagles import FLAVOURS, SAYS, random_model
from tests.helpers.models.tiny_pair import CONFIG, EOS, tiny_models, tiny_tokenizer
from tests.invariant.test_harvest import GREEDY, RECIPE

WARP = Warp(0.8, 0, 0.95)
CHAIN = "chain x token"
PLACES = [("cuda:0", "cuda:0"), ("cuda:0", "cuda:1")]
CASES = {f"{case.rule}-{case.rule_values}-{case.builds}": case for (case,) in
         (param.values for param in [*ASKING, *ALONE])}  # fmt: skip
on_host = cache(lambda: pair_on("cpu", "cpu"))
pytestmark = pytest.mark.slow


def same(make: Callable[[ModelPair], Engine], places: tuple[str, str]) -> None:
    expected = decoded(make(on_host()))
    with pretend() as counts:
        found = decoded(make(pair_on(*places)))
    assert found.tokens == expected.tokens and found.tokens
    assert [each.draft_tokens for each in found.rounds] == [
        each.draft_tokens for each in expected.rounds
    ]
    assert counts.bytes["to host"], "nothing was on the device"


def decoded(engine: Engine) -> Trace:
    return engine.decode(PROMPT, 12, Sampler.seeded(4))


@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("name", CASES)
def test_every_structure_with_every_verifier(
    name: str, places: tuple[str, str], tmp_path: Path
) -> None:
    case: Case = CASES[name]
    same(lambda pair: engine(pair, case, tmp_path, None, WARP, WARP), places)


@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize(("stop", "values"), STOP_CASES)
def test_every_stop_rule(stop: str, values: dict, places: tuple[str, str], tmp_path: Path) -> None:
    case = CASES["token-{}-chain"]
    rule = lambda: stop_rule(stop, tmp_path, values, 3, CONFIG.hidden_size)  # noqa: E731
    same(lambda pair: engine(pair, case, tmp_path, rule(), WARP, WARP), places)


OTHERS: dict[str, Callable[[ModelPair], Engine]] = {
    "lookahead": lambda pair: LookaheadEngine(pair, 3, 3, 3, True, WARP),
    "overlapped, in turn": lambda pair: overlapped(pair, False),
    "overlapped, side by side": lambda pair: overlapped(pair, True),
}


def overlapped(pair: ModelPair, overlap: bool) -> OverlappedEngine:
    """In turn, or each model in a thread and a stream of its own."""
    return OverlappedEngine(
        pair=pair,
        structure=BranchPoint(3, 2),
        stop=Confidence(0.4),
        verifier=TokenVerifier(),
        warp=WARP,
        draft_warp=WARP,
        branch_verifier=RrswVerifier(),
        overlap=overlap,
    )


@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("name", OTHERS)
def test_other_engines(name: str, places: tuple[str, str]) -> None:
    same(OTHERS[name], places)


def published_on(flavour: Flavour) -> Callable[[str, str], ModelPair]:
    def made(target: str, draft: str) -> ModelPair:
        lm = CachedLM(tiny_models()[0].requires_grad_(False).float().to(target))
        model = random_model(flavour, says=len(SAYS)).float().to(draft)
        draft_lm = PublishedDraft(model, lm, vocabulary=SAYS)
        return ModelPair(lm, draft_lm, tiny_tokenizer(), "tiny", (EOS,))

    return made


@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("name", FLAVOURS)
def test_published_drafts(name: str, places: tuple[str, str]) -> None:
    made = published_on(FLAVOURS[name])
    expected, _ = decode_counted(made("cpu", "cpu"), CHAIN, WARP, 12)
    with pretend():
        found, counts = decode_counted(made(*places), CHAIN, WARP, 12)
    assert found.tokens == expected.tokens
    between = counts.bytes["between"] > 0
    assert between == (places[0] != places[1]), "the target's states go to the draft"


# Per rollout token that is labelled, as it is today: upper bounds of bytes to the host, bytes to
# the device, and waits.
HARVESTS = {
    "sampled": (RECIPE, (290, 170, 4.0)),
    "greedy": (GREEDY, (240, 85, 2.4)),
    "greedy, draft sampled": (replace(RECIPE, warp=GREEDY.warp), (290, 170, 4.0)),
}


@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("name", HARVESTS)
def test_a_harvest_has_the_hosts_records(name: str, places: tuple[str, str]) -> None:
    recipe, bounds = HARVESTS[name]
    expected, _ = harvested(on_host(), recipe)
    with pretend():
        found, counts = harvested(pair_on(*places), recipe)
    for kind in expected:
        for ours, theirs in zip(found[kind], expected[kind], strict=True):
            assert ours.keys() == theirs.keys()
            for column in ours:
                same_values(ours[column], theirs[column])
    each = per_label(found, counts)
    assert all(value <= bound for value, bound in zip(each, bounds, strict=True)), each


def same_values(ours: Any, theirs: Any) -> None:
    """Up to rounding. Packed hidden states are the bits of bfloat16."""
    if isinstance(ours, ndarray):
        pair = (torch.from_numpy(packed).view(torch.bfloat16) for packed in (ours, theirs))
        torch.testing.assert_close(*pair, atol=1e-2, rtol=1e-2)
    elif isinstance(ours, Tensor):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    else:
        assert ours == theirs
