"""A published EAGLE draft with a vocabulary of its own: the whole engine, enumerated with real
models, has the target's distribution."""

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from decoding.models.cached_lm import CachedLM
from decoding.models.eagle.published import Flavour, PublishedDraft, PublishedModel
from decoding.models.loading import ModelPair
from tests.contract import test_eagle_distribution
from tests.contract.engines import Case
from tests.contract.test_eagle_distribution import CASES
from tests.helpers.models.tiny_pair import tiny_tokenizer


def published_pair(vocab: int) -> ModelPair:
    """Two random models, float64; the draft can say all tokens but the first."""
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=8,
        intermediate_size=8,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_hidden_layers=2,
        max_position_embeddings=32,
        initializer_range=0.6,
        tie_word_embeddings=False,
    )
    target = CachedLM(LlamaForCausalLM(config).double())
    config = LlamaConfig(**{**config.to_dict(), "num_hidden_layers": 1})
    model = PublishedModel(config, Flavour((0, 1), fc_norm=True), vocab - 1, 8).double()
    for parameter in model.requires_grad_(False).parameters():
        parameter.add_(0.6 * torch.randn_like(parameter))
    draft = PublishedDraft(model, target, vocabulary=torch.arange(1, vocab))
    return ModelPair(target, draft, tiny_tokenizer(), "tiny", ())


@pytest.mark.parametrize("case", CASES)
def test_distribution_with_a_published_draft(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(test_eagle_distribution, "eagle_pair", published_pair)
    test_eagle_distribution.test_distribution_with_a_draft_that_reads_along(case, tmp_path)
