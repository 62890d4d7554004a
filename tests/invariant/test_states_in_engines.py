"""Models that keep states, in every engine that takes them: what each forward says of the text it
stands on, exactness, and what is refused before anything runs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from decoding.engines.lookahead import LookaheadEngine
from decoding.engines.overlapped import OverlappedEngine
from decoding.engines.serial import SerialEngine
from decoding.models.batched_lm import batch_of
from decoding.models.cached_lm import CachedLM
from decoding.models.eagle.draft import EagleDraft
from decoding.models.loading import ModelPair
from decoding.models.recurrent import cached
from decoding.sampling import Sampler, Warp
from decoding.stopping.confidence import Confidence
from decoding.stopping.never import Never
from decoding.structures.branch_point import BranchPoint
from decoding.structures.chain import Chain
from decoding.structures.lookup import Lookup
from decoding.structures.sources import Sources
from decoding.verifiers.block import BlockVerifier
from decoding.verifiers.rrsw import RrswVerifier
from decoding.verifiers.token import TokenVerifier
from evaluation.batched.lengths import measured
from runtime.errors import UserError
from tests.contract.enumeration import autoregressive_distribution, distribution_of, largest_error
from tests.contract.overlaps import Policy
from tests.helpers.models.stateful import near, stateful
from tests.helpers.models.tiny_pair import tiny_tokenizer
from tests.helpers.models.windowed import windowed
from tests.invariant.test_cached_lm import random_tokens

FEW = ["Qwen3Next", "FalconH1", "Lfm2", "Mamba2"]
WARP = Warp(0.5)


def pair_of(target: CachedLM, draft: CachedLM) -> ModelPair:
    return ModelPair(target, draft, tiny_tokenizer(), "stateful", ())


def dense() -> CachedLM:
    return CachedLM(windowed("Qwen2", 5).float())


def overlapped(pair: ModelPair, **more: Any) -> OverlappedEngine:
    parts = {"stop": Confidence(0.3), "structure": BranchPoint(3, 1), "overlap": False, **more}
    rules = {"verifier": BlockVerifier(), "branch_verifier": RrswVerifier()}
    return OverlappedEngine(pair=pair, warp=WARP, draft_warp=WARP, **parts, **rules)


def serial(pair: ModelPair, structure: Any, stop: Any) -> SerialEngine:
    return SerialEngine(pair, structure, stop, TokenVerifier(), WARP, WARP)


ENGINES: dict[str, Callable[[ModelPair], Any]] = {
    "chain": lambda pair: serial(pair, Chain(4), Confidence(0.3)),
    "one token": lambda pair: serial(pair, Chain(1), Never()),
    "copies": lambda pair: serial(pair, Lookup(3, 1, 5), Never()),
    "sources": lambda pair: serial(pair, Sources(3, 3, 1, 2), Never()),
    "open leaves": lambda pair: SerialEngine(
        pair, BranchPoint(3, 3), Confidence(0.3), RrswVerifier(), WARP, WARP
    ),
    "SpecBranch": overlapped,
    "SpecBranch, side by side": lambda pair: overlapped(pair, overlap=True),
    "PEARL": lambda pair: overlapped(pair, pre_verify=True, stop=Never()),
}


class Followed:
    """Holds what each forward of a model says against one call without a cache, on the text that
    its calls have told so far."""

    def __init__(self, lm: CachedLM, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lm, self.text, self.forwards = lm, list[int](), 0
        self.own, self.inside = (lm.forward, lm.crop, lm.keep), False
        for name in ("forward", "crop", "keep"):
            monkeypatch.setattr(lm, name, getattr(self, name))

    def forward(self, tokens: torch.Tensor, *given: Any, **wanted: Any) -> Any:
        found, before = self.own[0](tokens, *given, **wanted), len(self.text)
        self.text += tokens.tolist()
        inputs = {"input_ids": torch.tensor([self.text]), "use_cache": False}
        expected = self.lm.model(**inputs).logits[0, before:].float()
        expected = expected[len(expected) - len(found.logits) :]
        torch.testing.assert_close(found.logits, expected, atol=2e-5, rtol=2e-5)
        self.forwards += 1
        return found

    def crop(self, length: int) -> None:
        self.own[1](length)
        del self.text[length:]
        assert self.lm.length == len(self.text)

    def keep(self, start: int, rows: list[int]) -> None:
        self.own[2](start, rows)
        self.crop(start + len(rows))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", FEW)
@pytest.mark.few(6)
def test_each_forward_is_that_of_the_text(
    kind: str, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of one token and of more, one request after another, to the end of the context."""
    pair = pair_of(cached(stateful(kind), max_length=40), cached(near(kind), max_length=40))
    followed = [Followed(lm, monkeypatch) for lm in (pair.target, pair.draft)]
    decoder = ENGINES[engine](pair)
    for seed, (length, new) in enumerate([(1, 9), (9, 50), (2, 1)]):
        prompt = random_tokens(length, seed)
        trace = decoder.decode(prompt, new, Sampler.seeded(seed))
        assert len(trace.tokens) == min(new, 40 - length)
    assert followed[0].forwards > 10 and (followed[1].forwards > 10 or engine == "copies")


EXACT = [
    (Policy("token", "rrsw", 1, k_max=1), True),
    (Policy("block", "rrsw", None, k_max=1), True),
    (Policy("block", "rrsw", 2, k_max=1, pre_verify=True), True),
    (Policy("token", "rrsw", 1, k_max=3), False),
]


@pytest.mark.parametrize("kind", ["Lfm2", "Mamba2"])
@pytest.mark.parametrize(("policy", "both"), EXACT)
@pytest.mark.few(1)
def test_the_overlapped_engine_is_exact(policy: Policy, both: bool, kind: str) -> None:
    """Every draw enumerated. both: the draft keeps states, too."""
    small, prompt = {"vocab_size": 3}, (1, 2, 1)
    draft = near(kind, **small) if both else windowed("Qwen2", 5, **small)
    pair, plain = pair_of(cached(stateful(kind, **small)), cached(draft)), stateful(kind, **small)
    decoder = policy.engine(pair, Warp(0.3), Warp(0.3))

    def conditional(text: tuple[int, ...]) -> torch.Tensor:
        return Warp(0.3).probs(plain(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1])

    with torch.no_grad():
        exact = autoregressive_distribution(conditional, 3, 3, prompt)
    found = distribution_of(lambda sampler: tuple(decoder.decode(prompt, 3, sampler).tokens))
    assert largest_error(found, exact) < 1e-5


def test_two_engines_on_one_pair_take_turns() -> None:
    pair = pair_of(cached(stateful("Qwen3Next")), cached(near("Qwen3Next")))
    engines = [make(pair) for make in ENGINES.values()]
    prompts = [random_tokens(n + 1, n) for n in range(len(engines))]
    alone = [
        one.decode(p, 12, Sampler.seeded(1)).tokens for one, p in zip(engines, prompts, strict=True)
    ]
    again = [
        one.decode(p, 12, Sampler.seeded(1)).tokens
        for one, p in zip(engines[::-1], prompts[::-1], strict=True)
    ]
    assert again[::-1] == alone


def test_branches_and_windows_are_refused_before_anything_runs() -> None:
    pair = pair_of(cached(stateful("Lfm2")), cached(near("Lfm2")))
    with pytest.raises(UserError, match=r"^structure\.candidates, pair\.draft: .*candidates=1$"):
        overlapped(pair, structure=BranchPoint(3, 3))
    overlapped(pair_of(pair.target, dense()), structure=BranchPoint(3, 3))
    with pytest.raises(UserError, match=r"^engine, pair\.target: .* Use engine=serial"):
        LookaheadEngine(pair, 3, 3, 3, True, WARP)


@pytest.mark.parametrize("side", ["target", "draft"])
def test_costs_of_batches_are_refused(side: str) -> None:
    models = {"target": dense(), "draft": dense(), side: cached(stateful("Lfm2"))}
    with pytest.raises(UserError, match=rf"^batch_cost, pair\.{side}: .* Give a GPU's costs"):
        measured(pair_of(**models), [1, 2], [1, 2], 8, 1)


def test_a_draft_that_reads_states_is_refused_in_a_harvest_and_decodes() -> None:
    """The batch of such a target keeps no states for it."""
    target, own = cached(stateful("Lfm2")), dense()
    draft = EagleDraft(own.model, target, Reading(), vocab_size=target.vocab_size)
    texts = [random_tokens(5, 0), random_tokens(7, 1)]
    batch = batch_of(target, texts, 3)
    with pytest.raises(UserError, match=r"^pair\.draft: expected one that reads no states"):
        batch_of(draft, texts, 3, batch)
    target.reset()
    decoder = serial(pair_of(target, draft), Chain(3), Never())
    assert len(decoder.decode(texts[0], 12, Sampler.seeded(0)).tokens) == 12


class Reading:
    """The last state of the target, as it is."""

    layers, described, tensors = (), "", ()

    def of_target(self, states: torch.Tensor) -> torch.Tensor:
        return states[..., -1, :]

    def of_own(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden
