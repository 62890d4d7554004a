"""Draws, warps, rules, trees and records, for distributions and shapes that nobody thought of."""

import math
import tempfile
from functools import cache, partial
from pathlib import Path

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from data_gen.labels import accepted_length, drafted_length
from data_gen.storage import shards
from decoding.draft import Draft
from decoding.models.forward import RowTree
from decoding.picking import BLOCK, HostPool, pick
from decoding.sampling import Sampler, Warp, iid, top_tokens, without_replacement
from predictors.features.draft_statistics import Q_STATS
from tests.contract.enumeration import largest_error
from tests.contract.instances import Instance, Prefix, exact, output_distribution
from tests.contract.rules import RULES
from tests.contract.test_verifiers import CASES
from tests.contract.trees import STRUCTURES, proposals
from tests.helpers.data.harvests import write_harvest

UNIFORM = st.floats(0, 1, exclude_max=True)
WARPS = st.builds(
    Warp,
    temperature=st.sampled_from([0.0, 0.2, 1.0, 3.0]),
    top_k=st.integers(0, 6),
    top_p=st.sampled_from([0.3, 0.9, 1.0]),
)
LOGITS = st.lists(st.floats(-40, 40, width=32) | st.just(-math.inf), min_size=1, max_size=9).filter(
    lambda row: max(row) > -math.inf
)


def distributions(most: int = 8) -> st.SearchStrategy[Tensor]:
    """Masses between 0 and 1, some of them nothing or next to nothing, at least one above; not
    normalised."""
    mass = st.sampled_from([0.0, 1e-30, 1e-12]) | st.floats(1e-6, 1)
    rows = st.lists(mass, min_size=1, max_size=most).filter(lambda row: max(row) > 0)
    return rows.map(lambda row: torch.tensor(row, dtype=torch.float32))


@given(distributions(), UNIFORM)
def test_a_draw_is_possible_and_is_the_inverse_of_the_cumulative_sum(
    distribution: Tensor, uniform: float
) -> None:
    token = int(pick(distribution, torch.tensor(uniform, dtype=torch.float64)))
    assert distribution[token] > 0
    before, total = float(distribution[:token].double().sum()), float(distribution.double().sum())
    after = before + float(distribution[token])
    assert before / total <= uniform + 1e-9 and uniform <= after / total + 1e-9


@given(distributions(), UNIFORM, st.integers(0, 2 * BLOCK))
def test_a_pool_draws_like_pick(distribution: Tensor, uniform: float, padding: int) -> None:
    distribution = torch.cat([distribution.new_zeros(padding), distribution, distribution])
    token = HostPool(distribution).pick(uniform).token
    assert distribution[token] > 0
    same = int(pick(distribution, torch.tensor(uniform, dtype=torch.float64)))
    between = distribution[min(token, same) + 1 : max(token, same)]
    rounding = 1e-6 * float(distribution.sum())  # at a boundary
    assert token == same or float(between.sum()) <= rounding


@given(distributions(), st.integers(0, 2**32))
def test_without_replacement_draws_the_whole_support_once(distribution: Tensor, seed: int) -> None:
    drawn = [each.token for each in without_replacement(distribution, Sampler.seeded(seed))]
    assert sorted(drawn) == distribution.nonzero()[:, 0].tolist()


@given(distributions(), st.integers(0, 2**32))
def test_independent_draws_are_possible(distribution: Tensor, seed: int) -> None:
    draws = iid(distribution, Sampler.seeded(seed))
    assert all(distribution[next(draws).token] > 0 for _ in range(5))


@given(distributions())
def test_top_tokens_fall(distribution: Tensor) -> None:
    tokens = [each.token for each in top_tokens(distribution, Sampler.seeded(0))]
    assert sorted(tokens) == distribution.nonzero()[:, 0].tolist()
    assert tokens == sorted(tokens, key=lambda token: (-distribution[token], token))


@given(LOGITS, WARPS)
def test_a_warped_distribution_is_a_distribution(row: list[float], warp: Warp) -> None:
    logits = torch.tensor(row, dtype=torch.float32)
    probs = warp.probs(logits)
    assert (probs >= 0).all() and abs(float(probs.double().sum()) - 1) < 1e-5
    assert not probs[logits == -math.inf].any()
    left_out = max(logits[probs == 0].tolist(), default=-math.inf)
    assert float(logits[probs > 0].min()) >= left_out, "what is left out ranks below"


MASS = st.sampled_from([0, 0, 1, 1, 2, 3, 7, 100, 10**6])


@st.composite
def normalised(draw: st.DrawFn, vocab: int) -> torch.Tensor:
    masses = draw(st.lists(MASS, min_size=vocab, max_size=vocab).filter(any))
    return torch.tensor(masses, dtype=torch.float64) / sum(masses)


@st.composite
def instances(draw: st.DrawFn, vocab: int, gamma: int) -> Instance:
    """p and q after every prefix are among a few normalised, so that they are now equal, now far
    apart, now disjoint."""
    some = draw(st.lists(normalised(vocab), min_size=1, max_size=4))
    shift = draw(st.integers(0, 3))

    @cache
    def distribution(prefix: Prefix, side: int) -> torch.Tensor:
        return some[(sum(prefix) + len(prefix) + side) % len(some)]

    p, q = (partial(distribution, side=side) for side in (0, shift))
    return Instance(vocab, gamma, p, q)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_every_rule_is_lossless_on_every_shape_it_takes(data: st.DataObject) -> None:
    name, kind = data.draw(st.sampled_from(CASES))
    verifier, structure = RULES[name], STRUCTURES[kind]
    case = data.draw(instances(min(structure.vocabs), structure.gamma))
    every = proposals(case, structure, verifier.siblings)
    distribution = output_distribution(case, verifier.distribution, every)
    assert largest_error(distribution, exact(case)) < 1e-9


@st.composite
def parents(draw: st.DrawFn) -> list[int]:
    """Of each node the row of its parent, 0 being the root."""
    return [draw(st.integers(0, row)) for row in range(draw(st.integers(0, 12)))]


@given(parents())
def test_every_node_is_reached_by_one_path(above: list[int]) -> None:
    draft = Draft(above, list(range(len(above))), [])
    below = sorted(row for rows in draft.children() for row in rows)
    assert below == list(range(1, len(above) + 1))
    for row in range(len(above) + 1):
        path = draft.rows_to(row)
        assert path[-1:] == ([row] if row else []) and len(draft.path(row)) == len(path)
        assert [above[step - 1] for step in path] == [0, *path[:-1]][: len(path)]


@given(parents(), st.integers(0, 12))
def test_a_row_of_a_tree_sees_its_ancestors_and_itself(above: list[int], cut: int) -> None:
    grown = RowTree()
    for part in (above[:cut], above[cut:]):
        grown = grown.grown(torch.tensor(part, dtype=torch.long) - 1)
    draft = Draft(above, list(range(len(above))), [])
    for row in range(len(above)):
        path = [step - 1 for step in draft.rows_to(row + 1)]
        assert grown.visible()[row].nonzero()[:, 0].tolist() == path
        assert grown.depth[row] == len(path) - 1
    assert torch.equal(grown.visible(min(cut, len(above))), grown.visible()[cut:])


SMALL = st.integers(0, 4)


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 5), st.integers(1, 5), st.integers(0, 2**31))
def test_rounds_come_back_as_they_were(rows: int, gamma: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    floats = torch.rand(rows, gamma, generator=generator)
    whole = torch.randint(0, 2**31 - 1, (rows,), generator=generator)
    features = torch.randn(rows, gamma, 3, generator=generator) * 1e3
    record = {
        **{"prompt_id": "é\n|", "dataset": "", "split": "test"},
        **dict.fromkeys(("anchor", "committed", "known", "drafted", "accepted"), whole),
        "token": whole[:, None].expand(-1, gamma),
        **dict.fromkeys(("q", *Q_STATS, "accept_prob"), floats),
        "history": floats[:, :1].expand(-1, 3),
        "target_hidden": shards.pack_features(features[:, 0]),
        "draft_hidden": shards.pack_features(features),
        "draft_first": shards.pack_features(features[:, 0]),
    }
    for name, count in shards.SIBLINGS.items():
        values = whole[:, None] if name.endswith("token") else floats
        record[name] = values[..., None].expand(-1, gamma, count)
    with tempfile.TemporaryDirectory() as name:
        folder = write_harvest(Path(name), rows=2, gamma=gamma)
        entry, content = shards.encoded_shard("rounds", 0, [record])
        (folder / entry.name).write_bytes(content)
        (row,) = next(shards.batches(folder, entry, record)).to_pylist()
    assert row["prompt_id"] == "é\n|" and row["accepted"] == whole.tolist()
    assert torch.equal(torch.tensor(row["accept_prob"]), floats.flatten())
    bits = torch.tensor(row["draft_hidden"], dtype=torch.int16).view(torch.bfloat16)
    assert torch.equal(bits, features.bfloat16().flatten())


@given(
    st.lists(st.lists(SMALL, min_size=3, max_size=3), min_size=1, max_size=5),
    st.sets(SMALL),
    st.data(),
)
def test_lengths_keep_their_order(
    tokens: list[list[int]], ends: set[int], data: st.DataObject
) -> None:
    drafted = drafted_length(torch.tensor(tokens), ends)
    chance = st.lists(st.floats(0, 1), min_size=3, max_size=3)
    accept, coins = (
        torch.tensor([data.draw(chance) for _ in tokens], dtype=torch.float64) for _ in range(2)
    )
    accepted = accepted_length(accept, coins, drafted)
    assert (0 <= accepted).all() and (accepted <= drafted).all() and (drafted <= 3).all()
    for row, count in zip(tokens, drafted.tolist(), strict=True):
        assert not ends & set(row[: count - 1]) and (count == 3 or row[count - 1] in ends)
