"""The whole engine, several rounds, enumerated: its output distribution is the target's with every
verifier, every structure the verifier takes and every stop rule the structure asks."""

from pathlib import Path

import pytest
from hydra.utils import instantiate
from omegaconf import OmegaConf

from decoding.engines.autoregressive import AutoregressiveEngine
from decoding.engines.serial import SerialEngine
from decoding.sampling import Sampler, Warp
from decoding.stopping.fixed import Fixed
from decoding.structures.chain import Chain
from decoding.structures.sources import Sources
from decoding.trace import Trace
from decoding.verifiers.token import TokenVerifier
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
    checked,
    engine,
    limited_pair,
    rule_of,
    stop_rule,
    structure_of,
    toy_pair,
    verifier,
)
from tests.contract.enumeration import distribution_of


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
