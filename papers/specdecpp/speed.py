"""SpecDec++ and what it is compared with."""

from collections.abc import Sequence

from reports.artifacts import Evaluation
from reports.figure import Entry, Figure
from reports.figures.comparison import MEASURED, MODELLED, measured, modelled
from reports.figures.times import ROUND_TIMES, step_times
from reports.runs import Run, runs, with_method
from reports.settings import each_setting

NEEDS = "needs SpecDec++ decoded: python scripts/evaluate.py experiment=specdecpp"
TABLES = "SpecDec++, tables 1 and 4"


def specdecpp_speed(evaluations: Sequence[Evaluation]) -> Figure:
    title = "SpecDec++ and what it is compared with"
    return measured("specdecpp-speed", title, TABLES, specdecpp(evaluations))


def specdecpp_modelled(evaluations: Sequence[Evaluation]) -> Figure:
    title = "SpecDec++ and what it is compared with, on other machines"
    return modelled("specdecpp-modelled", title, TABLES, specdecpp(evaluations))


def specdecpp_times(evaluations: Sequence[Evaluation]) -> Figure:
    title = "Where a round's time goes: SpecDec++ and others"
    source = "Ours; SpecBranch's table 9 has the times of its own rounds"
    return step_times("specdecpp-times", title, source, specdecpp(evaluations))


def specdecpp(evaluations: Sequence[Evaluation]) -> list[Run]:
    """Of evaluations with it, all that is compared there."""
    return runs(with_method(evaluations, lambda how: how.stop == "SpecDecPPStop", NEEDS))


FIGURES = (
    Entry("SpecDec++ and what it is compared with", MEASURED, each_setting(specdecpp_speed)),
    Entry("SpecDec++ on other machines", MODELLED, each_setting(specdecpp_modelled)),
    Entry("Where a round's time goes: SpecDec++", ROUND_TIMES, each_setting(specdecpp_times)),
)
