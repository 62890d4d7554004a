"""A structure and a verifier as a newcomer writes them, of the interfaces alone: enumerated, the
output has the target's distribution."""

import pytest
import torch

from decoding.draft import Draft, Verdict
from decoding.draft_tree import DraftStep
from decoding.engines.serial import SerialEngine
from decoding.sampling import Warp, iid
from decoding.stopping.confidence import Confidence
from decoding.stopping.never import Never
from decoding.structures.chain import Chain
from decoding.verification import VerdictDistribution
from decoding.verifiers.token import TokenVerifier
from tests.contract.engines import decoded_distribution, target_distribution, toy_pair
from tests.contract.enumeration import largest_error


class AtMostTwo:
    """A chain of at most two tokens."""

    shape = "chain"
    sibling_samplers = None
    max_siblings = 1
    asks_stop = True
    uses_draft = True
    draft_layers = target_layers = ()

    def grow(self, tree) -> None:
        step = DraftStep(tree)
        while step.count < min(2, tree.context.max_depth) and not step.stopped_by(tree.stop):
            if step.draw() in tree.context.eos_ids:
                return


class OneByOne:
    """min(1, p / q) for each token, then what p has more than q."""

    lossless = True
    siblings = staticmethod(iid)
    shapes = ("chain",)
    max_siblings = 1

    def distribution(self, draft: Draft, p: torch.Tensor) -> VerdictDistribution:
        end, left = torch.zeros(len(draft) + 1, dtype=torch.float64), 1.0
        for row, token in enumerate(draft.token):
            accept = min(1.0, (p[row][token] / draft.q[row][token]).item())
            end[row], left = left * (1 - accept), left * accept
        end[-1] = left
        return VerdictDistribution(end, lambda row: self.residual(draft, p, row))

    def residual(self, draft: Draft, p: torch.Tensor, row: int) -> torch.Tensor:
        if row == len(draft):
            return p[row]
        more = (p[row] - draft.q[row]).clamp(min=0)
        return more / more.sum() if more.any() else p[row]

    def verify(self, draft: Draft, p, sampler) -> Verdict:
        for row, token in enumerate(draft.token):
            if not sampler.accept(p[row][token].item(), draft.q[row][token].item()):
                drawn = sampler.draw(self.residual(draft, p, row)).token
                return Verdict(row, draft.token[:row], drawn, len(draft))
        return Verdict(len(draft), draft.token, sampler.draw(p[len(draft)]).token, len(draft))


@pytest.mark.parametrize("stop", [Never(), Confidence(0.4)], ids=["never", "confidence"])
@pytest.mark.parametrize(
    ("structure", "verifier"),
    [(AtMostTwo(), TokenVerifier()), (Chain(3), OneByOne()), (AtMostTwo(), OneByOne())],
    ids=["structure", "verifier", "both"],
)
def test_the_output_has_the_target_s_distribution(structure, verifier, stop) -> None:
    pair, warp = toy_pair(3, 31), Warp()
    engine = SerialEngine(pair, structure, stop, verifier, warp, Warp(0.7))
    found, traces = decoded_distribution(engine, 3)
    assert largest_error(found, target_distribution(pair, warp, 3)) < 1e-9
    assert {len(round_.draft_tokens) for trace in traces for round_ in trace.rounds} >= {0, 1, 2}
