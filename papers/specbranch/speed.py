"""SpecBranch and what it is compared with."""

from collections.abc import Sequence

from reports.artifacts import Evaluation
from reports.figure import Entry, Figure
from reports.figures.comparison import MEASURED, MODELLED, measured, modelled
from reports.figures.times import ROUND_TIMES, step_times
from reports.runs import Run, branches, pearl, runs, with_method
from reports.settings import each_setting

NEEDS = "needs SpecBranch beside other methods: python scripts/evaluate.py experiment=specbranch"
TABLES = "SpecBranch, main tables"


def specbranch_speed(evaluations: Sequence[Evaluation]) -> Figure:
    title = "SpecBranch and what it is compared with"
    return measured("specbranch-speed", title, TABLES, specbranch(evaluations))


def specbranch_modelled(evaluations: Sequence[Evaluation]) -> Figure:
    title = "SpecBranch and what it is compared with, a device for each model"
    return modelled("specbranch-modelled", title, TABLES, specbranch(evaluations))


def specbranch_times(evaluations: Sequence[Evaluation]) -> Figure:
    title = "Where a round's time goes: SpecBranch and others"
    return step_times("specbranch-times", title, "SpecBranch, table 9", specbranch(evaluations))


def specbranch(evaluations: Sequence[Evaluation]) -> list[Run]:
    """Of evaluations that compare it with something else than itself."""
    beside = [
        e
        for e in evaluations
        if any(pearl(r.method) or r.method.structure == "Chain" for r in runs([e]))
    ]
    return runs(with_method(beside, branches, NEEDS))


FIGURES = (
    Entry(
        "SpecBranch and what it is compared with",
        f"{MEASURED} On one processor, running side by side cannot pay.",
        each_setting(specbranch_speed),
    ),
    Entry("SpecBranch with a device for each model", MODELLED, each_setting(specbranch_modelled)),
    Entry("Where a round's time goes: SpecBranch", ROUND_TIMES, each_setting(specbranch_times)),
)
