"""The trace viewer of a report: a fragment of HTML that steps through the rounds of a decode,
without any network."""

import json
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment

from decoding.trace import Trace
from evaluation.table import drafted_tokens
from evaluation.token_texts import Vocabulary, tokens_of
from reports.artifacts import Evaluation
from reports.viewer import rounds as view
from reports.viewer.rounds import CLASSES, LANES, MARKS, MEANINGS, Drafted, Round

PROMPTS, PROMPTS_IN_ALL = (
    8,
    24,
)  # most of an evaluation, and of a page where every evaluation has one: it stays small
PROMPT_END = 400  # characters of a prompt that are shown
PARTS = ("html", "css", "js")
KINDS = list(MARKS)
Json = dict[str, Any]


def fragment(evaluations: Sequence[Evaluation], vocabularies: Mapping[Path, Vocabulary]) -> str:
    """HTML with its own style, script and data; every id and class begins with "viewer". Empty
    without evaluations.

    vocabularies: by the evaluation's folder; tokens are shown as their ids where there is none.
    """
    evaluations = [one for one in evaluations if one.traces]
    if not evaluations:
        return ""
    limit = max(1, min(PROMPTS, PROMPTS_IN_ALL // len(evaluations)))
    found = [_run(one, vocabularies.get(one.folder, Vocabulary()), limit) for one in evaluations]
    data = {"runs": found, "kinds": list(MARKS.items()), "lanes": LANES}
    parts = {
        part: (files(__package__) / f"viewer.{part}").read_text(encoding="utf-8") for part in PARTS
    }
    template = Environment(autoescape=True, trim_blocks=True).from_string(parts["html"])
    return template.render(parts, data=embedded(data), kinds=MARKS, meanings=MEANINGS, limit=limit)


def embedded(data: Json) -> str:
    """JSON for a <script> element: no text in it can end the element or open a comment."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _run(evaluation: Evaluation, vocabulary: Vocabulary, limit: int) -> Json:
    shown = {
        method: _first(traces, evaluation, limit) for method, traces in evaluation.traces.items()
    }
    some, everything = (
        next(iter(shown.values())),
        [trace for found in shown.values() for trace in found],
    )
    used = sorted(
        {token for trace in everything for round_ in trace.rounds for token in tokens_of(round_)}
    )
    return {
        "name": f"{evaluation.folder.name} (T = {evaluation.temperature:g})",
        "prompts": [
            [f"{trace.dataset} {trace.prompt_id}", vocabulary.prompt(trace)[-PROMPT_END:]]
            for trace in some
        ],
        "methods": [
            _method(evaluation, method, found)
            for method, found in sorted(shown.items(), key=_drafts_nothing)
        ],
        "texts": {token: vocabulary.text(token) for token in used},
    }


def _drafts_nothing(shown: tuple[str, Sequence[Trace]]) -> bool:
    """Sorts methods that draft to the front, otherwise as they were."""
    return not any(map(drafted_tokens, shown[1]))


def _first(traces: Sequence[Trace], evaluation: Evaluation, limit: int) -> Sequence[Trace]:
    """Those decoded first, of the first repeat."""
    return traces[: min(limit, len(traces) // evaluation.config["repeats"])]


def _method(evaluation: Evaluation, method: str, traces: Sequence[Trace]) -> Json:
    rule = view.rule_of(evaluation.settings(method))
    requests = [_request(view.rounds(trace, rule)) for trace in traces]
    return {"name": method, "predicted": rule.says or "stop rule's value", "requests": requests}


def _request(found: Sequence[Round]) -> Json:
    """jobs: [lane, name] of what is done in it; laid: whether its stages are laid end to end."""
    jobs = sorted({(LANES.index(bar.lane), bar.job) for one in found for bar in one.bars})
    said = [view.summary(one, number, len(found)) for number, one in enumerate(found, 1)]
    return {
        "rounds": [_round(one, text, jobs) for one, text in zip(found, said, strict=True)],
        "jobs": jobs,
        "laid": any(bar.rows is None for one in found for bar in one.bars),
    }


def _round(found: Round, text: str, jobs: Sequence[tuple[int, str]]) -> list[Any]:
    """Times in microseconds, those of bars since the round began."""
    bars = [
        [
            jobs.index((LANES.index(bar.lane), bar.job)),
            _micro(bar.start - found.start),
            _micro(bar.end - bar.start),
        ]
        + ([] if bar.rows is None else [bar.rows])
        for bar in found.bars
    ]
    return [
        text,
        None if found.outcome is None else CLASSES[found.outcome],
        [_drafted(node) for node in found.drafted],
        [[token.token, KINDS.index(token.origin)] for token in found.committed],
        bars,
        _micro(found.start),
        _micro(found.end - found.start),
    ]


def _drafted(node: Drafted) -> list[Any]:
    numbers = [
        None if value is None else float(f"{value:.4g}")
        for value in (node.q, node.p, node.predicted)
    ]
    return [node.token, node.depth, node.line, KINDS.index(node.fate), *numbers]


def _micro(seconds: float) -> int:
    return round(1e6 * seconds)
