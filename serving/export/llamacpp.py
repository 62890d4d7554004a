"""llama.cpp: how many tokens its draft model proposes and when it stops; the draft as GGUF."""

import pathlib
from dataclasses import dataclass
from functools import partial
from os.path import expanduser
from shlex import quote
from typing import Any

from decoding.models.gguf import write_gguf
from serving.export.base import Export, Given

SCRIPT, DRAFT = "serve.sh", "draft.gguf"
RULES = ("fixed", "confidence_before")  # --spec-draft-n-max alone, and with --spec-draft-p-min


@dataclass(frozen=True)
class LlamaCpp:
    """Exports the command of llama-server, and the draft in its format where that is a Hugging Face
    folder; then `target_model` is a GGUF file, whose tokenizer the draft gets.

    llama.cpp drafts the most probable token, so that only thresholds of a greedy harvest say how
    often it is accepted."""

    def export(self, given: Given) -> Export:
        made = Export("llama.cpp b11434")
        if given.thresholds is not None:
            tuned = given.thresholds["results"]["chosen"]["rules"]
            if given.thresholds["draft_warp"]["temperature"] != 0:
                made.left_out.append(
                    "thresholds: they are of a sampled draft, and llama.cpp takes the most probable"
                    " token. Tune on a greedy harvest"
                )
            elif rules := {name: tuned[name] for name in RULES if name in tuned}:
                flags = self._flags(rules, given, made)
                words = ["llama-server", "-m", quote(given.target), *flags]
                made.files[SCRIPT] = f'#!/bin/sh\nexec {" ".join(words)} "$@"\n'
                made.launch.append(f"sh {given.file(SCRIPT)}")
            else:
                made.left_out.append(f"thresholds: nothing is tuned of {' or '.join(RULES)}")
        made.left_out += given.left_out(
            calibration="the threshold is on the draft's own probability, as it is",
            costs="llama.cpp prices nothing",
            schedule="one length serves any number of requests",
        )
        return made

    def _flags(self, rules: dict[str, Any], given: Given, made: Export) -> list[str]:
        paying = {name: rule for name, rule in rules.items() if rule["speculate"]}
        if not paying:
            made.left_out.append("thresholds: no draft pays at their costs. It serves without one")
            return []
        assert given.thresholds is not None
        name = max(paying, key=lambda name: float(paying[name]["speedup"]))
        threshold, longest = paying[name]["threshold"], given.gamma or given.thresholds["gamma"]
        length, least = (int(threshold), 0) if name == "fixed" else (longest, threshold)
        folder, draft = pathlib.Path(expanduser(given.draft)), quote(given.draft)
        if (folder / "config.json").is_file():
            made.files[DRAFT] = partial(write_gguf, folder, pathlib.Path(expanduser(given.target)))
            draft = given.file(DRAFT)
        limits = f"--spec-draft-n-max {length} --spec-draft-p-min {least:g}"
        return ["-md", draft, "--spec-type draft-simple", limits]
