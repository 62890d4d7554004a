"""p of draft tokens in traces: the target's distribution where the verifier has read it, nothing
elsewhere."""

import json
from types import SimpleNamespace

import pytest
import torch
from pydantic import TypeAdapter

from decoding.engines.branching import Always
from decoding.engines.lookahead import LookaheadEngine
from decoding.engines.overlapped import OverlappedEngine
from decoding.engines.serial import SerialEngine
from decoding.models.table_lm import TableLM, mixed_table, random_table
from decoding.sampling import Sampler, Warp
from decoding.stopping.confidence import Confidence
from decoding.stopping.fixed import Fixed
from decoding.stopping.never import Never
from decoding.structures.branch_point import BranchPoint
from decoding.structures.chain import Chain
from decoding.structures.dyspec import DySpecHeap
from decoding.trace import RoundTrace, Trace
from decoding.verification import WarpedRows
from decoding.verifiers.block import BlockVerifier
from decoding.verifiers.rrsw import RrswVerifier
from decoding.verifiers.token import TokenVerifier

PROMPT = [1, 2]
OFF = Warp()


def pair() -> SimpleNamespace:
    target = random_table(5, seed=1, concentration=0.5)
    return SimpleNamespace(
        target=TableLM(target), draft=TableLM(mixed_table(target, random_table(5, seed=2), 0.6))
    )


def overlapped(models: SimpleNamespace) -> OverlappedEngine:
    parts = BranchPoint(3, 3), Always(1, Confidence(0.3)), BlockVerifier(), RrswVerifier()
    return OverlappedEngine(models, *parts, OFF, OFF, False)


ENGINES = {
    "token": lambda m: SerialEngine(m, Chain(20), Fixed(4), TokenVerifier(), OFF, OFF),
    "block": lambda m: SerialEngine(m, Chain(20), Fixed(4), BlockVerifier(), OFF, OFF),
    "tree": lambda m: SerialEngine(m, DySpecHeap(8), Never(), RrswVerifier(), OFF, OFF),
    "lookahead": lambda m: LookaheadEngine(m, 3, 3, 2, True, OFF),
    "overlapped": overlapped,
}


@pytest.mark.parametrize("name", ENGINES)
def test_p_is_the_distribution_of_the_target(name: str) -> None:
    models = pair()
    trace = ENGINES[name](models).decode(PROMPT, 60, Sampler.seeded(0))
    committed, known = list(PROMPT), 0
    for r in trace.rounds:
        assert len(r.draft_p) == len(r.draft_tokens)
        for i, p in enumerate(r.draft_p):
            path = path_to(r, r.draft_parents[i])
            assert p is None or p == pytest.approx(
                models.target.distribution((*committed, *path))[r.draft_tokens[i]].item()
            )
            known += p is not None
        judged = [i for i, parent in enumerate(r.draft_parents) if parent in rows_to(r, r.row)]
        assert all(r.draft_p[i] is not None for i in judged)
        committed += r.tokens
    assert known > 10


def test_tokens_nobody_judged_have_none() -> None:
    """After a rejection the token rule reads nothing more."""
    trace = ENGINES["token"](pair()).decode(PROMPT, 60, Sampler.seeded(0))
    unread = [r.draft_p[r.accepted + 1 :] for r in trace.rounds if r.rejected]
    assert any(unread) and all(p is None for tail in unread for p in tail)


def test_nothing_is_warped_for_the_record() -> None:
    rows = WarpedRows(torch.zeros(3, 4), OFF)
    rows[1]
    assert rows.drawn([0, 1, 1, 2], [0, 3, 2, 1]) == [None, 0.25, 0.25, None]
    assert list(rows._distributions) == [1]


def test_traces_without_p_are_read() -> None:
    trace = ENGINES["token"](pair()).decode(PROMPT, 8, Sampler.seeded(0))
    assert TypeAdapter(Trace).validate_json(json.dumps(trace.to_dict())) == trace
    old = trace.to_dict()
    for round_ in old["rounds"]:
        del round_["draft_p"]
    assert [r.draft_p for r in TypeAdapter(Trace).validate_json(json.dumps(old)).rounds] == [
        [] for _ in trace.rounds
    ]


def rows_to(round_: RoundTrace, row: int) -> list[int]:
    """From the root, itself included."""
    rows = [row]
    while rows[-1]:
        rows.append(round_.draft_parents[rows[-1] - 1])
    return rows[::-1]


def path_to(round_: RoundTrace, row: int) -> list[int]:
    return [round_.draft_tokens[row - 1] for row in rows_to(round_, row)[1:]]
