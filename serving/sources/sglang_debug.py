"""SGLang's debug records of decode steps."""

import math
import pathlib
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from pydantic import Field as PydanticField

from predictors.confidences.table import Confidences, Labels, joined
from runtime.errors import UserError
from runtime.json_files import OpenForm, Size, fitting, read_object
from runtime.settings.kinds import Path, Text
from serving.sources.files import matching
from serving.sources.rows import Row, of_rows

LEAST = 5e-5  # confidences are written with four digits
RECORD = "dspark_info_record"
REMEDY = "Serve with SGLANG_DSPARK_DEBUG_DUMP=core,reqs and save what /server_info says"
Probability = Annotated[float, PydanticField(ge=0, le=1)]


class Request(OpenForm):
    verify_len: Size
    correct_drafts: Size
    cap_trim: Size = 0
    rid: str | None = None
    confidence: list[Probability] | None = None


class Step(OpenForm):
    reqs: list[Request] = []


class Records(OpenForm):
    records: list[Step]


class Rank(OpenForm):
    dspark_info_record: Records


class ServerInfo(OpenForm):
    """internal_states: of every data-parallel rank."""

    internal_states: Annotated[list[Rank], PydanticField(min_length=1)]


@dataclass(frozen=True)
class SglangRecords:
    """A JSON file: what /server_info says, where `internal_states` have the key
    `dspark_info_record` of every rank, one of those states, or that key's value. Confidences are
    those after the engine's own temperatures. Only tokens that were verified count."""

    labels: ClassVar[Labels] = "realised"
    files: Annotated[Path, "file, or a pattern such as 'logs/info-*.json'"]
    domain: Annotated[Text, "what the requests were about"]

    def read(self) -> Confidences:
        """Raises UserError for files without such records."""
        return joined([self._file(path) for path in matching(self.files)], "source.files")

    def _file(self, path: pathlib.Path) -> Confidences:
        found = read_object(path, "source.files", REMEDY)
        try:
            steps = fitting(lambda: _steps(found))
        except ValueError as error:
            raise UserError(
                f"source.files: {path} holds no debug records ({error}). {REMEDY}"
            ) from error
        requests = [one for step in steps for one in step.reqs if one.confidence]
        gamma = max((len(one.confidence or ()) for one in requests), default=0)
        rows = [_row(one) for one in requests]
        return of_rows(f"source.files: {path}", rows, self.domain, gamma or None)


def _steps(found: dict[str, Any]) -> list[Step]:
    if "internal_states" in found:
        ranks = ServerInfo.model_validate(found).internal_states
        return [step for rank in ranks for step in rank.dspark_info_record.records]
    return Records.model_validate(found.get(RECORD, found)).records


def _row(one: Request) -> Row:
    """What was verified of a proposal; what a cap left out is not known."""
    said = one.confidence or []
    known = max(0, min(len(said), one.verify_len - 1))
    if one.cap_trim:
        known = min(known, one.correct_drafts)
    accepted = [float(number < one.correct_drafts) for number in range(known)]
    return Row([_logit(p) for p in said[:known]], accepted, one.rid or "")


def _logit(p: float) -> float:
    inside = min(max(p, LEAST), 1 - LEAST)
    return math.log(inside / (1 - inside))
