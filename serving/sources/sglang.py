"""SGLang's logs: the shards that it collects for sequential temperature scaling, and its debug
records of decode steps."""

import math
import pathlib
import warnings
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field as PydanticField

from predictors.confidences.table import Confidences, Labels, blocks, joined, table
from runtime.errors import UserError
from runtime.json_files import OpenForm, Size, fitting, read_object
from runtime.settings.kinds import Path, Text
from serving.sources.rows import Row, matching, of_rows, refuse_unsettled

COLLECT = "Collect again: SGLANG_DSPARK_STS_COLLECT_PATH=<stem>"
DUMP = "Serve with SGLANG_DSPARK_DEBUG_DUMP=core,reqs and save what /server_info says"
LEAST = 5e-5  # confidences of debug records are written with four digits


@dataclass(frozen=True)
class SglangShards:
    """Files ``<stem>.<k>.pt``, each a dict of `logits` and `prefix_mask`, float32 [n, gamma]; the
    mask is 1 where a draft token and all before it are the target's most probable ones. Proposals
    of one batch are adjacent and requests are not named, so blocks of them count as independent."""

    labels: ClassVar[Labels] = "realised"
    files: Annotated[Path, "shards, or a pattern such as logs/sts.*.pt"]
    domain: Annotated[Text, "what the requests were about"]

    def read(self) -> Confidences:
        """Read the table. Raises UserError for files that are no such shards."""
        return joined([self._shard(path) for path in matching(self.files)], "source.files")

    def _shard(self, path: pathlib.Path) -> Confidences:
        where = f"source.files: {path}"
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the error says the same
                content = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # a damaged file makes it raise anything
            lines = str(error).splitlines()
            reason = ascii(lines[0][:80])[1:-1] if lines else type(error).__name__
            raise UserError(f"{where} cannot be read ({reason}). {COLLECT}") from error
        kind = type(content).__name__
        if isinstance(content, dict):
            kind = str(sorted(map(str, content))[:4])
            parts = [content.get(key) for key in ("logits", "prefix_mask")]
        if not isinstance(content, dict) or not all(map(_is_plain, parts)):
            raise UserError(
                f"{where}: expected a dict of the dense tensors logits and prefix_mask, got {kind}."
                f" {COLLECT}"
            )
        logits, labels = (torch.as_tensor(part) for part in parts)
        refuse_unsettled(where, labels)
        length = torch.full((len(logits),), logits.shape[-1] if logits.ndim == 2 else 0)
        return table(where, self.domain, logits, labels, length, blocks(len(logits)))


def _is_plain(part: object) -> bool:
    """Return whether `part` is a dense table of numbers, not a sparse or quantised tensor."""
    return (
        isinstance(part, torch.Tensor)
        and part.layout is torch.strided
        and not (part.is_nested or part.is_quantized or part.is_complex())
        and part.device.type == "cpu"
        and part.ndim > 0
    )


class Request(OpenForm):
    verify_len: Size
    correct_drafts: Size
    cap_trim: Size = 0
    rid: str | None = None
    confidence: list[Annotated[float, PydanticField(ge=0, le=1)]] | None = None


class Step(OpenForm):
    reqs: list[Request] = []


class Records(OpenForm):
    records: list[Step]


class Rank(OpenForm):
    dspark_info_record: Records


class ServerInfo(OpenForm):
    """The reply of /server_info. internal_states: those of every data-parallel rank."""

    internal_states: Annotated[list[Rank], PydanticField(min_length=1)]


@dataclass(frozen=True)
class SglangRecords:
    """A JSON file: the reply of /server_info, whose `internal_states` have the key
    `dspark_info_record` for every rank, one of those states, or that key's value. Confidences are
    those after the engine's own temperatures. Only verified tokens count."""

    labels: ClassVar[Labels] = "realised"
    files: Annotated[Path, "file, or a pattern such as 'logs/info-*.json'"]
    domain: Annotated[Text, "what the requests were about"]

    def read(self) -> Confidences:
        """Read the table. Raises UserError for files without such records."""
        return joined([self._file(path) for path in matching(self.files)], "source.files")

    def _file(self, path: pathlib.Path) -> Confidences:
        content = read_object(path, "source.files", DUMP)
        try:
            steps = fitting(lambda: _steps(content))
        except ValueError as error:
            raise UserError(
                f"source.files: {path} holds no debug records ({error}). {DUMP}"
            ) from error
        rows, gamma = list[Row](), 0
        for request in (request for step in steps for request in step.reqs):
            if not (confidence := request.confidence):
                continue
            gamma = max(gamma, len(confidence))
            count = max(0, min(len(confidence), request.verify_len - 1))
            if request.cap_trim:  # tokens cut by a cap are unknown
                count = min(count, request.correct_drafts)
            accepted = [float(number < request.correct_drafts) for number in range(count)]
            inside = [min(max(p, LEAST), 1 - LEAST) for p in confidence[:count]]
            logits = [math.log(p / (1 - p)) for p in inside]
            rows.append(Row(logits, accepted, request.rid or ""))
        return of_rows(f"source.files: {path}", rows, self.domain, gamma or None)


def _steps(content: dict[str, Any]) -> list[Step]:
    if "internal_states" in content:
        ranks = ServerInfo.model_validate(content).internal_states
        return [step for rank in ranks for step in rank.dspark_info_record.records]
    return Records.model_validate(content.get("dspark_info_record", content)).records
