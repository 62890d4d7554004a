"""Token-wise against block verification, for one draft and for several in parallel."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure as Canvas

from evaluation.table import SPEEDUP, divided, prompts
from reports import drawing
from reports.artifacts import Evaluation
from reports.figure import Entry, Figure, Missing, Record, estimated
from reports.runs import BEST_FIXED, CALLS, Method, Run, each_setting, extent, runs, with_all
from runtime.intervals import METHOD, Array, bootstrap

RULES = {"TokenVerifier": "token", "BlockVerifier": "block"}
UNITS = {"gamma": "gamma, tokens of a draft", "drafts": "drafts side by side"}
GAIN = "tokens/call over token-wise"
Key = tuple[Path, float, str, Any]


def block_gain(evaluations: Sequence[Evaluation]) -> Figure:
    """Return the figure of fixed draft lengths, by gamma and temperature."""

    def one_draft(how: Method) -> bool:
        return how.structure == "Chain" and how.stop == "Fixed" and how.verifier in RULES

    return _figure(
        [run for run in runs(evaluations, one_draft) if run.label != BEST_FIXED],
        "needs both rules at the same draft lengths: python scripts/evaluate.py"
        " experiment=draft_lengths",
        setting="gamma",
        name="block-verification",
        title="Block against token-wise verification by draft length",
        source="HSD, tables 1 and 3: block over token-wise verification, not HSD itself",
    )


def parallel_drafts(evaluations: Sequence[Evaluation]) -> Figure:
    """Return the figure of parallel drafts, by their number."""

    def parallel(how: Method) -> bool:
        return how.structure == "ParallelPaths" and how.verifier == "ParallelVerifier"

    return _figure(
        runs(evaluations, parallel),
        "needs several drafts under both rules: python scripts/evaluate.py"
        " experiment=parallel_drafts",
        setting="drafts",
        name="parallel-drafts",
        title="Several whole drafts, each verified token by token or as a block",
        source="HSD, table 2",
    )


def _figure(selected: Sequence[Run], needed: str, setting: str, **words: str) -> Figure:
    """Return the figure of the runs decoded under both rules. Raises Missing if there are none."""
    rules: dict[Key, set[str]] = {}
    for run in (run for run in selected if run.traces):
        rules.setdefault(_key(run), set()).add(_rule(run))
    both = [run for run in selected if rules.get(_key(run)) == {"token", "block"}]
    if not both:
        raise Missing(needed)
    every = sorted(
        with_all(both), key=lambda run: (run.temperature, _size(run), _rule(run) == "block")
    )
    return Figure(
        kind="measured",
        n=extent(both),
        interval=f"{METHOD}; of the gain on the same prompts for both rules",
        records=[
            {
                **{"T": run.temperature, "dataset": run.dataset},
                **{setting: _size(run), "rule": _rule(run)},
                **run.columns(CALLS),
                **_gain(run, every),
                **run.columns(SPEEDUP),
            }
            for run in every
        ],
        draw=partial(_draw, setting=setting),
        **words,
    )


def _draw(records: Sequence[Record], canvas: Canvas, setting: str) -> None:
    shown, size = drawing.together(records), (3.4, 3.0)
    for axes, part in drawing.panels_by(canvas, shown, "T", 3, size, datasets=True):
        drawing.lines(axes, part, setting, CALLS, "rule")
        axes.set_xticks(sorted({record[setting] for record in shown}))
        axes.set_xlabel(UNITS[setting])


def _gain(run: Run, every: Sequence[Run]) -> Record:
    """Return the gain of block over token-wise verification; none for the latter."""
    if _rule(run) == "token":
        return estimated(GAIN, (None, None, None))
    other = next(other for other in every if _key(other) == _key(run) and _rule(other) == "token")
    block, token = (prompts(each.rows, "emitted", "rounds") for each in (run, other))
    both = block.index.intersection(token.index, sort=False)
    shared = np.hstack([block.loc[both], token.loc[both]]).astype(np.float64)

    def difference(times: Array) -> Array:
        sums = (times @ shared).T
        gain: Array = divided(sums[0], sums[1]) - divided(sums[2], sums[3])
        return gain

    return estimated(GAIN, bootstrap(difference, len(shared)))


def _rule(run: Run) -> str:
    return str(run.method.settings.get("verifier.rule") or RULES[run.method.verifier])


def _size(run: Run) -> int:
    """Return the tokens of a draft, or the number of drafts."""
    settings = run.method.settings
    return int(
        settings["structure.paths"] if "structure.paths" in settings else settings["stop.gamma"]
    )


def _key(run: Run) -> Key:
    """Return the key that runs of both rules have to share to be compared, prompts included."""
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
