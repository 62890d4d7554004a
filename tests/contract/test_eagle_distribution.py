"""Drafts that read their target, ours and a published one with a vocabulary of its own: the whole
engine, enumerated with real models, has the target's distribution."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from decoding.models.cached_lm import CachedLM
from decoding.models.eagle.draft import EagleDraft, FeatureMaps
from decoding.models.eagle.published import Flavour, PublishedDraft, PublishedModel
from decoding.models.loading import ModelPair
from decoding.sampling import Warp
from decoding.stopping.confidence_before import ConfidenceBefore
from tests.contract.engines import PROMPT, THREE_WORDS, Case, decoded_distribution, engine
from tests.contract.enumeration import autoregressive_distribution, largest_error
from tests.helpers.models.tiny_pair import tiny_tokenizer


def config(vocab: int, layers: int, context: int = 32) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=vocab,
        hidden_size=8,
        intermediate_size=8,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_hidden_layers=layers,
        max_position_embeddings=context,
        initializer_range=0.6,
        tie_word_embeddings=False,
    )


def eagle_pair(vocab: int) -> ModelPair:
    """Two random Llamas, float64; what the draft reads of the target moves its distributions a
    lot."""
    torch.manual_seed(7)
    models = [LlamaForCausalLM(config(vocab, layers)).double() for layers in (2, 1)]
    target = CachedLM(models[0])
    maps = FeatureMaps((1,), torch.randn(8, 16).double(), torch.randn(8, 8).double())
    return ModelPair(target, EagleDraft(models[1], target, maps), tiny_tokenizer(), "tiny", ())


def published_pair(vocab: int) -> ModelPair:
    """The draft can say all tokens but the first."""
    torch.manual_seed(7)
    target = CachedLM(LlamaForCausalLM(config(vocab, 2)).double())
    flavour = Flavour((0, 1), fc_norm=True)
    model = PublishedModel(config(vocab, 1), flavour, vocab - 1, 8).double()
    for parameter in model.requires_grad_(False).parameters():
        parameter.add_(0.6 * torch.randn_like(parameter))
    draft = PublishedDraft(model, target, vocabulary=torch.arange(1, vocab))
    return ModelPair(target, draft, tiny_tokenizer(), "tiny", ())


RULES = {"chain": ["token", "block"], "dyspec": ["rrsw"], "tree": ["spechub"]}
CASES = [
    case for case in THREE_WORDS if case.values[0].rule in RULES.get(case.values[0].builds, [])
]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("make", [published_pair, eagle_pair])
@pytest.mark.few(5)
def test_distribution_with_a_draft_that_reads_along(
    make: Callable[[int], ModelPair], case: Case, tmp_path: Path
) -> None:
    pair = make(case.size.vocab)
    stop = ConfidenceBefore(0.5) if case.builds == "chain" else None
    found, traces = decoded_distribution(engine(pair, case, tmp_path, stop), case.size.length)

    def conditional(context: tuple[int, ...]) -> torch.Tensor:
        with torch.inference_mode():
            alone = CachedLM(pair.target.model)
            return Warp().probs(alone.forward(torch.tensor(context), logits="last").logits[-1])

    exact = autoregressive_distribution(conditional, case.size.vocab, case.size.length, PROMPT)
    assert largest_error(found, exact) < 1e-5, "logits are float32"
    assert any(round_.draft_tokens for trace in traces for round_ in trace.rounds)
