"""Engines, several rounds, enumerated: the output distribution is the target's with every verifier,
every structure the verifier takes and every stop rule the structure asks, on a pretend device, and
by lookahead; what is expected of a draft is the mean over every draft there is."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf
from torch import Tensor

from decoding.draft import Draft, RoundContext, Verdict
from decoding.draft_tree import DraftStep
from decoding.engines.autoregressive import AutoregressiveEngine
from decoding.engines.lookahead import LookaheadEngine
from decoding.engines.request import prefill
from decoding.engines.serial import SerialEngine
from decoding.interfaces import LMOutput, Pair
from decoding.models.table_lm import TableLM
from decoding.sampling import Sampler, Warp, iid
from decoding.stopping.confidence import Confidence
from decoding.stopping.fixed import Fixed
from decoding.stopping.never import Never
from decoding.structures.chain import Chain
from decoding.structures.sources import Sources
from decoding.trace import Trace
from decoding.verification import VerdictDistribution
from decoding.verifiers.token import TokenVerifier
from evaluation.expect import expected_counts
from tests.contract.covering import covering, crossed
from tests.contract.engines import (
    ACTING,
    ALONE,
    ASKING,
    CONF,
    OFF,
    PROMPT,
    STOP_CASES,
    THREE_WORDS,
    Case,
    Size,
    checked,
    engine,
    limited_pair,
    rule_of,
    stop_rule,
    structure_of,
    toy_pair,
    verifier,
)
from tests.contract.enumeration import Distribution, distribution_of
from tests.helpers.device.pretend_device import pretend


def early_stops(trace: Trace, gamma: int, length: int) -> set[bool]:
    """Whether the rule ended the chain, for each round in which it could."""
    found = set()
    for round_ in trace.rounds:
        limit = min(gamma, length - 1)
        if limit:
            found.add(len(round_.draft_tokens) < limit)
        length -= len(round_.tokens)
    return found


@pytest.mark.parametrize(
    ("case", "stop", "values"),
    covering(
        crossed(ASKING, STOP_CASES),
        lambda case, stop, values: (case.builds, stop, str(values)),
        lambda case, stop, values: (case.rule, str(case.rule_values), stop, str(values)),
    ),
)
def test_engine_distribution_under_every_stop_rule(
    case: Case, stop: str, values: dict, tmp_path: Path
) -> None:
    vocab, length, gamma = case.size.vocab, case.size.length, case.size.values["gamma_max"]
    rule = stop_rule(stop, tmp_path, values, gamma)
    traces = checked(engine(toy_pair(vocab, 31), case, tmp_path, rule), length)
    assert max(len(trace.rounds) for trace in traces) > 1
    # Point masses are what is most probable, so confidence stays
    if case.builds == "chain" and case.rule != "point_mass":
        acted = {early for trace in traces for early in early_stops(trace, gamma, length)}
        unscored = values.get("order") == "code" and gamma == 2  # before the second draw
        assert acted == {True, False} or stop not in ACTING or unscored, "always or never acted"


@pytest.mark.parametrize("name", ["token", "block"])
def test_engine_distribution_of_copies_behind_drawn_tokens(name: str) -> None:
    parts = Sources(2, 2, 1, 1), Fixed(2), verifier(name), OFF, OFF
    traces = checked(SerialEngine(toy_pair(3, 31), *parts), 4)
    kinds = {tuple(q == 1 for q in round_.draft_q) for trace in traces for round_ in trace.rounds}
    assert {(True,), (False,), (False, True), (True, True)} <= kinds


@pytest.mark.parametrize("case", covering(ALONE, structure_of, rule_of))
def test_engine_distribution_of_structures_that_ask_no_rule(case: Case, tmp_path: Path) -> None:
    traces = checked(engine(toy_pair(case.size.vocab, seed=31), case, tmp_path), case.size.length)
    assert max(len(trace.rounds) for trace in traces) > 1
    assert max(len(round_.draft_tokens) for trace in traces for round_ in trace.rounds) > 1


WARPS = [(Warp(0.7, top_k=2), Warp(1.5)), (Warp(top_p=0.8), Warp(top_p=0.6)), (OFF, Warp(0.0))]


@pytest.mark.parametrize(
    ("case", "warp", "draft_warp"),
    covering(
        crossed(THREE_WORDS, WARPS),
        lambda case, *warps: case.builds,
        lambda case, *warps: rule_of(case),
        lambda case, *warps: (*warps, case.rule in ("token", "block", "rrsw")),
    ),
)
def test_engine_distribution_under_warps(
    case: Case, warp: Warp, draft_warp: Warp, tmp_path: Path
) -> None:
    decoder = engine(toy_pair(3, seed=5), case, tmp_path, warp=warp, draft_warp=draft_warp)
    checked(decoder, case.size.length)


@pytest.mark.parametrize("case", covering(THREE_WORDS, structure_of, rule_of))
def test_greedy_target_is_autoregressive_whatever_is_drawn(case: Case, tmp_path: Path) -> None:
    pair, greedy, length = toy_pair(3, seed=5), Warp(0.0), case.size.length
    plain = AutoregressiveEngine(pair, greedy).decode(PROMPT, length, Sampler.seeded(0))
    traces = checked(engine(pair, case, tmp_path, warp=greedy), length)
    assert all(trace.tokens == plain.tokens for trace in traces)


@pytest.mark.parametrize("case", covering(THREE_WORDS, structure_of, rule_of))
def test_engine_distribution_with_eos(case: Case, tmp_path: Path) -> None:
    eos = frozenset({1})  # it is in the prompt, where lookup finds it
    traces = checked(engine(toy_pair(3, seed=3), case, tmp_path, eos_ids=eos), case.size.length)
    for trace in traces:
        assert not set(trace.tokens[:-1]) & eos
        for round_ in trace.rounds:
            inner = {round_.draft_tokens[parent - 1] for parent in round_.draft_parents if parent}
            assert not inner & eos
    assert any(eos & {*round_.draft_tokens} for trace in traces for round_ in trace.rounds)


@pytest.mark.parametrize("tokens", [[0, 2], [1]], ids=str)
@pytest.mark.parametrize("case", covering(THREE_WORDS, structure_of, rule_of))
def test_engine_distribution_of_a_draft_that_lacks_tokens(
    case: Case, tokens: list[int], tmp_path: Path
) -> None:
    traces = checked(engine(limited_pair(3, 5, tokens), case, tmp_path), case.size.length)
    drafted = {token for trace in traces for r in trace.rounds for token in r.draft_tokens}
    assert case.builds in ("lookup", "sources") or drafted == set(tokens)
    assert {token for trace in traces for token in trace.tokens} == {0, 1, 2}


@pytest.mark.parametrize("stop", ["fixed", "confidence", "adaedl"])
@pytest.mark.parametrize("name", ["token", "block"])
def test_engine_distribution_of_longer_chains_with_eos(
    name: str, stop: str, tmp_path: Path
) -> None:
    rule, eos = stop_rule(stop, tmp_path, ACTING.get(stop, [{}])[0]), frozenset({2})
    checked(SerialEngine(toy_pair(3, seed=3), Chain(3), rule, verifier(name), OFF, OFF, eos), 3)


@pytest.mark.parametrize("name", ["token", "block"])
def test_engine_distribution_over_many_rounds(name: str) -> None:
    pair = toy_pair(2, seed=9, weight=0.2)
    traces = checked(SerialEngine(pair, Chain(2), Fixed(2), verifier(name), OFF, OFF), 5)
    assert max(len(trace.rounds) for trace in traces) == 5


@pytest.mark.parametrize(
    "case", covering([case for case in THREE_WORDS if case.values[0].draws], structure_of, rule_of)
)
def test_a_draft_that_is_the_target_is_accepted_to_a_leaf(case: Case, tmp_path: Path) -> None:
    pair = toy_pair(3, seed=8, weight=1.0)
    decoder = engine(pair, case, tmp_path)

    def rejected(sampler: Sampler) -> bool:
        rounds = decoder.decode(PROMPT, case.size.length, sampler).rounds
        return any(round_.rejected for round_ in rounds)

    assert distribution_of(rejected).get(True, 0.0) < 1e-12


def test_same_seed_same_tokens_whatever_came_before() -> None:
    stop = instantiate(OmegaConf.load(CONF / "stop" / "adaedl.yaml"), threshold=0.7)
    engine = SerialEngine(toy_pair(3, seed=1), Chain(4), stop, TokenVerifier(), OFF, OFF)
    first = engine.decode(PROMPT, 30, Sampler.seeded(5)).tokens
    engine.decode(PROMPT, 30, Sampler.seeded(6))
    assert engine.decode(PROMPT, 30, Sampler.seeded(5)).tokens == first


ON_DEVICES = [
    Case("block", {}, "chain", Size(3, 3, {"gamma_max": 2})),
    Case("rrsw", {}, "tree", Size(3, 2, {"widths": [2, 1]})),
    Case("spechub", {}, "tree", Size(3, 2, {"widths": [2, 1]})),
    Case("rrsw", {}, "dyspec", Size(2, 4, {"budget": 4})),
    Case("block", {}, "sources", Size(2, 4, {"gamma_max": 2, "stretch": 1})),
]


class PlacedLM(TableLM):
    """Its outputs are on `output_device`, as a `CachedLM`'s are; one engine uses it at a time."""

    def __init__(self, lm: TableLM, device: str) -> None:
        super().__init__(lm.table)
        self.device, self.output_device = torch.device(device), torch.device("cpu")

    def forward(self, *args: Any, **options: Any) -> LMOutput:
        found = super().forward(*args, **options)
        hidden = None if found.hidden is None else found.hidden.to(self.output_device)
        return LMOutput(found.logits.to(self.output_device), hidden)

    def embed(self, token: int) -> Tensor:
        return super().embed(token).to(self.output_device)


@pytest.mark.parametrize(
    ("case", "draft_warp", "draft"),
    covering(
        crossed(
            [pytest.param(case, id=case.label) for case in ON_DEVICES],
            [OFF, Warp(1.5)],
            ["cuda:1", "cuda:0"],
        ),
        lambda case, *_: case.label,
        lambda _, draft_warp, __: draft_warp,
        lambda *values: values[-1],
    ),
)
def test_engine_distribution_on_a_device(
    case: Case, draft_warp: Warp, draft: str, tmp_path: Path
) -> None:
    plain = toy_pair(case.size.vocab, 9, 0.2)  # rejected often: every coin and trial counts
    with pretend() as counts:
        models = PlacedLM(plain.target, "cuda:0"), PlacedLM(plain.draft, draft)
        pair = SimpleNamespace(target=models[0], draft=models[1])
        traces = checked(engine(pair, case, tmp_path, draft_warp=draft_warp), case.size.length)
    assert max(len(trace.rounds) for trace in traces) > 1
    assert counts.transfers["to host"] > len(traces)


LOOKING = [Warp(0.0), Warp(0.7), OFF]
FILTERS = [Warp(0.7, top_k=2), Warp(top_p=0.8)]
SIZES = [(2, 5), (3, 4), (4, 3)]  # vocabulary, tokens decoded
SETTINGS = [(1, 2, 1), (3, 2, 2), (2, 3, 1), (3, 3, 2), (2, 4, 3)]  # window, ngram, guesses


def lookahead(
    pair: Pair, settings: tuple[int, int, int], prompt_pool: bool = True, **kw
) -> LookaheadEngine:
    window, ngram, guesses = settings
    return LookaheadEngine(pair, window, ngram, guesses, prompt_pool, **{"warp": OFF, **kw})


def lengths_of(traces: list[Trace]) -> list[int]:
    return [len(round_.draft_tokens) for trace in traces for round_ in trace.rounds]


@pytest.mark.parametrize("warp", LOOKING + FILTERS, ids=str)
@pytest.mark.parametrize(("vocab", "length"), SIZES)
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.few(16)
def test_lookahead_has_the_target_s_distribution(
    settings: tuple[int, int, int], vocab: int, length: int, warp: Warp
) -> None:
    traces = checked(lookahead(toy_pair(vocab, seed=31), settings, warp=warp), length)
    assert max(len(trace.rounds) for trace in traces) > 1
    if warp.temperature == 0:
        pair = toy_pair(vocab, seed=31)
        expected = AutoregressiveEngine(pair, warp).decode(PROMPT, length, Sampler.seeded(0)).tokens
        assert [trace.tokens for trace in traces] == [expected]
    else:
        assert max(lengths_of(traces)) >= min(settings[1] - 1, length - 2)


@pytest.mark.parametrize("warp", LOOKING, ids=str)
@pytest.mark.parametrize("settings", [(3, 2, 2), (3, 3, 2)], ids=str)
def test_distribution_of_n_grams_from_the_window_alone(
    settings: tuple[int, int, int], warp: Warp
) -> None:
    """Nothing is known at first; what is drafted later the window has guessed."""
    traces = checked(lookahead(toy_pair(2, seed=9), settings, prompt_pool=False, warp=warp), 6)
    assert not any(trace.rounds[0].draft_tokens for trace in traces) and max(lengths_of(traces)) > 0
    if warp.temperature > 0:
        rounds = [round_ for trace in traces for round_ in trace.rounds]
        assert {round_.accepted > 0 for round_ in rounds if round_.draft_tokens} == {True, False}
        parents = [round_.draft_parents for round_ in rounds]
        assert any(len(set(found)) < len(found) for found in parents), "two at one position"


@pytest.mark.parametrize("eos", [0, 1])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_distribution_with_eos_inside_n_grams(settings: tuple[int, int, int], eos: int) -> None:
    """Both tokens are in the prompt, so the pool has n-grams that go on after them."""
    ids = frozenset({eos})
    traces = checked(lookahead(toy_pair(3, seed=3), settings, eos_ids=ids), 4)
    for trace in traces:
        assert not set(trace.tokens[:-1]) & ids
        for round_ in trace.rounds:
            inner = {round_.draft_tokens[parent - 1] for parent in round_.draft_parents if parent}
            assert not inner & ids
    if settings[1] > 2 or eos == 1:
        assert any(ids & set(round_.draft_tokens) for trace in traces for round_ in trace.rounds)


@pytest.mark.slow
@pytest.mark.parametrize("warp", LOOKING, ids=str)
@pytest.mark.parametrize(("vocab", "length"), [(2, 8), (3, 6)])
def test_distribution_over_more_rounds(vocab: int, length: int, warp: Warp) -> None:
    checked(lookahead(toy_pair(vocab, seed=7), (3, 3, 2), warp=warp), length)


ALIKE = [(OFF, OFF), (Warp(0.6), Warp(0.6)), (Warp(0.0), OFF)]
Counts = tuple[float, float]
"""Accepted and committed tokens of a round."""


def mean(distribution: Distribution) -> list[float]:
    """Of counts."""
    return [sum(p * of[i] for of, p in distribution.items()) for i in range(2)]  # type: ignore[index]


def expected(decoder: SerialEngine, length: int) -> list[float]:
    committed, models = torch.tensor(PROMPT), (decoder.pair.target, decoder.pair.draft)
    for model in models:
        model.reset()
    hidden = prefill(models[0], committed, decoder.target_layers)
    prefill(models[1], committed)
    before = [model.length for model in models]

    def run(sampler: Sampler) -> Counts:
        context = RoundContext(committed, length, 0, hidden, models[0].embed, decoder.eos_ids)
        found = decoder.expected(context, sampler)
        assert [model.length for model in models] == before
        return expected_counts(found.draft, found.verdict.end_prob, decoder.eos_ids)

    return mean(distribution_of(run))


def decoded(decoder: SerialEngine, length: int) -> list[float]:
    def run(sampler: Sampler) -> Counts:
        first = decoder.decode(PROMPT, length, sampler).rounds[0]
        return first.accepted, len(first.tokens)

    return mean(distribution_of(run))


@pytest.mark.parametrize(
    ("case", "eos_ids"),
    covering(
        crossed([c for c in ASKING + ALONE if not c.marks], [frozenset(), frozenset({1})]),
        lambda case, eos_ids: (case.builds, not eos_ids),
        lambda case, eos_ids: rule_of(case),
        lambda case, eos_ids: eos_ids,
    ),
)
def test_it_is_the_mean_of_first_rounds(
    case: Case, eos_ids: frozenset[int], tmp_path: Path
) -> None:
    for warp, draft_warp in ALIKE:
        pair = toy_pair(case.size.vocab, seed=31)
        decoder = engine(pair, case, tmp_path, warp=warp, draft_warp=draft_warp, eos_ids=eos_ids)
        accepted, tokens = expected(decoder, case.size.length)
        assert decoded(decoder, case.size.length) == pytest.approx([accepted, tokens], abs=1e-9)
        if not eos_ids and case.builds != "branch_point":
            assert tokens == pytest.approx(accepted + 1, abs=1e-9)


class AtMostTwo:
    """A chain of at most two tokens, as a newcomer writes it, of the interfaces alone."""

    shape = "chain"
    sibling_samplers = None
    max_siblings = 1
    asks_stop = True
    uses_draft = True
    draft_layers = target_layers = ()

    def grow(self, tree) -> None:
        step = DraftStep(tree)
        while step.count < min(2, tree.context.max_depth) and not step.stopped_by(tree.stop):
            if step.draw() in tree.context.eos_ids:
                return


class OneByOne:
    """min(1, p / q) for each token, then what p has more than q."""

    lossless = True
    siblings = staticmethod(iid)
    shapes = ("chain",)
    max_siblings = 1

    def distribution(self, draft: Draft, p: Tensor) -> VerdictDistribution:
        end, left = torch.zeros(len(draft) + 1, dtype=torch.float64), 1.0
        for row, token in enumerate(draft.token):
            accept = min(1.0, (p[row][token] / draft.q[row][token]).item())
            end[row], left = left * (1 - accept), left * accept
        end[-1] = left
        return VerdictDistribution(end, lambda row: self.residual(draft, p, row))

    def residual(self, draft: Draft, p: Tensor, row: int) -> Tensor:
        if row == len(draft):
            return p[row]
        more = (p[row] - draft.q[row]).clamp(min=0)
        return more / more.sum() if more.any() else p[row]

    def verify(self, draft: Draft, p, sampler) -> Verdict:
        for row, token in enumerate(draft.token):
            if not sampler.accept(p[row][token].item(), draft.q[row][token].item()):
                drawn = sampler.draw(self.residual(draft, p, row)).token
                return Verdict(row, draft.token[:row], drawn, len(draft))
        return Verdict(len(draft), draft.token, sampler.draw(p[len(draft)]).token, len(draft))


@pytest.mark.parametrize("stop", [Never(), Confidence(0.4)], ids=["never", "confidence"])
@pytest.mark.parametrize(
    ("structure", "verifier"),
    [(AtMostTwo(), TokenVerifier()), (Chain(3), OneByOne()), (AtMostTwo(), OneByOne())],
    ids=["structure", "verifier", "both"],
)
def test_engine_distribution_of_parts_that_a_newcomer_writes(structure, verifier, stop) -> None:
    traces = checked(SerialEngine(toy_pair(3, 31), structure, stop, verifier, OFF, Warp(0.7)), 3)
    assert {len(round_.draft_tokens) for trace in traces for round_ in trace.rounds} >= {0, 1, 2}
