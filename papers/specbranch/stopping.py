"""H-RAD without branches, in replay: against rules of the draft's confidence and a predictor of the
length, by epsilon, and by the layers that it reads.

Speeds are modelled: a target call takes c draft forwards, predictions take no time."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from matplotlib.figure import Figure as Canvas
from numpy.typing import NDArray

from data_gen.samples import unseen
from decoding.cost import cost_table
from decoding.stopping.adaedl import AdaEDL
from decoding.stopping.base import TunableRule
from decoding.stopping.confidence import Confidence
from decoding.stopping.fixed import Fixed
from decoding.stopping.hrad import HRADStop
from decoding.stopping.policy import lengths
from decoding.stopping.predicted_length import PredictedLength
from evaluation.replay.read import read_table
from evaluation.replay.simulate import Replayer
from evaluation.replay.tuning import Candidate, best, ratio, sweep
from evaluation.table import divided
from papers.specbranch.hrad import NEEDS, NO_LENGTHS, by_their_layers, count_of
from papers.specbranch.hrad_data import counterpart, of_hrad
from reports import drawing
from reports.artifacts import Artifacts, Checkpoint
from reports.figure import Builder, Entry, Figure, Missing, Record, each, estimated
from reports.harvest_data import on_harvests
from runtime.intervals import METHOD, Estimate, bootstrap

Array = NDArray[np.float64]
COSTS = {c: cost_table(draft=1.0, target=float(c)) for c in (5, 10)}
EPSILONS = (0.1, 0.2, 0.4, 0.6, 0.8, 0.9)  # those of the paper
POINTS = 20  # thresholds tried from 0 to 1
FIXED, EXPLICIT, HYBRID = "fixed length", "explicit (length)", "hybrid (H-RAD)"
CONFIDENCE, ADAEDL = "implicit (confidence)", "implicit (AdaEDL)"
SPEEDUP, ACCURACY, SAME = "speed-up", "right class", "right length"
SPREAD = "fastest over slowest"
OTHERS = (
    "needs an H-RAD checkpoint, the harvest it was trained on, and two others of the pair with a"
    " round at every position: python scripts/gen_data.py anchors.stride=1 out=data/rounds"
)


@dataclass(frozen=True)
class Replays:
    """Stop rules at their thresholds, on harvests that hold no prompt of the training harvest.

    rules: by name; replayers: by harvest; counts: by harvest, every rule at every threshold"""

    checkpoint: str
    gamma: int
    rules: Mapping[str, TunableRule]
    replayers: Mapping[str, Replayer]
    counts: Mapping[str, Sequence[Candidate]]

    @property
    def n(self) -> str:
        tables = [one.table for one in self.replayers.values()]
        prompts, rounds = sum(len(t.length) for t in tables), sum(t.length.sum() for t in tables)
        return f"{prompts} prompts of {len(tables)} harvests, {rounds:,} rounds of {self.gamma}"

    def at(self, rule: str, threshold: float, harvest: str) -> Candidate:
        found = (one for one in self.counts[harvest] if one.rule == rule)
        return next(one for one in found if one.threshold == threshold)

    def chosen(self, rule: str, c: int, harvest: str) -> Candidate:
        """Return the rule on a harvest at the threshold that is fastest on the others."""
        elsewhere = [
            [one for one in counts if one.rule == rule]
            for name, counts in self.counts.items()
            if name != harvest
        ]
        together = [
            Candidate(rule, alike[0].threshold, _joined(alike))
            for alike in zip(*elsewhere, strict=True)
        ]
        return self.at(rule, best(together, COSTS[c]).threshold, harvest)


def _joined(candidates: Sequence[Candidate]) -> dict[str, Array]:
    """Return the counts of a rule on all prompts."""
    counts = [one.counts for one in candidates]
    return {name: np.concatenate([one[name] for one in counts]) for name in counts[0]}


def _cut(candidate: Candidate, gamma: int) -> Candidate:
    """Return it without the counts of longer drafts, so that harvests of any length join."""
    calls = candidate.counts["calls_by_drafted"][:, : gamma + 1]
    return replace(candidate, counts={**candidate.counts, "calls_by_drafted": calls})


def replays(
    checkpoint: Checkpoint, artifacts: Artifacts, rules: Mapping[str, TunableRule], gamma: int
) -> Replays:
    """Replay the rules with drafts of up to `gamma` tokens. Raises Missing without two harvests for
    it."""
    _, fitting = on_harvests(checkpoint, artifacts.harvests)
    others = [one for one in fitting[1:] if one.manifest.anchors.stride == 1]
    others = [one for one in others if unseen(one, fitting[0]).all()]
    if len(others) < 2:
        raise Missing(OTHERS)
    grid = {name: sorted({*EPSILONS, *rule.grid(POINTS, gamma)}) for name, rule in rules.items()}
    grid |= {FIXED: list(range(1, gamma + 1))} if FIXED in rules else {}
    replayers, counts = dict[str, Replayer](), dict[str, Sequence[Candidate]]()
    for harvest in others:
        replayer = Replayer(read_table(harvest, "all", rules.values()), gamma)
        policies = {name: rule.policy(replayer.table) for name, rule in rules.items()}
        counts[harvest.name] = [_cut(one, gamma) for one in sweep(replayer, policies, grid)]
        replayers[harvest.name] = replayer
    return Replays(checkpoint.folder.name, gamma, rules, replayers, counts)


def compared(checkpoint: Checkpoint, artifacts: Artifacts) -> Replays:
    """Return H-RAD and the rules it is compared with, that of its counterpart for lengths among
    them if there is one."""

    def read() -> Replays:
        rules: dict[str, TunableRule] = {
            FIXED: Fixed(1),
            CONFIDENCE: Confidence(0.2),
            ADAEDL: AdaEDL(0.4, 0.2, 0.9, 0.01, 0.5, 0.9),  # conf/stop/adaedl.yaml
            HYBRID: HRADStop.of(str(checkpoint.folder), None),
        }
        if other := counterpart(checkpoint, artifacts.checkpoints):
            rules[EXPLICIT] = PredictedLength(str(other.folder), 0.5)
        return replays(checkpoint, artifacts, rules, checkpoint.config["gamma"])

    return artifacts.once(("stop rules", checkpoint.folder), read)


# Predictors ---------------------------------------------------------------------------------------


def predictors(checkpoint: Checkpoint, artifacts: Artifacts) -> Figure:
    """Return accuracy and speed of every rule, by harvest and on all of them."""
    if not counterpart(checkpoint, artifacts.checkpoints):
        raise Missing(NO_LENGTHS)
    found = compared(checkpoint, artifacts)
    harvests = [*found.replayers]
    sets = {name: [name] for name in harvests} | {"all": harvests}
    return Figure(
        name=f"predictors-{found.checkpoint}",
        title=f"{found.checkpoint}: implicit, explicit and hybrid prediction of the draft length",
        source="SpecBranch, figure 3c and d; H-RAD over a fixed length: table 13",
        kind="modelled",
        n=found.n,
        records=[
            _predictor(found, rule, c, name, parts)
            for name, parts in sets.items()
            for c in COSTS
            for rule in found.rules
        ],
        draw=_draw_predictors,
        how_to_read="Each threshold is the fastest on the other harvests.",
    )


def _predictor(found: Replays, rule: str, c: int, name: str, parts: Sequence[str]) -> Record:
    def counts(of: str) -> dict[str, Array]:
        return _joined([found.chosen(of, c, part) for part in parts])

    cost, mine = COSTS[c], counts(rule)
    spent, record = cost.price(mine), {"harvest": name, "c": c, "rule": rule}
    record["threshold"] = " ".join(f"{found.chosen(rule, c, part).threshold:g}" for part in parts)
    rates = [right(found, rule, found.chosen(rule, c, part).threshold, part) for part in parts]
    judged = np.concatenate([rate[2] for rate in rates])
    for place, what in enumerate((ACCURACY, SAME)):
        record |= estimated(what, ratio(np.concatenate([rate[place] for rate in rates]), judged))
    record |= estimated(SPEEDUP, ratio(cost.plain(mine), spent))
    for rival in (FIXED, HYBRID):
        record |= estimated(f"speed over {rival}", ratio(cost.price(counts(rival)), spent))
    return record


def right(found: Replays, rule: str, threshold: float, harvest: str) -> tuple[Array, Array, Array]:
    """Return by prompt how many rounds the rule is expected to be right about, in the class of its
    length (none, some, all of gamma) and in the length itself, and how many there are [B].

    Counted are rounds at every position that leave room for gamma tokens; AdaEDL's threshold is the
    one that it begins with."""
    replayer, gamma = found.replayers[harvest], found.gamma
    table, policy = replayer.table, found.rules[rule].policy(replayer.table)
    drafted = lengths(policy, threshold, replayer.limit).drafted
    survival = np.cumprod(table.accept[..., :gamma], -1)
    bounds = np.concatenate([np.ones_like(survival[..., :1]), survival], -1)
    exactly = bounds - np.concatenate([survival, np.zeros_like(survival[..., :1])], -1)
    none, every = exactly[..., 0], exactly[..., -1]
    of_class = np.select([drafted == 0, drafted == gamma], [none, every], 1 - none - every)
    of_length = np.take_along_axis(exactly, drafted[..., None], -1)[..., 0]
    inside = np.arange(table.tokens.shape[1]) < table.length[:, None]
    judged = inside & (replayer.limit == gamma)
    sums = [(judged * each).sum(1) for each in (of_class, of_length, 1.0)]
    return sums[0], sums[1], sums[2]


def _draw_predictors(records: Sequence[Record], canvas: Canvas) -> None:
    together = drawing.where(records, harvest="all")
    panels = drawing.panels(canvas, ["class of the length chosen", "speed-up, modelled"])
    shown = [{**record, "speed ratio": f"c = {record['c']}"} for record in together]
    for axes, value in zip(panels, (ACCURACY, SPEEDUP), strict=True):
        drawing.bars(axes, shown, "speed ratio", value, "rule")
    drawing.legend(canvas, panels[0], across=2)


# By epsilon ---------------------------------------------------------------------------------------


def by_epsilon(checkpoint: Checkpoint, artifacts: Artifacts) -> Figure:
    """Return the speed of H-RAD and of rules of the confidence by their threshold, on all harvests,
    and how far it spreads."""
    found, records = compared(checkpoint, artifacts), list[Record]()
    for c, cost in COSTS.items():
        for rule in (HYBRID, CONFIDENCE, ADAEDL):
            counts = [
                _joined([found.at(rule, eps, part) for part in found.replayers]) for eps in EPSILONS
            ]
            spread = estimated(SPREAD, spread_of([cost.price(each) for each in counts]))
            for eps, mine in zip(EPSILONS, counts, strict=True):
                speed = ratio(cost.plain(mine), cost.price(mine))
                record = {"c": c, "rule": rule, "epsilon": eps, **estimated(SPEEDUP, speed)}
                records.append({**record, **spread})
    return Figure(
        name=f"epsilon-{found.checkpoint}",
        title=f"{found.checkpoint}: draft lengths by epsilon, one token after the other",
        source="SpecBranch, table 4",
        kind="modelled",
        n=found.n,
        records=records,
        draw=_draw_epsilon,
    )


def spread_of(prices: Sequence[Array]) -> Estimate:
    """Return the largest over the smallest sum of prices [settings, B]."""

    def statistic(times: NDArray[np.int64]) -> Array:
        sums = np.stack([times @ price for price in prices], -1)
        return np.asarray(divided(sums.max(-1), sums.min(-1)))

    return bootstrap(statistic, len(prices[0]))


def _draw_epsilon(records: Sequence[Record], canvas: Canvas) -> None:
    shown = [{**record, "speed ratio": f"c = {record['c']}"} for record in records]
    for axes, part in drawing.panels_by(canvas, shown, "speed ratio"):
        drawing.lines(axes, part, "epsilon", SPEEDUP, "rule")


# By the layers ------------------------------------------------------------------------------------


def speed_by_layers(checkpoints: Sequence[Checkpoint], artifacts: Artifacts) -> Figure:
    """Return the speed of H-RAD by the number of layers it reads, over that of the fewest."""
    ordered = sorted(checkpoints, key=count_of)
    rules = {f"{count_of(one)}": HRADStop.of(str(one.folder), None) for one in ordered}
    first, eps = ordered[0], 0.2
    found = replays(first, artifacts, rules, first.config["gamma"])
    records = []
    for c, cost in COSTS.items():
        counts = {
            rule: _joined([found.at(rule, eps, part) for part in found.replayers]) for rule in rules
        }
        fewest = cost.price(counts[f"{count_of(first)}"])
        for one in ordered:
            mine = counts[f"{count_of(one)}"]
            spent = cost.price(mine)
            speed = estimated(SPEEDUP, ratio(cost.plain(mine), spent))
            gain = estimated("speed over the fewest", ratio(fewest, spent))
            records.append({"speed ratio": f"c = {c}", "layers": count_of(one), **speed, **gain})
    return Figure(
        name=f"layers-speed-{found.checkpoint}",
        title=f"{first.folder.name} and others: speed by the layers H-RAD reads, epsilon {eps}",
        source="SpecBranch, table 5",
        kind="modelled",
        n=found.n,
        records=records,
        draw=_draw_layers,
    )


def _draw_layers(records: Sequence[Record], canvas: Canvas) -> None:
    drawing.lines(canvas.subplots(), records, "layers", SPEEDUP, "speed ratio")
    drawing.legend(canvas, canvas.axes[0])


def _of_hrad(
    artifacts: Artifacts, build: Callable[[Checkpoint, Artifacts], Figure]
) -> list[Builder]:
    return each(of_hrad(artifacts), lambda one: build(one, artifacts), NEEDS)


MODELLED = f" Modelled: a target call takes c draft forwards; {METHOD}."
FIGURES = (
    Entry(
        "Implicit, explicit and hybrid predictors of the draft length",
        "Right class: how often the class of the length chosen (none, some, all of gamma) comes"
        " true; right length: the length itself. Implicit rules look at what the draft has drawn,"
        " so that their length is never none." + MODELLED,
        partial(_of_hrad, build=predictors),
    ),
    Entry(
        "Draft lengths by epsilon, one token after the other",
        "Epsilon is the threshold of each rule, for H-RAD that of the class some. Fastest over"
        " slowest: of these settings; 1 is flat." + MODELLED,
        partial(_of_hrad, build=by_epsilon),
    ),
    Entry(
        "H-RAD's speed by the layers it reads",
        "H-RAD without branches, heads that differ in nothing but the layers." + MODELLED,
        partial(by_their_layers, build=speed_by_layers),
    ),
)
