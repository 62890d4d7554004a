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

batch=[1,8,64] asks which fixed length pays with so many requests decoded together, under the costs
of `batch_cost`, and writes to `out` a schedule that scripts/export.py reads; no model runs, but
with batch_cost=measure, which times batched forwards. With scheduler=true, also what the scheduler
of serving engines is worth over one length for all, by the calibration of the confidences it is
told, and by their age.

check=true chooses nothing: it decodes the prompts of a greedy harvest with some settings of every
rule and compares the counts with those of the replay, one by one. A difference is excused where two
numbers within rounding of each other decided it; exits with 1 where one is not.

    python scripts/tune.py check=true methods=[fixed,confidence] data=data/greedy \\
        warp=greedy draft_warp.temperature=0

Harvest with pair.dtype=float32, and set it here, too: in bfloat16 too many decisions of a greedy
decode rest on rounding."""

from collections.abc import Mapping
from typing import Annotated, Any

from decoding.settings import Pair
from programs.groups import (
    Calibration,
    Dataset,
    DraftWarp,
    Limit,
    Replay,
    SomeNames,
    Splits,
    Warp,
    among,
)
from runtime.cli import Program
from runtime.settings.kinds import Count, Counts, Group, Output, Part, Path, Paths, Seed


class Measuring(Group):
    """cost=measure"""

    file: Annotated[Path, "what is measured is saved here; cost=measured reads it again"]
    gammas: Annotated[Counts, "draft lengths decoded; target calls of other sizes are interpolated"]
    limit: Limit
    max_new_tokens: Annotated[Count, "tokens of each response"]


class BatchMeasuring(Group):
    """batch_cost=measure"""

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


class Tune(Replay):
    pair: Pair
    dataset: Dataset
    warp: Warp
    draft_warp: DraftWarp
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
        if batch and values["check"]:
            unknown = {"check": "false with batch, which decodes nothing"}
        if batch and values["judge_data"] and not values["scheduler"]:
            unknown = {
                "judge_data": "[] with batch, which judges on one harvest, or scheduler=true"
            }
        return {**Replay.misfits(values), **unknown}


main = Program(__file__, Tune, "programs.tune")

if __name__ == "__main__":
    main()
