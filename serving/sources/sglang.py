"""Shards that SGLang collects for sequential temperature scaling."""

import pathlib
import warnings
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch

from predictors.confidences.table import Confidences, Labels, blocks, joined, table
from runtime.errors import UserError
from runtime.settings.kinds import Path, Text
from serving.sources.files import matching
from serving.sources.rows import refuse_unsettled

REMEDY = "Collect again: SGLANG_DSPARK_STS_COLLECT_PATH=<stem>"


@dataclass(frozen=True)
class SglangShards:
    """``<stem>.<k>.pt``: a dict of `logits` and `prefix_mask`, float32 [n, gamma], the mask 1 where
    a draft token and all before it are the target's most probable ones. Proposals of one batch
    follow each other and no request is named, so blocks of them count as independent."""

    labels: ClassVar[Labels] = "realised"
    files: Annotated[Path, "shards, or a pattern such as logs/sts.*.pt"]
    domain: Annotated[Text, "what the requests were about"]

    def read(self) -> Confidences:
        """Raises UserError for files that are no such shards."""
        return joined([self._shard(path) for path in matching(self.files)], "source.files")

    def _shard(self, path: pathlib.Path) -> Confidences:
        where = f"source.files: {path}"
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # said in the error
                found = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # a damaged file makes it raise anything
            said = str(error).splitlines()
            reason = ascii(said[0][:80])[1:-1] if said else type(error).__name__
            raise UserError(f"{where} cannot be read ({reason}). {REMEDY}") from error
        parts = [found.get(key) for key in ("logits", "prefix_mask")] if _is_dict(found) else []
        if len(parts) != 2 or not all(map(_is_plain, parts)):
            raise UserError(
                f"{where}: expected a dict of the dense tensors logits and prefix_mask, got"
                f" {sorted(map(str, found))[:4] if _is_dict(found) else type(found).__name__}."
                f" {REMEDY}"
            )
        logits, labels = (torch.as_tensor(part) for part in parts)
        refuse_unsettled(where, labels)
        length = torch.full((len(logits),), logits.shape[-1] if logits.ndim == 2 else 0)
        return table(where, self.domain, logits, labels, length, blocks(len(logits)))


def _is_plain(part: object) -> bool:
    """Whether it is a table of numbers, and not one of the tensors that hold them otherwise."""
    return (
        isinstance(part, torch.Tensor)
        and part.layout is torch.strided
        and not (part.is_nested or part.is_quantized or part.is_complex())
        and part.device.type == "cpu"
        and part.ndim > 0
    )


def _is_dict(found: object) -> bool:
    return isinstance(found, dict)
