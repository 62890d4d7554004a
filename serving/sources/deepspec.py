"""Confidence records of DeepSpec's evaluation."""

import pathlib
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from pydantic import Field as PydanticField

from predictors.confidences.table import Confidences, Labels, joined
from runtime.errors import UserError
from runtime.json_files import OpenForm, fitting
from runtime.json_lines import read_objects
from runtime.settings.kinds import Path, Text
from serving.sources.files import matching
from serving.sources.rows import Row, of_rows

FORM = 'Write it as {"logits": [0.5], "labels": [1]}'


class Record(OpenForm):
    """labels: whether the tokens up to each are all accepted."""

    logits: list[Annotated[float, PydanticField(allow_inf_nan=False)]]
    labels: list[Annotated[float, PydanticField(ge=0, le=1)]]


@dataclass(frozen=True)
class DeepspecRecords:
    """``<dir>/<dataset>/confidence_records.jsonl``: a proposal in each line. Its folder says what
    it is about, where `domain` does not."""

    labels: ClassVar[Labels] = "realised"
    files: Annotated[Path, "file, or a pattern such as 'eval/*/confidence_records.jsonl'"]
    domain: Annotated[Text | None, "what the requests were about; null: the name of the folder"]

    def read(self) -> Confidences:
        """Raises UserError naming the line that is no record."""
        parts = {path: self._records(path) for path in matching(self.files)}
        gamma = max(len(row.logits) for rows in parts.values() for row in rows)
        return joined(
            [
                of_rows(
                    f"source.files: {path}", rows, self.domain or path.absolute().parent.name, gamma
                )
                for path, rows in parts.items()
            ],
            "source.files",
        )

    def _records(self, path: pathlib.Path) -> list[Row]:
        found = [
            _record(row, f"source.files: {where}")
            for where, _, row in read_objects(path, "source.files", FORM)
        ]
        if not found:
            raise UserError(f"source.files: {path} is empty. Evaluate again")
        return found


def _record(row: dict[str, Any], where: str) -> Row:
    try:
        found = fitting(lambda: Record.model_validate(row))
    except ValueError as error:
        raise UserError(f"{where} is no confidence record ({error}). {FORM}") from error
    return Row(found.logits, found.labels)
