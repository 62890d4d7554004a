"""Give up drafting where it does not pay: a bound on what speculation may cost a request."""

from typing import Annotated

from pydantic import Field

from decoding.cost import read_cost
from decoding.draft import RoundContext, Verdict
from decoding.draft_tree import DraftStep
from decoding.interfaces import StopRule
from runtime.settings.kinds import Path


class StopLoss(StopRule):
    """`rule`, until the request is `loss` of its longest output behind plain decoding; from then on
    no draft.

    Every round is priced by the measured costs in the file `cost`: draft forwards and target rows,
    against a plain forward for each token that came of it. A request of at most n tokens is given
    up once its rounds have cost loss * n plain forwards more than that, so by these prices none
    loses more than that and one round. Earlier rounds decide, not the clock: it is as lossless as
    `rule` and repeats with the seed. A structure that also copies may win time back, since it asks
    no rule there."""

    def __init__(
        self,
        rule: Annotated[StopRule, "the stop rule until then"],
        cost: Annotated[
            Path,
            "file of measured costs (scripts/tune.py): runs/<pair>-cost-T<temperature>.json; one of"
            " another pair is refused, of another machine taken with a warning",
        ],
        loss: Annotated[
            float,
            Field(gt=0, le=1),
            "share of the longest output that may be lost; 0.02: 2.56 tokens of 128",
        ],
    ) -> None:
        self.rule, self.loss = rule, loss
        self.cost = read_cost(cost, "stop.cost")
        self.draft_layers, self.target_layers = rule.draft_layers, rule.target_layers
        self.predicted, self.caution = [], rule.caution
        self._behind, self._most = 0.0, 0.0  # in the unit of the costs
        self._step: DraftStep | None = None

    def begin_round(self, context: RoundContext) -> None:
        if context.round == 0:
            self._behind, self._most = 0.0, self.loss * context.max_new * self.cost.autoregressive
        self._step = None
        self._given_up = self._behind > self._most
        self.predicted = []
        if not self._given_up:
            self.rule.begin_round(context)
            self.predicted = self.rule.predicted

    def should_stop(self, step: DraftStep) -> bool:
        self._step = step
        return self._given_up or self.rule.should_stop(step)

    def end_round(self, verdict: Verdict) -> None:
        plain = self.cost.autoregressive
        spent = self.cost.target(verdict.drafted + 1) if verdict.drafted else plain
        spent += self.cost.draft * (self._step.forwards if self._step else 0)
        self._behind += spent - plain * len(verdict.emitted)
        if not self._given_up:
            self.rule.end_round(verdict)
