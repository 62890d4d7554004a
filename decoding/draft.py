"""What a round works on: the draft, its verdict, the facts known before drafting, and what a stop rule may look at."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from decoding.lm import LM
from decoding.sampling import Sampler, SiblingLaw, Warp
from decoding.trace import Stopwatch


@dataclass(frozen=True)
class Draft:
    """A tree of drafted tokens. Row 0 is the last committed token; node i is row i + 1.

    parent: [n] int64, row of each node's parent (parents precede children)
    token:  [n] int64, siblings in draw order
    q:      [n + 1, V], row r = the law the children of row r were drawn from (zeros where there are none)
    """

    parent: Tensor
    token: Tensor
    q: Tensor

    @classmethod
    def chain(cls, tokens: Sequence[int], q: Tensor) -> "Draft":
        """One path. q: [n, V], the law each token was drawn from."""
        leaf = q.new_zeros(1, q.shape[-1])
        return cls(torch.arange(len(tokens)), torch.tensor(tokens, dtype=torch.long), torch.cat([q, leaf]))

    def __len__(self) -> int:
        return len(self.token)

    @property
    def is_chain(self) -> bool:
        return self.parent.tolist() == list(range(len(self)))

    def path(self, row: int) -> list[int]:
        """The drafted tokens from the root to `row`, both ends included except the root itself."""
        parents, tokens, path = self.parent.tolist(), self.token.tolist(), list[int]()
        while row > 0:
            path.append(tokens[row - 1])
            row = parents[row - 1]
        return path[::-1]


@dataclass(frozen=True)
class Verdict:
    """row: last accepted row; path: the accepted draft tokens; token: the residual or bonus token after them;
    drafted: how many draft tokens were put to the test."""

    row: int
    path: list[int]
    token: int | None
    drafted: int

    @property
    def accepted(self) -> int:
        return len(self.path)

    @property
    def emitted(self) -> list[int]:
        return self.path if self.token is None else [*self.path, self.token]


@dataclass(frozen=True)
class RoundContext:
    """Facts verified before the round starts.

    committed: [n] int64, prompt and output so far
    target_hidden: [n_layers + 1, H], the target at the last verified position (that of committed[-2]); None when the
        stop rule does not read it or nothing has been verified yet
    next_embedding: [H], the target's input embedding of committed[-1]; None when target_hidden is
    max_new: tokens that may still be committed
    round: 0 for the first round of a request (adaptive rules start afresh there)
    eos_ids: tokens that end the output
    """

    committed: Tensor
    max_new: int
    round: int = 0
    target_hidden: Tensor | None = None
    next_embedding: Tensor | None = None
    eos_ids: frozenset[int] = frozenset()


class DraftStep:
    """The draft of one round as it grows; what a stop rule sees before each draw.

    Everything that needs the draft model at the last drawn token is lazy: it runs the forward that the next draw
    would run anyway. A rule that only counts, or looks at tokens already drawn, therefore costs nothing.

    tokens:  drawn and kept so far
    drawn_q: q of each of them, under the law it was drawn from
    """

    def __init__(self, lm: LM, committed: Tensor, warp: Warp, watch: Stopwatch, keep_hidden: bool = False) -> None:
        self.tokens: list[int] = []
        self.drawn_q: list[float] = []
        self.laws: list[Tensor] = []
        self.forwards = 0
        self._lm = lm
        self._warp = warp
        self._watch = watch
        self._keep_hidden = keep_hidden
        self._pending = committed[lm.length :]
        self._logits: Tensor | None = None
        self._hidden: Tensor | None = None
        self._q: Tensor | None = None
        self._belief: Tensor | None = None

    @property
    def count(self) -> int:
        return len(self.tokens)

    def q(self) -> Tensor:
        """[V], the law of the next draw: the draft after its warp."""
        self._catch_up()
        if self._q is None:
            assert self._logits is not None
            with self._watch.stage("sample"):
                known = self._belief if self._warp == Warp() else None
            self._q = self._warp.probs(self._logits) if known is None else known
        return self._q

    def belief(self) -> Tensor:
        """[V], what the draft thinks of the next token at temperature 1, unfiltered.

        Equal to `q` for the default warp. Confidence and entropy are read here: a greedy q is always certain.
        """
        self._catch_up()
        return self._belief_at_last_forward()

    def drawn_belief(self) -> float:
        """`belief` in the last drawn token at the moment it was drawn. Call it before anything that runs a forward."""
        assert self.tokens and len(self._pending), "no token drawn since the last forward"
        return self._belief_at_last_forward()[self.tokens[-1]].item()

    def hidden(self) -> Tensor:
        """[n_layers + 1, H], the draft's hidden states at the last drawn token (the last committed one at first)."""
        self._catch_up()
        return self.previous_hidden()

    def previous_hidden(self) -> Tensor:
        """[n_layers + 1, H], the same at the last token the draft has already run on: never a forward."""
        assert self._hidden is not None, "the stop rule must set reads_hidden = 'draft', and a token must be drawn"
        return self._hidden

    def stopped_by(self, stop: "StopRule") -> bool:
        """Ask the rule; its own time is counted apart from the forwards it causes."""
        with self._watch.stage("stop"):
            return stop.should_stop(self)

    def candidates(self, count: int, siblings: SiblingLaw, sampler: Sampler) -> list[int]:
        """`count` tokens for the next position, drawn from `q()` as the verifier demands."""
        q = self.q()
        with self._watch.stage("sample"):
            return siblings(q, count, sampler)

    def push(self, token: int) -> None:
        """Keep `token`, drawn from `q()`."""
        q = self.q()
        self.tokens.append(token)
        self.drawn_q.append(q[token].item())
        self.laws.append(q)
        assert self.drawn_q[-1] > 0, "a drawn token has q > 0"
        self._pending = torch.tensor([token])

    def draft(self) -> Draft:
        q = torch.stack(self.laws) if self.laws else torch.zeros(0, self._lm.vocab_size)
        return Draft.chain(self.tokens, q)

    def _belief_at_last_forward(self) -> Tensor:
        if self._belief is None:
            assert self._logits is not None
            self._belief = self._q if self._q is not None and self._warp == Warp() else Warp().probs(self._logits)
        return self._belief

    def _catch_up(self) -> None:
        """Run the draft on every token it has not seen."""
        if not len(self._pending):
            return
        with self._watch.stage("draft"):
            output = self._lm.forward(self._pending, hidden=self._keep_hidden, logits="last")
        self.forwards += 1
        self._logits = output.logits[-1]
        self._hidden = None if output.hidden is None else output.hidden[:, -1]
        self._q = self._belief = None
        self._pending = self._pending[:0]


class StopRule(Protocol):
    """Ends drafting; never withdraws a drawn token.

    reads_hidden: whose hidden states the rule reads, so that only those are kept
    predicted: what the rule computed this round, one number per decision, for the trace
    """

    reads_hidden: Literal["draft", "target"] | None
    predicted: list[float]

    def begin_round(self, context: RoundContext) -> None: ...

    def should_stop(self, step: DraftStep) -> bool:
        """Asked before each draw, the first included."""
        ...

    def end_round(self, verdict: Verdict) -> None: ...


class DraftStructure(Protocol):
    """Decides which candidates are drawn."""

    def grow(
        self, step: DraftStep, context: RoundContext, stop: StopRule, siblings: SiblingLaw, sampler: Sampler
    ) -> Draft: ...
