"""Two requests at once, enumerated: each gets the target's distribution whatever the other one
gets, with every verifier, structure and stop rule that is enumerated alone."""

from itertools import count
from pathlib import Path

import pytest

from decoding.draft_tree import DraftTree
from decoding.engines.autoregressive import AutoregressiveEngine
from decoding.engines.batched import Asked, BatchedEngine
from decoding.engines.serial import SerialEngine
from decoding.interfaces import Pair
from decoding.sampling import Sampler
from decoding.stopping import shared
from decoding.stopping.never import Never
from decoding.stopping.shared import Shared
from decoding.structures.chain import Chain
from tests.contract.covering import covering, crossed
from tests.contract.engines import (
    ALONE,
    ASKING,
    OFF,
    PROMPT,
    STOP_CASES,
    Case,
    batch_cost,
    engine,
    rule_of,
    stop_rule,
    structure_of,
    toy_pair,
    verifier,
)
from tests.contract.enumeration import (
    Distribution,
    autoregressive_distribution,
    distribution_of,
    largest_error,
)

OTHER = (0, 1, 1)
LENGTHS = 3, 2
SMALL = [case for case in ASKING if case.values[0].size.vocab == 2 and not case.marks]
NO_RULE = [case for case in ALONE if case.values[0].size.vocab == 2 and not case.marks]


def right(pair: Pair, lengths: tuple[int, int] = LENGTHS) -> Distribution:
    first, second = (
        autoregressive_distribution(pair.target.distribution, 2, length, prompt)
        for length, prompt in zip(lengths, (PROMPT, OTHER), strict=True)
    )
    return {(one, two): p * q for one, p in first.items() for two, q in second.items()}


def asked(sampler: Sampler, lengths: tuple[int, int] = LENGTHS) -> list[Asked]:
    both = zip((PROMPT, OTHER), lengths, strict=True)
    return [Asked(prompt, length, sampler) for prompt, length in both]


def error_of(
    decoder: SerialEngine | AutoregressiveEngine, size: int = 2, lengths: tuple[int, int] = LENGTHS
) -> float:
    batch = BatchedEngine(decoder, size)

    def run(sampler: Sampler) -> tuple[tuple[int, ...], ...]:
        found = dict(batch.decode(asked(sampler, lengths)))
        return tuple(tuple(found[number].tokens) for number in range(2))

    return largest_error(distribution_of(run), right(decoder.pair, lengths))


@pytest.mark.parametrize(
    ("case", "stop", "values"),
    covering(
        crossed(SMALL, STOP_CASES),
        lambda case, stop, values: (case.builds, stop, str(values)),
        lambda case, stop, values: (case.rule, str(case.rule_values), stop, str(values)),
    ),
)
@pytest.mark.few(16, rest="slow")
def test_two_requests_under_every_stop_rule(
    case: Case, stop: str, values: dict, tmp_path: Path
) -> None:
    rule = stop_rule(stop, tmp_path, values, case.size.values["gamma_max"])
    decoder = engine(toy_pair(2, 31), case, tmp_path, rule)
    many = (case.rule, case.builds) == ("rrs", "branch_point")  # 7,776 paths of all tokens
    assert error_of(decoder, lengths=(2, 2) if many else LENGTHS) < 1e-9


@pytest.mark.parametrize("case", covering(NO_RULE, structure_of, rule_of))
@pytest.mark.few(6, rest="slow")
def test_two_requests_with_structures_that_ask_no_rule(case: Case, tmp_path: Path) -> None:
    assert error_of(engine(toy_pair(2, 31), case, tmp_path)) < 1e-9


@pytest.mark.parametrize("size", [1, 2])
def test_two_requests_without_a_draft(size: int) -> None:
    assert error_of(AutoregressiveEngine(toy_pair(2, 31), OFF), size) < 1e-9


@pytest.mark.parametrize("first", [0, 1, shared.FIRST])
@pytest.mark.parametrize("target_row", [0.0, 0.2, 0.8, 1.0])
@pytest.mark.parametrize("name", ["token", "block"])
def test_two_requests_that_share_a_budget(
    name: str, target_row: float, first: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its ledger is of one run, so each path has a new one. first: steps with drafts before one
    goes without. A row of 0.8 is worth it for the second request alone, when the first, for which
    both have rested, has ended."""
    pair, lengths = toy_pair(2, 31), (2, 4) if target_row == 0.8 else LENGTHS
    drafts = set[tuple[int, ...]]()
    costs = batch_cost(tmp_path / "costs.json", target_row)
    monkeypatch.setattr(shared, "FIRST", first)

    def run(sampler: Sampler) -> tuple[tuple[int, ...], ...]:
        steps = count(step=1 + target_row)  # as the costs say; paths that begin alike go on alike
        monkeypatch.setattr(shared, "perf_counter", lambda: next(steps))
        rule = Shared(costs, learns=True)
        decoder = SerialEngine(pair, Chain(3), rule, verifier(name), OFF, OFF)
        found = dict(BatchedEngine(decoder, 2).decode(asked(sampler, lengths)))
        drafts.update(tuple(len(x.draft_tokens) for x in found[n].rounds) for n in range(2))
        return tuple(tuple(found[number].tokens) for number in range(2))

    assert largest_error(distribution_of(run), right(pair, lengths)) < 1e-9
    if target_row == 0.8 and first:
        assert {each[:3] for each in drafts} == {(0, 0), (0, 0, 1)}
    else:
        assert max(map(max, drafts)) == (2 if target_row < 0.8 and first else 0), "and it acts"


def test_a_request_decoded_alone_has_no_share_of_a_later_budget(tmp_path: Path) -> None:
    """The costs reach two requests."""
    rule = Shared(batch_cost(tmp_path / "costs.json"), learns=True)
    decoder = SerialEngine(toy_pair(2, 31), Chain(3), rule, verifier("token"), OFF, OFF)
    assert len(decoder.decode([1, 0], 5, Sampler.seeded(0)).tokens) == 5
    assert len(dict(BatchedEngine(decoder, 2).decode(asked(Sampler.seeded(0))))) == 2


class Withdrawing(Chain):
    """Biased: a token is drawn, looked at, and not verified where it is improbable, so that others
    get the row."""

    def grow(self, tree: DraftTree) -> None:
        super().grow(tree)
        if tree.drawn and tree.drawn[-1] < 0.5:
            for kept in (tree.token, tree.parent, tree.drawn, tree.depth):
                kept.pop()


def test_to_drop_a_token_that_was_looked_at_is_found() -> None:
    decoder = SerialEngine(toy_pair(2, 31), Withdrawing(2), Never(), verifier("token"), OFF, OFF)
    assert error_of(decoder) > 1e-3
