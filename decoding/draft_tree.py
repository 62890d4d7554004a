"""The draft of one round while it is drawn: the tree, a path as stop rules see it, and a drawn
token as predictors see it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from decoding.draft import Draft, Placed, PointMass, RoundContext, depth_first, path_to, zeros
from decoding.interfaces import LM, LMOutput, StopRule
from decoding.picking import Draw, pool_of
from decoding.sampling import Sampler, SiblingSampler, Warp, iid
from decoding.trace import Stopwatch
from predictors.features.draft_statistics import q_stats_of, q_stats_row

PLAIN = Warp()
SOME = 16  # tokens that it may lag behind


class DrawnToken:
    """A drawn token and the draft model's outputs for it, computed lazily."""

    def __init__(self, tree: DraftTree, row: int) -> None:
        self._tree, self._row = tree, row

    @property
    def token(self) -> int:
        return self._tree.token[self._row - 1]

    @property
    def depth(self) -> int:
        """Return 1 for the first of the draft."""
        return self._tree.depth[self._row]

    def hidden(self) -> Tensor:
        """Return the draft's hidden states at the token, [len(draft_layers), H]."""
        return self._tree.hidden(self._row)

    def hidden_before(self) -> Tensor:
        """Return the hidden states at the token before, [len(draft_layers), H]: never a forward."""
        return self._tree.hidden(self._tree.parent[self._row - 1])

    def path_q(self) -> list[float]:
        """Return the draft's probabilities at temperature 1, unfiltered, of the tokens up to this
        one, the first of the draft first: never a forward."""
        return [self._tree.drawn_unwarped(row) for row in path_to(self._tree.parent, self._row)]

    def q_stats(self) -> Sequence[float]:
        """Return `DraftTree.q_stats` of it: never a forward."""
        return self._tree.q_stats(self._row)

    def unwarped_q(self) -> Tensor:
        """Return `DraftTree.unwarped_q` [V] where it was drawn: never a forward."""
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
        """Count the draft's forwards of this round so far."""
        return self._tree.forwards

    @property
    def unread(self) -> int:
        """Return how many committed tokens the draft model has yet to read; 0 where some."""
        unread = len(self._tree.context.committed) - self._tree.lm.length
        return unread if unread > SOME else 0

    @property
    def left(self) -> int:
        """Return how many tokens may still be committed."""
        return self._tree.context.max_new

    def q(self) -> Tensor:
        """Return the distribution of the next draw, [V]: the warped q."""
        return self._tree.q(self.row)

    def unwarped_q(self) -> Tensor:
        """Return the unwarped q of the next token, [V] (`DraftTree.unwarped_q`)."""
        return self._tree.unwarped_q(self.row)

    def drawn_unwarped_q(self) -> float:
        """Return the unwarped q of the last drawn token, noted with the draw: never a forward."""
        assert self.tokens, "no token drawn yet"
        return self._tree.drawn_unwarped(self.row)

    def drawn(self, back: int = 0) -> DrawnToken:
        """Return the last drawn token of the path, or the one `back` tokens before it."""
        row = self.row
        for _ in range(back):
            row = self._tree.parent[row - 1]
        assert row > 0, "no such token has been drawn"
        return DrawnToken(self._tree, row)

    @property
    def eos_ids(self) -> frozenset[int]:
        return self._tree.context.eos_ids

    def stopped_by(self, stop: StopRule | None) -> bool:
        """Return whether the rule, if there is one, stops here; its own time is counted apart from
        the forwards it causes."""
        if stop is None:
            return False
        with self._tree.watch.stage("stop"):
            return stop.should_stop(self)

    def draw(self) -> int:
        """Draw the next token from `q()` as the verifier demands, keep it and return it."""
        row = self._tree.draw(self.row)
        assert row is not None, "a distribution has at least one token"
        self.row = row
        self.tokens.append(self._tree.token[-1])
        return self.tokens[-1]


@dataclass(eq=False)
class DraftTree:
    """The tokens drawn so far and the draft model's outputs for them. A token that was drawn at
    random is never removed.

    Row 0 is the last committed token, node i is row i + 1 in the order of `add`. Methods that need
    the draft model at a row run it there, once; `run` does several rows in one forward.

    lm, warp: the draft model and its warp; layers: those whose hidden states are read
    context: facts verified before the round; stop: the rule that a structure may ask
    siblings, sampler: how the children of a row are drawn, and the source of random numbers
    token, parent, drawn: of each node: its token, its parent's row, and its q under the
        distribution it was drawn from; depth: of each row
    open: number of last nodes that are open leaves; forwards: those of the draft in this round"""

    lm: LM
    context: RoundContext
    warp: Warp
    watch: Stopwatch
    layers: Sequence[int] = ()
    stop: StopRule | None = None
    siblings: SiblingSampler = iid
    sampler: Sampler = field(default_factory=lambda: Sampler.seeded(0))

    def __post_init__(self) -> None:
        self.token: list[int] = []
        self.parent: list[int] = []
        self.drawn: list[float] = []
        self.depth: list[int] = [0]
        self.open = self.forwards = 0
        self._logits: dict[int, Tensor] = {}
        self._hidden: dict[int, Tensor] = {}
        self._unwarped: dict[int, Tensor] = {}
        self._distributions: dict[int, Tensor] = {}
        self._copied: dict[int, PointMass] = {}  # q of rows whose child was not drawn
        self._noted: dict[int, Sequence[float]] = {}  # q_stats of nodes that a device has sent
        self._candidates: dict[int, Iterator[Draw]] = {}  # still to be drawn, by row
        self._cached: dict[int, int] = {}  # node -> row among those added to the draft's cache
        self._order: list[int] = [0]

    def draw(self, row: int, siblings: SiblingSampler | None = None) -> int | None:
        """Draw the next child of `row` and return its row; None where no candidate is left.

        siblings: how the children of `row` are drawn, if not as the tree's are."""
        if row not in self._candidates:
            q, noting = self.q(row), None
            if q.device.type != "cpu":  # refers not to the tree: a cycle would keep it alive
                noting = partial(q_stats_row, self.unwarped_q(row))
            self._candidates[row] = (siblings or self.siblings)(pool_of(q, noting), self.sampler)
        with self.watch.stage("sample"):
            drawn = next(self._candidates[row], None)
        return None if drawn is None else self.add(row, drawn)

    def add(self, row: int, drawn: Draw) -> int:
        """Keep a token drawn from `q(row)` (or given by `set_q`) as a child of `row`; returns its
        row."""
        assert drawn.q > 0, "a drawn token has q > 0"
        if drawn.noted:
            self._noted[len(self.token) + 1] = drawn.noted
        return self._append(row, drawn.token, drawn.q)

    def copy(self, row: int, token: int) -> int:
        """Add `token`, which was not drawn, as the only child of `row`: a point mass, with one-hot
        q."""
        self._copied[row] = PointMass(token, self.zero_q())
        return self._append(row, token, 1.0)

    def _append(self, row: int, token: int, q: float) -> int:
        self.token.append(token)
        self.parent.append(row)
        self.drawn.append(q)
        self.depth.append(self.depth[row] + 1)
        return len(self.token)

    def may_grow(self, row: int) -> bool:
        """Return whether `row` may have children: it is no EOS, and they would not be too deep."""
        ended = row > 0 and self.token[row - 1] in self.context.eos_ids
        return not ended and self.depth[row] < self.context.max_depth

    def run(self, rows: Iterable[int]) -> None:
        """Run one draft forward over those of `rows` it has not run on yet; their parents must have
        been run before."""
        new = [row for row in rows if row not in self._logits]
        if 0 in new:
            with self.watch.stage("draft"):
                output = self.lm.forward(
                    self.context.committed[self.lm.length :],
                    hidden=self.layers,
                    hidden_rows="last",
                    logits="last",
                )
            self._note([0], output)
            new.remove(0)
        if not new:
            return
        tokens = torch.tensor([self.token[row - 1] for row in new])
        parents = torch.tensor([self._cached.get(self.parent[row - 1], -1) for row in new])
        with self.watch.stage("draft"):
            output = self.lm.forward(tokens, parents, extend=bool(self._cached), hidden=self.layers)
        self._cached |= {row: len(self._cached) + i for i, row in enumerate(new)}
        self._note(new, output)

    def q(self, row: int) -> Tensor:
        """Return the warped q, [V], from which the children of `row` are drawn. Ask for it right
        before drawing: one row of a large vocabulary fits a core's cache, a whole layer does not
        and takes more than twice the time."""
        if row in self._copied:
            return self._copied[row].to(self._copied[row].device)
        if row not in self._distributions:
            self.run([row])
            with self.watch.stage("sample"):
                self._distributions[row] = self._warp_after(row).probs(self._logits[row])
        return self._distributions[row]

    def _warp_after(self, row: int) -> Warp:
        warp = self.warp.within(self.context.prompt, self.context.eos_ids)
        return warp.after(partial(self._text, row))

    def _text(self, row: int) -> Tensor:
        """Return the text [n] that ends at `row`."""
        path = [self.token[each - 1] for each in path_to(self.parent, row)]
        return torch.cat([self.context.committed, torch.tensor(path, dtype=torch.long)])

    def set_q(self, row: int, q: Tensor) -> None:
        """Let children of `row` be drawn from `q` [V], which does not come from the draft model."""
        self._distributions[row] = q
        self._candidates.pop(row, None)

    def zero_q(self) -> Tensor:
        """Return the distribution of a row without children, [V] zeros, which must not be written
        to."""
        like = next(iter(self._distributions.values()), None)
        dtype = torch.float32 if like is None else like.dtype
        return zeros(self.lm.vocab_size, dtype, self.lm.output_device)

    def unwarped_q(self, row: int) -> Tensor:
        """Return the unwarped q of the token after `row`, [V] (temperature 1, unfiltered). Equal to
        `q` for the default warp. Confidence and entropy are computed from it: a greedy q is always
        certain."""
        if self.warp == PLAIN:
            return self.q(row)
        if row not in self._unwarped:
            self.run([row])
            self._unwarped[row] = PLAIN.probs(self._logits[row])
        return self._unwarped[row]

    def drawn_unwarped(self, row: int) -> float:
        """Return the unwarped q of the token of node `row`."""
        if row in self._noted:
            return self._noted[row][0]
        if self.warp == PLAIN:
            return self.drawn[row - 1]
        return self.unwarped_q(self.parent[row - 1])[self.token[row - 1]].item()

    def q_stats(self, row: int) -> Sequence[float]:
        """Return `features.draft_statistics.q_stats` of the node `row`, where it was drawn."""
        if row not in self._noted:
            return q_stats_of(self.unwarped_q(self.parent[row - 1]), self.token[row - 1])
        return self._noted[row]

    def hidden(self, row: int) -> Tensor:
        """Return the draft's hidden states at `row`, [len(layers), H]."""
        self.run([row])
        return self._hidden[row]

    @property
    def order(self) -> list[int]:
        """Return the rows depth first, siblings in draw order: row r of `draft()` is `order[r]`
        here."""
        if len(self._order) != len(self.parent) + 1:  # nodes are only ever added
            self._order = depth_first(self.parent)
        return self._order

    def draft(self) -> Draft:
        """Return everything drawn, in the `order` of its rows."""
        order, nodes = self.order, self.order[1:]
        number = {row: new for new, row in enumerate(order)}
        none, drawn_from = self.zero_q(), set(self.parent)
        q: dict[int, Any] = {**self._distributions, **self._copied}
        rows = [q[row] if row in drawn_from else none for row in order]
        return Draft(
            [number[self.parent[row - 1]] for row in nodes],
            [self.token[row - 1] for row in nodes],
            Placed(rows, none.device) if self._copied else rows,
            self.open,
            [self.drawn[row - 1] for row in nodes],
        )

    def settle(self, rows: Sequence[int], committed: int) -> None:
        """Wind the draft's cache back to `committed` - 1 tokens along the accepted path `rows` (of
        `draft()`).

        Nodes the draft has not run on are missing there; the next round catches up."""
        self.wind_back([self.order[row] for row in rows], committed - 1)

    def wind_back(self, path: Sequence[int], length: int) -> None:
        """Keep `path` of this tree in the draft's cache (rows in order of `add`, from the root on),
        `length` tokens at most in all."""
        if self._cached:
            self.lm.keep_path([self._cached[row] for row in path if row in self._cached])
        self.lm.crop(min(self.lm.length, length))

    def keep(self, rows: Sequence[int]) -> None:
        """Keep only `rows` (increasing, with all of their parents) of a tree of tokens that were
        not drawn; the draft is not run on them again."""
        names = {old: new for new, old in enumerate([0, *rows])}
        self.parent = [names[self.parent[row - 1]] for row in rows]
        self.token = [self.token[row - 1] for row in rows]
        self.drawn = [self.drawn[row - 1] for row in rows]
        self.depth = [self.depth[row] for row in names]
        for facts in (*self._facts(), self._cached):
            kept = {names[row]: fact for row, fact in facts.items() if row in names}
            facts.clear()
            facts.update(kept)

    def reroot(self, path: Sequence[int], kept: Sequence[int], context: RoundContext) -> DraftTree:
        """Return the tree that continues from `path`, whose tokens end the committed text of
        `context`, with the nodes `kept` below it as its rows 1, 2, ...: the draft's outputs for
        them are kept."""
        self.wind_back([*path, *kept], len(context.committed) + len(kept))
        tree = replace(self, context=context)
        for row, old in enumerate(kept):
            tree._append(row, self.token[old - 1], self.drawn[old - 1])
        names = {old: new for new, old in enumerate([path[-1], *kept])}
        for facts, earlier in zip(tree._facts(), self._facts(), strict=True):
            facts.update((names[row], fact) for row, fact in earlier.items() if row in names)
        return tree

    def _facts(self) -> tuple[dict[int, Any], ...]:
        models = self._logits, self._hidden, self._unwarped
        return *models, self._distributions, self._copied, self._noted

    def _note(self, rows: Sequence[int], output: LMOutput) -> None:
        self._logits |= dict(zip(rows, output.logits, strict=True))
        if output.hidden is not None:
            self._hidden |= dict(zip(rows, output.hidden.unbind(1), strict=True))
        self.forwards += 1
