"""What is expected of a draft against what happens to it."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from decoding.draft import Draft, RoundContext
from decoding.engines.serial import SerialEngine
from decoding.sampling import Sampler, Warp
from decoding.stopping.fixed import Fixed
from decoding.stopping.never import Never
from decoding.structures.chain import Chain
from decoding.structures.static_tree import WidthTree
from decoding.verification import sample_verdict
from decoding.verifiers.block import BlockVerifier
from decoding.verifiers.rrs import RrsVerifier
from decoding.verifiers.rrsw import RrswVerifier
from decoding.verifiers.token import TokenVerifier
from evaluation.expect import (
    Expected,
    Plan,
    Text,
    along,
    difference,
    expected_counts,
    in_context,
    measured,
)
from evaluation.table import ratio
from runtime.errors import UserError
from tests.unit.decoding.test_rounds import pair

TEXT = Text("toy", "a", torch.tensor([1, 2, 3, 4, 0, 1, 2, 2, 3, 1, 4, 4]), 3)


def chain(models: SimpleNamespace, verifier: object = None, gamma: int = 4, **kw) -> SerialEngine:
    parts = {"structure": Chain(20), "stop": Fixed(gamma), "verifier": verifier or TokenVerifier()}
    return SerialEngine(models, warp=Warp(), draft_warp=Warp(), **parts | kw)


def tree(models: SimpleNamespace, verifier: object) -> SerialEngine:
    return chain(models, verifier, structure=WidthTree([2, 2]), stop=Never())


def prefilled(models: SimpleNamespace) -> RoundContext:
    for model in (models.target, models.draft):
        model.reset()
        model.forward(TEXT.tokens[:4])
    return RoundContext(TEXT.tokens[:5], 50)


@pytest.mark.parametrize("make", [chain, lambda models: tree(models, RrswVerifier())])
def test_it_is_the_average_of_real_verdicts(make):
    models = pair()
    engine, context = make(models), prefilled(models)
    drafted = engine.expected(context, Sampler.seeded(3))
    accepted, tokens = expected_counts(drafted.draft, drafted.verdict.end_prob)
    sampler = Sampler.seeded(0)
    drawn = [sample_verdict(drafted.draft, drafted.verdict, sampler) for _ in range(4000)]
    assert np.mean([one.accepted for one in drawn]) == pytest.approx(accepted, abs=0.08)
    assert tokens == pytest.approx(accepted + 1)


def test_token_by_token_it_is_the_closed_form():
    models = pair()
    context = prefilled(models)
    drafted = chain(models).expected(context, Sampler.seeded(3))
    text, kept, expected = TEXT.tokens[:5].tolist(), 1.0, 0.0
    for token in drafted.draft.token:
        p, q = (model.distribution(tuple(text))[token] for model in (models.target, models.draft))
        kept *= min(1.0, float(p / q))
        expected += kept
        text.append(token)
    assert len(drafted.draft) == drafted.forwards == 4
    accepted, _ = expected_counts(drafted.draft, drafted.verdict.end_prob)
    assert accepted == pytest.approx(expected, abs=1e-6)


def test_nothing_follows_an_open_leaf_or_an_eos():
    draft = Draft([0, 1, 1], [3, 4, 2], [torch.zeros(5)] * 4, open=1)
    ends = torch.tensor([0.4, 0.3, 0.2, 0.1])
    accepted, tokens = expected_counts(draft, ends)
    assert accepted == pytest.approx(0.3 + 0.4 + 0.2) and tokens == pytest.approx(accepted + 0.9)
    _, tokens = expected_counts(draft, ends, frozenset([4]))
    assert tokens == pytest.approx(accepted + 0.7)


def test_the_caches_are_left_as_they_were():
    models = pair()
    context, engines = prefilled(models), [chain(models), tree(models, RrsVerifier())]
    before = [in_context(engine, context, [1]) for engine in engines]
    assert models.target.length == 4 == models.draft.length
    assert [in_context(engine, context, [1]) for engine in engines] == before


def test_a_prefill_for_each_context_gives_the_same():
    models = pair()
    found = dict(along({"a": chain(models)}, models, TEXT, Plan(4, 2, 0)))
    assert list(found) == [10, 8, 6, 4]
    for length in found:
        alone = Text("toy", "a", TEXT.tokens[: length + 1], length)
        again = dict(along({"a": chain(models)}, models, alone, Plan(1, 2, 0)))
        assert again == {length: found[length]}
    some = dict(along({"a": chain(models)}, models, TEXT, Plan(4, 2, 0), list(found)[:3]))
    assert some == {length: found[length] for length in list(found)[3:]}


def test_the_same_method_differs_by_nothing():
    models = pair()
    engines = {"a": chain(models), "b": chain(models), "block": chain(models, BlockVerifier())}
    turns = {}
    for name in "pqr":
        text = Text("toy", name, TEXT.tokens, 3)
        found = [one for _, one in along(engines, models, text, Plan(4, 1, 0))]
        turns["toy", name] = {method: [one[method] for one in found] for method in engines}
    rows = measured(turns)
    assert tuple(difference(rows, "b", "a", "emitted")) == (0, 0, 0)
    block = difference(rows, "block", "a", "accepted")
    means = [ratio(rows[rows["policy"] == m], "accepted", "rounds").value for m in ("block", "a")]
    assert block.value == pytest.approx(means[0] - means[1])
    assert difference(rows, "block", "a", "drafted").value == 0


def test_means_are_over_contexts_which_are_spread():
    one, two = Expected(1, 2, 3, 4), Expected(3, 4, 5, 6)
    turns = {("toy", "a"): {"m": [one, one, one]}, ("toy", "b"): {"m": [two]}}
    assert ratio(measured(turns), "accepted", "rounds").value == 1.5
    for length, count, expected in ((8, 2, [2, 6]), (3, 8, [0, 1, 2]), (64, 1, [32])):
        text = Text("toy", "a", torch.zeros(5 + length), 5)
        assert Plan(count, 1, 0).lengths(text) == [5 + position for position in expected]


def test_beyond_the_context_of_the_draft_nothing_is_drafted():
    models, whole = pair(), pair()
    models.draft.max_length = 8
    kinds = [along({"a": chain(m, gamma=2)}, m, TEXT, Plan(8, 2, 0)) for m in (models, whole)]
    short, long = ({n: found["a"] for n, found in kind} for kind in kinds)
    assert {n for n in short if short[n].accepted} == {n for n in short if n < 8}
    assert {n for n in short if short[n] == long[n]} == {n for n in short if n <= 6}
    assert all(short[n].tokens == 1 for n in short if n >= 8)


def test_a_text_that_does_not_fit_is_refused():
    models = pair(max_length=8)
    with pytest.raises(UserError, match="^data: a has 12 tokens"):
        list(along({"a": chain(models)}, models, TEXT, Plan(2, 1, 0)))
