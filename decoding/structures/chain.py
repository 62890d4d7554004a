"""One path of draft tokens."""

from decoding.draft import Draft, DraftStep, RoundContext, StopRule
from decoding.sampling import Sampler, SiblingLaw
from predictors.errors import UserError


class Chain:
    """Draw one token after another until the stop rule ends it, EOS is drawn, or `gamma_max` tokens are there.

    The limit on new tokens shortens the draft up front: it keeps one place for the residual or bonus token.
    """

    def __init__(self, gamma_max: int) -> None:
        if gamma_max < 1:
            raise UserError(f"structure.gamma_max: {gamma_max} leaves nothing to draft. Give at least 1")
        self.gamma_max = gamma_max

    def grow(
        self, step: DraftStep, context: RoundContext, stop: StopRule, siblings: SiblingLaw, sampler: Sampler
    ) -> Draft:
        limit = min(self.gamma_max, context.max_new - 1)
        ended = False
        while step.count < limit and not ended and not step.stopped_by(stop):
            (token,) = step.candidates(1, siblings, sampler)
            step.push(token)
            ended = token in context.eos_ids
        return step.draft()
