"""Import what a serving engine logged of its confidences, to be calibrated by train.py.

    python scripts/import_confidence.py source=sglang source.files='logs/sts.*.pt'
    python scripts/import_confidence.py source=sglang_debug source.files='logs/info-*.json'
    python scripts/import_confidence.py source=deepspec source.files='eval/*/*_records.jsonl'
    python scripts/import_confidence.py source=harvest source.data=data/rounds out=data/q
    python train.py calibration=sts data=data/served

A row is a proposal: the confidence logit of every draft token, and whether the tokens up to there
were all accepted. Proposals of one request depend on each other; where the log names no request,
blocks of 64 in a row count as one. Writes `out`: confidences.safetensors and confidences.json."""

from __future__ import annotations

from typing import Annotated

from hydra.utils import instantiate

from runtime.cli import program
from runtime.files import checked_folder, only_writer, refuse_foreign
from runtime.job import command_line
from runtime.settings.kinds import DraftLength, Group, Output, Part
from runtime.text import plural, printable


class ImportConfidence(Group):
    source: Annotated[Part, "the log"]
    gamma: Annotated[
        DraftLength | None, "draft tokens that every proposal must have; null: any number"
    ]
    out: Annotated[Output, "folder of the table"]


@program(__file__, ImportConfidence)
def main(settings: ImportConfidence) -> None:
    """Write the confidences of a log to a folder."""
    from predictors.confidences.table import MANIFEST, joined, write_confidences

    out = checked_folder("out", settings.out)
    refuse_foreign(out, MANIFEST)
    source = instantiate(settings.source)
    imported = joined([source.read()], "gamma", settings.gamma)
    with only_writer(out):
        write_confidences(out, imported, source.labels, command_line())
    for number, name in enumerate(imported.domains):
        rows = imported.rows(imported.domain == number)
        rates = [rows.labels[rows.counts(i), i].mean() for i in range(rows.gamma)]
        print(
            f"{printable(name)}: {len(rows.logits)} proposals of {rows.gamma} tokens,"
            f" {plural(len(rows.group.unique()), 'group')}, accepted up to each"
            f" {', '.join(f'{rate:.3f}' for rate in rates)}"
        )
    print(f"saved in {out}")


if __name__ == "__main__":
    main()
