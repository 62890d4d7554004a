"""The settings of an engine that runs both models side by side, as far as its counts depend on
them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hydra.utils import get_object
from torch import Tensor

from decoding.engines.branching import classes_of, tokens_after_candidate
from decoding.engines.fit import check_overlap_fit
from decoding.sampling import top_tokens
from decoding.stopping.policy import ALL
from decoding.stopping.rollout_table import RolloutTable
from evaluation.replay.candidates import REPLAYED
from predictors.base import Records
from predictors.features.layers import RecordedLayers
from runtime.errors import UserError

CANDIDATES = 3
"""Of a branch point, as many as a harvest records."""
COLUMNS = ("top_token", "top_accept", "rrsw_token", "rrsw_accept")


class BranchRecords:
    """Asks a harvest for what it says of candidates (`evaluation.replay.read.Asks`)."""

    columns: Sequence[str] = COLUMNS

    def predictions(self, records: Records, layers: RecordedLayers) -> dict[str, Tensor]:
        return {name: records[name] for name in COLUMNS}


@dataclass(frozen=True)
class Overlapped:
    """The settings of an overlapped engine that its counts depend on.

    gamma, candidates: of its structure, candidates 3 at most
    threshold: of its confidence rule
    outcomes: the `RolloutTable.predicted` that holds the class of every round; None: `always`
    keeps_unsure: the confidence rule keeps the token it stops at (`Confidence`), else it stops
        before (`ConfidenceBefore`)
    drawn: candidates are drawn without replacement (RRSw), else the most probable tokens (point
        masses)
    """

    gamma: int
    candidates: int = 1
    threshold: float = 0.0
    outcomes: str | None = None
    always: int = ALL
    pre_verify: bool = False
    a_priori: bool = False
    keeps_unsure: bool = True
    drawn: bool = False

    @property
    def continuation(self) -> int:
        """Most tokens of a branch after its candidate; its draft steps are one more."""
        return tokens_after_candidate(self.gamma, self.outcomes is not None, self.a_priori)


def settings_of(parts: Mapping[str, Any]) -> Overlapped:
    """parts: of an overlapped engine, by its arguments. Raises UserError for what does not go
    together."""
    structure, _, branch_rule = check_overlap_fit(
        parts["structure"], parts["verifier"], parts["branch_verifier"]
    )
    if structure.candidates > CANDIDATES:
        raise UserError(
            f"structure.candidates: expected at most {CANDIDATES}, as many as a harvest records,"
            f" got {structure.candidates}. Lower it"
        )
    classes: Any = classes_of(parts["stop"], structure.gamma_max, parts["a_priori"])
    outcomes = getattr(classes, "outcomes", None)
    return Overlapped(
        structure.gamma_max,
        structure.candidates,
        classes.confidence.before_drawing().threshold,
        outcomes,
        ALL if outcomes else classes.classify(None),
        parts["pre_verify"],
        parts["a_priori"],
        classes.confidence.keeps_unsure,
        branch_rule.siblings is not top_tokens,
    )


def is_serial(engine: Any, parts: Mapping[str, Any], key: str) -> bool:
    """Whether drafts and target calls take turns. Raises UserError for what is neither replayed in
    turn nor side by side."""
    if engine is not get_object(REPLAYED["engine"]):
        if not hasattr(engine, "pre_verify"):
            raise UserError(
                f"{key}.engine: expected serial, overlapped or pearl, got"
                f" {getattr(engine, '__name__', engine)}. Name"
                " another method"
            )
        return False
    for part in ("structure", "verifier"):
        if type(parts[part]) is not get_object(REPLAYED[part]):
            raise UserError(
                f"{part}: expected {REPLAYED[part]} in {key}, got {type(parts[part]).__name__}."
                " Leave it as it is"
            )
    return True


def refuse_short(table: RolloutTable, gamma: int) -> None:
    """Raises UserError where rollouts are no longer than drafts."""
    if gamma >= table.gamma:
        raise UserError(
            f"gamma: expected less than the {table.gamma} tokens of the harvest's rounds, got"
            f" {gamma}. Lower it, or harvest longer rounds: python scripts/gen_data.py gamma=..."
        )
