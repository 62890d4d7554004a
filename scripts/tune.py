"""Choose the threshold of every stop rule for your hardware: replay a harvest, price the counts.

    python scripts/tune.py
    python scripts/tune.py cost=measured
    python scripts/tune.py cost=a100 methods=[fixed,confidence]

Needs a harvest with a round at every position (python scripts/gen_data.py anchors.stride=1
out=data/rounds) and, for rules and structures that learn, their checkpoints (python train.py);
methods=[fixed,confidence,product] needs none. cost=measure decodes a few prompts to learn what
forwards cost here; with any other `cost` no model runs. Thresholds are chosen on one split and
judged on another. Writes `out`: evaluate.py takes the thresholds of measured costs by itself, those
of other costs where `thresholds` names the file.

batch=[1,8,64] finds the fixed length that pays for each number of requests decoded together, under
the costs of `batch_cost`, and writes to `out` a schedule that scripts/export.py reads; no model
runs, except with batch_cost=measure, which times batched forwards. With scheduler=true, also the
gain of the scheduler of serving engines over one length for all, by calibration and age of its
confidences.

check=true chooses nothing: it decodes the prompts of a greedy harvest with some settings of every
rule and compares the counts with those of the replay, one by one. A difference is excused where two
numbers within rounding of each other decided it; exits with 1 where one is not. Harvest with
pair.dtype=float32, and set it here, too: in bfloat16 too many decisions rest on rounding.

    python scripts/tune.py check=true methods=[fixed,confidence] data=data/greedy \\
        warp=greedy draft_warp.temperature=0
    python scripts/tune.py what=overlapped data=data/greedy warp=greedy draft_warp.temperature=0
    python scripts/tune.py what=checkpoints folder=checkpoints/specdecpp-sweep data=data/rounds
    python scripts/tune.py what=tree nodes=64

what=overlapped counts and prices methods, including engines that run both models side by side, from
the rollouts of a harvest (gamma=<longer than the drafts>): with their configured setting, and with
the value that is fastest on `data`. With a greedy target the rounds are those of the engine (in
distribution, if the draft is sampled). Prices are modelled: draft and target have a device each,
and a target call takes c draft forwards.

what=checkpoints makes one table of many checkpoints of one harvest (python train.py -m ...): the
settings in which they differ, their scores, and the best threshold of each by replay (data=null:
scores alone).

what=tree finds the static tree that decodes fastest here, from the measured acceptance of the b-th
sibling along responses of the target and the costs of forwards of 1 to max_nodes + 1 rows. Its
speed is modelled: drawing and verification are left out. Writes `structure.tree`, which
structure=sequoia reads."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from omegaconf import DictConfig
from pydantic import Field

from decoding.settings import Pair
from runtime.cli import program
from runtime.job import command_line
from runtime.settings.groups import (
    AnySplit,
    Calibration,
    Dataset,
    DraftWarp,
    Limit,
    Logger,
    Methods,
    Replay,
    SomeNames,
    Splits,
    Warp,
    among,
)
from runtime.settings.kinds import (
    Count,
    Counts,
    Distinct,
    Group,
    Names,
    Output,
    Part,
    Path,
    Paths,
    Positive,
    Probability,
    Says,
    Seed,
)

MODES = Says("thresholds, overlapped, checkpoints or tree, as what=tree and in no sweep")
WHAT = "what is tuned: thresholds, overlapped, checkpoints or tree; each has its --help"


class Measuring(Group):
    """Settings of cost=measure."""

    file: Annotated[Path, "what is measured is saved here; cost=measured reads it again"]
    gammas: Annotated[Counts, "draft lengths decoded; target calls of other sizes are interpolated"]
    limit: Limit
    max_new_tokens: Annotated[Count, "tokens of each response"]


class BatchMeasuring(Group):
    """Settings of batch_cost=measure."""

    file: Annotated[Path, "what is measured is saved here; batch_cost=measured reads it again"]
    rows: Annotated[
        Counts,
        "target rows of each request, in rising order from 1 to one more than the longest draft;"
        " in between is interpolated",
    ]
    context: Annotated[Count, "tokens of each request's text"]
    repeats: Annotated[Count, "forwards of each size, whose median counts"]

    @staticmethod
    def misfits(values: Mapping[str, Any]) -> Mapping[str, str]:
        rows = values["rows"]
        rising = sorted({1, *rows})
        return {} if rows == rising else {"rows": f"rising numbers from 1 on, such as {rising}"}


TAKEN = {
    "what_if": ["chosen"],
    "rules": ["autoregressive"],
    "calibrations": ["as logged", "position alone", "oracle"],
}
"""Names that results give to something else, by the setting that may not have them."""


def taken(values: Mapping[str, Any]) -> Mapping[str, str]:
    """Return the misfits of names that stand for two things in the results."""
    names = {**TAKEN, "structures": list(values["rules"])}
    twice = {key: sorted(set(each) & set(values[key])) for key, each in names.items()}
    return {key: f"other names than {', '.join(each)}" for key, each in twice.items() if each}


def unchecked(values: Mapping[str, Any]) -> Mapping[str, str]:
    """Return the misfits of settings that check=true does not read."""
    unread = {
        "check": values["batch"] and "false with batch, which decodes nothing",
        "judge_data": values["judge_data"] and "[] with check=true, which decodes one harvest's",
        "methods": set(values["methods"]) & set(values["structures"])
        and "names among rules with check=true, which compares no structure",
        "workers": "count" in values["workers"] and "local with check=true, which decodes here",
    }
    return {key: str(what) for key, what in unread.items() if what and values["check"]}


class Tune(Replay):
    what: Annotated[Literal["thresholds"], MODES, WHAT]
    pair: Pair
    dataset: Dataset
    warp: Warp
    draft_warp: DraftWarp
    workers: Annotated[Part, "processes that replay: this one, or several by Ray"]
    logger: Logger
    cost: Annotated[Part | Measuring, "what forwards cost: a table, or measured here"]
    what_if: Annotated[dict[str, Part], "tables that thresholds are chosen for besides"]
    rules: Annotated[dict[str, Part], "stop rules, by name"]
    structures: Annotated[
        dict[str, Part], "structures that grow by worth and cost, by name: nothing of them is tuned"
    ]
    methods: Annotated[SomeNames, "keys of `rules` to tune, and of `structures` to compare"]
    data: Annotated[
        Path,
        "harvest with a round at every position (gen_data.py anchors.stride=1 out=data/rounds)",
    ]
    judge_data: Annotated[
        Paths, "more harvests of the same pair and distributions; judged on all prompts of each"
    ]
    splits: Splits
    batch: Annotated[
        Counts | None,
        "requests decoded together, in rising order: the best fixed length for each; null:"
        " thresholds, for one request",
    ]
    batch_cost: Annotated[
        Part | BatchMeasuring, "with batch, what forwards of many requests cost, or measured here"
    ]
    scheduler: Annotated[
        bool,
        "with batch, simulate a budget of rows that all requests share, filled by survival, on"
        " `judge` prompts and judge_data, too",
    ]
    calibrations: Annotated[
        dict[str, Calibration],
        "with scheduler=true, of the draft's probabilities, by name; fitted on `choose` prompts",
    ]
    seed: Annotated[Seed, "of the draws of cost=measure"]
    check: Annotated[
        bool,
        "decode the prompts of a greedy harvest and compare with the replay, count by count;"
        " nothing is tuned",
    ]
    check_values: Annotated[Count, "with check=true, values of each rule's setting, evenly spaced"]
    check_prompts: Annotated[
        Count | None, "with check=true, the first of the harvest; null: all of them"
    ]
    verbose: Annotated[bool, "print every table: other costs and harvests, frontiers"]
    out: Annotated[
        Output | None,
        "file; null: runs/<pair>-thresholds-T<temperature>.json, which evaluate.py reads, or"
        " ...-<cost>.json for costs of another machine; with batch,"
        " runs/<pair>-schedule-<batch_cost>.json",
    ]

    @staticmethod
    def misfits(values: Mapping[str, Any]) -> Mapping[str, str]:
        methods, rules = values["methods"], values["rules"]
        unknown = among("methods", methods, {**rules, **values["structures"]})
        if not unknown and not set(methods) & set(rules):
            unknown = {"methods": f"one of {', '.join(rules)} besides, to compare with"}
        if (batch := values["batch"]) and batch != sorted(batch):
            unknown = {"batch": f"numbers in rising order, such as {sorted(batch)}"}
        if values["scheduler"] and not batch:
            unknown = {"scheduler": "false without batch, the requests that it has"}
        if batch and values["judge_data"] and not values["scheduler"]:
            unknown = {
                "judge_data": "[] with batch, which judges on one harvest, or scheduler=true"
            }
        return {**Replay.misfits(values), **unknown, **taken(values), **unchecked(values)}


@program(__file__, Tune)
def main(settings: Tune) -> None:
    cfg = settings.composed
    if cfg.batch is not None:
        by_requests(cfg)
    elif cfg.check:
        from evaluation.replay.check import check

        check(cfg)
    else:
        from evaluation.replay.tune import tune

        tune(cfg)


def by_requests(cfg: DictConfig) -> None:
    from evaluation.batched.lengths import tuned
    from evaluation.replay.read import tracking
    from evaluation.replay.tune import chosen, out_file
    from evaluation.table import save
    from runtime.files import table_beside
    from serving.schedule import Schedule, write_schedule

    out = out_file(cfg, f"schedule-{chosen('batch_cost')}")
    table = table_beside(out)
    with tracking(cfg, "tune lengths") as logger:
        costs, details, measurements, text = tuned(cfg, chosen("batch_cost"))
        lengths = {size["requests"]: size["length"] for size in details["sizes"]}
        write_schedule(out, Schedule.at(lengths, costs), command_line(), details)
        save(measurements, table)
        logger.log({f"tokens/{size} at once": length for size, length in lengths.items()})
        logger.artifact("schedule", "schedule", out)
    print(f"\n{text}\n\nsaved {out}, and the measurements in {table}")


Ratios = Annotated[
    list[Positive], Distinct, Field(min_length=1),
    Says("a list of different numbers above 0, such as [10,15]"),
]  # fmt: skip


class Overlapped(Methods):
    what: Annotated[Literal["overlapped"], MODES, WHAT]
    pair: Pair
    methods: Annotated[SomeNames, "keys of `method` to compare"]
    against: Annotated[Names, "of `methods`: what the others are compared with"]
    data: Annotated[Path, "harvest with a round at every position; settings are chosen on it"]
    judge_data: Annotated[
        Paths, "more harvests of the same pair and distributions, judged as one; []: `data` itself"
    ]
    gamma: Annotated[Count, "tokens of a draft, and of a branch, at most"]
    gammas: Annotated[
        dict[str, Count],
        "by method, in its place: a predictor's branch has one token more, so that 9 is as long"
        " as 10 of a method without",
    ]
    candidates: Annotated[
        dict[str, Annotated[int, Field(ge=1, le=3)]],
        "by method, branches that it spawns at most, of three that a harvest records",
    ]
    checkpoint: Annotated[Path, "folder of the predictor of methods that ask one"]
    ratios: Annotated[Ratios, "speed ratios c: draft forwards that a target call takes"]
    points: Annotated[int, Field(ge=1, le=1000), "thresholds tried from 0 to 1, besides 0"]
    logger: Logger
    out: Annotated[Output, "file"]

    @staticmethod
    def misfits(values: Mapping[str, Any]) -> Mapping[str, str]:
        unknown = dict(among("methods", values["methods"], values["method"]))
        for key in ("candidates", "gammas"):
            unknown |= among(key, list(values[key]), values["method"])
        return {**unknown, **among("against", values["against"], dict.fromkeys(values["methods"]))}


@main.mode("overlapped", Overlapped)
def overlapped(settings: Overlapped) -> None:
    from evaluation.overlapped.simulate import simulate

    simulate(settings.composed)


Levels = Annotated[
    list[Probability], Field(min_length=1), Distinct,
    Says("a list of different numbers from 0 to 1, such as [0.2,0.4]"),
]  # fmt: skip


class Checkpoints(Replay):
    what: Annotated[Literal["checkpoints"], MODES, WHAT]
    pair: Pair
    warp: Warp
    cost: Annotated[Part, "what forwards cost"]
    rules: Annotated[
        dict[str, Part],
        "of each predictor, the stop rule that asks it; more with"
        " +stop@rules.<predictor>=<stop rule>",
    ]
    folder: Annotated[Path, "every folder in it that holds a checkpoint is a row"]
    data: Annotated[
        Path | None,
        "harvest with a round at every position, replayed with each of them; null: no replay,"
        " scores alone",
    ]
    thresholds: Annotated[Levels | None, "a row for each of these; null: one for the best"]
    logger: Logger
    out: Annotated[Output, "file of the table"]


@main.mode("checkpoints", Checkpoints)
def checkpoints(settings: Checkpoints) -> None:
    from evaluation.replay.collect import collect

    collect(settings.composed)


Nodes = Annotated[int, Field(ge=1, le=1024)]


class Tree(Group):
    what: Annotated[Literal["tree"], MODES, WHAT]
    pair: Pair
    dataset: Dataset
    warp: Warp
    draft_warp: DraftWarp
    structure: Annotated[Part, "its `tree` is the file written"]
    nodes: Annotated[Nodes | None, "of the tree; null: as many as are fastest"]
    max_nodes: Annotated[Nodes, "most of them tried"]
    max_depth: Annotated[Nodes, "most tokens of a path"]
    max_children: Annotated[Nodes, "most of one node; 2 for verifier=spechub"]
    split: Annotated[AnySplit, "prompts measured on"]
    splits: Splits
    limit: Limit
    max_new_tokens: Annotated[Count, "tokens of each response"]
    rows: Annotated[Counts, "of timed forwards, besides the largest; packed weights serve 2 to 32"]
    repeats: Annotated[Count, "timed forwards for each"]
    seed: Annotated[Seed, "of the responses' draws"]
    logger: Logger

    @staticmethod
    def misfits(values: Mapping[str, Any]) -> Mapping[str, str]:
        if "tree" not in values["structure"]:
            return {"structure": "one that reads its `tree` from a file: structure=sequoia"}
        return {}


@main.mode("tree", Tree)
def tree(settings: Tree) -> None:
    from evaluation.replay.tune_tree import tune_tree

    tune_tree(settings.composed)


if __name__ == "__main__":
    main()
