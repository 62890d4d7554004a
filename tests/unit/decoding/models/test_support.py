"""Which models are refused for their layers, each in one line."""

from typing import Any

import pytest
import torch
import transformers

from decoding.models.cached_lm import CachedLM
from decoding.models.support import refuse_other_layers
from runtime.errors import UserError
from tests.invariant.test_cached_lm import SMALL, random_tokens

ZAMBA2 = {"layers_block_type": ["mamba", "hybrid", "mamba"], "num_mem_blocks": 1}
LIMITED = {"time_step_limit": (0.0, 0.1), "mamba_n_heads": 4}  # that of one row is not
REFUSED: list[tuple[str, str, dict[str, Any], str]] = [
    ("Mamba", "MambaForCausalLM", {}, "keeps other state"),
    ("FalconMamba", "FalconMambaForCausalLM", {}, "keeps other state"),
    ("Jamba", "JambaForCausalLM", {}, "keeps other state"),
    ("MiniMax", "MiniMaxForCausalLM", {}, "keeps other state"),
    ("NemotronH", "NemotronHForCausalLM", {}, "keeps other state"),
    ("RecurrentGemma", "RecurrentGemmaForCausalLM", {}, "keeps other state"),
    ("Rwkv", "RwkvForCausalLM", {}, "keeps other state"),
    ("Zamba2", "Zamba2ForCausalLM", ZAMBA2, "keeps other state"),
    ("xLSTM", "xLSTMForCausalLM", {}, "keeps other state"),
    ("Bamba", "BambaForCausalLM", LIMITED, "keeps other state"),
    ("Bert", "BertLMHeadModel", {}, "tokens that see those after them"),
    ("Roberta", "RobertaForCausalLM", {}, "tokens that see those after them"),
    ("Roberta", "RobertaForCausalLM", {"is_decoder": True}, "begin behind the pad token"),
    ("Gemma3Text", "Gemma3ForCausalLM", {"use_bidirectional_attention": True}, "tokens that see"),
]
TAKEN = [("Llama", "LlamaForCausalLM", {}), ("Bert", "BertLMHeadModel", {"is_decoder": True})]


@pytest.mark.parametrize(("config", "kind", "more", "line"), REFUSED)
def test_other_layers_are_refused(config: str, kind: str, more: dict[str, Any], line: str) -> None:
    with pytest.raises(UserError, match=rf"^pair\.target: .*{line}") as error:
        refuse_other_layers("pair.target", made(config, kind, more))
    assert "\n" not in str(error.value)


@pytest.mark.smoke
@pytest.mark.parametrize("version", ["5.16.0", "5.22.2", "5.23.0.dev0", "6.0.0"])
def test_states_need_a_newer_transformers(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers, "__version__", version)
    model = made("Bamba", "BambaForCausalLM", {"mamba_n_heads": 4})
    if version in ("5.16.0", "5.22.2"):
        line = rf"^pair\.draft: Bamba.* needs transformers 5\.23 or newer, got {version}\."
        with pytest.raises(UserError, match=line):
            refuse_other_layers("pair.draft", model)
    else:
        refuse_other_layers("pair.draft", model)
    refuse_other_layers("pair.draft", made("Llama", "LlamaForCausalLM", {}))


@pytest.mark.parametrize(("config", "kind", "more"), TAKEN)
def test_a_decoder_says_what_it_says_without_a_cache(
    config: str, kind: str, more: dict[str, Any]
) -> None:
    model, text = made(config, kind, more), random_tokens(12, 0)
    refuse_other_layers("draft", model)
    lm = CachedLM(model)
    found = torch.cat([lm.forward(text[:5]).logits, lm.forward(text[5:]).logits])
    expected = model(input_ids=text[None], use_cache=False).logits[0].detach()
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_masks_of_single_heads_are_refused() -> None:
    lm = CachedLM(made("Doge", "DogeForCausalLM", {}))
    with pytest.raises(UserError, match=r"^pair: expected attention without .*masks of single"):
        lm.forward(random_tokens(5, 0))


def made(config: str, kind: str, more: dict[str, Any]) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    settings = getattr(transformers, f"{config}Config")(**SMALL, pad_token_id=0, **more)
    model: transformers.PreTrainedModel = getattr(transformers, kind)(settings)
    return model.eval()
