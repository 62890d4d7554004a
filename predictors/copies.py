"""How far to copy where a text repeats itself: will the target say the next copied token, too?"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

import torch
from torch import nn

from predictors.base import Records
from predictors.calibration import Calibration
from predictors.inputs import FeatureSpec
from predictors.training.batches import Items
from predictors.training.losses import weighted_soft_bce
from predictors.training.trainer import Trainer
from runtime.errors import UserError, checked_count


def copy_features(match: torch.Tensor, depth: torch.Tensor) -> torch.Tensor:
    """float32 [n, 3] of copied tokens: logs of how many matched before the copy, of the token's
    place in it, both int64 [n] from 1 on, and of their sum, the tokens that agree in all if this
    one does."""
    return torch.stack([match, depth, match + depth], dim=-1).float().log()


@dataclass
class Copies:
    """Logistic regression of the acceptance of a copied token on the length of the match and its
    depth in the copy.

    A copied token is a point mass, so its acceptance probability is p of it. The response was drawn
    from p: given that it agrees with the copy so far, whether its next token does, too, has that p
    as its expectation, for a greedy target as for a sampled one, and wherever the text so far says
    that a copy begins. So responses alone are unbiased labels, and a harvest needs no records of
    copies.

    ngram_max, ngram_min: sizes of the n-grams looked for, as in `structure=sources`; longest:
    tokens of a copy."""

    name: ClassVar[str] = "copies"
    kind: ClassVar[str] = "responses"
    columns: ClassVar[tuple[str, ...]] = ("match", "depth", "accepted")
    classes: ClassVar[tuple[str, ...]] = ("reject", "accept")
    label: ClassVar[str] = (
        "whether the response goes on with the copied token, given that it agrees with those before"
        " it in the copy"
    )
    caveat: ClassVar[str] = (
        "Its rows are copies that a decoder would begin that copies two tokens for each that"
        " matched and draws none: other lengths, and drawn tokens, begin them elsewhere."
    )
    gamma: ClassVar[None] = None
    layers: ClassVar[None] = None
    offset: ClassVar[tuple[float, ...]] = ()

    ngram_max: int = 8
    ngram_min: int = 2
    longest: int = 32
    features: FeatureSpec = field(init=False)
    calibration: Calibration = field(default=Calibration(), init=False)
    head: nn.Module = field(init=False)

    def __post_init__(self) -> None:
        for setting in ("ngram_max", "ngram_min", "longest"):
            checked_count(f"predictor.{setting}", getattr(self, setting))
        if self.ngram_min > self.ngram_max:
            raise UserError(
                f"predictor.ngram_min: {self.ngram_min} is more than predictor.ngram_max. Lower it"
            )

    @property
    def ngrams(self) -> range:
        """Sizes, the longest first."""
        return range(self.ngram_max, self.ngram_min - 1, -1)

    def samples(self, records: Records) -> Records:
        """`features` of each copied token, and `stretch`: the least stretch that copies it, at most
        4."""
        match, depth = records["match"], records["depth"]
        stretch = (depth / match).ceil().long().clamp(max=4)
        return {**records, "features": copy_features(match, depth), "stretch": stretch}

    def build(self, dim: int) -> nn.Module:
        return nn.Linear(dim, len(self.classes))

    def fit(self, records: Records, features: FeatureSpec, trainer: Trainer) -> "Copies":
        """Train on `features` [n, D] and `accepted` [n]; a micro-batch is `batch_size` copied
        tokens.

        The loss is convex in eight numbers: nothing is held out, the epoch with the lowest loss of
        all rows is kept."""
        x, accepted = records["features"], records["accepted"]
        torch.manual_seed(trainer.seed)
        self.features, self.head = features, self.build(x.shape[1])
        loss = partial(weighted_soft_bce, w_rej=1.0)
        trainer.train(self.head, Items(x, accepted), Items(x, accepted), loss, loss)
        return self

    def targets(self, records: Records) -> torch.Tensor:
        accepted = records["accepted"]
        return torch.stack([1 - accepted, accepted], dim=-1)

    @torch.inference_mode()
    def predict_proba(self, x: torch.Tensor) -> torch.Tensor:
        """Calibrated acceptance probability [n] of float32 features [n, D]."""
        return self.calibration.apply(self.head(x))[:, 1]

    def all_accepted(self, match: int) -> Sequence[float]:
        """[longest]: how likely the first 1, 2, ... tokens copied after a match of `match` tokens
        are all accepted."""
        depth = torch.arange(1, self.longest + 1)
        found: list[float] = (
            self.predict_proba(copy_features(torch.full_like(depth, match), depth))
            .cumprod(0)
            .tolist()
        )
        return found


PREDICTOR = Copies
