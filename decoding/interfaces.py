"""Every seam of decoding: what a model, a draft structure, a stop rule and a verifier offer an
engine."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

if TYPE_CHECKING:
    from decoding.draft import Draft, RoundContext, Shape, Verdict
    from decoding.draft_tree import DraftStep, DraftTree
    from decoding.sampling import Sampler, SiblingSampler
    from decoding.verification import DraftPath, Rows, VerdictDistribution
    from decoding.verifiers.tree_walk import Tokens, Trials

# Models -------------------------------------------------------------------------------------------

RowsWanted = Literal["all", "last", "none"] | Sequence[int]
"""The rows of a call that something is wanted for. With a large vocabulary the logits of one row
cost as much as some layers."""


@dataclass(frozen=True)
class LMOutput:
    """logits: [m, V] of the rows asked for; hidden: [len(layers), k, H] of the layers and rows
    asked for, None where no layer was."""

    logits: Tensor
    hidden: Tensor | None


@dataclass(frozen=True)
class Wanted:
    """What a call returns. hidden: layers, indices into the n_layers + 1 hidden states (-1: what
    the output layer reads); hidden_rows: the rows they are wanted for; logits: the rows that logits
    are wanted for."""

    hidden: Sequence[int] = ()
    hidden_rows: RowsWanted = "all"
    logits: RowsWanted = "all"


class LM(Protocol):
    """One sequence and its key/value cache. Row t of the cache is the token at position t.

    device, output_device: where the model is, and where its outputs go; user: the thread of the
        engine that decodes with it"""

    vocab_size: int
    max_length: int
    forwards: int  # calls so far
    reads_target: bool  # whether it must be run after the target, whose hidden states it reads
    device: torch.device
    output_device: torch.device
    user: int | None

    @property
    def seconds(self) -> float:
        """Time spent in `forwards`."""

    @property
    def length(self) -> int:
        """Rows in the cache."""

    def forward(
        self,
        tokens: Tensor,
        parents: Tensor | None = None,
        *,
        extend: bool = False,
        hidden: Sequence[int] = (),
        hidden_rows: RowsWanted = "all",
        logits: RowsWanted = "all",
    ) -> LMOutput:
        """Append `tokens` [n] to the cache and return the distribution of what follows each of
        them.

        `hidden`, `hidden_rows`, `logits`: see `Wanted`. Nothing else leaves the model.

        `parents` None: a chain that continues the cache. Otherwise a tree: `parents[i]` is the row
        of the tree that row i follows, or -1 for the last row of the cache before it. The tree
        begins with this call, or, with `extend`, goes on from the previous one."""

    def crop(self, length: int) -> None:
        """Forget every cached row from `length` on."""

    def keep_path(self, rows: list[int]) -> None:
        """Keep only `rows` of the tree (or chain) of the last call, a path in order."""

    def reset(self) -> None:
        """Empty the cache and zero the counters."""

    def embed(self, token: int) -> Tensor:
        """Input embedding of one token, [H]."""


class Pair(Protocol):
    """Two models that share a vocabulary; the draft proposes, the target decides."""

    @property
    def target(self) -> LM: ...

    @property
    def draft(self) -> LM: ...


# Drafting -----------------------------------------------------------------------------------------


class StopRule(Protocol):
    """Ends drafting; never withdraws a drawn token. One that derives from it says what differs from
    the defaults here.

    draft_layers, target_layers: layers of the two models whose hidden states the rule reads
        (negative, -1: what the output layer reads), in the order it gets them; nothing else is kept
    stops_never: whether it leaves the length of a draft to the structure
    caution: what to know where it was not tuned, "" for nothing
    predicted: what the rule computed this round, one number per decision, for the trace
    """

    predicted: list[float]
    draft_layers: Sequence[int] = ()
    target_layers: Sequence[int] = ()
    stops_never: bool = False
    caution: str = ""

    def begin_round(self, context: RoundContext) -> None:
        self.predicted = []

    @abstractmethod
    def should_stop(self, step: DraftStep) -> bool:
        """Asked before each draw, the first included."""

    def end_round(self, verdict: Verdict) -> None:
        return


class DraftStructure(Protocol):
    """Decides which candidates are drawn, and adds them to the round's tree. One that derives from
    it says what differs from the defaults here.

    shape: what it builds; a verifier says which shapes it is exact for
    sibling_samplers: the distributions it may draw siblings with; None for any
    max_siblings: most children one node can get; None for any number
    asks_stop: whether it asks the stop rule; one that does not takes stop=never
    uses_draft: whether it runs the draft model
    draft_layers, target_layers: of the two models, whose hidden states it reads; only one that asks
        no stop rule may
    """

    shape: Shape
    sibling_samplers: Collection[SiblingSampler] | None = None
    max_siblings: int | None = None
    asks_stop: bool = False
    uses_draft: bool = True
    draft_layers: Sequence[int] = ()
    target_layers: Sequence[int] = ()

    @abstractmethod
    def grow(self, tree: DraftTree) -> None:
        """Add this round's candidates to `tree`: no drawn token deeper than
        `tree.context.max_depth`, none copied from elsewhere deeper than `tree.context.max_copied`,
        nothing after an EOS. `tree.stop` is the rule to ask."""


@runtime_checkable
class ConfidenceRule(StopRule, Protocol):
    """A rule on the draft's own confidence, which says what of a branch is worth keeping.

    keeps_unsure: whether it stops after the token it found unsure, which is then in the draft
    """

    keeps_unsure: bool

    def before_drawing(self) -> StopRule:
        """The same rule, decided before a token is drawn."""


@runtime_checkable
class Classes(Protocol):
    """How far to draft, from verified facts alone, and the confidence rule that class "some" asks.

    target_layers: of the target, whose hidden states `classify` reads
    trained_gamma: the draft length that a learned class is about; None where nothing was learned
    trained_age: rounds between what a learned class was trained to read and what it is about"""

    @property
    def trained_gamma(self) -> int | None: ...

    @property
    def trained_age(self) -> int: ...

    @property
    def target_layers(self) -> Sequence[int]: ...

    @property
    def confidence(self) -> ConfidenceRule: ...

    def classify(self, context: RoundContext) -> int:
        """0 none, 1 until the confidence rule stops, 2 all: what is drafted after
        `context.committed`."""


# Verifying ----------------------------------------------------------------------------------------


class Verifier(Protocol):
    """A verification rule. `lossless` is what its author claims; the contract tests hold it to
    that.

    siblings: the distribution the candidates of one position must be drawn from
    shapes: of drafts it is exact for
    max_siblings: most candidates it takes at one position; None for any number
    """

    lossless: bool
    siblings: SiblingSampler
    shapes: Collection[Shape]
    max_siblings: int | None

    def distribution(self, draft: Draft, p: Tensor) -> VerdictDistribution:
        """p: [closed + 1, V], target distribution after each row the target was run on (all but
        open leaves)."""

    def verify(self, draft: Draft, p: Rows, sampler: Sampler) -> Verdict:
        """Draw one verdict from `distribution(draft, p)`, reading only the rows it needs."""


@runtime_checkable
class PathVerifier(Verifier, Protocol):
    """One that also verifies part of a chain: what an overlapped engine asks about its pending
    tokens."""

    def walk(self, path: DraftPath, sampler: Sampler) -> tuple[int, Tensor | None]:
        """Return of one path the tokens accepted, and the distribution [V] of what follows (None
        after an open leaf)."""


@runtime_checkable
class CandidateVerifier(Verifier, Protocol):
    """One that also chooses among the candidates of one position: what an overlapped engine asks
    about its branches."""

    def trials(self, p: Tensor, q: Tensor, tokens: Tokens) -> Trials:
        """p, q: [V], target and draft distribution there; tokens: the candidates in draw order."""


class BranchingStructure(DraftStructure, Protocol):
    """A chain of at most `gamma_max` tokens with at most `candidates` open leaves at its end."""

    gamma_max: int
    candidates: int
