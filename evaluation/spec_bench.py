"""Responses as lines of JSON in the layout of Spec-Bench's answer files, which its own scripts
(github.com/hemingkx/Spec-Bench, evaluation/speed.py) read: a file a method, a line a question."""

import json
import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from data_gen.prompts.prompt import TURN
from decoding.models.loading import ModelPair
from decoding.trace import Trace
from runtime.files import file_name

FOLDER = "spec_bench"
TURN_OF = re.compile(rf"(.+){TURN}\d+", re.DOTALL)


def write(folder: Path, traces: Mapping[str, Sequence[Trace]], pair: ModelPair) -> None:
    """Write `<method>.jsonl` of each method. traces: of all prompts, one repeat after the other."""
    folder.mkdir()
    for name, decoded in traces.items():
        lines = answers(f"{pair.name}-{name}", decoded, pair.tokenizer)
        text = "".join(f"{json.dumps(line, ensure_ascii=False)}\n" for line in lines)
        (folder / f"{file_name(name)}.jsonl").write_text(text, encoding="utf-8")


def answers(model: str, decoded: Sequence[Trace], tokenizer: Any) -> list[dict[str, Any]]:
    """Return an object for each question, with a choice for each repeat; its lists have an entry
    for each turn, `accept_lengths` one for each target call of all turns: the tokens it committed,
    the target's own included. A prompt without a category has its dataset's name as one."""
    questions = dict[tuple[str, str], dict[str, Any]]()
    repeats = Counter[tuple[str, str]]()
    for trace in decoded:
        turn = TURN_OF.fullmatch(trace.prompt_id)
        question = turn[1] if turn else trace.prompt_id
        line = questions.setdefault(
            (trace.dataset, question),
            {
                "question_id": question,
                "category": trace.category or trace.dataset,
                "answer_id": f"{model}/{question}",
                "model_id": model,
                "choices": [],
                "tstamp": time.time(),
            },
        )
        index, choices = repeats[trace.dataset, trace.prompt_id], line["choices"]
        repeats[trace.dataset, trace.prompt_id] += 1
        lists = ("turns", "decoding_steps", "new_tokens", "wall_time", "accept_lengths")
        if index == len(choices):
            choices.append({"index": index, **{name: [] for name in lists}})
        choice = choices[index]
        choice["turns"].append(tokenizer.decode(trace.tokens, skip_special_tokens=True))
        choice["decoding_steps"].append(len(trace.rounds))
        choice["new_tokens"].append(len(trace.tokens))
        choice["wall_time"].append(trace.seconds)
        choice["accept_lengths"] += [len(round_.tokens) for round_ in trace.rounds]
    return list(questions.values())
