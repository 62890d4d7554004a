"""A fixed number of draft tokens per round."""

from collections.abc import Sequence

from decoding.draft import RoundContext, Verdict
from decoding.draft_tree import DraftStep
from runtime.errors import UserError


class Fixed:
    """Stop after `gamma` tokens (Leviathan et al. 2023)."""

    draft_layers: Sequence[int] = ()
    target_layers: Sequence[int] = ()

    def __init__(self, gamma: int) -> None:
        if gamma < 1:
            raise UserError(
                f"stop.gamma: {gamma} leaves nothing to draft. Give at least 1, or"
                " engine=autoregressive"
            )
        self.gamma = gamma
        self.predicted: list[float] = []

    def begin_round(self, context: RoundContext) -> None:
        pass

    def should_stop(self, step: DraftStep) -> bool:
        return step.count >= self.gamma

    def end_round(self, verdict: Verdict) -> None:
        pass
