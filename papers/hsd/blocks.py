"""Token-wise against block verification, of one draft and of several side by side."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure as Canvas

from evaluation.table import SPEEDUP, divided, prompts
from reports import drawing
from reports.artifacts import Evaluation
from reports.figure import Cell, Entry, Figure, Missing
from reports.runs import BEST_FIXED, CALLS, Method, Run, extent, runs, with_all
from reports.settings import each_setting
from runtime.intervals import METHOD, Array, bootstrap, columns

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
        _with_both(found, needed),
        setting="gamma",
        name="block-verification",
        title="Block against token-wise verification by draft length",
        source="HSD, tables 1 and 3: block over token-wise verification, not HSD itself",
    )


def parallel_drafts(evaluations: Sequence[Evaluation]) -> Figure:
    """Whole drafts side by side, by their number."""
    found = [run for run in runs(evaluations, _parallel) if run.traces]
    needed = (
        "needs several drafts under both rules: python scripts/evaluate.py"
        " experiment=parallel_drafts"
    )
    return _figure(
        _with_both(found, needed),
        setting="drafts",
        name="parallel-drafts",
        title="Several whole drafts, each verified token by token or as a block",
        source="HSD, table 2",
    )


def _with_both(found: Sequence[Run], needed: str) -> list[Run]:
    """Runs of what was decoded under both rules. Raises Missing where nothing was."""
    rules: dict[Key, set[str]] = {}
    for run in found:
        rules.setdefault(_key(run), set()).add(_rule(run))
    each = [run for run in found if rules[_key(run)] == {"token", "block"}]
    if not each:
        raise Missing(needed)
    return each


def _figure(each: Sequence[Run], setting: str, **said: str) -> Figure:
    every = with_all(each)
    names = ["T", "dataset", setting, "rule", *columns(CALLS), *columns(GAIN), *columns(SPEEDUP)]
    rows: list[list[Cell]] = [
        [
            *(run.temperature, run.dataset, _size(run), _rule(run)),
            *(*run.estimate(CALLS), *_gain(run, every), *run.estimate(SPEEDUP)),
        ]
        for run in sorted(
            every, key=lambda run: (run.temperature, _size(run), _rule(run) == "block")
        )
    ]
    return Figure(
        kind="measured",
        n=extent(each),
        interval=f"{METHOD}; of the gain on the same prompts for both rules",
        columns=names,
        rows=rows,
        draw=partial(_draw, drawing.records(names, rows), setting),
        **said,
    )


def _draw(every: Sequence[drawing.Record], setting: str, canvas: Canvas) -> None:
    records = drawing.together(every)
    panels = drawing.panels(canvas, drawing.titles(records), 3, (3.4, 3.0))
    for temperature, axes in zip(drawing.distinct(records, "T"), panels, strict=True):
        here = [record for record in records if record["T"] == temperature]
        drawing.lines(axes, here, setting, CALLS, "rule")
        axes.set_xticks(sorted({record[setting] for record in records}))
        axes.set_xlabel(UNITS[setting])
    drawing.legend(canvas, panels[0])


def _gain(run: Run, every: Sequence[Run]) -> Sequence[Cell]:
    """Of block over token-wise verification; none for the latter."""
    if _rule(run) == "token":
        return None, None, None
    other = next(other for other in every if _key(other) == _key(run) and _rule(other) == "token")
    block, token = (prompts(each.rows, "emitted", "rounds") for each in (run, other))
    both = block.index.intersection(token.index, sort=False)
    shared = np.hstack([block.loc[both], token.loc[both]]).astype(np.float64)

    def difference(times: Array) -> Array:
        sums = (times @ shared).T
        gain: Array = divided(sums[0], sums[1]) - divided(sums[2], sums[3])
        return gain

    return bootstrap(difference, len(shared))


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


FIGURES = (
    Entry(
        "Block against token-wise verification by draft length",
        "Block verification accepts at least as much in expectation, the more the longer the draft;"
        " where the interval of the gain holds 0 these prompts cannot tell. In tokens a step the"
        " paper's table 1 has block verification 1.4 to 5.8 % above token-wise, and HSD 3.3 to"
        " 12.3 %.",
        each_setting(block_gain),
    ),
    Entry(
        "Several whole drafts, token by token or as a block",
        "A further draft helps only where it agrees with what is accepted so far, so each brings"
        " less than the one before.",
        each_setting(parallel_drafts),
    ),
)
