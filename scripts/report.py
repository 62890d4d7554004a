"""Draw every figure and table that evaluations, harvests, checkpoints and tunings allow, as one
page to look at.

    python scripts/report.py                      # of all that is in runs, data and checkpoints
    python scripts/report.py run=runs/smollm2-eagle-starter-T1.0
    python scripts/report.py run=[runs,data/rounds] out=runs/rounds-report
    python scripts/report.py trace=runs/smollm2-eagle-starter-T1.0/traces-hrad.jsonl prompt=3

Folders are searched with the folders in them. Writes index.html, which needs no network and none of
the other files, a PNG and a CSV of each figure, and report.json, which lists them; an earlier
report in `out` is replaced. What lacks its input is named at the end of the page, with the command
that makes it. `trace` and `prompt` print the rounds of one request instead, and write nothing."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from programs.groups import Logger
from runtime.cli import Program
from runtime.settings.kinds import Count, Group, Output, Path, Text


class Report(Group):
    logger: Logger
    run: Annotated[
        Path | Annotated[list[Path], Field(min_length=1)] | None,
        "folder, or a list of them, each searched with the folders in it; null: runs, data and"
        " checkpoints",
    ]
    out: Annotated[Output, "folder of index.html, a PNG and a CSV of each figure, report.json"]
    trace: Annotated[Path | None, "a traces-<method>.jsonl of an evaluation, to be printed instead"]
    prompt: Annotated[Count | Text | None, "which of its prompts: a number from 1 on, or an id"]

    @staticmethod
    def misfits(values: Mapping[str, Any]) -> Mapping[str, str]:
        if values["trace"] is None and values["prompt"] is not None:
            return {"trace": "a traces-<method>.jsonl, as prompt is given"}
        if values["prompt"] is None and values["trace"] is not None:
            return {"prompt": "a number from 1 on, or an id, as trace is given"}
        return {}


main = Program(__file__, Report, "programs.report")

if __name__ == "__main__":
    main()
