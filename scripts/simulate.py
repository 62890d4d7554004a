"""Count and price methods from recorded rollouts, engines side by side included: no model runs.

    python scripts/simulate.py data=data/greedy warp=greedy draft_warp.temperature=0 gamma=5
    python scripts/simulate.py data=data/choose judge_data=[data/humaneval,data/gsm8k] gamma=10 \\
        ratios=[10,15] methods=[fixed,adaedl,pearl,without_hrad]

Walks the rollouts of a harvest with a round at every position (gen_data.py anchors.stride=1
gamma=<longer than the drafts>). With a greedy target the rounds are those of the engine, in law
where the draft is sampled. Every method is counted as it is set, and with the value of its setting
that is fastest on `data`. Prices are modelled: draft and target have a device each, and a target
call takes c draft forwards. Writes `out`."""

import shlex
import sys
from collections.abc import Mapping
from typing import Annotated, Any

from omegaconf import DictConfig
from pydantic import Field

from decoding.settings import Pair
from runtime.cli import program
from runtime.files import checked_folder, refuse_foreign_file, write_json
from runtime.settings.groups import DraftWarp, SomeNames, Warp, among
from runtime.settings.kinds import (
    Count,
    Distinct,
    Group,
    Names,
    Output,
    Part,
    Path,
    Paths,
    Positive,
    Says,
)
from runtime.text import printable

Ratios = Annotated[
    list[Positive], Distinct, Field(min_length=1),
    Says("a list of different numbers above 0, such as [10,15]"),
]  # fmt: skip


class Method(Group):
    """What decodes."""

    engine: Annotated[Part, "runs both models: serial, overlapped or pearl"]
    structure: Annotated[Part | None, "how long drafts and branches are, and how many"]
    verifier: Annotated[Part | None, "accepts or rejects them: token"]
    stop: Annotated[Part | None, "when drafting ends"]


class Simulate(Group):
    pair: Pair
    warp: Warp
    draft_warp: DraftWarp
    structure: Annotated[Part, "of methods that draft and verify in turn, and of `custom`"]
    verifier: Annotated[Part, "of methods that draft and verify in turn, and of `custom`"]
    stop: Annotated[Part, "of the method `custom`: when drafting ends"]
    engine: Annotated[Part, "of the method `custom`: runs both models"]
    method: Annotated[dict[str, Method], "what there is to compare, by name"]
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
    out: Annotated[Output, "file"]

    @staticmethod
    def misfits(values: Mapping[str, Any]) -> Mapping[str, str]:
        unknown = dict(among("methods", values["methods"], values["method"]))
        for key in ("candidates", "gammas"):
            unknown |= among(key, list(values[key]), values["method"])
        return {**unknown, **among("against", values["against"], dict.fromkeys(values["methods"]))}


@program(__file__, Simulate)
def main(cfg: DictConfig) -> None:
    """Harvests in, a table per speed ratio out."""
    from data_gen.storage.dataset import Harvest
    from evaluation.overlapped.simulate import (
        MARK,
        about,
        cell,
        check,
        page,
        refuse_reading_draft,
        simulated,
        swept,
        tables,
    )
    from evaluation.page import simulated as simulated_draft
    from evaluation.table import save

    out, harvest = checked_folder("out", cfg.out, "file"), Harvest.open(cfg.data)
    refuse_foreign_file(out, MARK)
    elsewhere = [Harvest.open(folder, "judge_data") for folder in cfg.judge_data]
    check(cfg, harvest, elsewhere)
    methods = [simulated(cfg, name) for name in cfg.methods]
    if any(not method.serial for method in methods):
        refuse_reading_draft(cfg)
    chosen_on, *judged_on = (tables(cfg, each, methods) for each in [harvest, *elsewhere])
    measurements = swept(cfg, methods, chosen_on, judged_on)
    found = {f"{c:g}": cell(cfg, methods, measurements, c) for c in cfg.ratios}
    save(measurements, out.with_suffix(".parquet"))
    command = shlex.join([*MARK.split(), *sys.argv[1:]])
    write_json(out, {"command": command, **about(cfg, harvest), "cells": found})
    pages = [page(cfg, c, rows, methods) for c, rows in found.items()]
    heading = f"# {printable(harvest.pair.name)}"
    print("\n\n".join([heading, *pages, *simulated_draft(cfg.pair), f"saved {out}"]))


if __name__ == "__main__":
    main()
