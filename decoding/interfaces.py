"""The interfaces of decoding: models, draft structures, stop rules and verifiers, as engines use
them."""

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
    """The outputs of a call. logits: [m, V] of the rows asked for; hidden: [len(layers), k, H] of
    the layers and rows asked for, None if no layer was."""

    logits: Tensor
    hidden: Tensor | None


@dataclass(frozen=True)
class Wanted:
    """The outputs to return from a call. hidden: layers, indices into the n_layers + 1 hidden
    states (-1: what the output layer reads); hidden_rows: rows to return them for; logits: rows to
    return logits for."""

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
        """Seconds spent in `forwards`."""

    @property
    def length(self) -> int:
        """Number of rows in the cache."""

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
        """Return the input embedding of one token, [H]."""


class Pair(Protocol):
    """Two models that share a vocabulary; the draft proposes, the target decides."""

    @property
    def target(self) -> LM: ...

    @property
    def draft(self) -> LM: ...


# Drafting -----------------------------------------------------------------------------------------


class StopRule(Protocol):
    """Ends drafting; never withdraws a drawn token. A subclass overrides the defaults here.

    draft_layers, target_layers: layers of the two models whose hidden states the rule reads
        (negative, -1: what the output layer reads), in the order it gets them; nothing else is kept
    stops_never: whether it leaves the length of a draft to the structure
    caution: warning for use without tuning, "" for none
    abstains: whether it may draft nothing in a whole request; the draft then reads the prompt when
        it is first run, in the time of a round
    predicted: the numbers that the rule computed this round, one per decision, for the trace
    """

    predicted: list[float]
    draft_layers: Sequence[int] = ()
    target_layers: Sequence[int] = ()
    stops_never: bool = False
    caution: str = ""
    abstains: bool = False

    def begin_round(self, context: RoundContext) -> None:
        self.predicted = []

    def rests(self) -> bool:
        """Return whether nothing is drawn in the round that would begin now, whatever the text: it
        is plain decoding, and the rule not asked in it. Not every engine or structure asks so."""
        return False

    @abstractmethod
    def should_stop(self, step: DraftStep) -> bool:
        """Return whether to stop; asked before each draw, the first included."""

    def end_round(self, verdict: Verdict) -> None:
        return

    def end_request(self) -> None:
        """Called after the last round of a request."""
        return


class DraftStructure(Protocol):
    """Decides which candidates are drawn, and adds them to the round's tree. A subclass overrides
    the defaults here.

    shape: the shape it builds; a verifier says which shapes it is exact for
    sibling_samplers: the distributions it may draw siblings with; None for any
    max_siblings: most children one node can get; None for any number
    asks_stop: whether it asks the stop rule; one that does not takes stop=never
    uses_draft: whether it runs the draft model
    draft_layers, target_layers: layers of the two models whose hidden states it reads; () if it
        asks a stop rule
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
    """A rule on the draft's own confidence, which also decides how much of a branch to keep.

    keeps_unsure: whether it stops after the unsure token, which is then in the draft
    """

    keeps_unsure: bool

    def before_drawing(self) -> StopRule:
        """Return the same rule, decided before a token is drawn."""


@runtime_checkable
class Classes(Protocol):
    """Decides from verified facts alone how far to draft, and holds the confidence rule of class
    "some".

    target_layers: layers of the target whose hidden states `classify` reads
    trained_gamma: the draft length for which classes were learned; None if they are not learned
    trained_age: in training, rounds between the states read and the round predicted"""

    @property
    def trained_gamma(self) -> int | None: ...

    @property
    def trained_age(self) -> int: ...

    @property
    def target_layers(self) -> Sequence[int]: ...

    @property
    def confidence(self) -> ConfidenceRule: ...

    def classify(self, context: RoundContext) -> int:
        """Return how much to draft after `context.committed`: 0 nothing, 1 until the confidence
        rule stops, 2 all."""


# Verifying ----------------------------------------------------------------------------------------


class Verifier(Protocol):
    """A verification rule. `lossless` is its author's claim, which the contract tests check.

    siblings: the distribution the candidates of one position must be drawn from
    shapes: shapes of drafts that it is exact for
    max_siblings: most candidates it takes at one position; None for any number
    """

    lossless: bool
    siblings: SiblingSampler
    shapes: Collection[Shape]
    max_siblings: int | None

    def distribution(self, draft: Draft, p: Tensor) -> VerdictDistribution:
        """Return the distribution of the round's outcome. p: [closed + 1, V], target distribution
        after each row the target was run on (all but open leaves)."""

    def verify(self, draft: Draft, p: Rows, sampler: Sampler) -> Verdict:
        """Draw one verdict from `distribution(draft, p)`, reading only the rows it needs."""


@runtime_checkable
class PathVerifier(Verifier, Protocol):
    """A verifier that also verifies part of a chain, as overlapped engines need for pending
    tokens."""

    def walk(self, path: DraftPath, sampler: Sampler) -> tuple[int, Tensor | None]:
        """Return how many tokens of a path are accepted, and the distribution [V] of the token that
        follows (None after an open leaf)."""


@runtime_checkable
class CandidateVerifier(Verifier, Protocol):
    """A verifier that also chooses among the candidates of one position, as overlapped engines need
    for branches."""

    def trials(self, p: Tensor, q: Tensor, tokens: Tokens) -> Trials:
        """Return the trials of one position. p, q: [V], target and draft distribution there;
        tokens: the candidates in draw order."""


class BranchingStructure(DraftStructure, Protocol):
    """A chain of at most `gamma_max` tokens with at most `candidates` open leaves at its end."""

    gamma_max: int
    candidates: int
