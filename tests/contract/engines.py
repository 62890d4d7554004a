"""Engines small enough to enumerate: every verifier with every structure it takes, and the
distribution of what they decode."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import NamedTuple, Protocol

import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf
from torch import Tensor

from decoding.batch_cost import PerRow, tabled, write_batch_cost
from decoding.engines.fit import check_fit
from decoding.engines.serial import SerialEngine
from decoding.interfaces import DraftStructure, Pair, StopRule, Verifier
from decoding.models.table_lm import TableLM, mixed_table, random_table
from decoding.sampling import Sampler, Warp
from decoding.stopping.never import Never
from decoding.structures.sequoia import write_artefact
from decoding.trace import Trace
from runtime.errors import UserError
from tests.contract.enumeration import (
    Distribution,
    autoregressive_distribution,
    distribution_of,
    largest_error,
)
from tests.contract.rules import FIRST
from tests.helpers.decoding.costs import write_cost
from tests.helpers.decoding.value_stub import grown
from tests.helpers.training.checkpoints import columns, write_checkpoint

CONF = Path(__file__).parents[2] / "conf"
STOPS, STRUCTURES = (
    sorted(path.stem for path in (CONF / group).glob("*.yaml")) for group in ("stop", "structure")
)
VERIFIERS = [name for name, first in FIRST.items() if name == first]
PROMPT = (1, 0, 1, 0)  # it repeats itself, so that lookup finds something
OFF = Warp()

# Values at which a stop rule acts on these small vocabularies; one without an entry is tested as
# its YAML says.
ACTING: dict[str, list[dict]] = {
    "confidence": [{"threshold": 0.4}],
    "product": [{"threshold": 0.3}],
    "confidence_before": [{"threshold": 0.65}],
    "adaedl": [{"threshold": 0.64, "step": 0.2}],
    "specdecpp": [{"threshold": 0.35, "bounds": [1, 20], "order": o} for o in ("paper", "code")],
    "specdecpp_paper": [{"threshold": 0.35}],
    "hrad": [{"confidence": {"threshold": 0.4}, "none": none} for none in (None, 0.288)],
    "predicted_length": [{"threshold": 0.5}],
    "value": [{"threshold": 0.2}],
    "shared": [{"learns": False}],  # by what other paths were like; two requests learn elsewhere
    "stop_loss": [{"rule": {"threshold": 0.01}, "loss": 0.4}],
}
STOP_CASES = [(name, values) for name in STOPS for values in ACTING.get(name, [{}])]
RULES: dict[str, list[dict]] = {"parallel": [{"rule": "token"}, {"rule": "block"}]}


class Size(NamedTuple):
    """Small enough to enumerate. values: of the structure."""

    vocab: int
    length: int
    values: dict


def branches(gamma_max: int) -> dict:
    return {"gamma_max": gamma_max, "candidates": 2}


def sizes(values: dict, larger: dict | None = None) -> list[Size]:
    return [Size(2, 4, values), Size(3, 3, larger or values)]


SIZES: dict[str, list[Size]] = {  # a structure without an entry is tested as its YAML says
    "chain": sizes({"gamma_max": 3}, {"gamma_max": 2}),
    "branch_point": [Size(2, 3, branches(2)), Size(3, 2, branches(1))],
    "parallel_paths": sizes({"paths": 2, "gamma": 2}),
    "tree": sizes({"widths": [2, 1]}),
    "specinfer": sizes({"widths": [2, 1]}),
    "dyspec": sizes({"budget": 4}),
    "dyspec_layers": sizes({"threshold": 0.15, "cap": 4}),
    "grown": sizes({"budget": 4}, {"budget": 3}),
    "reranked": sizes({"width": 2, "depth": 2, "nodes": 3}),
    "lookup": sizes({"gamma": 3}),
    "sources": [
        Size(2, 4, {"gamma_max": 2, "stretch": 1}),
        Size(3, 4, {"gamma_max": 1, "ngram_min": 1, "stretch": 1}),
    ],
}
LARGER: dict[str, list[Size]] = {
    "branch_point": [Size(2, 4, branches(2)), Size(3, 3, branches(1))],
    "parallel_paths": [Size(2, 4, {"paths": 3, "gamma": 2})],
    "tree": [Size(2, 4, {"widths": [2, 2]}), Size(3, 3, {"widths": [2, 2]})],
    "specinfer": [Size(2, 4, {"widths": [3, 1]})],
    "dyspec": [Size(2, 5, {"budget": 7}), Size(4, 3, {"budget": 5}), Size(3, 4, {"budget": 5})],
    "dyspec_layers": [
        Size(2, 5, {"threshold": 0.05, "cap": 9}),
        Size(3, 4, {"threshold": 0.1, "cap": 6}),
    ],
    "sequoia": [Size(3, 4, {})],
    "reranked": [
        Size(2, 5, {"width": 2, "depth": 3, "nodes": 4}),
        Size(4, 3, {"width": 3, "depth": 2, "nodes": 5}),
    ],
    "lookup": [Size(2, 6, {"gamma": 4}), Size(3, 5, {"gamma": 4})],
    "sources": [
        Size(2, 5, {"gamma_max": 2, "stretch": 2}),
        Size(3, 4, {"gamma_max": 2, "stretch": 1}),
    ],
}
SEQUOIA = [0, 1, 0, 3]  # the tree of the artefact: two children, each with one of its own


def toy_pair(vocab: int, seed: int, weight: float = 0.5) -> Pair:
    target, noise = (random_table(vocab, seed + offset, concentration=0.7) for offset in range(2))
    draft = TableLM(mixed_table(target, noise, weight))
    return SimpleNamespace(target=TableLM(target), draft=draft)


def limited_pair(vocab: int, seed: int, tokens: list[int]) -> Pair:
    """A pair whose draft proposes `tokens` only."""
    pair = toy_pair(vocab, seed)
    table = pair.draft.table

    def distribution(context: tuple[int, ...]) -> Tensor:
        kept = torch.zeros_like(table(context))
        kept[tokens] = table(context)[tokens]
        return kept / kept.sum()

    return SimpleNamespace(target=pair.target, draft=TableLM(distribution))


def batch_cost(file: Path, target_row: float = 0.2) -> Path:
    """Write costs of up to two requests of six rows each."""
    seconds = tabled(PerRow(1.0, target_row, 0.05, 0.01), [1, 2], 5)
    write_batch_cost(file, {"seconds": asdict(seconds)})
    return file


def stop_rule(
    name: str, folder: Path, values: dict, gamma: int = 3, width: int | None = None
) -> StopRule:
    """From its YAML; a learned rule gets an untrained predictor for models of `width`, else for the
    toy model."""
    config = OmegaConf.merge(OmegaConf.load(CONF / "stop" / f"{name}.yaml"), values)
    if "checkpoint" in config:
        predictor = Path(config.checkpoint).name
        width = width or TableLM(random_table(2, 0)).shape[1]
        dim = columns(predictor, width)
        config.checkpoint = str(write_checkpoint(folder / predictor, predictor, dim, gamma=gamma))
    if name == "shared":
        config.cost = str(batch_cost(folder / "batch-cost.json"))
    if OmegaConf.is_missing(config, "cost"):
        seconds = {"draft": 1.0, "target": 1.2, "autoregressive": 1.0}
        config.cost = str(write_cost(folder / "cost.json", **seconds))
    return instantiate(config)


def verifier(name: str, values: dict | None = None) -> Verifier:
    config = OmegaConf.load(CONF / "verifier" / f"{name}.yaml")
    return instantiate(OmegaConf.merge(config, values or {}))


def structure(name: str, folder: Path, values: dict) -> DraftStructure:
    config = OmegaConf.load(CONF / "structure" / f"{name}.yaml")
    if "checkpoint" in config:
        return grown(**values)
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
        return self.rule != "point_mass" and self.builds not in ("lookup", "sources")

    @property
    def label(self) -> str:
        named = "-".join([self.rule, *map(str, self.rule_values.values()), self.builds])
        return f"{named}-{self.size.vocab}-{self.size.length}"


def cases(asks_stop: bool) -> list:
    """Of all verifiers and structures, those that go together; larger sizes are slow."""
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


def structure_of(case: Case) -> str:
    return case.builds


def rule_of(case: Case) -> str:
    return f"{case.rule} {case.rule_values}"


def engine(
    pair: Pair,
    case: Case,
    folder: Path,
    stop: StopRule | None = None,
    warp: Warp = OFF,
    draft_warp: Warp = OFF,
    eos_ids: frozenset[int] = frozenset(),
) -> SerialEngine:
    drafts = structure(case.builds, folder, case.size.values)
    rule = verifier(case.rule, case.rule_values)
    return SerialEngine(pair, drafts, stop or Never(), rule, warp, draft_warp, eos_ids)


class Engine(Protocol):
    """One that can be enumerated."""

    pair: Pair
    warp: Warp
    eos_ids: frozenset[int]

    def decode(self, prompt_ids: Sequence[int], max_new_tokens: int, sampler: Sampler) -> Trace: ...


def decoded_distribution(engine: Engine, length: int) -> tuple[Distribution, list[Trace]]:
    traces: list[Trace] = []

    def run(sampler: Sampler) -> tuple[int, ...]:
        traces.append(engine.decode(PROMPT, length, sampler))
        return tuple(traces[-1].tokens)

    return distribution_of(run), traces


def target_distribution(
    pair: Pair, warp: Warp, length: int, eos_ids: frozenset[int] = frozenset()
) -> Distribution:
    def conditional(context: tuple[int, ...]) -> Tensor:
        after = warp.within(len(PROMPT), eos_ids).after(lambda: torch.tensor(context))
        return after.probs(pair.target.distribution(context).log())

    vocab = pair.target.vocab_size
    return autoregressive_distribution(conditional, vocab, length, PROMPT, eos_ids)


def checked(engine: Engine, length: int) -> list[Trace]:
    """Every decode there is, after a look at their distribution."""
    distribution, traces = decoded_distribution(engine, length)
    exact = target_distribution(engine.pair, engine.warp, length, engine.eos_ids)
    error = largest_error(distribution, exact)
    print(f"largest error {error:.1e} over {len(traces)} paths")
    assert error < 1e-9
    assert sum(distribution.values()) == pytest.approx(1, abs=1e-9)
    return traces
