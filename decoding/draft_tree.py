"""The draft of one round while it is drawn."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from decoding.draft import Draft, Placed, PointMass, RoundContext, zeros
from decoding.draft import depth_first as depth_first
from decoding.draft_step import DraftStep as DraftStep
from decoding.interfaces import LM, LMOutput
from decoding.picking import Drawn
from decoding.sampling import Noting, Sampler, SiblingSampler, Warp
from decoding.trace import Stopwatch
from decoding.verification import numbers
from predictors.features.draft_statistics import q_stats_of, q_stats_row

PLAIN = Warp()


class DraftTree:
    """Tokens drawn so far and the draft model's view of them. Nothing that was drawn by chance is
    ever taken out.

    Row 0 is the last committed token, node i is row i + 1 in the order of `add`. Whatever needs the
    draft model at a row runs it there, once; `run` does several rows in one forward.

    token, parent: of each node, as in `Draft`; depth: of each row; open: how many of the last nodes
    are open leaves"""

    def __init__(
        self, lm: LM, committed: Tensor, warp: Warp, watch: Stopwatch, layers: Sequence[int] = ()
    ) -> None:
        """layers: of the draft, whose hidden states the stop rule reads."""
        self.token: list[int] = []
        self.parent: list[int] = []
        self._drawn: list[float] = []
        self._unread: dict[int, Tensor] = {}  # of nodes drawn on a GPU, where it was not sent along
        self._noted: dict[int, list[float]] = {}  # q_stats of rows drawn there
        self.depth: list[int] = [0]
        self.open = 0
        self.forwards = 0
        self.watch = watch
        self._lm = lm
        place = getattr(lm, "output_device", None)
        self._nothing = torch.zeros(0, device=place)  # of the dtype and place of what is not known
        self._committed = committed
        self._warp = warp
        self._layers = layers
        self._logits: dict[int, Tensor] = {}
        self._hidden: dict[int, Tensor] = {}
        self._unwarped: dict[int, Tensor] = {}
        self._distributions: dict[int, Tensor] = {}
        self._copied: dict[int, PointMass] = {}  # what follows rows whose child nobody drew
        self._cached: dict[int, int] = {}  # node -> row among those added to the draft's cache
        self._order: list[int] = [0]

    def add(self, row: int, token: int) -> int:
        """Keep `token`, drawn from `q(row)` (or given by `set_q`), as a child of `row`; returns its
        row."""
        distribution = self._distributions[row]
        if distribution.device.type == "cpu":
            self._drawn += self._checked([distribution[token].item()])
        else:
            token = self._add_there(distribution, token)
        return self._append(row, token)

    def _append(self, row: int, token: int) -> int:
        self.token.append(token)
        self.parent.append(row)
        self.depth.append(self.depth[row] + 1)
        return len(self.token)

    def _add_there(self, distribution: Tensor, token: int) -> int:
        """On a GPU: what was sent along is known, else it is asked for when somebody wants it."""
        if isinstance(token, Drawn):
            self._drawn += self._checked([token.q])
            if token.noted:
                self._noted[len(self._drawn)] = token.noted
        else:
            self._unread[len(self._drawn)] = distribution[token]
            self._drawn.append(math.nan)
        return int(token)

    @property
    def drawn(self) -> list[float]:
        """q of each node under the distribution it was drawn from."""
        if self._unread:
            found = self._checked(numbers(list(self._unread.values())))
            for node, q in zip(self._unread, found, strict=True):
                self._drawn[node] = q
            self._unread.clear()
        return self._drawn

    @staticmethod
    def _checked(q: list[float]) -> list[float]:
        assert all(each > 0 for each in q), "a drawn token has q > 0"
        return q

    def copy(self, row: int, token: int) -> int:
        """Keep `token`, which nobody drew, as the only child of `row`: a point mass, so its q is
        one-hot."""
        self._copied[row] = PointMass(token, self.zero_q())
        self._drawn.append(1.0)
        return self._append(row, token)

    def candidates(self, row: int, siblings: SiblingSampler, sampler: Sampler) -> Iterator[int]:
        """Of `row`, by the sibling distribution. From a GPU each comes with its `q_stats`."""
        q = self.q(row)
        if q.device.type != "cpu":
            sampler = Noting(sampler, partial(q_stats_row, self.unwarped_q(row)))
        return siblings(q, sampler)

    def draw(self, row: int, candidates: Iterator[int]) -> int | None:
        """Keep the next of `candidates`, the sibling distribution of `q(row)`, as a child of `row`;
        None where it has ended."""
        with self.watch.stage("sample"):
            token = next(candidates, None)
        return None if token is None else self.add(row, token)

    def may_grow(self, row: int, context: RoundContext) -> bool:
        """Whether `row` may have children: it is no EOS, and they are not too deep."""
        ended = row > 0 and self.token[row - 1] in context.eos_ids
        return not ended and self.depth[row] < context.max_depth

    def run(self, rows: Iterable[int]) -> None:
        """One draft forward over those of `rows` it has not run on yet; their parents must have
        been run before."""
        new = [row for row in rows if row not in self._logits]
        if 0 in new:
            with self.watch.stage("draft"):
                output = self._lm.forward(
                    self._committed[self._lm.length :],
                    hidden=self._layers,
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
            output = self._lm.forward(
                tokens, parents, extend=bool(self._cached), hidden=self._layers
            )
        self._cached |= {row: len(self._cached) + i for i, row in enumerate(new)}
        self._note(new, output)

    def q(self, row: int) -> Tensor:
        """[V], the distribution the children of `row` are drawn from: the draft after its warp. Ask
        for it right before drawing: one row of a large vocabulary fits a core's cache, a whole
        layer does not and takes more than twice the time."""
        if row in self._copied:
            return self._copied[row].to(self._copied[row].device)
        if row not in self._distributions:
            self.run([row])
            with self.watch.stage("sample"):
                self._distributions[row] = self._warp.probs(self._logits[row])
        return self._distributions[row]

    def set_q(self, row: int, q: Tensor) -> None:
        """Children of `row` are drawn from `q` [V], which does not come from the draft model."""
        self._distributions[row] = q

    def zero_q(self) -> Tensor:
        """[V] zeros, the distribution of a row without children, which nobody may write to."""
        known = next(iter(self._distributions.values()), self._nothing)
        return zeros(self._lm.vocab_size, known.dtype, known.device)

    def unwarped_q(self, row: int) -> Tensor:
        """[V], what the draft thinks follows `row`, at temperature 1, unfiltered. Equal to `q` for
        the default warp.

        Confidence and entropy are read here: a greedy q is always certain.
        """
        if self._warp == PLAIN:
            return self.q(row)
        if row not in self._unwarped:
            self.run([row])
            self._unwarped[row] = PLAIN.probs(self._logits[row])
        return self._unwarped[row]

    def drawn_unwarped(self, row: int) -> float:
        """`unwarped_q` of the node `row`, where it was drawn."""
        if row in self._noted:
            return self._noted[row][0]
        if self._warp == PLAIN:
            return self.drawn[row - 1]
        return self.unwarped_q(self.parent[row - 1])[self.token[row - 1]].item()

    def q_stats(self, row: int) -> list[float]:
        """`features.draft_statistics.q_stats` of the node `row`, where it was drawn."""
        if row not in self._noted:
            return q_stats_of(self.unwarped_q(self.parent[row - 1]), self.token[row - 1])
        return self._noted[row]

    def hidden(self, row: int) -> Tensor:
        """[len(layers), H], the draft's hidden states at `row`: those of the stop rule's
        `draft_layers`."""
        self.run([row])
        return self._hidden[row]

    def has_run(self, row: int) -> bool:
        return row in self._logits

    @property
    def order(self) -> list[int]:
        """The rows depth first, siblings in draw order: row r of `draft()` is `order[r]` here."""
        if len(self._order) != len(self.parent) + 1:  # nodes are only ever added
            self._order = depth_first(self.parent)
        return self._order

    def draft(self) -> Draft:
        """Everything drawn, in the `order` of its rows."""
        order = self.order
        place = {row: number for number, row in enumerate(order)}
        nodes = order[1:]
        none = self.zero_q()
        drawn_from = set(self.parent)
        known: dict[int, Any] = {**self._distributions, **self._copied}
        rows = [known[row] if row in drawn_from else none for row in order]
        sent = none.device.type != "cpu" and not self._unread
        return Draft(
            [place[self.parent[row - 1]] for row in nodes],
            [self.token[row - 1] for row in nodes],
            Placed(rows, none.device) if self._copied else rows,
            self.open,
            self.drawn_q() if sent else (),
        )

    def drawn_q(self) -> list[float]:
        """q of each node of `draft()`, under the distribution it was drawn from."""
        drawn = self.drawn
        return [drawn[row - 1] for row in self.order[1:]]

    def settle(self, rows: Sequence[int], committed: int) -> None:
        """Wind the draft's cache back to `committed` - 1 tokens along the accepted path `rows` (of
        `draft()`).

        Nodes the draft has not run on are missing there; the next round catches up.
        """
        self.wind_back([self.order[row] for row in rows], committed - 1)

    def wind_back(self, path: Sequence[int], length: int) -> None:
        """Of this tree the draft's cache keeps `path` (rows in order of `add`, from the root on),
        `length` tokens at most in all."""
        if self._cached:
            self._lm.keep_path([self._cached[row] for row in path if row in self._cached])
        self._lm.crop(min(self._lm.length, length))

    def keep(self, rows: Sequence[int]) -> None:
        """Only `rows` (increasing, with all of their parents) of a tree of tokens that nobody drew;
        the draft runs on none of them again."""
        names = {old: new for new, old in enumerate([0, *rows])}
        self.parent = [names[self.parent[row - 1]] for row in rows]
        self.token = [self.token[row - 1] for row in rows]
        self._drawn = [self.drawn[row - 1] for row in rows]
        self.depth = [self.depth[row] for row in names]
        for facts in self._known():
            _rename(facts, names)
        _rename(self._cached, names)

    def reroot(self, path: Sequence[int], kept: Sequence[int], committed: Tensor) -> "DraftTree":
        """The tree that goes on from `path`, whose tokens end `committed` now, with the nodes
        `kept` below it as its rows 1, 2, ...: nothing the draft has computed for them is computed
        again."""
        self.wind_back([*path, *kept], len(committed) + len(kept))
        tree = DraftTree(self._lm, committed, self._warp, self.watch, self._layers)
        for new, old in enumerate([path[-1], *kept]):
            if new:
                tree.token.append(self.token[old - 1])
                tree._drawn.append(self.drawn[old - 1])
                tree.parent.append(new - 1)
                tree.depth.append(new)
            for theirs, ours in zip(tree._known(), self._known(), strict=True):
                theirs |= {new: ours[old]} if old in ours else {}
        return tree

    def _known(self) -> tuple[dict[int, Any], ...]:
        models = self._logits, self._hidden, self._unwarped
        return *models, self._distributions, self._copied, self._noted

    def _note(self, rows: Sequence[int], output: LMOutput) -> None:
        self._logits |= dict(zip(rows, output.logits, strict=True))
        if output.hidden is not None:
            self._hidden |= dict(zip(rows, output.hidden.unbind(1), strict=True))
        self.forwards += 1


def _rename(facts: dict[int, Any], names: Mapping[int, int]) -> None:
    """The rows of `facts`, in place; one without a name goes."""
    kept = {names[row]: found for row, found in facts.items() if row in names}
    facts.clear()
    facts.update(kept)
