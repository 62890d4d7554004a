"""A draft mixed with its target: its distribution, cached as uncached, trees as paths, batches as
one by one, in every structure, engine and harvest; and what is refused."""

import math
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from decoding.engines.overlapped import OverlappedEngine
from decoding.models.cached_lm import CachedLM
from decoding.models.draft_vocabulary import keep_rows
from decoding.models.loading import ModelPair, pair_identity
from decoding.models.mixed import mix_in, mix_of, mixed, refuse_mixed
from decoding.pair import open_pair
from decoding.sampling import Sampler, Warp
from decoding.structures.branch_point import BranchPoint
from decoding.verifiers.point_mass import PointMassVerifier
from decoding.verifiers.rrsw import RrswVerifier
from decoding.verifiers.token import TokenVerifier
from evaluation.baselines.generate import assistant_of
from runtime.errors import UserError
from tests.contract import test_eagle_distribution
from tests.contract.engines import Case
from tests.helpers.models.cached import build, check_batch, check_tree, close, random_tokens
from tests.helpers.models.tiny_pair import tiny_models, tiny_pair
from tests.invariant import test_plain_harvest, test_tree_caches
from tests.invariant.test_eagle_draft import eagle_pair
from tests.invariant.test_eagle_harvest import WARPS
from tests.unit.decoding.engines.test_overlapped import ByTarget

MIX, MIXES = 0.6, (0.9, 0.4, 0.01)
PAIRS = {"ordinary": tiny_pair, "reading": eagle_pair}


def mixed_pair(kind: str = "ordinary", mix: float = MIX) -> ModelPair:
    pair = PAIRS[kind]()
    mix_in(pair.draft, pair.target, mix)
    return pair


# The distribution ---------------------------------------------------------------------------------


def variation(p: Tensor, q: Tensor) -> Tensor:
    """[n] total variation of distributions [n, V]."""
    return (p.double() - q.double()).abs().sum(-1) / 2


def some_logits(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Of a draft that cannot say every token and its target, peaky and flat rows."""
    generator = torch.Generator().manual_seed(1)
    scale = torch.tensor([0.0, 1.0, 5.0, 30.0])[:, None]
    found = torch.randn(2, 4, 50_000, dtype=torch.float64, generator=generator) * scale
    found[:, 0, 0] = 12  # the others weigh little each and a lot together: sums lose them
    found[0, :, 100:40_000] = -math.inf
    return found[0].to(dtype), found[1].to(dtype)


@pytest.mark.parametrize(("dtype", "error"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
@pytest.mark.parametrize("mix", MIXES)
def test_total_variation_is_the_drafts_times_the_share(
    mix: float, dtype: torch.dtype, error: float
) -> None:
    draft, target = some_logits(dtype)
    distributions = draft, target, mixed(draft, target, mix)
    q0, p, q = (logits.double().softmax(-1) for logits in distributions)
    torch.testing.assert_close(variation(p, q), mix * variation(p, q0), rtol=0, atol=error)
    acceptance, alone = (torch.minimum(p, of).double().sum(-1) for of in (q, q0))
    torch.testing.assert_close(acceptance, 1 - mix * (1 - alone), rtol=0, atol=error)
    assert float(variation(p, q0).min()) > 0.02


def test_narrow_logits_are_mixed_in_float32_and_all_tokens_can_be_said() -> None:
    draft, target = some_logits(torch.bfloat16)
    found = mixed(draft, target, 0.4)
    assert found.dtype == torch.float32 and found.isfinite().all()
    assert torch.equal(found, mixed(draft.float(), target.float(), 0.4))


@pytest.mark.parametrize("mix", MIXES)
def test_a_pairs_draft_proposes_from_the_mixture_and_shares_weights(mix: float) -> None:
    """The cache that verifies is not touched."""
    plain, pair, text = tiny_pair(), mixed_pair(mix=mix), torch.arange(1, 20)
    rows = [lm.forward(text).logits for lm in (plain.target, plain.draft, pair.draft)]
    p, q0, q = (Warp().probs(logits) for logits in rows)
    torch.testing.assert_close(variation(p, q), mix * variation(p, q0), rtol=0, atol=1e-6)
    assert float(variation(p, q0).mean()) > 0.2
    assert pair.target.length == pair.target.forwards == 0 and not pair.target._cache.layers
    assert len([*pair.target.model.parameters()]) == len([*plain.target.model.parameters()])
    assert pair.draft.row_bytes == 2 * plain.target.row_bytes


def test_every_mix_is_another_draft(tiny_pair_dir: Path) -> None:
    models = str(tiny_pair_dir / "target"), str(tiny_pair_dir / "draft")
    found = [pair_identity(open_pair(*models, draft_mix=mix)) for mix in (1, 0.4, 0.41, 0.4)]
    assert len({identity.pop("draft") for identity in found}) == 3
    assert found[0] == found[1] == found[2] == found[3]


@pytest.mark.parametrize("mix", [0, 1.5, -0.1, float("nan"), "x", None])
def test_other_shares_are_refused(mix: object, tiny_pair_dir: Path) -> None:
    models = str(tiny_pair_dir / "target"), str(tiny_pair_dir / "draft")
    with pytest.raises(UserError, match=r"^pair\.draft_mix: expected a number above 0.* got .*=1$"):
        open_pair(*models, draft_mix=mix)


def test_what_wants_the_draft_itself_refuses_a_mixture_but_not_one_of_nothing() -> None:
    pair, alone = mixed_pair(), mixed_pair(mix=1)
    with pytest.raises(UserError, match=r"^pair\.draft_mix: expected 1.* got 0\.6\. Leave it away"):
        refuse_mixed(pair.draft)
    with pytest.raises(UserError, match=r"^pair\.draft_mix: expected 1"):
        assistant_of(None, {}, pair)
    assert assistant_of("given", {}, pair) == "given"
    assert type(alone.draft.network) is type(alone.target.network) and mix_of(alone.draft) == 1
    refuse_mixed(alone.draft)


# The cache ----------------------------------------------------------------------------------------


@pytest.fixture(params=[("llama", "llama"), ("qwen2", "gemma2"), ("gemma2", "qwen2")], ids="-".join)
def lm(request: pytest.FixtureRequest) -> CachedLM:
    """A draft of some tokens mixed with a target of another size, of a padded vocabulary."""
    tokens, models = torch.tensor([3, 1, 40, 7, 22]), [build(kind) for kind in request.param]
    del models[0].model.layers[2:]
    models[0].config.num_hidden_layers = 2
    keep_rows(models[0], tokens)
    draft = CachedLM(models[0], vocab_size=60, vocabulary=tokens)
    mix_in(draft, CachedLM(models[1], vocab_size=60), MIX)
    return draft


def alone(lm: CachedLM, text: Tensor) -> Tensor:
    """[n, V] by a forward of each model on its own and a cache that has seen nothing else."""
    network = lm.network
    draft, target = CachedLM(lm.model), CachedLM(network._target.model)
    q0, p = (one.forward(text).logits for one in (draft, target))
    q = torch.zeros(len(text), 60).index_copy(1, network.vocabulary, q0.softmax(-1))
    return (MIX * q + (1 - MIX) * p[:, :60].softmax(-1)).log()


@pytest.mark.parametrize("seed", range(2))
def test_trees_are_paths_and_it_goes_on_after_keep_path(lm: CachedLM, seed: int) -> None:
    text = check_tree(lm, partial(alone, lm), 20, seed, words=60)
    lm.crop(7)
    close(lm.forward(text[7:]).logits, alone(lm, text)[7:])
    held, more = lm.held(), random_tokens(5, seed, 60)
    lm.crop(4)
    close(lm.forward(more).logits, alone(lm, torch.cat([text[:4], more]))[4:])
    lm.load(*held)
    close(lm.forward(more).logits, alone(lm, torch.cat([text, more]))[len(text) :])


def test_a_batch_is_one_by_one_and_goes_on_in_the_single_cache(lm: CachedLM) -> None:
    check_batch(lm, partial(alone, lm), words=60)


def test_other_dtypes_of_draft_and_target_go_together() -> None:
    """Whose masks have other lowest numbers."""
    target, draft = tiny_models()
    text, parents = torch.arange(1, 9), torch.tensor([-1, -1, 0])
    for narrow in (0, 1):
        models = [target.float(), draft.float()]
        models[narrow] = models[narrow].bfloat16()
        pair = [CachedLM(model) for model in models]
        mix_in(pair[1], pair[0], MIX)
        pair[1].forward(text)
        tree = pair[1].forward(text[:3], parents).logits
        pair[1].crop(len(text))
        path = pair[1].forward(text[[0, 2]]).logits[-1]
        torch.testing.assert_close(tree[2], path, atol=0.1, rtol=0.05)


second_pair = cache(mixed_pair)


def afresh(model: LlamaForCausalLM) -> CachedLM:
    """Of the two models of `mixed_pair`, with an empty cache: what `test_tree_caches` compares
    with."""
    pair = second_pair()
    drafts = torch.equal(model.lm_head.weight, pair.draft.model.lm_head.weight)
    found = pair.draft if drafts else pair.target
    found.reset()
    return found


# Structures, engines, harvests: their own tests with a mixed draft --------------------------------


@pytest.mark.parametrize("warp", [Warp(0.0), Warp()], ids=["greedy", "sampled"])
@pytest.mark.parametrize("builds", test_tree_caches.ONE_EACH)
@pytest.mark.few(2)
def test_both_caches_follow_every_structure(
    builds: str, warp: Warp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(test_tree_caches, "CachedLM", afresh)
    test_tree_caches.test_caches_of_a_real_model_follow_every_draft(
        builds, warp, mixed_pair(), tmp_path
    )


@pytest.mark.parametrize("case", test_eagle_distribution.CASES)
@pytest.mark.few(1)
def test_the_distribution_is_the_targets(case: Case, tmp_path: Path) -> None:
    """Every outcome enumerated, with a draft that reads its target's states and is mixed."""

    def mixed(vocab: int) -> ModelPair:
        pair = test_eagle_distribution.eagle_pair(vocab)
        mix_in(pair.draft, pair.target, MIX)
        return pair

    test_eagle_distribution.test_distribution_with_a_draft_that_reads_along(mixed, case, tmp_path)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_side_by_side_is_in_turn(temperature: float) -> None:
    warp = Warp(temperature)
    rule = RrswVerifier() if temperature else PointMassVerifier()

    def decode(overlap: bool) -> list[list[int]]:
        parts = BranchPoint(4, 4), ByTarget(), TokenVerifier(), rule, warp, warp
        engine = OverlappedEngine(mixed_pair(), *parts, overlap=overlap)
        return [engine.decode([3, 4, 5], 30, Sampler.seeded(seed)).tokens for seed in range(4)]

    assert decode(overlap=True) == decode(overlap=False)


@pytest.mark.parametrize("kind", PAIRS)
@pytest.mark.parametrize("warps", WARPS)
@pytest.mark.few(2)
def test_labels_are_those_of_one_round_at_a_time(
    kind: str, warps: tuple[Warp, Warp], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(test_plain_harvest, "tiny_pair", lambda: mixed_pair(kind))
    test_plain_harvest.test_all_positions_at_once_give_the_labels_of_one_at_a_time(*warps)
