"""Drafts grown by value against cost: whatever is worth its time is drawn, the best draw first, and
nothing is pruned."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from decoding.asking import ask_value, load_value
from decoding.cost import CostTable
from decoding.draft import RoundContext
from decoding.draft_tree import DraftTree, DrawnToken
from decoding.interfaces import DraftStructure
from decoding.sampling import SETTLED_FIRST
from decoding.stopping.base import probabilities
from decoding.stopping.rollout_table import RolloutTable
from decoding.structures.comb import Worth, row_seconds
from decoding.structures.lookup import Copies, copy
from predictors.base import Records
from predictors.features.layers import RecordedLayers
from predictors.inputs import readable
from predictors.outcomes import Chances
from runtime.errors import UserError
from runtime.settings.kinds import Nodes, Path, Positive

CERTAIN = Chances(1.0, 1.0, 0.0, 0.0)
PRIOR = 4  # tokens of plain decoding that a request begins with, when it estimates its own rate


@dataclass
class Position:
    """A position, after `row`, where the next candidate may be drawn.

    value: of that draw; reach: probability that the path to it is accepted and none of its
    candidates so far; said: the predictor's output, for `row` before the first candidate is drawn,
    for that candidate afterwards; None: not asked yet, and `value` is an upper bound; beside:
    chance of a second candidate, predicted at the position before; chances: those of the next
    candidates, each given that those before it are rejected; begun: whether the first was drawn"""

    row: int
    value: float
    reach: float
    said: Chances[float] | None
    beside: float
    chances: list[float] = field(default_factory=list)
    begun: bool = False


class Grown(DraftStructure):
    """Each draw is one more candidate at some position. Its value is the probability that it is
    reached and accepted, as a value predictor says once the token before it, or its eldest sibling,
    is drawn. It costs a row of the target call and, the first one of a position, a draft forward.
    Draws whose value is above their price are made, the best one first, until there is none or
    `budget` is used; the first token is always drawn.

    Where the committed text ends as it did before, `copies` may take the whole draft from what
    followed then, as `Lookup` does, `budget` tokens at most: point masses, so the rate is the only
    thing they share.

    The price is in tokens: `rate`, tokens per second, times the seconds of a cost table. A request
    can find its rate itself, from its earlier rounds: their tokens over their priced seconds.

    Whether to draw depends on tokens in the tree, verified text and earlier rounds; a drawn token
    stays. Where a pair of candidates has a distribution of its own, whether the second one is drawn
    is settled before the first, by what is known of the position before."""

    training = "python train.py predictor=value"

    def __init__(
        self,
        checkpoint: Annotated[Path, "folder of a trained value predictor (python train.py)"],
        cost: Annotated[CostTable, "what a draft forward and rows of a target call cost"],
        rate: Annotated[
            Positive | None,
            "tokens per second (of the cost table) that a draw must be worth; null: a request"
            " estimates it from its own rounds",
        ],
        budget: Annotated[Nodes, "most tokens of a draft"],
        siblings: Annotated[
            int,
            Field(ge=1, le=16),
            "most candidates of one position; 1: a chain; 2: what SpecHub takes; what is beyond the"
            " third was not learned and is taken to fall on",
        ],
        copies: Annotated[
            Copies | None,
            "how a round copies from the text instead, where the text repeats itself; null: never",
        ] = None,
    ) -> None:
        self.cost, self.rate, self.budget, self.siblings = cost, rate, budget, siblings
        self.max_siblings = siblings
        if not isinstance(copies, Copies | None):
            raise UserError(
                "structure.copies: expected decoding.structures.lookup.Copies, got"
                f" {type(copies).__name__}. Write structure.copies=null, or as"
                " conf/method/grown_sources.yaml does"
            )
        self.copies = copies
        self.shape = "chain" if siblings == 1 else "tree"
        self.predictor = load_value(checkpoint, "structure.checkpoint")
        inputs = self.predictor.inputs
        if inputs.draft_hidden:
            raise UserError(
                f"structure.checkpoint: {checkpoint} reads draft_hidden, a draft forward for each"
                " question, which this structure's prices leave out. Train one that reads"
                " draft_before: python train.py predictor=value"
                " predictor.inputs=[q_stats,q_path,depth,draft_before]"
            )
        self.draft_layers = inputs.draft_layers
        self.target_layers = inputs.target_layers
        self.rows = row_seconds(cost, budget).tolist()
        self._start, self._seconds = 0, 0.0
        self.columns = inputs.columns("token")
        self._outcomes = f"outcomes by {checkpoint}"  # column of a table

    def grow(self, tree: DraftTree) -> None:
        context, rate, tokens = tree.context, self._rate(tree.context), list[int]()
        if self.copies is not None and context.max_copied:
            with tree.watch.stage("sample"):
                tokens = self.copies.of(context.committed, min(self.budget, context.max_copied))
            copy(tree, 0, tokens)
        if not tokens:
            growing = _Growing(self, tree, rate)
            while (position := growing.best()) is not None:
                growing.draw(position)
        self._seconds += self.cost.draft * tree.forwards + self.cost.target(len(tree.token) + 1)

    def _rate(self, context: RoundContext) -> float:
        """Return the rate of the request so far, if none is given."""
        if context.round == 0:
            self._start, self._seconds = len(context.committed), 0.0
        tokens = len(context.committed) - self._start
        plain = self.cost.autoregressive
        return self.rate or (tokens + PRIOR) / (self._seconds + PRIOR * plain)

    # In replay

    def predictions(self, records: Records, layers: RecordedLayers) -> dict[str, Tensor]:
        """Return the outcome probabilities of each token of each rollout, [n, G, 5]."""
        return {self._outcomes: probabilities(self.predictor, records, layers)}

    def worth(self, table: RolloutTable) -> Worth:
        """Return the value of every draw of a comb with at most two leaves beside a token: more
        siblings, and continuations of leaves, are not recorded."""
        outcomes = torch.from_numpy(table.of_predictor(self._outcomes))
        survival = self.predictor.calibration.survival
        return Worth.of(Chances.of(outcomes), survival).up_to(self.siblings - 1)


@dataclass
class _Growing:
    """The growth of one draft. waiting: (-gain, order of arrival, position)"""

    by: Grown
    tree: DraftTree
    rate: float
    waiting: list[tuple[float, int, Position]] = field(default_factory=list)
    arrival: Iterator[int] = field(default_factory=count)

    def __post_init__(self) -> None:
        self.budget = self.by.budget if readable(self.by.predictor.inputs, self.tree.context) else 1
        if self.tree.may_grow(0):
            self._wait(Position(0, 1.0, 1.0, CERTAIN, 0.0))

    def best(self) -> Position | None:
        """Return the position whose next draw gains most, if that is worth its row."""
        while self.waiting and (drawn := len(self.tree.token)) < self.budget:
            loss, _, position = heappop(self.waiting)
            if drawn and -loss < self.rate * self.by.rows[drawn]:
                return None
            if position.said is not None:
                return position
            self._foresee(position, self._ask(position.row))
        return None

    def draw(self, position: Position) -> None:
        """Draw the next candidate there, or two if the sibling distribution fixes their number
        before the first draw."""
        if position.begun:
            self._younger(position)
            return
        settled, drawn, paired = self.tree.siblings in SETTLED_FIRST, len(self.tree.token), False
        if settled and self.by.siblings > 1 and drawn + 2 <= self.budget:
            second = max(0.0, position.reach - position.value) * position.beside
            paired = drawn == 0 or 0 < second >= self.rate * self.by.rows[drawn + 1]
        position.begun = True
        child = self.tree.draw(position.row)
        if child is None or len(self.tree.token) == self.budget:
            return  # nothing can be drawn after it
        position.said = predicted = self._ask(child)
        self._below(
            Position(
                child, position.value, position.reach * predicted.first, predicted, predicted.second
            )
        )
        position.reach *= 1 - predicted.first
        if not settled:
            position.chances = predicted.younger(self.by.siblings - 1)
            self._offer_sibling(position)
        elif paired:
            position.chances = [predicted.second]
            self._younger(position)

    def _younger(self, position: Position) -> None:
        chance, eldest = position.chances.pop(0), position.said
        child = self.tree.draw(position.row)
        if child is not None and eldest is not None:
            reach = position.reach * chance
            self._below(Position(child, reach, reach, None, eldest.second))
            position.reach *= 1 - chance
            self._offer_sibling(position)

    def _below(self, position: Position) -> None:
        """Offer the first candidate after a token just drawn. Its value is at most the reach of
        that token and, with a fitted survival, at most the value of that token's draw."""
        if not self.tree.may_grow(position.row):
            return
        if position.said is None:
            self._wait(position)
        else:
            self._foresee(position, position.said)

    def _foresee(self, position: Position, said: Chances[float]) -> None:
        product, depth = position.reach * said.following, self.tree.depth[position.row]
        survival = self.by.predictor.calibration.survival
        position.value = survival.of_product(product, depth, position.value)
        position.said = said
        self._wait(position)

    def _offer_sibling(self, position: Position) -> None:
        if position.chances:
            position.value = position.reach * position.chances[0]
            self._wait(position)

    def _wait(self, position: Position) -> None:
        if position.value > 0:
            first = not position.begun
            gain = position.value - self.rate * self.by.cost.draft * first
            heappush(self.waiting, (-gain, next(self.arrival), position))

    def _ask(self, row: int) -> Chances[float]:
        with self.tree.watch.stage("stop"):
            return ask_value(self.by.predictor, self.tree.context, DrawnToken(self.tree, row))
