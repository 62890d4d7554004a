"""Multimodal classes on texts: their text part says what the whole says, and speculates as it
generates."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedModel

from decoding.engines.serial import SerialEngine
from decoding.models.cached_lm import CachedLM
from decoding.models.support import text_part
from decoding.pair import open_pair
from decoding.sampling import Sampler, Warp
from decoding.stopping.fixed import Fixed
from decoding.structures.chain import Chain
from decoding.verifiers.token import TokenVerifier
from runtime.errors import UserError
from serving.generate import speculate
from tests.helpers.models.tiny_pair import tiny_tokenizer
from tests.helpers.models.windowed import KINDS, SMALL

SIDE = dict(
    hidden_size=16,
    intermediate_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    image_size=28,
    patch_size=14,
)
SLIDING = {"sliding_window": 5}
THREE = {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}}
QWEN = dict(depth=1, num_heads=2)
# Per class: what its text part has besides `SMALL`, and its other part.
CLASSES: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
    "Gemma3": ({**KINDS["Gemma3"], **SLIDING}, SIDE),
    "Gemma4": ({}, None),
    "Llama4": (
        {**KINDS["Llama4"], "attention_chunk_size": 5},
        {**SIDE, **dict.fromkeys(("vision_output_dim", "projector_input_dim"), 16)},
    ),
    "Llava": ({"model_type": "llama"}, {**SIDE, "model_type": "clip_vision_model"}),
    "LlavaNext": (
        {"model_type": "mistral", **SLIDING},
        {**SIDE, "model_type": "clip_vision_model"},
    ),
    "LlavaOnevision": ({"model_type": "qwen2"}, {**SIDE, "model_type": "siglip_vision_model"}),
    "Mistral3": ({"model_type": "mistral", **SLIDING}, {**SIDE, "model_type": "pixtral"}),
    "InternVL": ({"model_type": "qwen2"}, {**SIDE, "image_size": [28, 28], "patch_size": [14, 14]}),
    "Idefics3": ({"model_type": "llama"}, SIDE),
    "SmolVLM": ({"model_type": "llama"}, SIDE),
    "Qwen2VL": (THREE, {**QWEN, "embed_dim": 16, "hidden_size": 32}),
    "Qwen2_5_VL": (
        THREE,
        {**QWEN, "hidden_size": 16, "out_hidden_size": 32, "fullatt_block_indexes": [0]},
    ),
    "Qwen3VL": (
        THREE,
        {**QWEN, "hidden_size": 16, "out_hidden_size": 32, "deepstack_visual_indexes": [0]},
    ),
}


def multimodal(name: str) -> PreTrainedModel:
    torch.manual_seed(5)
    text, other = CLASSES[name]
    config = getattr(transformers, f"{name}Config")(
        text_config={**SMALL, **text}, vision_config=other
    )
    model: PreTrainedModel = getattr(transformers, f"{name}ForConditionalGeneration")(config)
    with torch.no_grad():
        for weights in model.parameters():
            if not weights.isfinite().all() or weights.abs().max() > 10:
                weights.normal_(0, 0.3)  # what is left uninitialised
    return model.eval()


PROMPT = torch.randint(1, 30, (9,), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.few(1)
def test_the_text_part_says_what_the_whole_says(name: str) -> None:
    model = multimodal(name)
    expected = model.generate(PROMPT[None], max_new_tokens=12, do_sample=False)
    with torch.no_grad():
        logits = model(input_ids=expected, use_cache=False).logits[0]
    lm, text = CachedLM(text_part("pair.target", model)), expected[0]
    found = [lm.forward(text[rows]).logits for rows in (slice(9), slice(9, 15), slice(15, None))]
    torch.testing.assert_close(torch.cat(found), logits, atol=1e-4, rtol=1e-4)
    lm.crop(9)
    tree = lm.forward(text[[9, 3, 10, 4]], torch.tensor([-1, -1, 0, 2])).logits
    torch.testing.assert_close(tree[[0, 2]], logits[9:11], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.few(1)
def test_it_speculates_inside_generate(name: str) -> None:
    model = multimodal(name)
    inputs = {"max_new_tokens": 12, "do_sample": False}
    expected = model.generate(PROMPT[None], **inputs)
    found = model.generate(PROMPT[None], **inputs, custom_generate=speculate, draft=model)
    assert torch.equal(found, expected)
    assert torch.equal(model.generate(PROMPT[None], **inputs), expected)  # left as it was


def test_hooks_around_the_text_part_are_refused_and_others_kept() -> None:
    model = multimodal("Gemma3")
    model.get_output_embeddings().register_forward_hook(lambda _, __, out: out * 2)
    with torch.no_grad():
        logits = model(input_ids=PROMPT[None]).logits[0]
    found = CachedLM(text_part("pair.target", model)).forward(PROMPT).logits
    torch.testing.assert_close(found, logits, atol=1e-4, rtol=1e-4)
    model.model.register_forward_hook(lambda _, __, out: out)
    with pytest.raises(UserError, match="expected hooks and patches on the text part of Gemma3"):
        text_part("pair.target", model)


@pytest.mark.parametrize("name", ["Gemma3", "Llava", "Qwen3VL"])
def test_a_folder_is_loaded_as_its_text_part(name: str, tmp_path: Path) -> None:
    model = multimodal(name)
    expected = model.generate(PROMPT[None], max_new_tokens=12, do_sample=False)[0, 9:]
    model.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    pair = open_pair(str(tmp_path), str(tmp_path), dtype="float32")
    engine = SerialEngine(pair, Chain(4), Fixed(4), TokenVerifier(), Warp(0.0), Warp(0.0))
    assert engine.decode(PROMPT, 12, Sampler.seeded(0)).tokens == expected.tolist()


def test_prompts_read_in_both_directions_are_refused() -> None:
    config = transformers.PaliGemmaConfig(
        text_config={**SMALL, "model_type": "gemma"}, vision_config=SIDE
    )
    model = transformers.PaliGemmaForConditionalGeneration(config)
    with pytest.raises(UserError, match=r"^pair\.draft: expected .* got PaliGemmaForCond"):
        text_part("pair.draft", model)
