"""What holds for the rounds of every engine: greedy output is the target's, rounds add up, and
where the response ends nothing behind the end counts as accepted."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from decoding.draft import RoundContext
from decoding.engines.autoregressive import AutoregressiveEngine
from decoding.engines.branching import Always
from decoding.engines.lookahead import LookaheadEngine
from decoding.engines.overlapped import OverlappedEngine
from decoding.engines.request import RequestState
from decoding.engines.serial import SerialEngine
from decoding.interfaces import LMOutput
from decoding.models.table_lm import TableLM, mixed_table, random_table
from decoding.sampling import Sampler, Warp
from decoding.stopping.confidence import Confidence
from decoding.stopping.fixed import Fixed
from decoding.stopping.hrad import HRADStop
from decoding.stopping.never import Never
from decoding.stopping.specdecpp import SpecDecPPStop
from decoding.structures.branch_point import BranchPoint
from decoding.structures.chain import Chain
from decoding.structures.dyspec import DySpecHeap
from decoding.structures.lookup import Lookup
from decoding.structures.static_tree import WidthTree
from decoding.trace import RoundTrace
from decoding.verification import WarpedRows
from decoding.verifiers.block import BlockVerifier
from decoding.verifiers.point_mass import PointMassVerifier
from decoding.verifiers.rrsw import RrswVerifier
from decoding.verifiers.token import TokenVerifier
from evaluation.lossless import broken_invariants
from evaluation.table import draft_steps
from predictors.inputs import Inputs
from runtime.errors import UserError
from serving.generate import speculate
from tests.helpers.damage.refusals import refuses
from tests.helpers.models.tiny_pair import tiny_pair
from tests.helpers.training.checkpoints import write_checkpoint

GREEDY, OFF = Warp(0.0), Warp()
PROMPT = [3, 2, 1, 0, 4, 3, 2, 1]
Build = Callable[..., Any]
WIDTH, LAYERS = 24, (-3, -1)
DRAFTS = [Chain(2), BranchPoint(2, 3), BranchPoint(1, 2), WidthTree([2, 2, 1])]


def pair(vocab: int = 5, max_length: int = 1000) -> SimpleNamespace:
    target = random_table(vocab, seed=1, concentration=0.5)
    draft = mixed_table(target, random_table(vocab, seed=2), 0.6)
    models = {"target": target, "draft": draft}
    return SimpleNamespace(**{n: TableLM(m, max_length=max_length) for n, m in models.items()})


def serial(structure: Any, stop: Any, verifier: Any) -> Build:
    parts = structure, stop, verifier
    return lambda models, warp=OFF, **kw: SerialEngine(models, *parts, warp, warp, **kw)


def overlapped(**settings: Any) -> Build:
    parts = {"verifier": TokenVerifier(), "branch_verifier": RrswVerifier(), **settings}
    return lambda models, warp=OFF, **kw: OverlappedEngine(
        models, BranchPoint(4, 2), **parts, warp=warp, draft_warp=warp, **kw
    )


ENGINES: dict[str, Build] = {
    "plain": lambda models, warp=OFF, **kw: AutoregressiveEngine(models, warp, **kw),
    "chain": serial(Chain(5), Fixed(4), TokenVerifier()),
    "block": serial(Chain(5), Confidence(0.1), BlockVerifier()),
    "tree": serial(DySpecHeap(9), Never(), RrswVerifier()),
    "branch point": serial(BranchPoint(3, 2), Never(), RrswVerifier()),
    "lookup": serial(Lookup(5, 1, 3), Never(), PointMassVerifier()),
    "specbranch": overlapped(stop=Always(1, Confidence(0.3))),
    "a priori": overlapped(stop=Never(), a_priori=True, overlap=False),
    "pearl": overlapped(stop=Never(), pre_verify=True, overlap=False),
    "lookahead": lambda models, warp=OFF, **kw: LookaheadEngine(models, 4, 3, 4, True, warp, **kw),
}
every_engine = pytest.mark.parametrize("name", ENGINES)


@every_engine
@pytest.mark.parametrize(("vocab", "prompt"), [(2, [1]), (5, [3]), (5, [1, 2, 3])])
def test_greedy_output_is_autoregressive(name, vocab, prompt):
    models = pair(vocab)
    expected = AutoregressiveEngine(models, GREEDY).decode(prompt, 40, Sampler.seeded(0)).tokens
    trace = ENGINES[name](models, GREEDY).decode(prompt, 40, Sampler.seeded(1))
    assert trace.tokens == expected and len(trace.tokens) == 40
    assert not broken_invariants(trace, 40, frozenset())
    assert name == "plain" or sum(r.accepted for r in trace.rounds) > 0
    if not trace.rounds[0].overlap:
        assert models.target.length == len(prompt) + 39
        assert models.target.forwards == len(trace.rounds) + (len(prompt) > 1)
        assert sum(trace.stages.values()) <= trace.decode_seconds


def test_rounds_of_a_chain_add_up():
    models = pair()
    trace = ENGINES["chain"](models).decode([1, 2], 50, Sampler.seeded(3))
    for r in trace.rounds:
        assert len(r.tokens) == r.accepted + 1
        assert len(r.draft_q) == len(r.draft_tokens) == r.draft_forwards
        assert all(0 < q <= 1 for q in r.draft_q)
    assert models.draft.forwards == sum(r.draft_forwards for r in trace.rounds) + 1
    engine = serial(Chain(2), Fixed(9), TokenVerifier())(pair())
    short = engine.decode(PROMPT, 20, Sampler.seeded(0))
    assert max(len(r.draft_tokens) for r in short.rounds) == 2, "what the structure allows"


@every_engine
@pytest.mark.parametrize("length", [1, 2, 7])
def test_a_draft_is_limited_by_what_may_still_be_committed(name, length):
    left = length
    for r in ENGINES[name](pair()).decode(PROMPT, length, Sampler.seeded(0)).rounds:
        assert r.depth <= left - (name not in ("branch point", "specbranch", "a priori", "pearl"))
        left -= len(r.tokens)
    assert left == 0


@every_engine
@pytest.mark.parametrize("eos", range(5))
def test_eos_ends_the_draft_and_the_output(name, eos):
    models, ids = pair(), frozenset({eos})
    plain = AutoregressiveEngine(models, GREEDY, ids).decode(PROMPT, 30, Sampler.seeded(0))
    trace = ENGINES[name](models, GREEDY, eos_ids=ids).decode(PROMPT, 30, Sampler.seeded(0))
    assert trace.tokens == plain.tokens and not broken_invariants(trace, 30, ids)
    for r in trace.rounds:
        assert eos not in {r.draft_tokens[parent - 1] for parent in r.draft_parents if parent}


@every_engine
def test_an_accepted_eos_has_no_bonus_token(name):
    always = TableLM(lambda context: torch.tensor([0.0, 1.0]).double())
    models = SimpleNamespace(target=always, draft=TableLM(always.table))
    trace = ENGINES[name](models, eos_ids=frozenset({1})).decode([0, 1, 0], 9, Sampler.seeded(0))
    last = trace.rounds[-1]
    assert trace.tokens == last.tokens == [1] and last.accepted == (name != "plain")


@every_engine
def test_the_output_fits_the_context_and_bad_requests_are_refused(name):
    engine = ENGINES[name](pair(max_length=8), GREEDY)
    assert len(engine.decode([1, 2, 3], 99, Sampler.seeded(0)).tokens) == 5
    refuses("prompt: empty", engine.decode, [], 5, Sampler.seeded(0))
    refuses("max_length", engine.decode, [1] * 8, 5, Sampler.seeded(0))
    refuses("new_", engine.decode, [1], 0, Sampler.seeded(0))


@every_engine
def test_accepted_counts_what_a_cut_round_has_kept(name):
    engine, cut = ENGINES[name](pair(), GREEDY if name == "lookup" else OFF), 0
    whole = engine.decode(PROMPT, 30, Sampler.seeded(0))
    for length in range(1, 24):

        def ends(text: torch.Tensor, length: int = length) -> bool:
            return len(text) >= len(PROMPT) + length

        trace = engine.decode(PROMPT, 30, Sampler.seeded(0), ends)
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


def test_a_stopping_criterion_of_generate_cuts_alike():
    models, prompt = tiny_pair(), [3, 7, 1, 9, 4, 3, 7, 1]
    asked = {"custom_generate": speculate, "draft": models, "do_sample": False, "stop": Fixed(5)}
    for length in range(1, 12):
        criteria = [lambda ids, scores, n=length, **_: ids.shape[1] >= len(prompt) + n]
        [trace] = models.target.model.generate(
            torch.tensor([prompt]),
            max_new_tokens=20,
            eos_token_id=None,
            stopping_criteria=criteria,
            return_dict_in_generate=True,
            **asked,
        ).traces
        assert len(trace.tokens) == length and not broken_invariants(trace, 20, frozenset())


def test_whoever_ends_a_response_hears_every_token_an_eos_included():
    def request(ends: Any, eos: frozenset[int] = frozenset()) -> RequestState:
        text = torch.zeros(7, dtype=torch.long)
        return RequestState(text, text[:2], 5, eos, ends=ends)

    sevens = request(lambda text: bool(text[-1] == 7))
    assert sevens.commit([1, 2]) == [1, 2] and not sevens.finished
    assert sevens.commit([3, 7, 4]) == [3, 7] and sevens.finished
    assert sevens.committed.tolist() == [0, 0, 1, 2, 3, 7] and sevens.max_new == 1
    heard = list[list[int]]()
    asked = request(lambda text: heard.append(text.tolist()), eos=frozenset({2}))
    asked.commit([1, 2, 3])
    assert heard == [[0, 0, 1], [0, 0, 1, 2]] and asked.finished


def rows_to(round_: RoundTrace, row: int) -> list[int]:
    """From the root, itself included."""
    rows = [row]
    while rows[-1]:
        rows.append(round_.draft_parents[rows[-1] - 1])
    return rows[::-1]


@pytest.mark.parametrize("name", ["chain", "block", "tree", "lookahead", "specbranch"])
def test_p_is_the_distribution_of_the_target_where_the_verifier_has_read_it(name):
    models = pair()
    trace = ENGINES[name](models).decode([1, 2], 60, Sampler.seeded(0))
    committed, read = [1, 2], 0
    for r in trace.rounds:
        assert len(r.draft_p) == len(r.draft_tokens)
        for token, parent, p in zip(r.draft_tokens, r.draft_parents, r.draft_p, strict=True):
            path = [r.draft_tokens[row - 1] for row in rows_to(r, parent)[1:]]
            expected = models.target.distribution((*committed, *path))[token].item()
            assert p is None or p == pytest.approx(expected)
            assert p is not None or parent not in rows_to(r, r.row)
            read += p is not None
        committed += r.tokens
    assert read > 10
    if name == "chain":  # after a rejection the token rule reads nothing more
        unread = [r.draft_p[r.accepted + 1 :] for r in trace.rounds if r.rejected]
        assert any(unread) and all(p is None for tail in unread for p in tail)


def test_nothing_is_warped_for_the_record():
    rows = WarpedRows(torch.zeros(3, 4), OFF)
    rows[1]
    assert rows.drawn([0, 1, 1, 2], [0, 3, 2, 1]) == [None, 0.25, 0.25, None]
    assert list(rows._distributions) == [1]


class Watching(Never):
    """Reads the target, as H-RAD does, and keeps what it is shown."""

    target_layers = (-3, -2, -1)

    def begin_round(self, context: RoundContext) -> None:
        self.predicted = [float(context.round)]
        self.seen = [*getattr(self, "seen", []), context]


@pytest.mark.parametrize("structure", DRAFTS)
def test_rules_see_the_last_verified_position_after_any_draft(structure):
    models, stop = pair(), Watching()
    engine = serial(structure, stop, RrswVerifier())(models)
    trace = engine.decode([1, 2], 60, Sampler.seeded(4))
    whole = torch.tensor([1, 2, *trace.tokens])
    rows = TableLM(models.target.table).forward(whole, hidden=range(-3, 0)).hidden
    for number, context in enumerate(stop.seen):
        assert torch.equal(context.target_hidden, rows[:, len(context.committed) - 2])
        assert trace.rounds[number].predicted == [number]
    after_leaf = sum(len(round_.tokens) == round_.accepted for round_ in trace.rounds[:-1])
    assert after_leaf > 3 or structure.shape != "branch_point"
    assert len({round_.accepted for round_ in trace.rounds}) >= 2
    stop.seen.clear()
    engine.decode([1], 5, Sampler.seeded(4))
    assert stop.seen[0].target_hidden is None and stop.seen[1].target_hidden is not None


def noted(lm: Any, monkeypatch: pytest.MonkeyPatch) -> list[LMOutput]:
    """What each call of this model returns from now on."""
    outputs, forward = list[LMOutput](), lm.forward

    def noting(*args: Any, **kwargs: Any) -> LMOutput:
        outputs.append(forward(*args, **kwargs))
        return outputs[-1]

    monkeypatch.setattr(lm, "forward", noting)
    return outputs


@pytest.mark.parametrize("length", [5, 60])
def test_prefill_returns_one_position_for_hrad(length, tmp_path, monkeypatch):
    models, reads = tiny_pair(), Inputs((), LAYERS, token=True)
    width = (len(LAYERS) + 1) * WIDTH
    checkpoint = write_checkpoint(tmp_path / "hrad", "hrad", width, inputs=reads)
    outputs = noted(models.target, monkeypatch)
    engine = serial(Chain(4), HRADStop(checkpoint, Confidence(0.3)), TokenVerifier())(models)
    trace = engine.decode([1 + place % 30 for place in range(length)], 20, Sampler.seeded(1))
    prefill, *rounds = outputs
    assert prefill.hidden.shape == (len(LAYERS), 1, WIDTH) and len(prefill.logits) == 0
    assert prefill.hidden.untyped_storage().nbytes() == prefill.hidden.nbytes
    drafted = [len(round_.draft_tokens) + 1 for round_ in trace.rounds]
    assert [output.hidden.shape for output in rounds] == [(2, n, WIDTH) for n in drafted]


def test_a_head_on_the_draft_gets_the_layer_it_reads(tmp_path, monkeypatch):
    models = tiny_pair()
    head = write_checkpoint(tmp_path / "head", "specdecpp", WIDTH)
    draft, target = noted(models.draft, monkeypatch), noted(models.target, monkeypatch)
    stop = SpecDecPPStop(head, 0.9, (1, 5), "paper")
    serial(Chain(5), stop, TokenVerifier())(models).decode(range(1, 31), 20, Sampler.seeded(1))
    assert draft[0].hidden is None, "nobody reads the prompt's"
    assert {output.hidden.shape for output in draft[1:]} == {(1, 1, WIDTH)}
    assert all(output.hidden is None for output in target)


def test_layers_and_rows_are_those_of_all():
    target, tokens = tiny_pair().target, torch.arange(1, 12)
    every = target.forward(tokens, hidden=range(-5, 0)).hidden
    for layers in ((-1,), (-4, -2), (-2, -4), (-5, -1)):
        for rows in ("all", "last", [3], [7, 0, 2]):
            target.reset()
            some = target.forward(tokens, hidden=layers, hidden_rows=rows).hidden
            index = slice(None) if rows == "all" else [-1] if rows == "last" else rows
            assert torch.equal(some, every[list(layers)][:, index])
    with pytest.raises(UserError, match=r"^inputs: expected .* -5 to -1, got \[-6, -1\]"):
        target.forward(torch.arange(3), hidden=(-6, -1))
