"""Token-wise against block verification, of one draft and of several side by side."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure as Canvas

from evaluation.ratios import compared, counted, divided
from reports import drawing
from reports.artifacts import Evaluation
from reports.figure import Cell, Figure, Missing
from reports.figures.speed import CALLS, SPEED, speedup, tokens, tokens_per_call
from reports.runs import BEST_FIXED, Method, Run, extent, runs, with_all
from runtime.intervals import METHOD, Array, columns

RULES = {"TokenVerifier": "token", "BlockVerifier": "block"}
UNITS = {"gamma": "gamma, tokens of a draft", "drafts": "drafts side by side"}
GAIN = "tokens/call over token-wise"
Key = tuple[Path, float, str, Any]


def block_gain(evaluations: Sequence[Evaluation]) -> Figure:
    """Fixed draft lengths, by gamma and temperature."""
    found = [run for run in runs(evaluations, _one_draft) if run.traces and run.label != BEST_FIXED]
    needed = (
        "needs both rules at the same draft lengths: python scripts/evaluate.py"
        " experiment=draft_lengths"
    )
    return _figure(
        found,
        needed,
        setting="gamma",
        name="block-verification",
        title="Block against token-wise verification by draft length",
        source="HSD, tables 1 and 3",
        reading=(
            "Block verification accepts at least as much in expectation, the more the longer the"
            " draft; where the interval of the gain holds 0 these prompts cannot tell. HSD with"
            " capped branch resampling is the same rule."
        ),
    )


def parallel_drafts(evaluations: Sequence[Evaluation]) -> Figure:
    """Whole drafts side by side, by their number."""
    found = [run for run in runs(evaluations, _parallel) if run.traces]
    return _figure(
        found,
        "needs several drafts under both rules: python scripts/evaluate.py"
        " experiment=parallel_drafts",
        setting="drafts",
        name="parallel-drafts",
        title="Several whole drafts, each verified token by token or as a block",
        source="HSD, multi-draft table",
        reading=(
            "A further draft helps only where it agrees with what is accepted so far, so each"
            " brings less than the one before."
        ),
    )


def _figure(found: Sequence[Run], needed: str, setting: str, **said: str) -> Figure:
    both = {
        key
        for key in map(_key, found)
        if {_rule(run) for run in found if _key(run) == key} == {"token", "block"}
    }
    each = [run for run in found if _key(run) in both]
    if not each:
        raise Missing(needed)
    every = with_all(each)
    names = ["T", "dataset", setting, "rule", *columns(CALLS), *columns(GAIN), *columns(SPEED)]
    rows: list[list[Cell]] = [
        [
            run.temperature,
            run.dataset,
            _size(run),
            _rule(run),
            *tokens_per_call(run),
            *_gain(run, every),
            *speedup(run),
        ]
        for run in sorted(
            every, key=lambda run: (run.temperature, _size(run), _rule(run) == "block")
        )
    ]

    def draw(canvas: Canvas) -> None:
        records = drawing.together(drawing.records(names, rows))
        distributions = drawing.distinct(records, "T")
        panels = drawing.panels(canvas, drawing.titles(records), 3, (3.4, 3.0))
        for distribution, axes in zip(distributions, panels, strict=True):
            drawing.lines(
                axes, [r for r in records if r["T"] == distribution], setting, CALLS, "rule"
            )
            axes.set_xticks(sorted({r[setting] for r in records}))
            axes.set_xlabel(UNITS[setting])
        drawing.legend(canvas, panels[0])

    return Figure(
        kind="measured",
        n=extent(each),
        interval=f"{METHOD}; of the gain on the same prompts for both rules",
        columns=names,
        rows=rows,
        draw=draw,
        **said,
    )


def _gain(run: Run, every: Sequence[Run]) -> Sequence[Cell]:
    """Of block over token-wise verification; none for the latter."""
    if _rule(run) == "token":
        return None, None, None
    other = next(other for other in every if _key(other) == _key(run) and _rule(other) == "token")
    ours, theirs = (
        counted(r.traces, tokens, lambda trace: len(trace.rounds)) for r in (run, other)
    )
    return compared(ours, theirs, _difference)


def _difference(ours: Array, theirs: Array) -> Array:
    one, other = (divided(sums[..., 0], sums[..., 1]) for sums in (ours, theirs))
    difference: Array = one - other
    return difference


def _one_draft(how: Method) -> bool:
    return how.structure == "Chain" and how.stop == "Fixed" and how.verifier in RULES


def _parallel(how: Method) -> bool:
    return how.structure == "ParallelPaths" and how.verifier == "ParallelVerifier"


def _rule(run: Run) -> str:
    return str(run.method.settings.get("verifier.rule") or RULES[run.method.verifier])


def _size(run: Run) -> int:
    """Tokens of a draft, or the number of drafts."""
    settings = run.method.settings
    return int(
        settings["structure.paths"] if "structure.paths" in settings else settings["stop.gamma"]
    )


def _key(run: Run) -> Key:
    """What both rules have to share to be compared: the prompts, too."""
    return run.evaluation.folder, run.temperature, run.dataset, _size(run)
