"""The table of measurements: the counts and seconds of every policy on every prompt, and
comparisons of policies.

Decoding, replay of a harvest, simulation of overlapped engines, batched schedules and expected
acceptance all fill the same pandas frame: a row for each (policy, setting, dataset, prompt,
repeat), with sums over the rounds of that response. `price` adds modelled seconds, `compare` the
speed of one policy over another's on the same prompts. Every figure is a ratio of sums over prompts
with a 95 % bootstrap interval over prompts (repeats of a prompt are added up, and so are the turns
of a conversation), so that a page, a table and a notebook that read the same rows show the same
number."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from data_gen.prompts.prompt import TURN
from decoding.cost import CostTable, Counts
from decoding.trace import STAGES, RoundTrace, Trace
from runtime.files import write_atomically
from runtime.intervals import Array, Estimate, bootstrap
from runtime.text import printable

FILE = "measurements.parquet"
BASELINE = "autoregressive"  # the policy that drafts nothing
ALL = "all"  # all datasets together, in tables and figures
SPEEDUP = "speed-up"
FEW = 8  # prompts: with fewer, an interval is hardly more than their range
MODELLED = "modelled"  # prefix of columns with seconds of a cost table
IDENTITY = {"policy": "", "setting": np.nan, "dataset": "", "prompt": ""}
"""Columns that identify a row, and what they hold where a producer knows nothing."""

SCHEMA = {
    "kind": "timed (decoded here), counted (replayed or simulated, exactly) or expected (a mean"
    " over random verdicts)",
    "policy": "name of the method, stop rule or schedule",
    "setting": "the value that is swept, such as a threshold or a length; NaN: as configured",
    "dataset": "of the prompt",
    "category": "of the prompt, within its dataset",
    "prompt": "id of the prompt",
    "repeat": "from 0, how often the policy had decoded the prompt before",
    "requests": "decoded together; without the column: one",
    "split": "of a harvest: the prompts that values are chosen on, or judged on",
    "emitted": "tokens of the response",
    "rounds": "calls of the target, without the prefill",
    "target_rows": "rows of those calls",
    "drafted": "draft tokens; in a tree every node",
    "accepted": "of those, the ones that the target accepted",
    "drafts": "rounds that drafted; NaN for models side by side, whose lists are empty",
    "accepted_at": "list; entry n: drafts of which more than n tokens were accepted",
    "judged_at": "list; entry n: drafts of which n tokens were accepted and one more was judged",
    "draft_forwards": "forwards of the draft",
    "questions": "numbers that the stop rule computed or asked of a predictor",
    "calls_by_drafted": "list; entry n: target calls that verified n draft tokens",
    "steps": "draft steps in time: tokens of a chain, depth of a tree, branches side by side once",
    "lost": "of those, the ones that a rejection took",
    "runs": "runs of accepted draft tokens: a serial round that drafted is one, with both models"
    " side by side a run ends at a rejection (SpecBranch, appendix E.3)",
    "run_tokens": "tokens of those runs",
    "waste": "draft steps behind an accepted branch that were not used (models side by side)",
    "draft_stages": "rounds that began with the draft alone (models side by side)",
    "class_none": "rounds whose class was: keep no branch token (models side by side)",
    "class_some": "rounds whose class was: stop by confidence",
    "class_all": "rounds whose class was: keep all",
    "seconds": "wall time of the request, prefill included",
    "decode_seconds": "the same without the prefill",
    **{f"{stage}_seconds": f"of the decode, in stage {stage}" for stage in STAGES},
    "overhead_seconds": "of the decode, outside both models' forwards",
    "target_idle_seconds": "of the decode, the target without a job (models side by side)",
    "draft_idle_seconds": "of the decode, the draft without a job (models side by side)",
    "joules": "energy that the machine counted, NaN where nothing was counted",
    "modelled": "added by `price`: seconds that a cost table gives these counts, without prefill",
    "modelled_plain": "added by `price`: seconds that it gives as many tokens without a draft",
}
"""Columns and what they hold. A producer fills those that it knows."""

RATIOS = {
    "tokens/s": ("emitted", "seconds"),
    "tokens/target call": ("emitted", "rounds"),
    "drafted/round": ("drafted", "rounds"),
    "draft forwards/round": ("draft_forwards", "rounds"),
    "acceptance": ("accepted", "drafted"),
    "acceptance length": ("with_bonus", "drafts"),
    "accepted length M": ("run_tokens", "runs"),
    "rollback RB": ("lost", "steps"),
    "stop rule time": ("stop_seconds", "seconds"),  # including its predictor
    "joules/token": ("joules", "emitted"),
}
"""What is read off a table: above / below, sums over prompts."""
SHARES: dict[str, tuple[str, str]] = {
    str(name): (f"{name}_seconds", "decode_seconds") for name in (*STAGES, "overhead")
}
"""Of decode time. Where the models run side by side, shares of the stages add up to more than 1."""
SIDE_BY_SIDE = ["waste", "draft_stages", "class_none", "class_some", "class_all"]
SIDE_BY_SIDE += ["target_idle_seconds", "draft_idle_seconds"]
"""Columns that say something of engines alone that run both models side by side."""
OVERLAP = {
    "waste": ("waste", "steps"),
    "target idle": ("target_idle_seconds", "decode_seconds"),
    "draft idle": ("draft_idle_seconds", "decode_seconds"),
    "draft stages": ("draft_stages", "rounds"),
    "class none": ("class_none", "classified"),
    "class some": ("class_some", "classified"),
    "class all": ("class_all", "classified"),
}
"""How draft and target shared the work, of engines that run both side by side."""

Row = dict[str, Estimate]
Summary = dict[str, Row]
"""policy -> figure -> its value and interval."""


# Filling ------------------------------------------------------------------------------------------


def timed(traces: Mapping[str, Sequence[Trace]]) -> pd.DataFrame:
    """Return the rows of decoded responses. traces: policy -> those of all prompts and repeats, in
    the order they were decoded."""
    rows = (
        {
            "policy": policy,
            "dataset": trace.dataset,
            "category": trace.category,
            "prompt": trace.prompt_id,
            **sums(trace),
        }
        for policy, decoded in traces.items()
        for trace in decoded
    )
    return table("timed", rows)


def table(kind: str, rows: Iterable[Mapping[str, Any]] | pd.DataFrame) -> pd.DataFrame:
    """Return a table of these rows with all identifying columns, in the order of `SCHEMA`, and with
    numbered repeats of a policy's prompts."""
    frame = pd.DataFrame(rows if isinstance(rows, pd.DataFrame) else list(rows))
    lacking = {column: value for column, value in IDENTITY.items() if column not in frame}
    frame = frame.assign(kind=kind, **lacking)
    keys = [*IDENTITY, *(column for column in ("requests", "split") if column in frame)]
    frame["repeat"] = frame.groupby(keys, dropna=False).cumcount()
    first = [column for column in SCHEMA if column in frame]
    return frame[[*first, *(column for column in frame if column not in SCHEMA)]]


def counted(
    kind: str,
    policy: str,
    counts: Counts,
    prompts: Sequence[str],
    setting: float | None = None,
    dataset: str = "",
) -> pd.DataFrame:
    """Return the rows of a replay. counts: [prompts] each, `calls_by_drafted` [prompts, G + 1]."""
    columns: dict[str, Any] = {
        **{name: list(values) for name, values in counts.items()},
        "steps": counts["drafted"],
        "lost": counts["drafted"] - counts["accepted"],
        "runs": counts["calls_by_drafted"][:, 1:].sum(1),
        "run_tokens": counts["accepted"],
        "prompt": list(prompts),
    }
    facts = {"policy": policy, "setting": np.nan if setting is None else setting}
    return table(kind, pd.DataFrame(columns).assign(dataset=dataset, **facts))


def sums(trace: Trace) -> dict[str, Any]:
    """Return the columns of one decoded response."""
    rounds, lengths = trace.rounds, accepted_lengths(trace)
    steps = [draft_steps(round_) for round_ in rounds]
    drafted = [len(round_.draft_tokens) for round_ in rounds]
    stages = {f"{stage}_seconds": seconds for stage, seconds in trace.stages.items()}
    decoded = trace.decode_seconds
    others = sum(seconds for stage, seconds in trace.stages.items() if stage != "other")
    stages["other_seconds"] = max(0.0, decoded - others)
    return {
        "emitted": len(trace.tokens),
        "rounds": len(rounds),
        "target_rows": sum(map(target_rows, rounds)),
        "drafted": sum(drafted),
        # only of known drafts: other libraries do not tell what they drafted
        "accepted": sum(round_.accepted for round_ in rounds if round_.draft_tokens),
        **_by_position(rounds),
        "draft_forwards": sum(round_.draft_forwards for round_ in rounds),
        "questions": sum(len(round_.predicted) for round_ in rounds),
        "calls_by_drafted": np.bincount(np.array(drafted, dtype=np.int64), minlength=1),
        "steps": sum(drawn for drawn, _ in steps),
        "lost": sum(lost for _, lost in steps),
        "runs": len(lengths),
        "run_tokens": sum(lengths),
        **_overlap_sums(trace),
        "seconds": trace.seconds,
        "decode_seconds": decoded,
        **stages,
        "overhead_seconds": max(0.0, decoded - _model_seconds(trace)),
        "joules": np.nan if trace.joules is None else trace.joules,
    }


def _by_position(rounds: Sequence[RoundTrace]) -> dict[str, Any]:
    """Return the number of drafts and what became of each position; in a tree, of the accepted
    path. Where models run side by side a draft goes on over rounds."""
    if any(round_.overlap for round_ in rounds):
        return {"drafts": np.nan, "accepted_at": [], "judged_at": []}
    drafts = [round_ for round_ in rounds if round_.draft_tokens]
    places = range(max((round_.judged for round_ in drafts), default=0))
    return {
        "drafts": len(drafts),
        "accepted_at": [sum(each.accepted > n for each in drafts) for n in places],
        "judged_at": [sum(each.judged > n for each in drafts) for n in places],
    }


def _overlap_sums(trace: Trace) -> dict[str, Any]:
    """Return the columns of overlapped engines, NaN if no round ran both models side by side."""
    shared = [round_.overlap for round_ in trace.rounds if round_.overlap]
    if not shared:
        return dict.fromkeys(SIDE_BY_SIDE, np.nan)
    outcomes = [stages.outcome for stages in shared]
    busy = {"target": 0.0, "draft": 0.0}
    for span in (span for stages in shared for span in stages.spans):
        busy[span.worker] += span.end - span.start
    return {
        "waste": sum(stages.waste for stages in shared),
        "draft_stages": sum(stages.stage == "draft" for stages in shared),
        **{f"class_{name}": outcomes.count(n) for n, name in enumerate(("none", "some", "all"))},
        **{f"{side}_idle_seconds": trace.decode_seconds - busy[side] for side in busy},
    }


def draft_steps(round_: RoundTrace) -> tuple[int, int]:
    """Return the number of draft steps in time, and of those lost to a rejection."""
    if round_.overlap:
        return round_.overlap.draft_steps, round_.overlap.rollback
    return round_.depth, round_.depth - round_.accepted


def target_rows(round_: RoundTrace) -> int:
    """Return the rows of the round's target call."""
    drafted = round_.overlap.pending if round_.overlap else len(round_.draft_tokens)
    return 1 + drafted + round_.extra_rows


def drafted_tokens(trace: Trace) -> int:
    """Count the nodes of all drafts."""
    return sum(len(round_.draft_tokens) for round_ in trace.rounds)


def tokens_per_second(traces: Iterable[Trace]) -> float:
    """Return tokens over wall time, prefill included, of all `traces` together."""
    every = list(traces)
    seconds = sum(trace.seconds for trace in every)
    return sum(len(trace.tokens) for trace in every) / seconds if seconds else 0.0


def accepted_lengths(trace: Trace) -> list[int]:
    """Return the lengths of runs of accepted draft tokens as SpecBranch counts them (2506.01979,
    appendix E.3): each serial round with a draft is one run; in an overlapped engine a run spans
    rounds until a rejection. A rejected first token makes a run of length 0."""
    if not any(round_.overlap for round_ in trace.rounds):
        return [round_.accepted for round_ in trace.rounds if round_.draft_tokens]
    runs, run = [], 0
    for round_ in trace.rounds:
        run += round_.accepted
        if round_.rejected:
            runs.append(run)
            run = 0
    return [*runs, run] if run else runs


def _model_seconds(trace: Trace) -> float:
    """Return the time in which at least one of the models was running: its forwards or, if models
    ran side by side, their jobs."""
    spans = [span for round_ in trace.rounds if round_.overlap for span in round_.overlap.spans]
    busy, end, side_by_side = 0.0, 0.0, False
    for span in sorted(spans, key=lambda span: span.start):
        side_by_side |= span.start < end
        busy += max(0.0, span.end - max(span.start, end))
        end = max(end, span.end)
    return busy if side_by_side else trace.stages["draft"] + trace.stages["target"]


def price(measurements: pd.DataFrame, cost: CostTable) -> pd.DataFrame:
    """Return the table with `modelled` and `modelled_plain`, the seconds of its counts under
    `cost`. Only for models in turn: rounds of overlapped engines are priced by
    `evaluation.timeline`."""
    parts = []
    for policy, rows in measurements.groupby("policy", sort=False):
        names = ("draft_forwards", "questions", "emitted")
        counts: dict[str, Any] = {name: rows[name].to_numpy() for name in names}
        counts["calls_by_drafted"] = listed(rows, "calls_by_drafted").to_numpy(np.float64)
        modelled = cost.price(counts, str(policy))
        parts.append(rows.assign(modelled=modelled, modelled_plain=cost.plain(counts)))
    return pd.concat(parts)


# Figures ------------------------------------------------------------------------------------------


def prompts(measurements: pd.DataFrame, *columns: str) -> pd.DataFrame:
    """Return sums over the repeats of every prompt, one row each, sorted by dataset and prompt (so
    that intervals do not depend on the order of decoding); NaN if a repeat has no value.

    Raises ValueError if rows of several settings, splits, kinds or numbers of requests would be
    added up: select one of them first."""
    for column in ("setting", "split", "requests", "kind"):
        if column in measurements and measurements[column].nunique(dropna=False) > 1:
            raise ValueError(f"rows of several values of {column!r}: select one of them first")
    return _added(measurements.groupby(["dataset", "prompt"], dropna=False), columns)


def conversations(each: pd.DataFrame) -> pd.DataFrame:
    """Return sums over the turns of every conversation, one observation for intervals. each: of
    `prompts`."""
    dataset, prompt = (each.index.get_level_values(level) for level in (0, 1))
    whole = prompt.astype(str).str.replace(rf"{TURN}[0-9]+$", "", regex=True)
    return _added(each.groupby([dataset, whole], dropna=False), list(map(str, each)))


def _added(groups: Any, columns: Sequence[str]) -> pd.DataFrame:
    each = groups[list(dict.fromkeys(columns))]
    return each.sum().where(each.count().eq(groups.size(), axis=0))


def ratio(measurements: pd.DataFrame, above: str, below: str) -> Estimate:
    """Return sum(above) / sum(below) with its 95 % interval over prompts; 0 if sum(below) is 0.
    Columns are of one policy."""
    each = conversations(prompts(measurements, above, below))
    return ratio_of(each[above].to_numpy(float), each[below].to_numpy(float))


def ratio_of(above: Array, below: Array) -> Estimate:
    """Return sum(above) / sum(below), [prompts] each, with its 95 % interval over prompts."""
    return bootstrap(lambda times: divided(times @ above, times @ below), len(above))


def by_position(measurements: pd.DataFrame, below: str = "drafts") -> list[Estimate]:
    """Return for each position of a draft its `accepted_at` over `below`: "drafts", all of them, or
    "judged_at", those whose token there was judged; without an interval where few prompts have any,
    so that resamples may have none. Columns are of one policy; none for models side by side."""
    if measurements["drafts"].isna().any():
        return []
    lists = listed(measurements, below) if below == "judged_at" else {}
    found = list[Estimate]()
    for place, accepted in listed(measurements, "accepted_at").items():
        of = lists.get(place, measurements["drafts"])
        rows = measurements.assign(above=accepted, below=of)
        each = conversations(prompts(rows, "above", "below"))
        estimate = ratio_of(each["above"].to_numpy(float), each["below"].to_numpy(float))
        few = len(each) > (each["below"] > 0).sum() < FEW
        found.append(Estimate(estimate.value) if few else estimate)
    return found


def listed(measurements: pd.DataFrame, column: str) -> pd.DataFrame:
    """Return a column for each entry of the lists in `column`, 0 where a list is shorter."""
    entries = zip_longest(*measurements[column], fillvalue=0)
    return pd.DataFrame(dict(enumerate(entries)), measurements.index)


def compare(
    measurements: pd.DataFrame,
    against: str = BASELINE,
    above: str = "emitted",
    below: str = "seconds",
) -> dict[str, Estimate]:
    """Return by policy its `above` / `below` over that of the policy `against`, on the prompts that
    both have: ratios of sums over prompts, with the paired 95 % interval over prompts.

    By default the measured speed-up; NaN for a policy that shares no prompt with `against`. Raises
    KeyError where `against` has no rows, ValueError where a policy's rows are of several settings,
    splits, kinds or numbers of requests."""
    every = {
        str(policy): prompts(rows, above, below)
        for policy, rows in measurements.groupby("policy", sort=False)
    }
    return {
        policy: Estimate(1.0) if policy == against else over(mine, every[against], above, below)
        for policy, mine in every.items()
    }


def over(mine: pd.DataFrame, other: pd.DataFrame, above: str, below: str) -> Estimate:
    """Return the ratio above / below of one policy over another's, both of `prompts`."""
    shared = mine.index.intersection(other.index)
    if shared.empty:
        return Estimate(float("nan"))
    first, second = (conversations(each.loc[shared]) for each in (mine, other))
    columns = [each[name].to_numpy(float) for each in (first, second) for name in (above, below)]

    def statistic(times: Any) -> Any:
        a, b, c, d = (times @ column for column in columns)
        return divided(divided(a, b), divided(c, d))

    return bootstrap(statistic, len(first))


def divided(above: Any, below: Any) -> Any:
    """Return above / below, 0 where `below` is 0."""
    above, below = np.asarray(above, dtype=np.float64), np.asarray(below, dtype=np.float64)
    return np.divide(above, below, out=np.zeros_like(above), where=below != 0)


def summary(
    measurements: pd.DataFrame,
    against: Iterable[str] = (),
    figures: Mapping[str, tuple[str, str]] = RATIOS | SHARES | OVERLAP,
) -> Summary:
    """Return the figures of every policy that its columns allow. against: policies besides plain
    decoding that speeds are compared with (`over <policy>`)."""
    classes = ["class_none", "class_some", "class_all"]
    rows = measurements
    if {"accepted", "drafts"} <= set(rows):
        rows = rows.assign(with_bonus=rows["accepted"] + rows["drafts"])
    if set(classes) <= set(rows):
        rows = rows.assign(classified=rows[classes].sum(axis=1))
    figures_of: Summary = {}
    for policy, mine in rows.groupby("policy", sort=False):
        filled = {column for column in mine if mine[column].notna().all()}
        figures_of[str(policy)] = {
            name: ratio(mine, *columns) for name, columns in figures.items() if filled >= {*columns}
        }
    speeds = {
        name: compare(rows, other)
        for name, other in {SPEEDUP: BASELINE, **{f"over {name}": name for name in against}}.items()
        if other in figures_of and "seconds" in rows
    }
    for column in (column for column in map(str, rows) if column.startswith(f"{MODELLED} ")):
        name = f"{SPEEDUP}, {column.removeprefix(f'{MODELLED} ')}"
        speeds[name] = compare(rows, BASELINE, below=column)
    for name, estimates in speeds.items():
        for policy, estimate in estimates.items():
            figures_of[policy][name] = estimate
    return figures_of


def by_dataset(measurements: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Return the rows of all prompts under `ALL` and, if there are several datasets, those of each
    by its name in tables."""
    names = sorted(measurements["dataset"].unique())
    parts = {shown_as(name): measurements[measurements["dataset"] == name] for name in names}
    return {ALL: measurements, **(parts if len(names) > 1 else {})}


def by_category(measurements: pd.DataFrame) -> dict[str, dict[str, pd.DataFrame]]:
    """Return the rows of each category, by dataset, of the datasets that have several."""
    found = dict[str, dict[str, pd.DataFrame]]()
    for dataset, rows in measurements.groupby("dataset"):
        parts = {str(name): part for name, part in rows.groupby("category", sort=False) if name}
        if len(parts) > 1:
            found[shown_as(str(dataset))] = parts
    return found


def count_prompts(measurements: pd.DataFrame) -> int:
    return len(measurements[["dataset", "prompt"]].drop_duplicates())


def shown_as(dataset: str) -> str:
    """Return the name of a dataset in tables and figures: in quotation marks if it could be taken
    for all datasets. Names are unique."""
    return f'"{dataset}"' if dataset.strip('"') == ALL else dataset


# Saving and showing -------------------------------------------------------------------------------


def save(measurements: pd.DataFrame, path: Path) -> None:
    """Write the table as parquet; the file appears whole or not at all."""
    write_atomically(path, lambda file: measurements.to_parquet(file, index=False))


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table whose columns also line up in a terminal."""
    cells = [[printable(cell) for cell in line] for line in (header, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [cells[0], ["-" * width for width in widths], *cells[1:]]
    return "\n".join(
        "| " + " | ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)) + " |"
        for line in lines
    )


def with_interval(estimate: Estimate, form: str = ".2f", unit: str = "") -> str:
    """Return a value as text, with its interval where it has one: `1.29x (1.27 to 1.32)`."""
    value, low, high = estimate
    interval = "" if low is None or high is None else f" ({low:{form}} to {high:{form}})"
    return f"{value:{form}}{unit}{interval}"
