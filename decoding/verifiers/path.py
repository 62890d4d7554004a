"""Draft tokens tested one after another, and the distributions around them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from decoding.draft import Draft
from decoding.verification import Rows, WarpedRows, numbers


@dataclass(frozen=True)
class DraftPath:
    """A path down a draft. Its rows are read in place: nothing of [V] is copied until a rule asks
    for it.

    rows:  [g + 1] the row the path starts from, then the row of each of its g tokens
    first: [V], the target distribution the first token is tested against: p[rows[0]], or what
    earlier drafts left of it"""

    draft: Draft
    p: Rows
    rows: Sequence[int]
    first: Tensor

    @classmethod
    def whole(cls, draft: Draft, p: Rows) -> "DraftPath":
        """The one path of a chain, from the last committed token on."""
        assert draft.is_chain, "this verifier is exact for chains only"
        return cls(draft, p, range(len(draft) + 1), p[0])

    def __len__(self) -> int:
        return len(self.rows) - 1

    def target(self, t: int) -> Tensor:
        """[V], target distribution after t tokens."""
        return self.p[self.rows[t]] if t else self.first

    def after(self) -> Tensor | None:
        """[V], what follows once all tokens are accepted; None when the last one is an open
        leaf."""
        return None if self.rows[-1] > self.draft.closed else self.target(len(self))

    def q(self, t: int) -> Tensor:
        """[V], the distribution token t + 1 was drawn from."""
        return self.draft.q[self.rows[t]]

    def drawn(self) -> Iterator[tuple[float, float]]:
        """p and q of each token, one after another: what is not asked for is not looked at."""
        tokens = [self.draft.token[row - 1] for row in self.rows[1:]]
        if self.first.device.type != "cpu":
            yield from self.drawn_there(tokens, [])[0]
            return
        for t, token in enumerate(tokens):
            p, q = self.target(t)[token].item(), self.q(t)[token].item()
            assert q > 0, "a drawn token has q > 0"
            yield p, q

    def drawn_there(
        self, tokens: Sequence[int], more: Sequence[Tensor]
    ) -> tuple[list[tuple[float, float]], list[float]]:
        """On a GPU: p and q of `tokens`, its tokens, and `more` numbers [], in one copy."""
        known = [self.draft.drawn_q[row - 1] for row in self.rows[1:]] if self.draft.drawn_q else []
        sides = (self.target,) if known else (self.target, self.q)
        drawn = [side(t)[x].double() for side in sides for t, x in enumerate(tokens)]
        found, count = numbers([*drawn, *more]), len(tokens)
        p, q = found[:count], known or found[count : 2 * count]
        if isinstance(self.p, WarpedRows):
            for t, token in enumerate(tokens):
                if t or self.first is self.p[self.rows[0]]:
                    self.p.note(self.rows[t], token, p[t])
        return list(zip(p, q, strict=True)), found[len(drawn) :]
