"""SpecDec++: stop when the learned probability that some draft token will be rejected exceeds a
threshold."""

from collections.abc import Sequence
from typing import Annotated, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from decoding.asking import ask, load_asked
from decoding.draft import RoundContext
from decoding.draft_tree import DraftStep
from decoding.stopping.base import TunableRule, probabilities
from decoding.stopping.policy import Policy, lowest, seen_later
from decoding.stopping.rollout_table import RolloutTable
from predictors.base import Records
from predictors.calibration import Calibration
from predictors.features.layers import RecordedLayers
from runtime.errors import UserError
from runtime.settings.kinds import DraftLength, Path, Probability, Says


class SpecDecPPStop(TunableRule):
    """Stop once 1 - prod f_i > `threshold`, f_i the head's acceptance probability of draft token i
    (2405.19715, 3.3).

    A checkpoint with calibrated prefix survival puts that in the product's place
    (`predictors.survival`). The paper's threshold 0.7 is for f as it is trained, which the weight
    `w_rej` of rejected tokens shifts down (`calibrated` false: the head is asked as it was
    trained). Calibration undoes the shift: then 0.7 is another rule, which drafts far longer. Tune
    it.

    bounds: never stop before the first number of tokens, always at the second. order: "paper" runs
        the draft on the last drawn token before it decides, so k tokens cost k + 1 draft forwards
        where the head stops; "code" (the released program) decides from the token before it, so
        the last token is sent without a score and k tokens cost k forwards. Either way every drawn
        token is sent: both are lossless.
    """

    value_says = "predicted acceptance"
    training = "python train.py predictor=specdecpp"

    def __init__(
        self,
        checkpoint: Annotated[Path, "folder of a trained head (python train.py)"],
        threshold: Annotated[
            Probability,
            "a draft ends where a rejection is more probable than this; 0.7 is the paper's, for a"
            " head as it is trained (calibrated=false): w_rej shifts it down. Calibration makes it"
            " another rule, which drafts far longer: tune it (scripts/tune.py)",
        ],
        bounds: Annotated[
            Sequence[DraftLength],
            Field(min_length=2, max_length=2),
            Says("two whole numbers from 1 to 1000, such as [2,20]"),
            "least and most tokens of a draft",
        ],
        order: Annotated[
            Literal["paper", "code"],
            "code: decide from the token before the last, one draft forward less per round",
        ],
        calibrated: Annotated[
            bool, "false: the head as it was trained, whatever calibration its checkpoint holds"
        ] = True,
    ) -> None:
        super().__init__()
        self.threshold, self.order = threshold, order
        self.least, self.most = bounds
        if self.least > self.most:
            raise UserError(
                f"stop.bounds: expected the smaller number first, got {list(bounds)}. The paper's"
                " code has [2, 20]"
            )
        wanted = "score draft tokens", self.training
        self.predictor = load_asked(checkpoint, "stop.checkpoint", "token", 2, *wanted)
        inputs = self.predictor.inputs
        self.draft_layers, self.target_layers = inputs.draft_layers, inputs.target_layers
        self.columns = inputs.columns("token")
        if not calibrated:
            self.predictor.calibration = Calibration()
        calibration = self.predictor.calibration
        if calibration.method != "none" or not calibration.survival.is_product:
            self.caution = (
                f"threshold {threshold} is not tuned, and {checkpoint} is calibrated: the paper's"
                " 0.7 is for a head as it is trained. Tune it: python scripts/tune.py, or take"
                " stop=specdecpp_paper"
            )
        # column of a table
        self.survival = f"survival by {checkpoint}{'' if calibrated else ', as trained'}"

    @classmethod
    def of(cls, checkpoint: Path, threshold: float | None) -> "SpecDecPPStop":
        """Return the rule with the paper's bounds; None: with its threshold, too."""
        return cls(checkpoint, 0.7 if threshold is None else threshold, (1, 20), "code")

    def begin_round(self, context: RoundContext) -> None:
        self.predicted, self._context = [], context
        self._all_accepted = 1.0  # P(all scored tokens are accepted)

    def should_stop(self, step: DraftStep) -> bool:
        if step.count >= self.most:
            return True
        if step.count > (1 if self.order == "code" else 0):
            self.predicted.append(self._acceptance(step))
            survival = self.predictor.calibration.survival(torch.tensor(self.predicted))
            self._all_accepted = survival[-1].item()
        return step.count >= self.least and 1 - self._all_accepted > self.threshold

    def _acceptance(self, step: DraftStep) -> float:
        """Return f of the last drawn token ("paper") or of the one before it ("code")."""
        drawn = step.drawn(back=0 if self.order == "paper" else 1)
        return ask(self.predictor, self._context, drawn).item()

    def policy(self, table: RolloutTable) -> Policy:
        """Return the policy on -(1 - survival) of the tokens scored so far: all ("paper"), or all
        but the last ("code"). Only a head that reads the draft's states runs the draft first."""
        unscored = 1 if self.order == "code" else 0
        rejected = seen_later(-(1 - table.of_predictor(self.survival)), 1 + unscored)
        rejected[..., : self.least] = np.inf
        ahead = self.order == "paper" and bool(self.predictor.inputs.draft_hidden)
        return Policy(lowest(rejected), sign=-1, most=self.most, ahead=ahead, first=1 + unscored)

    def predictions(self, records: Records, layers: RecordedLayers) -> dict[str, Tensor]:
        """Return the survival of each prefix of each rollout, [n, G]."""
        f = probabilities(self.predictor, records, layers)
        return {self.survival: self.predictor.calibration.survival(f)}


RULE = SpecDecPPStop
