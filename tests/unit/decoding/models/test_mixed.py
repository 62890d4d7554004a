"""A draft mixed with its target: the distribution, and what is refused."""

import math
from pathlib import Path

import pytest
import torch

from decoding.models.loading import pair_identity
from decoding.models.mixed import mix_in, mix_of, mixed, refuse_mixed
from decoding.pair import open_pair
from decoding.sampling import Warp
from evaluation.baselines.generate import assistant_of
from runtime.errors import UserError
from tests.helpers.models.tiny_pair import save_tiny_pair, tiny_pair

MIXES = (0.9, 0.4, 0.01)
PRECISE = [(torch.float64, 1e-12), (torch.float32, 1e-6)]


def variation(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """[n] total variation of distributions [n, V]."""
    return (p.double() - q.double()).abs().sum(-1) / 2


def some_logits(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Of a draft that cannot say every token and its target, peaky and flat rows."""
    generator = torch.Generator().manual_seed(1)
    scale = torch.tensor([0.0, 1.0, 5.0, 30.0])[:, None]
    found = torch.randn(2, 4, 50_000, dtype=torch.float64, generator=generator) * scale
    found[:, 0, 0] = 12  # the others weigh little each and a lot together: sums lose them
    found[0, :, 100:40_000] = -math.inf
    return found[0].to(dtype), found[1].to(dtype)


@pytest.mark.parametrize(("dtype", "error"), PRECISE)
@pytest.mark.parametrize("mix", MIXES)
def test_total_variation_is_the_drafts_times_the_share(
    mix: float, dtype: torch.dtype, error: float
) -> None:
    draft, target = some_logits(dtype)
    found = draft, target, mixed(draft, target, mix)
    q0, p, q = (logits.double().softmax(-1) for logits in found)
    torch.testing.assert_close(variation(p, q), mix * variation(p, q0), rtol=0, atol=error)
    acceptance, own = (torch.minimum(p, of).double().sum(-1) for of in (q, q0))
    torch.testing.assert_close(acceptance, 1 - mix * (1 - own), rtol=0, atol=error)
    assert float(variation(p, q0).min()) > 0.02


def test_narrow_logits_are_mixed_in_float32_and_all_tokens_can_be_said() -> None:
    draft, target = some_logits(torch.bfloat16)
    found = mixed(draft, target, 0.4)
    assert found.dtype == torch.float32 and found.isfinite().all()
    assert torch.equal(found, mixed(draft.float(), target.float(), 0.4))


@pytest.mark.parametrize("mix", MIXES)
def test_a_pairs_draft_proposes_from_the_mixture(mix: float) -> None:
    pair, text = tiny_pair(), torch.arange(1, 20)
    rows = [lm.forward(text).logits for lm in (pair.target, pair.draft)]
    mix_in(pair.draft, pair.target, mix)
    pair.draft.reset()
    p, q0, q = (Warp().probs(logits) for logits in (*rows, pair.draft.forward(text).logits))
    torch.testing.assert_close(variation(p, q), mix * variation(p, q0), rtol=0, atol=1e-6)
    assert float(variation(p, q0).mean()) > 0.2


def test_weights_are_shared_and_the_verifying_cache_is_not_touched() -> None:
    pair, text = tiny_pair(), torch.arange(1, 20)
    held = sum(1 for _ in pair.target.model.parameters())
    mix_in(pair.draft, pair.target, 0.4)
    pair.draft.forward(text)
    assert pair.target.length == pair.target.forwards == 0 and not pair.target._cache.layers
    assert sum(1 for _ in pair.target.model.parameters()) == held
    assert pair.draft.row_bytes == 2 * (pair.target.forward(text), pair.target.row_bytes)[1]


@pytest.mark.parametrize("mix", [0, 1.5, -0.1, float("nan"), "x", None])
def test_other_shares_are_refused(mix: object, tmp_path: Path) -> None:
    folder = save_tiny_pair(tmp_path / "tiny")
    with pytest.raises(UserError, match=r"^pair\.draft_mix: expected a number above 0.* got .*=1$"):
        open_pair(str(folder / "target"), str(folder / "draft"), draft_mix=mix)


def test_a_share_of_one_is_the_draft_alone() -> None:
    pair, network = tiny_pair(), tiny_pair().draft.network
    mix_in(pair.draft, pair.target, 1)
    assert type(pair.draft.network) is type(network) and mix_of(pair.draft) == 1
    refuse_mixed(pair.draft)


def test_every_mix_is_another_draft(tmp_path: Path) -> None:
    folder = save_tiny_pair(tmp_path / "tiny")
    models = str(folder / "target"), str(folder / "draft")
    found = [pair_identity(open_pair(*models, draft_mix=mix)) for mix in (1, 0.4, 0.41, 0.4)]
    assert len({identity.pop("draft") for identity in found}) == 3
    assert found[0] == found[1] == found[2] == found[3]


def test_what_wants_the_draft_itself_refuses_a_mixture() -> None:
    pair = tiny_pair()
    mix_in(pair.draft, pair.target, 0.4)
    with pytest.raises(UserError, match=r"^pair\.draft_mix: expected 1.* got 0\.4\. Leave it away"):
        refuse_mixed(pair.draft)
    with pytest.raises(UserError, match=r"^pair\.draft_mix: expected 1"):
        assistant_of(None, {}, pair)
    assert assistant_of("given", {}, pair) == "given"
