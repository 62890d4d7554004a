"""The trace viewer of a report: a fragment of HTML that steps through the rounds of a decode,
without any network."""

import json
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment

from evaluation.table import drafted_tokens
from evaluation.token_texts import Vocabulary, tokens_of
from reports.artifacts import Evaluation
from reports.viewer.rounds import (
    CLASSES,
    LANES,
    MARKS,
    MEANINGS,
    Bar,
    Drafted,
    Round,
    rounds,
    rule_of,
    summary,
)

PROMPTS, PROMPTS_IN_ALL = 8, 24  # most prompts of an evaluation, and of a page, to keep it small
PROMPT_END = 400  # characters of a prompt that are shown
PARTS = ("html", "css", "js")
KINDS = list(MARKS)
Json = dict[str, Any]


def fragment(evaluations: Sequence[Evaluation], vocabularies: Mapping[Path, Vocabulary]) -> str:
    """Return HTML with its own style, script and data; every id and class begins with "viewer".
    Empty without evaluations.

    vocabularies: by the evaluation's folder; without one, tokens are shown as their ids.
    """
    evaluations = [one for one in evaluations if one.traces]
    if not evaluations:
        return ""
    limit = max(1, min(PROMPTS, PROMPTS_IN_ALL // len(evaluations)))
    shown = [_run(one, vocabularies.get(one.folder, Vocabulary()), limit) for one in evaluations]
    data = {"runs": shown, "kinds": list(MARKS.items()), "lanes": LANES}
    # No text in the data can end its <script> element or open a comment.
    embedded = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    parts = {
        part: (files(__package__) / f"viewer.{part}").read_text(encoding="utf-8") for part in PARTS
    }
    template = Environment(autoescape=True, trim_blocks=True).from_string(parts["html"])
    return template.render(parts, data=embedded, kinds=MARKS, meanings=MEANINGS, limit=limit)


def _run(evaluation: Evaluation, vocabulary: Vocabulary, limit: int) -> Json:
    """Return the prompts decoded first, of the first repeat, as every method decoded them; methods
    that draft come first."""
    shown = {
        method: traces[: min(limit, len(traces) // evaluation.config["repeats"])]
        for method, traces in evaluation.traces.items()
    }
    every = [trace for traces in shown.values() for trace in traces]
    used = {token for trace in every for round_ in trace.rounds for token in tokens_of(round_)}
    methods = []
    for method in sorted(shown, key=lambda name: not any(map(drafted_tokens, shown[name]))):
        rule = rule_of(evaluation.settings(method))
        methods.append(
            {
                "name": method,
                "predicted": rule.says or "stop rule's value",
                "requests": [_request(rounds(trace, rule)) for trace in shown[method]],
            }
        )
    return {
        "name": f"{evaluation.folder.name} (T = {evaluation.temperature:g})",
        "prompts": [
            [f"{trace.dataset} {trace.prompt_id}", vocabulary.prompt(trace)[-PROMPT_END:]]
            for trace in next(iter(shown.values()))
        ],
        "methods": methods,
        "texts": {token: vocabulary.text(token) for token in sorted(used)},
    }


def _request(request: Sequence[Round]) -> Json:
    """Return a request for the script. jobs: [lane, name] of its jobs; laid: whether its stages are
    laid end to end. Times are microseconds, those of bars since the round began."""
    jobs = sorted({(LANES.index(bar.lane), bar.job) for one in request for bar in one.bars})
    return {
        "rounds": [
            [
                summary(one, number, len(request)),
                None if one.outcome is None else CLASSES[one.outcome],
                [_drafted(node) for node in one.drafted],
                [[token.token, KINDS.index(token.origin)] for token in one.committed],
                [_bar(bar, one.start, jobs) for bar in one.bars],
                _micro(one.start),
                _micro(one.end - one.start),
            ]
            for number, one in enumerate(request, 1)
        ],
        "jobs": jobs,
        "laid": any(bar.rows is None for one in request for bar in one.bars),
    }


def _bar(bar: Bar, start: float, jobs: Sequence[tuple[int, str]]) -> list[int]:
    times = _micro(bar.start - start), _micro(bar.end - bar.start)
    rows = [] if bar.rows is None else [bar.rows]
    return [jobs.index((LANES.index(bar.lane), bar.job)), *times, *rows]


def _drafted(node: Drafted) -> list[Any]:
    numbers = [
        None if value is None else float(f"{value:.4g}")
        for value in (node.q, node.p, node.predicted)
    ]
    return [node.token, node.depth, node.line, KINDS.index(node.fate), *numbers]


def _micro(seconds: float) -> int:
    return round(1e6 * seconds)
