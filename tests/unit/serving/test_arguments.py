"""Prompts and models that nothing can be said with, each refused in one line."""

import pytest
import torch
from transformers import GenerationConfig, LlamaForCausalLM

from runtime.errors import UserError
from serving.generate import speculate
from tests.helpers.models.tiny_pair import VOCAB, tiny_models

PROMPT = torch.tensor([[3, 7, 1]])
ASKED = {"max_new_tokens": 5, "do_sample": False, "custom_generate": speculate}


def test_models_and_prompts_without_data_are_refused() -> None:
    target, draft = tiny_models()
    with torch.device("meta"):
        empty = LlamaForCausalLM(target.config)
    with pytest.raises(UserError, match=r"^draft: expected weights, got LlamaForCausalLM on"):
        target.generate(PROMPT, draft=empty, **ASKED)
    with pytest.raises(UserError, match=r"^model: expected weights, got LlamaForCausalLM on"):
        empty.generate(PROMPT, draft=draft, **ASKED)
    with pytest.raises(UserError, match=r"^input_ids: expected tokens, got a tensor on the meta"):
        config = GenerationConfig(max_length=9)
        speculate(empty, PROMPT.to("meta"), draft=draft, generation_config=config)


@pytest.mark.parametrize("token", [-1, VOCAB])
def test_tokens_that_the_model_does_not_have_are_refused(token: int) -> None:
    target, draft = tiny_models()
    with pytest.raises(UserError, match=rf"^input_ids: expected tokens from 0 to .*{token}"):
        target.generate(torch.tensor([[3, token]]), draft=draft, **ASKED)


def test_no_prompts_and_another_decoding_are_refused() -> None:
    """DoLa compares layers: what it says is not what the model says."""
    target, draft = tiny_models()
    with pytest.raises(UserError, match=r"^input_ids: expected at least one prompt"):
        target.generate(PROMPT[:0], draft=draft, **ASKED)
    with pytest.raises(UserError, match=r"^dola_layers: not supported"):
        target.generate(PROMPT, draft=draft, dola_layers="high", **ASKED)
