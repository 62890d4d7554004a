"""Share the rows of a target call among the requests that are decoded at once."""

from collections import deque
from collections.abc import Callable, Sequence
from functools import cache
from statistics import median
from time import perf_counter
from typing import Annotated, Any

import numpy as np

from decoding.batch_cost import BatchCost, read_batch_cost
from decoding.draft import RoundContext, Verdict
from decoding.draft_tree import DraftStep
from decoding.interfaces import StopRule
from runtime.settings.kinds import Path

NEW = 0.1  # least weight of a step in the means of what steps take beyond the costs
FIRST, RARELY = 4, 64  # most steps with drafts in a row, at first and at last
RESTS = 8, 256  # steps without drafts after which they are tried again, at first and at last
ENOUGH = 8  # steps with drafts in a row after which the next rest is a short one
SURE, LAST = 3, 5  # steps without drafts after which they become rarer; steps of a median
MARGIN = 1.05  # by which a step with drafts has to be worth more
STALL = 2  # times the costs: what a step takes at most beyond them, in these
TINY = 1e-9


class Budget:
    """Says which requests draw one more token: as many as bring most expected tokens per second of
    a step, those of highest survival first.

    The gain of a token is the survival of those *before* it, times the share of such tokens that
    were accepted so far, by depth. So neither the token nor any after it decides whether it is
    drawn, and what is drawn is verified: requests are independent, and each is exact, however the
    budget falls. The schedulers of engines, which rank a token by its own probability, are not
    (`evaluation.batched.scheduler`)."""

    def __init__(self, cost: BatchCost, learns: bool) -> None:
        """learns: as in `Shared`."""
        self._target, self._draft, self._learns = cache(cost.target), cache(cost.draft), learns
        self._drafts = dict["Shared", list[float]]()  # survival before each token drawn
        self._step: tuple[float, set[Shared]] | None = None  # when it began, and whose it is
        self._drawn, self._forwards, self._read, self._ended = 0, 0, 0, 0  # in this step
        self._reading = 0.0  # seconds of this step, of what is read in it
        self._request, self._token, self._unread = 0.0, 0.0, 0.0  # seconds of each, beyond costs
        self._last = deque[float](maxlen=LAST)  # of requests, in the last steps without drafts
        self._reads = deque[float](maxlen=LAST)  # of tokens that were read
        self._steps = 0  # that tokens were learned from
        self._in_a_row, self._most_in_a_row = 0, FIRST  # steps with drafts
        self._rest, self._next_rest = 0, RESTS[0]  # rounds of requests, and steps, without drafts
        self._rested, self._of = set[Shared](), 0  # in this step; requests when it was decided
        self._accepted, self._expected = np.full(2, 1.0), np.full(2, 1.0)  # by depth, with a prior

    def refuse_more(self, requests: int, structure: Any) -> None:
        """Raise UserError where the costs do not reach so many requests, or such long drafts."""
        longest = getattr(structure, "gamma_max", 0)
        self._target(requests, requests * (longest + 1))

    def __call__(self, *ask: Any) -> bool:
        return self.together([ask])[0]

    def together(self, asks: Sequence[Any]) -> list[bool]:
        """Return whether each of these requests draws one more. asks: a request's rule, the tokens
        that it has drawn in this round, their product of q, how many tokens its draft has yet to
        read before them, beyond some, and how many may still come."""
        begins = not any(self._drafts.values())
        if begins:
            self._begin_step()
        requests, drafts = len(self._drafts), list(self._drafts.values())
        drawn, forwards = sum(map(len, drafts)), max(map(len, drafts))
        tokens = requests + sum(self._gain(n, s) for each in drafts for n, s in enumerate(each))
        gains = np.array([self._gain(count, survival) for _, count, survival, *_ in asks])
        reading = np.array([self._unread * unread / max(1, left) for *_, unread, left in asks])
        order = np.lexsort((reading, -gains))
        tokens_by = [0.0, *gains[order].cumsum()]
        reading_by = [0.0, *reading[order].cumsum()]

        def rate(more: int) -> float:
            """Return expected tokens per second, with `more` drawn."""
            seconds = self._target(requests, requests + drawn + more)
            seconds += self._reading + reading_by[more]
            seconds += (forwards + (more > 0)) * self._draft(requests)
            seconds += self._request * requests + self._token * (drawn + more)
            return float(tokens + tokens_by[more]) / max(seconds, TINY)

        rates = [rate(more) for more in range(len(asks) + 1)]
        if begins and self._learns:
            rates[0] *= MARGIN
        best = int(np.argmax(rates))
        if begins and self._learns:
            best = self._or_none(best, len(asks))
        chosen = {int(place) for place in order[:best]}
        for place in chosen:
            rule, _, survival, unread, _ = asks[place]
            self._drafts[rule].append(survival)
            self._read += unread
        self._reading += reading_by[best]
        self._drawn, self._forwards = drawn + best, forwards + (best > 0)
        return [place in chosen for place in range(len(asks))]

    def _begin_step(self) -> None:
        """Learn from the step before, unless requests came or went, or one had a round without a
        question: what a step without drafts takes beyond the costs is the share of its requests,
        what others take besides is that of their tokens, or of what their drafts read."""
        now, here, then = perf_counter(), set(self._drafts), self._step
        drawn, forwards, read, requests = self._drawn, self._forwards, self._read, self._ended
        self._step = now, here
        self._drawn, self._forwards, self._read, self._ended = 0, 0, 0, 0
        self._reading = 0.0
        if not self._learns or then is None or then[1] != here or requests != len(here):
            return
        costs = self._target(requests, requests + drawn) + forwards * self._draft(requests)
        over = now - then[0] - costs
        if read:
            each = (over - self._request * requests - self._token * drawn) / read
            most = self._draft(1)  # one by one they take no longer
            self._reads.append(min(max(0.0, each), most))
            self._unread = median(self._reads)
            return
        over = min(over, STALL * costs)
        if drawn and self._last:  # else there is nothing to compare it with
            self._steps += 1
            each = (over - self._request * requests) / drawn
            self._token += (each - self._token) * max(NEW, 1 / self._steps)
            self._token = max(0.0, self._token)
        elif not drawn:
            self._last.append(over / requests)
            self._request = median(self._last)

    def _or_none(self, best: int, asked: int) -> int:
        """Return how many tokens a step draws at first: none now and then, for beside such steps it
        is known what drafts add; and where none are worth it, though every request asked, for many
        steps. Which steps those are depends on no token of theirs."""
        if not best:
            if asked == len(self._drafts):
                self._in_a_row, self._of = 0, asked
                self._rest = self._rest or self._next_rest * asked
        elif self._in_a_row < self._most_in_a_row:
            self._in_a_row, self._rest = self._in_a_row + 1, 0
            if self._in_a_row == ENOUGH:
                self._next_rest = RESTS[0]
        else:
            best, self._in_a_row = 0, 0
            if len(self._last) >= SURE:
                self._most_in_a_row = min(2 * self._most_in_a_row, RARELY)
        return best

    def rests(self) -> bool:
        """Return whether nobody draws for now. Where a quarter of the requests are gone, those left
        ask whether it is still not worth it."""
        return self._rest > 0 and 4 * len(self._drafts) > 3 * self._of

    def rest(self, rule: "Shared") -> bool:
        """Count a round without a draft, and return True, if nobody draws for now."""
        if rule not in self._drafts or not self.rests():
            return False
        if rule in self._rested:  # for the second time: a step begins
            self._begin_step()
            self._rested.clear()
        self._rested.add(rule)
        self.end(rule, 0)
        return True

    def begin(self, rule: "Shared", first: bool) -> None:
        """first: of its request; what was before may be long ago."""
        self._drafts[rule] = []
        if first:
            self._step = None

    def end(self, rule: "Shared", accepted: int | None = None) -> None:
        """Note a verdict; None: the request has ended."""
        draft = self._drafts.pop(rule, [])
        if accepted is None:
            self._rested.discard(rule)
            return
        if self._rest:
            self._rest -= 1
            if not self._rest:  # tried again: what is accepted may have changed
                self._token, self._steps, self._unread = 0.0, 0, self._unread / 2
                self._next_rest = min(2 * self._next_rest, RESTS[1])
        self._drafts[rule] = []
        self._ended += 1
        if not self._learns:
            return
        depth = len(draft) - len(self._accepted)
        if depth > 0:
            more = np.repeat([[self._accepted[-1]], [self._expected[-1]]], depth, 1)
            self._accepted = np.append(self._accepted, more[0])
            self._expected = np.append(self._expected, more[1])
        for place, survival in enumerate(draft):
            self._expected[place] += survival
            self._accepted[place] += place < accepted

    def _gain(self, place: int, survival: float) -> float:
        place = min(place, len(self._accepted) - 1)
        return survival * self._accepted[place] / self._expected[place]


class Shared(StopRule):
    """Draw while the row of one more token is worth its time, among all requests that are decoded
    at once (`BatchedEngine`); alone, a rule that knows the costs. Where none is, nobody draws for
    some steps, more each time.

    Survival is the product of the draft's own probabilities, as in `Product`, scaled by what was
    accepted so far."""

    abstains = True

    def __init__(
        self,
        cost: Annotated[
            Path,
            "file with the seconds of forwards by requests and rows, which tune.py"
            " batch_cost=measure has saved",
        ],
        learns: Annotated[
            bool, "from verdicts, and from the time that rounds take beyond the costs, as it goes"
        ],
    ) -> None:
        self.predicted = []
        self.budget = Budget(read_batch_cost(cost, "stop.cost"), learns)
        self.ask: Callable[..., bool] = self.budget  # together with others
        self._survival = 1.0

    def rests(self) -> bool:
        """See `StopRule.rests`."""
        return self.budget.rest(self)

    def begin_round(self, context: RoundContext) -> None:
        super().begin_round(context)
        self._survival = 1.0
        self.budget.begin(self, context.round == 0)

    def should_stop(self, step: DraftStep) -> bool:
        if step.count:
            self._survival *= step.drawn_unwarped_q()
            self.predicted.append(self._survival)
        if not step.count and self.budget.rests():
            return True
        return not self.ask(self, step.count, self._survival, step.unread, step.left)

    def end_round(self, verdict: Verdict) -> None:
        self.budget.end(self, verdict.accepted)

    def end_request(self) -> None:
        self.budget.end(self)
