"""Checks that structure, stop rule and verifier go together, made when the engine is built."""

from typing import cast

from decoding.interfaces import (
    LM,
    BranchingStructure,
    CandidateVerifier,
    DraftStructure,
    PathVerifier,
    StopRule,
    Verifier,
)
from decoding.models.recurrent import refuse_recurrent
from runtime.errors import UserError


def check_fit(structure: DraftStructure, stop: StopRule, verifier: Verifier) -> None:
    """Raise UserError naming both config keys if the verifier is not exact for the drafts of the
    structure."""
    builds, rule = type(structure).__name__, type(verifier).__name__
    if structure.shape not in verifier.shapes:
        raise UserError(
            f"structure, verifier: {builds} drafts a {structure.shape}, {rule} takes"
            f" {' or '.join(verifier.shapes)}. Change one of the two"
        )
    distributions = structure.sibling_samplers
    if distributions is not None and verifier.siblings not in distributions:
        known = " or ".join(sorted(distribution.__name__ for distribution in distributions))
        raise UserError(
            f"structure, verifier: {builds} draws siblings by {known}, {rule} is exact for "
            f"{verifier.siblings.__name__} only. Change one of the two"
        )
    limit = verifier.max_siblings
    if limit is not None and (structure.max_siblings is None or structure.max_siblings > limit):
        raise UserError(
            f"structure, verifier: {builds} puts up to {structure.max_siblings or 'any number of'}"
            f" candidates at one position, {rule} takes {limit}. Lower the structure's width or"
            " change verifier"
        )
    if not structure.asks_stop and not stop.stops_never:
        raise UserError(
            f"structure, stop: {builds} asks no stop rule, and {type(stop).__name__} is set. Use"
            " stop=never"
        )


def check_overlap_fit(
    structure: DraftStructure, verifier: Verifier, branch_verifier: Verifier
) -> tuple[BranchingStructure, PathVerifier, CandidateVerifier]:
    """Return the parts of an overlapped engine. Raises UserError naming both config keys."""
    builds, chain, branches = (
        type(part).__name__ for part in (structure, verifier, branch_verifier)
    )
    if structure.shape != "branch_point":
        raise UserError(
            f"structure, engine: {builds} does not branch off at one position. Use"
            " structure=branch_point"
        )
    if not isinstance(verifier, PathVerifier):
        raise UserError(
            f"verifier, engine: {chain} does not verify pending tokens. Use verifier=token or block"
        )
    if not isinstance(branch_verifier, CandidateVerifier):
        raise UserError(
            f"engine.branch_verifier, engine: {branches} does not choose among candidates. Set"
            " verifier@engine.branch_verifier=rrsw, rrs or point_mass, or spechub with"
            " structure.candidates=2"
        )
    branching = cast(BranchingStructure, structure)
    limit = branch_verifier.max_siblings
    if limit is not None and branching.candidates > limit:
        raise UserError(
            f"structure, engine.branch_verifier: {builds} spawns up to {branching.candidates}"
            f" branches, {branches} takes {limit}. Set structure.candidates={limit}, or"
            " verifier@engine.branch_verifier to another one"
        )
    return branching, verifier, branch_verifier


def check_runs_beside(draft: LM, branches: int) -> None:
    """Raise UserError for a draft that cannot run beside its target, or only with one branch."""
    if branches > 1:
        key = "structure.candidates, pair.draft"
        refuse_recurrent(key, draft, f"{branches} branches. Set structure.candidates=1")
    if draft.reads_target:
        raise UserError(
            "engine, pair.draft: this is an EAGLE-style draft that reads its target's hidden"
            " states, and here the two run side by side. Use engine=serial, or an ordinary"
            " draft: pair=smollm2"
        )
