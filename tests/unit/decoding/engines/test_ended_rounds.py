"""Where a round is cut because the response ends, nothing behind the end counts as accepted."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

from decoding.engines.autoregressive import AutoregressiveEngine
from decoding.engines.lookahead import LookaheadEngine
from decoding.engines.overlapped import OverlappedEngine
from decoding.engines.serial import SerialEngine
from decoding.models.loading import ModelPair
from decoding.sampling import Sampler, Warp
from decoding.stopping.confidence import Confidence
from decoding.stopping.fixed import Fixed
from decoding.stopping.never import Never
from decoding.structures.branch_point import BranchPoint
from decoding.structures.chain import Chain
from decoding.structures.dyspec import DySpecHeap
from decoding.structures.lookup import Lookup
from decoding.trace import Trace
from decoding.verifiers.block import BlockVerifier
from decoding.verifiers.point_mass import PointMassVerifier
from decoding.verifiers.rrsw import RrswVerifier
from decoding.verifiers.token import TokenVerifier
from evaluation.lossless import broken_invariants
from evaluation.table import draft_steps
from serving.generate import speculate
from tests.helpers.models.tiny_pair import tiny_pair

PROMPT = [3, 7, 1, 9, 4, 3, 7, 1]
WARPS = {"warp": Warp(), "draft_warp": Warp()}
Build = Callable[[ModelPair], Any]


def serial(structure: Any, stop: Any, verifier: Any) -> Build:
    warp = Warp(temperature=0 if isinstance(structure, Lookup) else 1)  # it then repeats itself
    return lambda pair: SerialEngine(pair, structure, stop, verifier, warp, warp)


def overlapped(**settings: Any) -> Build:
    parts = {"verifier": TokenVerifier(), "branch_verifier": RrswVerifier(), **settings}
    return lambda pair: OverlappedEngine(pair, BranchPoint(4, 2), **parts, **WARPS)


ENGINES: dict[str, Build] = {
    "plain": lambda pair: AutoregressiveEngine(pair, Warp()),
    "chain": serial(Chain(5), Fixed(5), TokenVerifier()),
    "block": serial(Chain(5), Confidence(0.1), BlockVerifier()),
    "tree": serial(DySpecHeap(9), Never(), RrswVerifier()),
    "branch point": serial(BranchPoint(3, 2), Never(), RrswVerifier()),
    "lookup": serial(Lookup(5, 1, 3), Never(), PointMassVerifier()),
    "specbranch": overlapped(stop=Confidence(0.1)),
    "a priori": overlapped(stop=Never(), a_priori=True, overlap=False),
    "pearl": overlapped(stop=Never(), pre_verify=True, overlap=False),
    "lookahead": lambda pair: LookaheadEngine(pair, 4, 3, 4, True, Warp()),
}


def cut_at_every_length(decode: Callable[[Callable[[torch.Tensor], bool]], Trace]) -> Iterable:
    """Traces of one response ended after its first token, its second, and so on."""
    for length in range(1, 24):
        yield length, decode(lambda text, n=length: len(text) >= len(PROMPT) + n)


@pytest.mark.parametrize("name", ENGINES)
def test_accepted_counts_what_a_cut_round_has_kept(name: str) -> None:
    pair = tiny_pair()
    engine, cut = ENGINES[name](pair), 0
    whole = engine.decode(PROMPT, 30, Sampler.seeded(0))
    for length, trace in cut_at_every_length(
        lambda ends: engine.decode(PROMPT, 30, Sampler.seeded(0), ends)
    ):
        assert trace.tokens == whole.tokens[:length]
        assert not broken_invariants(trace, 30, frozenset())
        last, before = trace.rounds[-1], whole.rounds[len(trace.rounds) - 1]
        assert last.accepted == min(before.accepted, len(last.tokens))
        assert last.draft_tokens == before.draft_tokens, "what was drafted stays drafted"
        assert last.rejected == (before.rejected and last.tokens == before.tokens)
        if last.overlap:
            of_trace = [(r.accepted, draft_steps(r), r.overlap.waste) for r in trace.rounds]
            spent = sum(accepted + lost + waste for accepted, (_, lost), waste in of_trace)
            assert spent == sum(steps for _, (steps, _), _ in of_trace)
        cut += last.tokens != before.tokens
    assert cut or name == "plain", "some rounds were cut"


def test_a_stopping_criterion_of_generate_cuts_alike() -> None:
    pair = tiny_pair()
    asked = {"custom_generate": speculate, "draft": pair, "do_sample": False, "stop": Fixed(5)}
    for length in range(1, 12):
        criteria = [lambda ids, scores, n=length, **_: ids.shape[1] >= len(PROMPT) + n]
        found = pair.target.model.generate(
            torch.tensor([PROMPT]),
            max_new_tokens=20,
            eos_token_id=None,
            stopping_criteria=criteria,
            return_dict_in_generate=True,
            **asked,
        )
        [trace] = found.traces
        assert len(trace.tokens) == length and not broken_invariants(trace, 20, frozenset())
