"""Proposals of differing lengths, as one table."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from predictors.confidences.table import Confidences, blocks, table
from runtime.errors import UserError


class Row(NamedTuple):
    """One proposal: logits and labels of its tokens that count; request: whose it is, "" where
    nobody knows."""

    logits: Sequence[float]
    labels: Sequence[float]
    request: str = ""


def of_rows(where: str, rows: Sequence[Row], domain: str, gamma: int | None = None) -> Confidences:
    """gamma: of the table; null: of the longest proposal. Raises UserError for rows of two lengths,
    and for longer ones than gamma."""
    longest = max((len(row.logits) for row in rows), default=0)
    if not longest:
        raise UserError(f"{where}: expected proposals with tokens, got none. Give another log")
    if gamma is not None and longest > gamma:
        raise UserError(
            f"{where}: expected proposals of at most {gamma} tokens, got one of {longest}. Write"
            " another gamma"
        )
    shape = (len(rows), gamma or longest)
    logits, labels = torch.zeros(shape, dtype=torch.float64), torch.zeros(shape).double()
    for number, row in enumerate(rows):
        if len(row.logits) != len(row.labels):
            raise UserError(
                f"{where}: expected as many labels as logits, got {len(row.labels)} and"
                f" {len(row.logits)} in proposal {number + 1}. Mend or remove it"
            )
        logits[number, : len(row.logits)] = torch.tensor(row.logits, dtype=torch.float64)
        labels[number, : len(row.labels)] = torch.tensor(row.labels, dtype=torch.float64)
    refuse_unsettled(where, labels)
    length = torch.tensor([len(row.logits) for row in rows])
    return table(where, domain, logits, labels, length, _groups(rows))


def refuse_unsettled(where: str, labels: torch.Tensor) -> None:
    """Raise UserError for a label that is neither 0 nor 1: an engine knows what it accepted."""
    if not ((labels == 0) | (labels == 1)).all():
        raise UserError(f"{where}: expected labels of 0 and 1, got others. Give an engine's log")


def _groups(rows: Sequence[Row]) -> torch.Tensor:
    """Return the rows by request, where all are known."""
    if not all(row.request for row in rows):
        return blocks(len(rows))
    numbers = {name: number for number, name in enumerate(dict.fromkeys(r.request for r in rows))}
    return torch.tensor([numbers[row.request] for row in rows])
