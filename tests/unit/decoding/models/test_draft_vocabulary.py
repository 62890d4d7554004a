"""A draft that proposes some tokens: what its file may hold, what its distributions are, and what
it is identified by."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from decoding.engines.autoregressive import AutoregressiveEngine
from decoding.engines.serial import SerialEngine
from decoding.interfaces import LMOutput
from decoding.models.batched_lm import BatchedLM
from decoding.models.cached_lm import CachedLM
from decoding.models.draft_vocabulary import (
    digest,
    keep_rows,
    read_vocabulary,
    rows_of,
    with_ends,
    write_vocabulary,
)
from decoding.models.loading import ModelPair, load_pair, pair_identity
from decoding.models.packing import PackedLinear
from decoding.pair import pair_settings
from decoding.sampling import Sampler, Warp
from decoding.stopping.fixed import Fixed
from decoding.structures.chain import Chain
from decoding.verifiers.token import TokenVerifier
from evaluation.replay.read import refuse_other_pair
from evaluation.replay.thresholds import misfit
from predictors.base import refuse_mismatch
from runtime.errors import UserError
from tests.helpers.damage.refusals import refuses
from tests.helpers.models.cached import build
from tests.helpers.models.tiny_pair import EOS, VOCAB

KEPT = [9, 3, 30, 4, 17, 8, 21, 12]
WITH_EOS = torch.tensor(sorted([EOS, *KEPT]))
OUTSIDE = torch.tensor([token for token in range(VOCAB) if token not in WITH_EOS.tolist()])
PROMPT = torch.tensor([5, 6, 7, 3])


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("vocabulary") / "tokens.safetensors"
    write_vocabulary(path, torch.tensor(KEPT), {"counted_on": "nothing", "size": 8})
    return path


def loaded(folder: Path, vocabulary: Path | None, dtype: str = "float64") -> ModelPair:
    models = {side: str(folder / side) for side in ("target", "draft")}
    tokens = None if vocabulary is None else str(vocabulary)
    return load_pair(pair_settings(**models, name="tiny", dtype=dtype, draft_vocabulary=tokens))


def test_a_file_keeps_the_order_and_says_what_was_counted(file, tmp_path):
    assert read_vocabulary(file, VOCAB).tolist() == KEPT
    with safe_open(file, "pt") as opened:
        assert {name: json.loads(value) for name, value in opened.metadata().items()} == {
            "counted_on": "nothing",
            "size": 8,
        }
        assert opened.get_tensor("tokens").dtype == torch.uint16
    large = tmp_path / "large.safetensors"
    write_vocabulary(large, torch.tensor([128_000, 5]), {})
    assert read_vocabulary(large, 128_001).tolist() == [128_000, 5]
    assert with_ends(torch.tensor([7, 2]), {2, 5}).tolist() == [2, 5, 7]


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (torch.tensor([], dtype=torch.long), "holds no tokens"),
        (torch.tensor([1, 4, 4, 2]), "holds token 4 2 times"),
        (torch.tensor([1, VOCAB]), "holds token 32, the pair's vocabulary ends at 31"),
        (torch.tensor([1, -1]), "holds token -1"),
        (torch.arange(VOCAB + 1), "holds token 32"),
        (torch.tensor([1.0]), "not a list of token ids"),
        (torch.tensor([[1]]), r"of shape \[1, 1\], not a list"),
        (torch.tensor([True]), "not a list of token ids"),
    ],
)
def test_tokens_that_cannot_be_are_refused(tokens, message, tmp_path, tiny_pair_dir):
    save_file({"tokens": tokens}, tmp_path / "bad.safetensors")
    line = rf"^pair\.draft_vocabulary: .*{message}.*python pairs/draft_vocabulary"
    refuses(line, loaded, tiny_pair_dir, tmp_path / "bad.safetensors")


def test_what_is_no_vocabulary_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"^pair\.draft_vocabulary: no file .*nowhere"):
        read_vocabulary(tmp_path / "nowhere", VOCAB)
    (tmp_path / "text").write_text("[1, 2]")
    save_file({"other": torch.arange(3)}, tmp_path / "other")
    for name in ("text", "other"):
        with pytest.raises(UserError, match=r"^pair\.draft_vocabulary: .* holds no draft vocabul"):
            read_vocabulary(tmp_path / name, VOCAB)


def test_logits_are_the_whole_draft_s_and_minus_infinity(tiny_pair_dir, file):
    whole, part = (loaded(tiny_pair_dir, path).draft for path in (None, file))
    assert part.vocab_size == VOCAB and part.model.get_output_embeddings().weight.shape == (9, 24)
    chain, tree = torch.arange(1, 7), (torch.tensor([8, 31, 2]), torch.tensor([-1, 0, 0]))
    for tokens in ((chain,), tree):
        ours, theirs = (lm.forward(*tokens, hidden=(-1,)) for lm in (part, whole))
        assert torch.equal(ours.hidden, theirs.hidden)
        torch.testing.assert_close(ours.logits[:, WITH_EOS], theirs.logits[:, WITH_EOS])
        assert (ours.logits[:, OUTSIDE] == -torch.inf).all() and ours.logits.dtype == torch.float32
    prompts, tokens = [torch.tensor([1, 2, 3]), torch.tensor([4])], torch.tensor([20, 21])
    seen = torch.tensor([0, 0]), torch.eye(2, dtype=torch.bool)
    calls: list[Callable[[CachedLM], LMOutput]] = [
        lambda lm: lm.forward(chain, logits=[1, 4]),
        lambda lm: BatchedLM(lm, prompts, 4).step(tokens),
        lambda lm: (lm.reset(), lm.forward_masked(tokens, *seen))[1],
    ]
    for call in calls:
        ours, theirs = (call(lm).logits for lm in (part, whole))
        torch.testing.assert_close(ours[:, WITH_EOS], theirs[:, WITH_EOS])
        assert (ours[:, OUTSIDE] == -torch.inf).all()


def test_a_model_that_bends_its_logits_has_none_for_other_tokens():
    """Gemma 2 takes their hyperbolic tangent: what a layer gave as -inf would come back finite."""
    model = build("gemma2")
    model.config.final_logit_softcapping = 0.5
    tokens = torch.tensor([2, 5, 11])
    whole = CachedLM(model).forward(torch.tensor([1, 2])).logits
    keep_rows(model, tokens)
    part = CachedLM(model, vocabulary=tokens).forward(torch.tensor([1, 2])).logits
    torch.testing.assert_close(part[:, tokens], whole[:, tokens])
    assert torch.isfinite(part).sum() == 6


def test_part_of_a_packed_layer_is_packed_and_keeps_its_bias(tiny_pair_dir, file):
    head = loaded(tiny_pair_dir, file, "float32").draft.model.get_output_embeddings()
    assert isinstance(head, PackedLinear) and head.out_features == 9
    whole = nn.Linear(6, 10)
    tokens, x = torch.tensor([7, 1, 4]), torch.randn(5, 6)
    for head in (whole, PackedLinear(whole)):
        part = rows_of(head, tokens)
        assert type(part) is type(head)
        with torch.no_grad():
            torch.testing.assert_close(part(x), whole(x)[:, tokens])


def test_a_layer_that_is_not_plain_is_refused():
    model: Any = SimpleNamespace(get_output_embeddings=lambda: None)
    several = r".*several devices. Set pair\.draft_device"
    for fault in (r"the output layer of pair\.draft is a NoneType", several):
        refuses(rf"^pair\.draft_vocabulary: {fault}", keep_rows, model, torch.tensor([1]))
        model.hf_device_map = {"a": "cpu", "b": "disk"}


@pytest.mark.parametrize("draft_warp", [Warp(), Warp(0.0), Warp(0.7, 20), Warp(top_p=0.8)], ids=str)
def test_drafted_tokens_are_its_own_and_the_answer_is_the_target_s(draft_warp, tiny_pair_dir, file):
    pair, greedy = loaded(tiny_pair_dir, file), Warp(0.0)
    expected = AutoregressiveEngine(pair, greedy).decode(PROMPT, 24, Sampler.seeded(0)).tokens
    engine = SerialEngine(pair, Chain(4), Fixed(4), TokenVerifier(), greedy, draft_warp)
    trace = engine.decode(PROMPT, 24, Sampler.seeded(0))
    drafted = {token for round_ in trace.rounds for token in round_.draft_tokens}
    assert trace.tokens == expected and drafted <= set(WITH_EOS.tolist())
    assert set(expected) - set(WITH_EOS.tolist()), "the target says other tokens, too"
    q = draft_warp.probs(pair.draft.forward(torch.tensor([7])).logits[-1])
    assert q.sum().item() == pytest.approx(1) and q[OUTSIDE].sum() == 0


def test_another_vocabulary_is_another_draft(tiny_pair_dir, file, tmp_path):
    write_vocabulary(tmp_path / "other", torch.tensor(KEPT[:-1]), {})
    write_vocabulary(tmp_path / "same", torch.tensor([EOS, *KEPT[::-1]]), {"counted_on": "else"})
    whole, part, other, same = (
        pair_identity(loaded(tiny_pair_dir, path))
        for path in (None, file, tmp_path / "other", tmp_path / "same")
    )
    assert same == part and len({whole["draft"], part["draft"], other["draft"]}) == 3
    assert part["draft"].endswith(f", {digest(WITH_EOS)}") and "9 tokens" in part["draft"]
    assert {**part, "draft": whole["draft"]} == whole
    for theirs, ours in ((whole, part), (part, whole), (part, other)):
        with pytest.raises(UserError, match=r"ck was trained with pair\.draft='.*', but this run"):
            refuse_mismatch({"pair": theirs, "predictor": "hrad"}, {"pair": ours}, "ck")
        with pytest.raises(UserError, match=r"^data: x belongs to another draft than the harvest"):
            refuse_other_pair(ours, theirs, "data: x")
        assert misfit({"pair": theirs}, {"pair": ours}) == "pair"
