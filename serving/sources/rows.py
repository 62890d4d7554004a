"""The files that a pattern names, and proposals of differing lengths as one table."""

from collections.abc import Sequence
from glob import glob
from pathlib import Path
from typing import NamedTuple

import torch

from predictors.confidences.table import Confidences, blocks, table
from runtime.errors import UserError


def matching(pattern: str | Path) -> list[Path]:
    """Return the files that match a pattern, in natural order of their names; a file with exactly
    that name takes precedence. Raises UserError if there is none."""
    exact = Path(pattern).expanduser()
    names = [exact] if exact.is_file() else map(Path, glob(str(exact)))
    paths = [path for path in names if path.is_file()]
    if not paths:
        raise UserError(
            f"source.files: no file matches {pattern}. Write e.g. source.files='logs/sts.*.pt'"
        )
    return sorted(paths, key=lambda path: (len(path.name), path.name))


class Row(NamedTuple):
    """One proposal: logits and labels of its valid tokens; request: the request it belongs to, ""
    if unknown."""

    logits: Sequence[float]
    labels: Sequence[float]
    request: str = ""


def of_rows(where: str, rows: Sequence[Row], domain: str, gamma: int | None = None) -> Confidences:
    """Return the table of proposals. gamma: of the table; None: of the longest proposal. Raises
    UserError for rows whose logits and labels differ in length, and for rows longer than gamma."""
    length = torch.tensor([len(row.logits) for row in rows])
    longest = int(length.max()) if rows else 0
    if not longest:
        raise UserError(f"{where}: expected proposals with tokens, got none. Give another log")
    if gamma is not None and longest > gamma:
        raise UserError(
            f"{where}: expected proposals of at most {gamma} tokens, got one of {longest}. Write"
            " another gamma"
        )
    logits = torch.zeros(len(rows), gamma or longest, dtype=torch.float64)
    labels = torch.zeros_like(logits)
    for number, row in enumerate(rows):
        if len(row.logits) != len(row.labels):
            raise UserError(
                f"{where}: expected as many labels as logits, got {len(row.labels)} and"
                f" {len(row.logits)} in proposal {number + 1}. Mend or remove it"
            )
        logits[number, : len(row.logits)] = torch.tensor(row.logits, dtype=torch.float64)
        labels[number, : len(row.labels)] = torch.tensor(row.labels, dtype=torch.float64)
    refuse_unsettled(where, labels)
    groups = blocks(len(rows))
    if all(row.request for row in rows):
        numbers = {name: n for n, name in enumerate(dict.fromkeys(row.request for row in rows))}
        groups = torch.tensor([numbers[row.request] for row in rows])
    return table(where, domain, logits, labels, length, groups)


def refuse_unsettled(where: str, labels: torch.Tensor) -> None:
    """Raise UserError for a label other than 0 and 1: engines log verdicts, not probabilities."""
    if not ((labels == 0) | (labels == 1)).all():
        raise UserError(f"{where}: expected labels of 0 and 1, got others. Give an engine's log")
