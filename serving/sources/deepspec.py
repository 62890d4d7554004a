"""Confidence records of DeepSpec's evaluation."""

import pathlib
from dataclasses import dataclass
from functools import partial
from typing import Annotated, ClassVar

from pydantic import Field as PydanticField

from predictors.confidences.table import Confidences, Labels, joined
from runtime.errors import UserError
from runtime.json_files import OpenForm, fitting
from runtime.json_lines import read_objects
from runtime.settings.kinds import Path, Text
from serving.sources.rows import Row, matching, of_rows

FORM = 'Write it as {"logits": [0.5], "labels": [1]}'


class Record(OpenForm):
    """One proposal. labels: whether the tokens up to each one are all accepted."""

    logits: list[Annotated[float, PydanticField(allow_inf_nan=False)]]
    labels: list[Annotated[float, PydanticField(ge=0, le=1)]]


@dataclass(frozen=True)
class DeepspecRecords:
    """Files ``<dir>/<dataset>/confidence_records.jsonl`` with a proposal in each line. The folder
    names the domain, unless `domain` does."""

    labels: ClassVar[Labels] = "realised"
    files: Annotated[Path, "file, or a pattern such as 'eval/*/confidence_records.jsonl'"]
    domain: Annotated[Text | None, "what the requests were about; null: the name of the folder"]

    def read(self) -> Confidences:
        """Read the table. Raises UserError naming a line that is no record."""
        parts = {path: self._records(path) for path in matching(self.files)}
        gamma = max(len(row.logits) for rows in parts.values() for row in rows)
        tables = []
        for path, rows in parts.items():
            domain = self.domain or path.absolute().parent.name
            tables.append(of_rows(f"source.files: {path}", rows, domain, gamma))
        return joined(tables, "source.files")

    def _records(self, path: pathlib.Path) -> list[Row]:
        rows = list[Row]()
        for where, _, line in read_objects(path, "source.files", FORM):
            try:
                record = fitting(partial(Record.model_validate, line))
            except ValueError as error:
                raise UserError(
                    f"source.files: {where} is no confidence record ({error}). {FORM}"
                ) from error
            rows.append(Row(record.logits, record.labels))
        if not rows:
            raise UserError(f"source.files: {path} is empty. Evaluate again")
        return rows
