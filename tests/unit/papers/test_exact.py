"""Figures that are computed: acceptance of toy distributions, masks, latency curves; and what tiny
harvests say of siblings and of rules that know the chance of survival."""

from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch

from data_gen.labels import siblings
from decoding.draft import RoundContext
from decoding.draft_tree import DraftTree
from decoding.models.table_lm import TableLM
from decoding.sampling import Sampler, Warp, without_replacement
from decoding.structures.dyspec import DySpecHeap
from decoding.trace import Stopwatch
from decoding.verifiers.rrs import RrsVerifier
from decoding.verifiers.rrsw import RrswVerifier
from papers.dyspec.masks import mask_order, mask_sizes, trees
from papers.dyspec.optimal import WORTHS, table_draft
from papers.dyspec.optimal import expected as worth_of
from papers.specbranch.latency import (
    CURVES,
    LATENCY,
    acceptance,
    expected,
    latency,
    sequential,
    theorem_1,
)
from papers.specdecpp.speed import forward_times
from papers.specdecpp.theorem import NAMES, SPEED, Rollouts, _judged, threshold_rules
from papers.spechub.theorems import _counted, full_optimum, random_pairs, with_replacement, without
from papers.spechub.toy import (
    RULES,
    Distributions,
    distinct_pair,
    hub_pair,
    independent,
    of,
    of_rule,
    single,
    softmaxes,
    toy_acceptance,
    toy_distributions,
    transport_optimum,
)
from papers.spechub.worth import _with_replacement, sibling_worth
from reports.artifacts import Evaluation
from reports.harvest_data import Rounds
from tests.contract.enumeration import distribution_of
from tests.helpers.data.harvests import WARP, described_as, write_harvest
from tests.helpers.evaluation.evaluations import (
    drawn,
    evaluation,
    interval,
    lacks,
    method,
    plain,
    records_by,
)
from tests.helpers.reports.artifacts import rounds_hold


def test_acceptance_of_three_tokens_is_what_pencil_and_paper_say():
    figure = toy_acceptance(toy_distributions()[:2])
    first, second = (row[2:6] for row in figure.rows)
    assert first == pytest.approx([0.9, 0.91, 0.925, 1.0])
    assert second == pytest.approx([0.7, 0.85, 0.98, 1.0])
    assert figure.kind == "exact" and "2 pairs" in figure.n and "enumerated" in figure.interval


@pytest.mark.parametrize("distributions", toy_distributions()[2:4], ids=lambda each: each.name)
def test_no_rule_passes_the_optimum_of_its_pairs(distributions):
    for pair in distributions.pairs[:2]:
        (row,) = toy_acceptance([Distributions("one", [pair])]).records
        assert row[of("one candidate")] <= row[of("RRS")] <= row[of("OTM, i.i.d. pairs")] + 1e-9
        assert row[of("RRSw")] <= row[of("OTM, distinct pairs")] + 1e-9


@pytest.mark.parametrize(
    ("name", "verifier", "pair"),
    [("RRS", RrsVerifier(), independent), ("RRSw", RrswVerifier(), distinct_pair)],
)
def test_siblings_are_accepted_as_their_rule_says(name, verifier, pair):  # type: ignore[no-untyped-def]
    small = [one.pairs[0] for one in toy_distributions()[:2]]
    for p, q in [*small, *softmaxes("uniform", 0.1, 0.5)[:1]]:
        assert RULES[name](p, q) == pytest.approx(of_rule(verifier, pair, p, q))


@pytest.mark.slow
def test_normal_logits_are_those_whose_cells_are_printed():
    """OTM of i.i.d. pairs leads SpecHub at T = .5 and is behind it at T = .1."""
    for temperature, leads in ((0.1, False), (0.5, True)):
        pairs = softmaxes("normal", temperature, 0.7)
        rules = RULES["OTM, i.i.d. pairs"], RULES["SpecHub"]
        best, hub = (sum(rule(*pair) for pair in pairs) for rule in rules)
        assert (best > hub) is leads


@pytest.mark.parametrize("distribution", [independent, distinct_pair, hub_pair])
def test_pair_distributions_are_distributions(distribution):  # type: ignore[no-untyped-def]
    q = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
    pairs = distribution(q)
    assert pairs.sum().item() == pytest.approx(1)
    assert pairs.sum(1).tolist() == pytest.approx(q.tolist())


def test_the_small_programme_is_the_whole_transport_and_spechub_solves_that_of_its_pairs():
    p, q = random_pairs(3, 0.5)[0]
    for law in (independent, distinct_pair, hub_pair):
        assert full_optimum(p, law(q)) == pytest.approx(transport_optimum(p, law(q)))
    found = _counted(random_pairs(4, 0.5)[:6])
    assert list(found.values())[:2] == pytest.approx([0, 0], abs=1e-9)
    for name in ("over RRS", "over OTM, i.i.d. pairs"):
        ahead, _, several = found[f"{name}, where promised"].split()
        assert ahead == several


def test_the_first_two_of_many_candidates_are_accepted_as_pairs_are():
    p, q = random_pairs(6, 0.5)[1]
    assert sum(islice(with_replacement(p, q), 2)) == pytest.approx(RULES["RRS"](p, q))
    many = torch.stack([*islice(without(p, q, torch.Generator().manual_seed(0)), 6)])
    error = float(many[:2].sum(0).std()) / len(many[0]) ** 0.5
    assert float(many[:2].sum(0).mean()) == pytest.approx(RULES["RRSw"](p, q), abs=3 * error)
    assert many.sum(0).tolist() == pytest.approx([1] * len(many[0])), "all six are tried"


@pytest.mark.parametrize("seed", [0, 1])
def test_the_greedy_tree_is_that_of_the_structure_and_has_most_draws_that_are_reached(seed):
    draft = table_draft(seed, 0.5)
    table = lambda context: torch.tensor(draft(context[1:]), dtype=torch.float64)  # noqa: E731

    def tree(sampler: Sampler) -> float:
        lm = TableLM(lambda context: table(context) if context else table((0,)), order=10)
        context = RoundContext(torch.tensor([0]), max_new=9)
        how = {"siblings": without_replacement, "sampler": sampler}
        grown = DraftTree(lm, context, Warp(), Stopwatch(), **how)
        DySpecHeap(3).grow(grown)
        reach = [1.0]
        for parent, q in zip(grown.parent, grown.drawn, strict=True):
            reach.append(reach[parent] * q)
        return sum(reach[1:])

    found = sum(value * weight for value, weight in distribution_of(tree).items())
    accepted, reached = WORTHS["accepted tokens"], WORTHS["draws that are reached"]
    assert found == pytest.approx(worth_of(draft, 3, accepted, True))
    assert worth_of(draft, 3, reached, True) == pytest.approx(worth_of(draft, 3, reached, False))
    assert found <= worth_of(draft, 3, accepted, False) + 1e-9


def test_means_are_over_the_pairs_of_a_row():
    pairs = [distributions.pairs[0] for distributions in toy_distributions()[:2]]
    figure = toy_acceptance([Distributions("both", pairs)])
    assert figure.column("RRS, probability of acceptance") == pytest.approx([(0.91 + 0.85) / 2])
    assert figure.column("pairs (p, q)") == [2]


def test_a_star_and_a_chain_have_the_blocks_one_counts():
    figure = mask_order({"chain": list(range(63)), "star": [0] * 63}, prefix=32)
    counts = figure.column("non-empty 32 x 32 blocks")
    # the prefix two, the tree: a triangle of three; a star's first column and diagonal
    assert counts == [5] * 8
    assert figure.column("blocks") == [6] * 8
    assert figure.column("order") == ["as drawn", "breadth first", "depth first", "heavy path"] * 2


def test_orders_that_keep_subtrees_together_touch_fewer_blocks():
    figure = mask_order()
    counts = figure.column("non-empty 32 x 32 blocks")
    assert counts == [*(326, 265, 184, 182), *(393, 328, 183, 180), *(17, 18, 18, 18)]
    assert [len(parents) for parents in trees().values()] == [768, 768, 64]


def test_a_prefix_is_seen_by_every_row():
    figure = mask_sizes((64,), (0, 128))
    bare, behind = (figure.column("non-empty 32 x 32 blocks")[n : n + 4] for n in (0, 4))
    assert [more - few for few, more in zip(bare, behind, strict=True)] == [3 * 4] * 4


def test_sure_drafts_are_drawn_to_their_end(tmp_path, monkeypatch):
    rounds_hold(monkeypatch, accept_prob=1.0, drafted=3)
    figure = threshold_rules([described_as(write_harvest(tmp_path / "tiny", rows=4, gamma=3))])
    assert len(figure.rows) == 2 * len(NAMES) and figure.kind == "modelled"
    assert figure.column(SPEED)[:3] == pytest.approx([4 / (5 + 3)] * 3)
    assert figure.column("threshold or length")[1:3] == [0.0, 3]


def test_halves_are_of_the_prompts_there_are_and_a_greedy_target_has_nothing_to_know(tmp_path):
    accept, group = np.random.default_rng(0).random((12, 4)), np.repeat([0, 2, 4, 6], 3)
    rows = [list(row.values())[3:9] for row in _judged([Rollouts([], "T = 1", accept, group)])]
    assert all(value is not None and value == value for row in rows for value in row)
    greedy = described_as(write_harvest(tmp_path / "tiny"), warp={**WARP, "temperature": 0.0})
    for some in ([], [greedy]):
        lacks("sampled target", threshold_rules, some)


def test_other_distributions_have_rows_of_their_own(tmp_path):
    one = described_as(write_harvest(tmp_path / "tiny", rows=8))
    other = described_as(one.folder, warp={**one.context["warp"], "top_k": 50})
    assert len(threshold_rules([one, other]).rows) == 2 * len(threshold_rules([one, one]).rows)


def test_candidates_add_up_to_one_of_them(tmp_path, monkeypatch):
    rounds_hold(
        monkeypatch,
        rrsw_accept=[0.25, 0.5],
        hub_accept=[0.75, 0.5],
        top_accept=[0.5, 0.25, 1.0],
        accept_prob=[0.5, 0.0, 0.75],  # of a round's three tokens: the last one is never reached
        q_drawn=[0.9, 0.5, 0.5],
    )
    figure = sibling_worth([described_as(write_harvest(tmp_path / "tiny", rows=2, gamma=3))])
    rows = records_by(figure, "candidates", "candidate")
    first = (1 * 0.5 + 0.5 * 0.0) / 1.5  # over the first token, and the second one half as often
    again = (0.5 * 0.1 + 0.5 * 1 * 0.25) / 1.5  # half of what is left at the first, all at the next
    wanted = {
        ("RRSw", "first"): first,
        ("RRSw", "second"): (1 - first) * 0.25,
        ("RRSw", "third"): (1 - first) * 0.75 * 0.5,
        ("RRSw", "one of them"): 1 - (1 - first) * 0.75 * 0.5,
        ("RRS", "second"): again,
        ("RRS", "one of them"): first + again,
        ("SpecHub", "first"): 0.75,
        ("SpecHub", "second"): 0.25 * 0.5,
        ("SpecHub", "one of them"): 0.875,
        ("point masses", "third"): 0.5 * 0.75,
        ("point masses", "one of them"): 1.0,
    }
    assert {key: rows[key]["accepted"] for key in wanted} == pytest.approx(wanted)
    assert ("SpecHub", "third") not in rows
    assert figure.n == "toy, 20 prompts, 80 draft tokens"
    assert set(figure.column("temperatures")) == {"T = 1"} and len(rows) == 3 + 4 + 3 + 4


@pytest.mark.slow
def test_a_second_candidate_with_replacement_is_read_off_one_without():
    """Over all draws of both, what the rule for i.i.d. candidates accepts."""
    for (p, q), *_ in (each.pairs for each in toy_distributions()[:3]):
        size, found = len(q), 0.0
        top, uniform = torch.zeros(size, 3, dtype=torch.long), torch.zeros(size, 2)
        for place in torch.linspace(0.0005, 0.9995, 1000):
            uniform[:, 0] = place
            rows = p.expand(size, -1), q.expand(size, -1)
            accept = siblings(*rows, torch.arange(size), top, uniform).rrsw_accept
            left = q * (1 - (p / q).clamp(max=1))
            found += float((left * _with_replacement(accept.double(), q)).sum()) / 1000
        more = RULES["RRS"](p, q) - single(p, q)
        assert found == pytest.approx(more, abs=2e-3)


SIDES = {"target": "cpu", "draft": "cpu"}
MACHINE = {"hardware": SIDES, "dtypes": {"target": "f32", "draft": "f32"}, "threads": 2}
SECONDS = {"draft": 0.01, "target": {"1": 0.05, "3": 0.06}, "autoregressive": 0.04, "calls": {}}
COST: dict[str, Any] = {
    "seconds": SECONDS,
    "regression": {"draft": 0.011, "target": 0.045, "r2": 0.99, "rows": 44},
    "measured_on": MACHINE,
    "pair": {"name": "toy"},
}
ROUNDS = Rounds(1.0, *torch.tensor([[0, 1, 3, 2], [3, 3, 3, 2], [0, 0, 1, 1]]))
COUNTED, DECODED = "one after the other, counted", "fixed length, decoded"


def test_curves_are_the_formulas():
    assert expected(3, 0.5) == pytest.approx(0.5 * (1 - 0.5**3) / 0.5)
    assert sequential(3, 4, 0.5) == pytest.approx((3 + 4) * (1 - 0.5) / (1 - 0.5**4) / 4)
    assert theorem_1(2, 4, 0.5) == pytest.approx(2 * 4 / ((1 + 0.25) * 0.75) / 4)
    ideal = [CURVES[name](8, 4, 0.5) for name in list(CURVES)[::2]]
    assert ideal == pytest.approx([12 / 9 / 4, 1 / 4])


def test_latency_counts_rounds_that_are_long_enough():
    assert acceptance([ROUNDS]).value == pytest.approx(6 / (6 + 2)), "two rounds end in a rejection"
    figure = latency([ROUNDS], COST)
    assert "a = 0.750" in figure.title and "c = 4.00" in figure.title
    points = records_by(figure, "curve", "draft tokens a round")
    assert points["one after the other", 2][LATENCY] == pytest.approx(sequential(2, 4, 0.75))
    # accepted of 1: 0 1 1 1, of 3: 0 1 3, and the fourth round ends after 2 tokens
    assert points[COUNTED, 1][LATENCY] == pytest.approx((1 + 4) / (3 / 4 + 1) / 4)
    value, low, high = interval(points[COUNTED, 3], LATENCY)
    assert value == pytest.approx((3 + 4) / (4 / 3 + 1) / 4) and low <= value <= high
    # of 4 tokens only rejections are known, which would make acceptance look worse than it is
    assert [g for curve, g in points if curve == COUNTED] == [1, 2, 3]
    assert figure.n == "2 prompts, 4 rounds of toy; c on cpu, f32, 2 threads"
    assert figure.kind == "modelled"
    lacks("gen_data.py", latency, [], COST)


def decoded(**other: Any) -> Evaluation:
    """Fixed lengths, in 4 seconds plain."""
    fixed = partial(method, "serial", "chain", "token", "fixed")
    lengths = {f"token_{g}": fixed(stop={"gamma": g}) for g in (1, 2)}
    seconds = {"autoregressive": 4.0, "token_1": 3.2, "token_2": 8.0}
    found = evaluation(lengths, {name: [plain(4, time)] for name, time in seconds.items()})
    found.results["run"] |= {**MACHINE, **other}
    return found


def test_what_was_decoded_on_that_machine_is_marked():
    points = records_by(latency([ROUNDS], COST, [decoded()]), "curve", "draft tokens a round")
    assert [points[DECODED, g][LATENCY] for g in (1, 2)] == pytest.approx([0.8, 2.0])
    elsewhere = latency([ROUNDS], COST, [decoded(threads=1)])
    assert DECODED not in elsewhere.column("curve")


def test_forward_times_are_those_of_the_file_and_the_papers():
    figure = forward_times([COST])
    assert figure.rows[0][1:] == pytest.approx([11, 45, 0.99, 44, 10, 50])
    printed = [list(row[1:]) for row in figure.rows[-2:]]
    assert printed == [[23.4, 112.0, *[None] * 4], [20.7, 108.0, *[None] * 4]]
    assert figure.n == "44 generations" and "no interval" in figure.interval


def test_pictures_are_drawn(tmp_path):
    masks = mask_order({"chain": list(range(63))}, prefix=32)
    for figure in (toy_acceptance(toy_distributions()[:2]), masks):
        assert figure.kind == "exact" and figure.interval.startswith("no interval")
        drawn(figure, tmp_path)
    drawn(latency([ROUNDS], COST, [decoded()]), tmp_path)
    drawn(forward_times([COST]), tmp_path)
