"""A draft with adjustable acceptance: its distribution is mixed with the target's.

q = m q0 + (1 - m) p. q0 is the draft's distribution, p the target's, from a second pass of the
target on the draft's own tokens. The total variation of q to p is m times that of q0, so acceptance
is 1 - m (1 - a0), any value from a0 to 1. It is a simulation: such a draft is slower than its
target, and its speed-up can only be modelled.

The unwarped distributions are mixed, at temperature 1 with all tokens. Any other warp is applied to
the mixture, and the identity does not hold for the result."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from decoding.interfaces import RowsWanted
from decoding.models.cached_lm import CachedLM
from decoding.models.draft_vocabulary import among_all
from decoding.models.forward import Result, Rows
from decoding.models.kv_cache import BufferCache
from decoding.models.recurrent import RecurrentLM
from runtime.errors import UserError

KEY = "pair.draft_mix"


def mix_in(draft: CachedLM, target: CachedLM, mix: float) -> None:
    """Let `draft` propose from its mixture with `target`. mix: m, the share of the draft, above 0;
    1 leaves it as it is.

    Raises UserError for any other share."""
    if not isinstance(mix, int | float) or not 0 < mix <= 1:
        raise UserError(
            f"{KEY}: expected a number above 0 and at most 1, got {mix}. Write e.g. {KEY}=1"
        )
    if mix == 1:
        return
    if isinstance(target, RecurrentLM) or isinstance(draft, RecurrentLM):
        raise UserError(
            f"{KEY}: expected 1, for a model with recurrent layers is mixed with no other, got"
            f" {mix}. Write {KEY}=1"
        )
    assert not isinstance(draft.network, MixedForward), "a draft is mixed once"
    draft.network = MixedForward(draft, target, mix)
    draft.vocabulary = None  # a mixture may propose any token of the target
    draft.max_length = min(draft.max_length, target.max_length)


def mix_of(draft: object) -> float:
    """Return the draft's share m of its mixture: 1 if it is not mixed."""
    network = getattr(draft, "network", None)
    return network.mix if isinstance(network, MixedForward) else 1.0


def refuse_mixed(draft: CachedLM) -> None:
    """Raise UserError for a mixed draft, whose own seconds or logits are not available."""
    if (mix := mix_of(draft)) < 1:
        raise UserError(
            f"{KEY}: expected 1, for a mixed draft runs its target as well, got {mix}. Leave it"
            " away"
        )


class MixedForward:
    """The `Forward` of a draft mixed with its target: logits are the logarithms of q, hidden states
    are the draft's.

    The target's keys and values lie in the draft's cache, as layers after its own: what the draft
    keeps or drops, they keep or drop. The target's weights are shared; the cache it verifies with
    is never touched."""

    def __init__(self, draft: CachedLM, target: CachedLM, mix: float) -> None:
        """mix: m, the share of the draft, above 0 and below 1."""
        self.mix, self.vocabulary = mix, draft.vocabulary
        self._vocab_size = draft.vocab_size
        self._draft, self._target = draft.network, target
        self._layers = draft.cached_layers

    def __call__(
        self, rows: Rows, cache: BufferCache, hidden: Sequence[int] = (), logits: RowsWanted = "all"
    ) -> Result:
        """See `Forward`. Logits are of all tokens of the pair, in float32 or float64."""
        q0, states = self._draft(rows, cache, hidden, logits)
        second = cache.part(self._layers, self._target.cached_layers)
        device, dtype, mask = self._target.device, self._target.model.dtype, rows.mask
        if mask is not None:  # the lowest number of one dtype may be below the other's
            mask = mask.to(device, dtype).clamp(min=torch.finfo(dtype).min)
        plain = Rows(rows.tokens.to(device), rows.positions.to(device), mask)  # nothing is added
        p, _ = self._target.network(plain, second, (), logits)
        if self.vocabulary is not None:
            self.vocabulary = self.vocabulary.to(q0.device)
            q0 = among_all(q0, self.vocabulary, self._vocab_size)
        p = p[..., : self._vocab_size].to(q0.device)
        return mixed(q0[..., : self._vocab_size], p, self.mix), states


def mixed(draft: Tensor, target: Tensor, mix: float) -> Tensor:
    """Return log(m softmax(draft) + (1 - m) softmax(target)) of logits [..., V], in float32 or
    float64. The draft's may be -inf."""
    dtype = torch.promote_types(torch.promote_types(draft.dtype, target.dtype), torch.float32)
    # torch's own log_softmax is off by 1e-5 in float32 where there are 50,000 tokens: it sums them
    # up in turn.
    below = [x - x.amax(-1, keepdim=True) for x in (draft.to(dtype), target.to(dtype))]
    q0, p = (x - x.logsumexp(-1, keepdim=True) for x in below)
    return torch.logaddexp(q0.add_(math.log(mix)), p.add_(math.log1p(-mix)))
