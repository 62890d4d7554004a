"""The rule of HSD's released code (2601.05724, and the paper's listing): NOT lossless.

Its branches are those of block verification, but a whole draft is accepted with the uncapped ratio
min(1, p(x_1..x_g) / q(x_1..x_g)). Where a shorter ratio was above 1 that accepts too often, so the
text does not have the target's distribution, and more tokens are accepted than any lossless rule
can. It serves to measure how much of the paper's margins this explains."""

import math
from typing import Annotated

from decoding.draft import Draft, Verdict
from decoding.sampling import Sampler, SiblingSampler, iid
from decoding.verification import DraftPath, Rows, VerdictDistribution, sample_verdict
from decoding.verifiers.block import BlockVerifier
from runtime.errors import UserError


class HsdReleased:
    """Block verification with the last coin min(1, r(1..g)) in place of min(1, r*(g)). Raises
    UserError without `allow_lossy`."""

    lossless = False
    siblings: SiblingSampler = staticmethod(iid)
    shapes = ("chain",)
    max_siblings = 1

    def __init__(
        self,
        allow_lossy: Annotated[
            bool, "true: text that does not have the target's distribution is accepted"
        ] = False,
    ) -> None:
        if not allow_lossy:
            raise UserError(
                "verifier.allow_lossy: expected true, since HSD as released changes what is"
                " generated, got false. Set it to true to measure that, or use verifier=block"
            )

    def distribution(self, draft: Draft, p: Rows) -> VerdictDistribution:
        path = DraftPath.whole(draft, p)
        block, logarithm = BlockVerifier().on_path(path), 0.0  # log r(1..g); 0 for an empty draft
        for p_token, q_token in path.drawn():
            if p_token == 0:
                logarithm = -math.inf
                break
            logarithm += math.log(p_token) - math.log(q_token)
        capped, full = block.end_prob[-1].item(), math.exp(min(0.0, logarithm))
        end = block.end_prob * ((1 - full) / (1 - capped) if capped < 1 else 0.0)
        end[-1] = full
        return VerdictDistribution(end, block.residual)

    def verify(self, draft: Draft, p: Rows, sampler: Sampler) -> Verdict:
        return sample_verdict(draft, self.distribution(draft, p), sampler)
