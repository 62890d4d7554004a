"""The tip of a path while a draft is drawn: what a stop rule sees, and how a structure draws on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from decoding.interfaces import StopRule
from decoding.sampling import Sampler, SiblingSampler

if TYPE_CHECKING:
    from decoding.draft_tree import DraftTree


class DrawnToken:
    """A drawn token and what the draft model says of it; nothing runs before it is asked."""

    def __init__(self, tree: DraftTree, row: int) -> None:
        self._tree, self._row = tree, row

    @property
    def token(self) -> int:
        return self._tree.token[self._row - 1]

    @property
    def depth(self) -> int:
        """1 for the first of the draft."""
        return self._tree.depth[self._row]

    def hidden(self) -> Tensor:
        """[len(draft_layers), H], the draft's hidden states at the token."""
        return self._tree.hidden(self._row)

    def hidden_before(self) -> Tensor:
        """[len(draft_layers), H], the same at the token before: never a forward."""
        return self._tree.hidden(self._tree.parent[self._row - 1])

    def path_q(self) -> list[float]:
        """The draft's probabilities at temperature 1, unfiltered, of the tokens up to this one, the
        first of the draft first: never a forward."""
        found, row = list[float](), self._row
        while row > 0:
            found.append(self._tree.drawn_unwarped(row))
            row = self._tree.parent[row - 1]
        return found[::-1]

    def q_stats(self) -> list[float]:
        """`DraftTree.q_stats` of it: never a forward."""
        return self._tree.q_stats(self._row)

    def unwarped_q(self) -> Tensor:
        """[V], `DraftTree.unwarped_q` where it was drawn: never a forward."""
        return self._tree.unwarped_q(self._tree.parent[self._row - 1])


class DraftStep:
    """The tip of one path of a `DraftTree`: what a stop rule sees before each draw.

    Everything that needs the draft model at the tip is lazy: it runs the forward that the next draw
    would run anyway. A rule that only counts, or looks at tokens already drawn, therefore costs
    nothing.

    row: the tip; tokens: drawn and kept on this path
    """

    def __init__(self, tree: DraftTree, row: int = 0) -> None:
        self.row = row
        self.tokens: list[int] = []
        self._tree = tree

    @property
    def count(self) -> int:
        return len(self.tokens)

    @property
    def forwards(self) -> int:
        """Of the draft, so far this round."""
        return self._tree.forwards

    def q(self) -> Tensor:
        """[V], the distribution of the next draw: the draft after its warp."""
        return self._tree.q(self.row)

    def unwarped_q(self) -> Tensor:
        """[V], what the draft thinks of the next token at temperature 1, unfiltered
        (`DraftTree.unwarped_q`)."""
        return self._tree.unwarped_q(self.row)

    def drawn_unwarped_q(self) -> float:
        """`unwarped_q` in the last drawn token at the moment it was drawn; never a forward."""
        assert self.tokens, "no token drawn yet"
        return self._tree.drawn_unwarped(self.row)

    def hidden(self) -> Tensor:
        """[len(draft_layers), H], the draft's hidden states at the last drawn token (the last
        committed one at first)."""
        return self._tree.hidden(self.row)

    def previous_hidden(self) -> Tensor:
        """[len(draft_layers), H], the same at the last token the draft has already run on: never a
        forward."""
        row = self.row if self._tree.has_run(self.row) or not self.tokens else self._before()
        assert self._tree.has_run(row), "the draft has not run on anything yet"
        return self._tree.hidden(row)

    def drawn(self, back: int = 0) -> DrawnToken:
        """The last drawn token of the path, or the one `back` tokens before it."""
        row = self.row
        for _ in range(back):
            row = self._tree.parent[row - 1]
        assert row > 0, "no such token has been drawn"
        return DrawnToken(self._tree, row)

    def stopped_by(self, stop: StopRule) -> bool:
        """Ask the rule; its own time is counted apart from the forwards it causes."""
        with self._tree.watch.stage("stop"):
            return stop.should_stop(self)

    def draw(self, siblings: SiblingSampler, sampler: Sampler) -> int:
        """Draw the next token from `q()` as the verifier demands, and keep it."""
        candidates = self._tree.candidates(self.row, siblings, sampler)
        with self._tree.watch.stage("sample"):
            token = next(candidates)
        self.push(token)
        return token

    def push(self, token: int) -> None:
        """Keep `token`, drawn from `q()`."""
        self.q()
        self.row = self._tree.add(self.row, token)
        self.tokens.append(self._tree.token[-1])

    def _before(self) -> int:
        return self._tree.parent[self.row - 1]
