"""The trace viewer of a report: a fragment of HTML that steps through the rounds of a decode, without any network."""

import json
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, get_args

from jinja2 import Environment

from decoding.figures.evidence import Evaluation
from decoding.figures.rounds import (
    CLASSES,
    LANES,
    MARKS,
    MEANINGS,
    PREDICTED,
    Bar,
    Drafted,
    Fate,
    Origin,
    Round,
    rounds,
    rule_of,
    summary,
)
from decoding.trace import Trace
from decoding.vocabulary import Vocabulary, tokens_of

PROMPTS = 8  # of each evaluation, those decoded first, in their first repeat: the page stays small
PROMPT_END = 400  # characters of a prompt that are shown
KINDS = list(dict.fromkeys([*get_args(Fate), *get_args(Origin)]))
Json = dict[str, Any]


def fragment(evaluations: Sequence[Evaluation], vocabularies: Mapping[Path, Vocabulary]) -> str:
    """HTML with its own style, script and data; every id and class begins with "viewer". Empty without evaluations.

    vocabularies: by the evaluation's folder; tokens are shown as their ids where there is none.
    """
    found = [_run(one, vocabularies.get(one.folder, Vocabulary())) for one in evaluations if one.traces]
    if not found:
        return ""
    data = {"runs": found, "kinds": [[kind, MARKS[kind]] for kind in KINDS], "classes": CLASSES, "lanes": LANES}
    parts = {
        name: (files(__package__) / f"viewer.{name}").read_text(encoding="utf-8") for name in ("html", "css", "js")
    }
    template = Environment(autoescape=True, trim_blocks=True).from_string(parts["html"])
    return template.render(parts, data=embedded(data), kinds=MARKS, meanings=MEANINGS, limit=PROMPTS)


def embedded(data: Json) -> str:
    """JSON for a <script> element: no text in it can end the element or open a comment."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _run(evaluation: Evaluation, vocabulary: Vocabulary) -> Json:
    shown = {method: _first(traces, evaluation) for method, traces in evaluation.traces.items()}
    some = next(iter(shown.values()))
    used = sorted(
        {token for found in shown.values() for trace in found for r in trace.rounds for token in tokens_of(r)}
    )
    return {
        "name": f"{evaluation.folder.name} (T = {evaluation.temperature:g})",
        "prompts": [[f"{trace.dataset} {trace.prompt_id}", vocabulary.prompt(trace)[-PROMPT_END:]] for trace in some],
        "methods": [_method(evaluation, method, found) for method, found in shown.items()],
        "texts": {token: vocabulary.text(token) for token in used},
    }


def _first(traces: Sequence[Trace], evaluation: Evaluation) -> Sequence[Trace]:
    """Those of the first repeat, PROMPTS at most."""
    return traces[: min(PROMPTS, len(traces) // evaluation.config["repeats"])]


def _method(evaluation: Evaluation, method: str, traces: Sequence[Trace]) -> Json:
    rule = rule_of(evaluation.config, method)
    requests = [_request(trace, rounds(trace, rule)) for trace in traces]
    return {"name": method, "predicted": PREDICTED.get(rule, "stop rule's value"), "requests": requests}


def _request(trace: Trace, found: Sequence[Round]) -> Json:
    said = [summary(one, number, len(found)) for number, one in enumerate(found, 1)]
    lanes = [lane for lane in LANES if any(one.uses(lane) for one in found)]
    return {
        "rounds": [_round(one, text) for one, text in zip(found, said, strict=True)],
        "lanes": [LANES.index(lane) for lane in lanes],
        "laid": not any(round_.overlap for round_ in trace.rounds),
    }


def _round(found: Round, text: str) -> list[Any]:
    """Times in microseconds since the request began."""
    return [
        text,
        [_drafted(node) for node in found.drafted],
        [[token.token, KINDS.index(token.origin)] for token in found.committed],
        [_bar(bar) for bar in found.bars],
        _micro(found.start),
        _micro(found.end),
    ]


def _drafted(node: Drafted) -> list[Any]:
    numbers = [None if value is None else float(f"{value:.4g}") for value in (node.q, node.p, node.predicted)]
    return [node.token, node.depth, node.line, KINDS.index(node.fate), *numbers]


def _bar(bar: Bar) -> list[Any]:
    return [LANES.index(bar.lane), bar.job, _micro(bar.start), _micro(bar.end), bar.rows]


def _micro(seconds: float) -> int:
    return round(1e6 * seconds)
