"""The whole engine, several rounds, enumerated: its output law is the target's with every verifier, every structure the
verifier takes and every stop rule the structure asks."""

from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf

from decoding.cached_lm import CachedLM
from decoding.engines.autoregressive import AutoregressiveEngine
from decoding.engines.fit import check_fit
from decoding.engines.serial import SerialEngine
from decoding.growth import DraftStructure, StopRule
from decoding.law import Verifier
from decoding.lm import Pair
from decoding.models import ModelPair
from decoding.sampling import Sampler, Warp
from decoding.stopping.fixed import Fixed
from decoding.stopping.never import Never
from decoding.structures.chain import Chain
from decoding.structures.dyspec import DySpecHeap
from decoding.structures.sequoia import write_artefact
from decoding.table_lm import TableLM, mixed_table, random_table
from decoding.trace import Trace
from decoding.verifiers.rrsw import RrswVerifier
from decoding.verifiers.token import TokenVerifier
from predictors.errors import UserError
from tests.checkpoints import ONE_STATE, write_checkpoint
from tests.contract.enumeration import Law, autoregressive_law, largest_error, law_of, total_variation
from tests.tiny_pair import tiny_pair

CONF = Path(__file__).parents[2] / "conf"
STOPS, STRUCTURES, VERIFIERS = (
    sorted(path.stem for path in (CONF / group).glob("*.yaml")) for group in ("stop", "structure", "verifier")
)
PROMPT = (1, 0, 1, 0)  # it repeats itself, so that lookup finds something
OFF = Warp()

# Values at which a stop rule acts on these small vocabularies; one without an entry is tested as its YAML says.
ACTING: dict[str, list[dict]] = {
    "confidence": [{"eps": 0.4}],
    "confidence_before": [{"eps": 0.65}],
    "entropy": [{"threshold": 0.64, "step": 0.2}],
    "acceptance": [{"threshold": 0.35, "bounds": [1, 20], "order": order} for order in ("paper", "code")],
    "hrad": [{"confidence": {"eps": 0.4}}],
}
STOP_CASES = [(name, values) for name in STOPS for values in ACTING.get(name, [{}])]
RULES: dict[str, list[dict]] = {"parallel": [{"rule": "token"}, {"rule": "block"}]}


class Size(NamedTuple):
    """Small enough to enumerate. values: of the structure."""

    vocab: int
    length: int
    values: dict


def sizes(values: dict, larger: dict | None = None) -> list[Size]:
    return [Size(2, 4, values), Size(3, 3, larger or values)]


SIZES: dict[str, list[Size]] = {  # a structure without an entry is tested as its YAML says
    "chain": sizes({"gamma_max": 3}, {"gamma_max": 2}),
    "branch_point": [
        Size(2, 3, {"gamma_max": 2, "candidates": 2}),
        Size(3, 2, {"gamma_max": 1, "candidates": 2}),
    ],
    "parallel_paths": sizes({"paths": 2, "gamma": 2}),
    "tree": sizes({"widths": [2, 1]}),
    "specinfer": sizes({"widths": [2, 1]}),
    "dyspec": sizes({"budget": 4}),
    "dyspec_layers": sizes({"threshold": 0.15, "cap": 4}),
    "lookup": sizes({"gamma": 3}),
}
LARGER: dict[str, list[Size]] = {
    "branch_point": [Size(2, 4, {"gamma_max": 2, "candidates": 2}), Size(3, 3, {"gamma_max": 1, "candidates": 2})],
    "parallel_paths": [Size(2, 4, {"paths": 3, "gamma": 2})],
    "tree": [Size(2, 4, {"widths": [2, 2]}), Size(3, 3, {"widths": [2, 2]})],
    "specinfer": [Size(2, 4, {"widths": [3, 1]})],
    "dyspec": [Size(2, 5, {"budget": 7}), Size(4, 3, {"budget": 5}), Size(3, 4, {"budget": 5})],
    "dyspec_layers": [Size(2, 5, {"threshold": 0.05, "cap": 9}), Size(3, 4, {"threshold": 0.1, "cap": 6})],
    "sequoia": [Size(3, 4, {})],
    "lookup": [Size(2, 6, {"gamma": 4}), Size(3, 5, {"gamma": 4})],
}
SEQUOIA = [0, 1, 0, 3]  # the tree of the artefact: two children, each with one of its own


def toy_pair(vocab: int, seed: int, weight: float = 0.5) -> Pair:
    target, noise = (random_table(vocab, seed + offset, concentration=0.7) for offset in range(2))
    return SimpleNamespace(target=TableLM(target), draft=TableLM(mixed_table(target, noise, weight)))


def stop_rule(name: str, folder: Path, values: dict, gamma: int = 3) -> StopRule:
    """From its YAML; a learned rule gets an untrained predictor for the toy model."""
    config = OmegaConf.merge(OmegaConf.load(CONF / "stop" / f"{name}.yaml"), values)
    if "checkpoint" in config:
        predictor = Path(config.checkpoint).name
        width = TableLM(random_table(2, 0)).shape[1]
        dim = width * (len(ONE_STATE[predictor].layers) + ONE_STATE[predictor].embedding)
        config.checkpoint = str(write_checkpoint(folder / predictor, predictor, dim, gamma=gamma))
    return instantiate(config)


def verifier(name: str, values: dict | None = None) -> Verifier:
    return instantiate(OmegaConf.merge(OmegaConf.load(CONF / "verifier" / f"{name}.yaml"), values or {}))


def structure(name: str, folder: Path, values: dict) -> DraftStructure:
    config = OmegaConf.load(CONF / "structure" / f"{name}.yaml")
    if "tree" in config:
        config.tree = str(folder / "tree.json")
        write_artefact(Path(config.tree), {"parents": SEQUOIA})
    return instantiate(OmegaConf.merge(config, values))


def fits(rule: Verifier, drafts: DraftStructure) -> bool:
    try:
        check_fit(drafts, Never(), rule)
    except UserError:
        return False
    return True


class Case(NamedTuple):
    """A verifier, a structure it takes, and a size."""

    rule: str
    rule_values: dict
    builds: str
    size: Size

    @property
    def draws(self) -> bool:
        """Whether its candidates are drawn: point masses are rejected even where p = q."""
        return self.rule != "point_mass" and self.builds != "lookup"

    @property
    def label(self) -> str:
        named = "-".join([self.rule, *map(str, self.rule_values.values()), self.builds])
        return f"{named}-{self.size.vocab}-{self.size.length}"


def cases(asks_stop: bool) -> list:
    """Of all verifiers and structures, those that go together; the larger sizes are marked slow."""
    found = []
    with TemporaryDirectory() as scratch:
        for builds in STRUCTURES:
            plain = SIZES.get(builds, sizes({}))
            for size in plain + LARGER.get(builds, []):
                drafts = structure(builds, Path(scratch), size.values)
                for rule in VERIFIERS:
                    for values in RULES.get(rule, [{}]):
                        if drafts.asks_stop == asks_stop and fits(verifier(rule, values), drafts):
                            case = Case(rule, values, builds, size)
                            marks = [] if size in plain else [pytest.mark.slow]
                            found.append(pytest.param(case, id=case.label, marks=marks))
    return found


ASKING, ALONE = cases(asks_stop=True), cases(asks_stop=False)
THREE_WORDS = [case for case in ASKING + ALONE if case.values[0].size.vocab == 3 and not case.marks]


def engine(
    pair: Pair,
    case: Case,
    folder: Path,
    stop: StopRule | None = None,
    warp: Warp = OFF,
    draft_warp: Warp = OFF,
    eos_ids: frozenset[int] = frozenset(),
) -> SerialEngine:
    drafts, rule = structure(case.builds, folder, case.size.values), verifier(case.rule, case.rule_values)
    return SerialEngine(pair, drafts, stop or Never(), rule, warp, draft_warp, eos_ids)


def decoded_law(engine: SerialEngine, length: int) -> tuple[Law, list[Trace]]:
    traces: list[Trace] = []

    def run(sampler: Sampler) -> tuple[int, ...]:
        traces.append(engine.decode(PROMPT, length, sampler))
        return tuple(traces[-1].tokens)

    return law_of(run), traces


def target_law(pair: Pair, warp: Warp, length: int, eos_ids: frozenset[int] = frozenset()) -> Law:
    return autoregressive_law(
        lambda context: warp.probs(pair.target.law(context).log()), pair.target.vocab_size, length, PROMPT, eos_ids
    )


def checked(engine: SerialEngine, length: int) -> list[Trace]:
    """Every decode there is, after a look at their law."""
    law, traces = decoded_law(engine, length)
    error = largest_error(law, target_law(engine.pair, engine.warp, length, engine.eos_ids))
    print(f"largest error {error:.1e} over {len(traces)} paths")
    assert error < 1e-9
    assert sum(law.values()) == pytest.approx(1, abs=1e-9)
    return traces


def early_stops(trace: Trace, gamma: int, length: int) -> set[bool]:
    """Whether the rule ended the chain, for each round in which it could."""
    found = set()
    for round_ in trace.rounds:
        limit = min(gamma, length - 1)
        if limit:
            found.add(len(round_.draft_tokens) < limit)
        length -= len(round_.tokens)
    return found


@pytest.mark.parametrize(("stop", "values"), STOP_CASES)
@pytest.mark.parametrize("case", ASKING)
def test_engine_law_under_every_stop_rule(case: Case, stop: str, values: dict, tmp_path: Path) -> None:
    vocab, length, gamma = case.size.vocab, case.size.length, case.size.values["gamma_max"]
    traces = checked(engine(toy_pair(vocab, 31), case, tmp_path, stop_rule(stop, tmp_path, values, gamma)), length)
    assert max(len(trace.rounds) for trace in traces) > 1
    if case.builds == "chain" and case.rule != "point_mass":  # which draws what is most probable, so confidence stays
        acted = {early for trace in traces for early in early_stops(trace, gamma, length)}
        too_short = values.get("order") == "code" and gamma == 2  # it has scored nothing before the second draw
        assert acted == {True, False} or stop not in ACTING or too_short, "the rule always or never acted"


@pytest.mark.parametrize("case", ALONE)
def test_engine_law_of_structures_that_ask_no_rule(case: Case, tmp_path: Path) -> None:
    traces = checked(engine(toy_pair(case.size.vocab, seed=31), case, tmp_path), case.size.length)
    assert max(len(trace.rounds) for trace in traces) > 1
    assert max(len(round_.draft_tokens) for trace in traces for round_ in trace.rounds) > 1


WARPS = [
    (Warp(0.7, top_k=2), Warp(1.5)),
    (Warp(top_p=0.8), Warp(top_p=0.6)),
    (OFF, Warp(0.0)),
]


@pytest.mark.parametrize(("warp", "draft_warp"), WARPS)
@pytest.mark.parametrize("case", THREE_WORDS)
def test_engine_law_under_warps(case: Case, warp: Warp, draft_warp: Warp, tmp_path: Path) -> None:
    checked(engine(toy_pair(3, seed=5), case, tmp_path, warp=warp, draft_warp=draft_warp), case.size.length)


@pytest.mark.parametrize("case", THREE_WORDS)
def test_greedy_target_is_autoregressive_whatever_is_drawn(case: Case, tmp_path: Path) -> None:
    pair, greedy = toy_pair(3, seed=5), Warp(0.0)
    expected = AutoregressiveEngine(pair, greedy).decode(PROMPT, case.size.length, Sampler.seeded(0)).tokens
    traces = checked(engine(pair, case, tmp_path, warp=greedy), case.size.length)
    assert all(trace.tokens == expected for trace in traces)


@pytest.mark.parametrize("case", THREE_WORDS)
def test_engine_law_with_eos(case: Case, tmp_path: Path) -> None:
    eos = frozenset({1})  # it is in the prompt, where lookup finds it
    traces = checked(engine(toy_pair(3, seed=3), case, tmp_path, eos_ids=eos), case.size.length)
    for trace in traces:
        assert not set(trace.tokens[:-1]) & eos
        for round_ in trace.rounds:
            inner = {round_.draft_tokens[parent - 1] for parent in round_.draft_parents if parent}
            assert not inner & eos
    drafted = {token for trace in traces for round_ in trace.rounds for token in round_.draft_tokens}
    assert drafted & eos


@pytest.mark.parametrize("stop", ["fixed", "confidence", "entropy"])
@pytest.mark.parametrize("name", ["token", "block"])
def test_engine_law_of_longer_chains_with_eos(name: str, stop: str, tmp_path: Path) -> None:
    rule, eos = stop_rule(stop, tmp_path, ACTING.get(stop, [{}])[0]), frozenset({2})
    checked(SerialEngine(toy_pair(3, seed=3), Chain(3), rule, verifier(name), OFF, OFF, eos), 3)


@pytest.mark.parametrize("name", ["token", "block"])
def test_engine_law_over_many_rounds(name: str) -> None:
    pair = toy_pair(2, seed=9, weight=0.2)
    traces = checked(SerialEngine(pair, Chain(2), Fixed(2), verifier(name), OFF, OFF), 5)
    assert max(len(trace.rounds) for trace in traces) == 5


@pytest.mark.parametrize("case", [case for case in THREE_WORDS if case.values[0].draws])
def test_a_draft_that_is_the_target_is_accepted_to_a_leaf(case: Case, tmp_path: Path) -> None:
    pair = toy_pair(3, seed=8, weight=1.0)
    decoder = engine(pair, case, tmp_path)

    def rejected(sampler: Sampler) -> bool:
        return any(round_.rejected for round_ in decoder.decode(PROMPT, case.size.length, sampler).rounds)

    assert law_of(rejected).get(True, 0.0) < 1e-12


# A real model --------------------------------------------------------------------------------------------------------


class WatchedEngine(SerialEngine):
    """Compares every row that draft and target were run on with the same path in a cache of its own."""

    def _context(self, request, round_, hidden):
        assert self.pair.target.length == len(request.committed) - 1
        return super()._context(request, round_, hidden)

    def _run_target(self, context, draft):
        output = super()._run_target(context, draft)
        for row in range(draft.closed + 1):
            text = torch.tensor([*context.committed.tolist(), *draft.path(row)])
            torch.testing.assert_close(output.logits[row], uncached(self.pair.target, text))
            if self.structure.uses_draft and row in draft.parent.tolist():
                q = self.draft_warp.probs(uncached(self.pair.draft, text))
                torch.testing.assert_close(draft.q[row], q)
        return output


def uncached(lm: CachedLM, text: torch.Tensor) -> torch.Tensor:
    """[V], by a cache that has seen nothing else."""
    return CachedLM(lm.model).forward(text, logits="last").logits[-1]


@pytest.fixture(scope="module")
def llamas() -> ModelPair:
    return tiny_pair()


ONE_EACH = {case.builds: case for (case,) in (param.values for param in THREE_WORDS) if case.rule in ("rrs", "rrsw")}


@pytest.mark.parametrize("warp", [Warp(0.0), Warp()], ids=["greedy", "sampled"])
@pytest.mark.parametrize("builds", ONE_EACH)
def test_caches_of_a_real_model_follow_every_draft(builds: str, warp: Warp, llamas: ModelPair, tmp_path: Path) -> None:
    """Drafts of their YAML's size, several rounds; a greedy decode is the autoregressive one."""
    assert set(ONE_EACH) == set(STRUCTURES)
    parts = engine(llamas, ONE_EACH[builds]._replace(size=Size(32, 20, {})), tmp_path)
    watched = WatchedEngine(llamas, parts.structure, parts.stop, parts.verifier, warp, Warp())
    prompt = [3, 4, 5, 3, 4]
    trace = watched.decode(prompt, 20, Sampler.seeded(1))
    assert len(trace.tokens) == 20 and llamas.target.length == len(prompt) + 19
    if warp.temperature == 0:
        assert sum(round_.accepted for round_ in trace.rounds) > 0
        assert trace.tokens == AutoregressiveEngine(llamas, warp).decode(prompt, 20, Sampler.seeded(0)).tokens


# Negative controls ---------------------------------------------------------------------------------------------------


class DroppingChain(Chain):
    """SpecBranch's class 1 as printed: a drawn token with q < eps is looked at and taken back."""

    def grow(self, tree, context, stop, siblings, sampler) -> None:
        super().grow(tree, context, stop, siblings, sampler)
        if tree.token and tree.q(tree.parent[-1])[tree.token[-1]] < 0.4:
            tree.token.pop()
            tree.parent.pop()


def test_engine_that_drops_an_unsure_token_is_caught(tmp_path: Path) -> None:
    """Published total variation: 6e-2 to 2e-1 per round."""
    pair = toy_pair(2, seed=9)
    stop = stop_rule("confidence", tmp_path, {"eps": 0.4})
    check_biased(SerialEngine(pair, DroppingChain(3), stop, TokenVerifier(), OFF, OFF), 4)


class PruningDySpec(DySpecHeap):
    """Draws, then keeps the most valuable half of the nodes by their own probability."""

    def grow(self, tree, context, stop, siblings, sampler) -> None:
        super().grow(tree, context, stop, siblings, sampler)
        reach = [1.0]
        for token, parent in zip(tree.token, tree.parent, strict=True):
            reach.append(reach[parent] * tree.q(parent)[token].item())
        least = sorted(reach, reverse=True)[: 1 + len(tree.token) // 2][-1]
        kept = [row for row in range(len(reach)) if reach[row] >= least]  # a parent is worth more than its children
        tree.parent = [kept.index(tree.parent[row - 1]) for row in kept if row]
        tree.token = [tree.token[row - 1] for row in kept if row]
        tree._laws = {new: tree._laws[old] for new, old in enumerate(kept) if old in tree._laws}
        tree._cached = {new: tree._cached[old] for new, old in enumerate(kept) if old in tree._cached}


def test_engine_that_prunes_drawn_nodes_by_value_is_caught() -> None:
    """Published total variation: 1e-1 to 2e-1 per round."""
    check_biased(SerialEngine(toy_pair(3, seed=9), PruningDySpec(4), Never(), RrswVerifier(), OFF, OFF), 3)


def check_biased(engine: SerialEngine, length: int) -> None:
    law, traces = decoded_law(engine, length)
    exact = target_law(engine.pair, OFF, length)
    name = type(engine.structure).__name__
    print(f"{name}: total variation {total_variation(law, exact):.3f} over {len(traces)} paths")
    assert largest_error(law, exact) > 1e-2
    assert 0.03 < total_variation(law, exact) < 0.4


def test_same_seed_same_tokens_whatever_came_before() -> None:
    stop = instantiate(OmegaConf.load(CONF / "stop" / "entropy.yaml"), threshold=0.7)
    engine = SerialEngine(toy_pair(3, seed=1), Chain(4), stop, TokenVerifier(), OFF, OFF)
    first = engine.decode(PROMPT, 30, Sampler.seeded(5)).tokens
    engine.decode(PROMPT, 30, Sampler.seeded(6))
    assert engine.decode(PROMPT, 30, Sampler.seeded(5)).tokens == first
