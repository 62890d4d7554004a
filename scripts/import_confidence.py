"""Import what a serving engine logged of its confidences, to be calibrated by train.py.

    python scripts/import_confidence.py source=sglang source.files='logs/sts.*.pt'
    python scripts/import_confidence.py source=sglang_debug source.files='logs/info-*.json'
    python scripts/import_confidence.py source=deepspec source.files='eval/*/*_records.jsonl'
    python scripts/import_confidence.py source=harvest source.data=data/rounds out=data/q
    python train.py calibration=sts data=data/served

A row is a proposal: the confidence logit of every draft token, and whether the tokens up to there
were all accepted. Proposals of one request depend on each other; where the log names no request,
blocks of 64 in a row count as one. Writes `out`: confidences.safetensors and confidences.json."""

from typing import Annotated

from runtime.cli import Program
from runtime.settings.kinds import DraftLength, Group, Output, Part


class ImportConfidence(Group):
    source: Annotated[Part, "the log"]
    gamma: Annotated[
        DraftLength | None, "draft tokens that every proposal must have; null: any number"
    ]
    out: Annotated[Output, "folder of the table"]


main = Program(__file__, ImportConfidence, "programs.serving.import_confidence")

if __name__ == "__main__":
    main()
