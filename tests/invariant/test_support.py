"""Which models run here: those of other layers are refused in one line each; of multimodal classes
the text part says what the whole says; rotations that depend on the length of the text are exact up
to where they begin to, refused beyond."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

from decoding.engines.autoregressive import AutoregressiveEngine
from decoding.engines.serial import SerialEngine
from decoding.models.batched_lm import BatchedLM
from decoding.models.cached_lm import CachedLM
from decoding.models.support import refuse_other_layers, text_part
from decoding.pair import open_pair
from decoding.sampling import Sampler, Warp
from decoding.stopping.never import Never
from decoding.structures.chain import Chain
from decoding.verifiers.token import TokenVerifier
from runtime.errors import UserError
from serving.generate import speculate
from tests.helpers.models.cached import (
    SMALL,
    check_folder,
    check_speculates,
    close,
    random_tokens,
    without_cache,
)
from tests.helpers.models.tiny_pair import EOS, VOCAB, random_words, tiny_tokenizer
from tests.helpers.models.windowed import KINDS
from tests.helpers.models.windowed import SMALL as WINDOWED


def made(config: str, kind: str, more: dict[str, Any], seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    given = SMALL | {"pad_token_id": 0} | more
    settings = getattr(transformers, f"{config}Config")(**given)
    return getattr(transformers, kind)(settings).eval()


# Layers -------------------------------------------------------------------------------------------

ZAMBA2 = {"layers_block_type": ["mamba", "hybrid", "mamba"], "num_mem_blocks": 1}
LIMITED = {"time_step_limit": (0.0, 0.1), "mamba_n_heads": 4}  # that of one row is not
OTHERS = "Mamba FalconMamba Jamba MiniMax NemotronH RecurrentGemma Rwkv xLSTM".split()
REFUSED: list[tuple[str, str, dict[str, Any], str]] = [
    *[(kind, f"{kind}ForCausalLM", {}, "keeps other state") for kind in OTHERS],
    ("Zamba2", "Zamba2ForCausalLM", ZAMBA2, "keeps other state"),
    ("Bamba", "BambaForCausalLM", LIMITED, "keeps other state"),
    ("Bert", "BertLMHeadModel", {}, "tokens that see those after them"),
    ("Roberta", "RobertaForCausalLM", {}, "tokens that see those after them"),
    ("Roberta", "RobertaForCausalLM", {"is_decoder": True}, "begin behind the pad token"),
    ("Gemma3Text", "Gemma3ForCausalLM", {"use_bidirectional_attention": True}, "tokens that see"),
]


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


@pytest.mark.parametrize(
    ("config", "kind", "more"),
    [("Llama", "LlamaForCausalLM", {}), ("Bert", "BertLMHeadModel", {"is_decoder": True})],
)
def test_a_decoder_says_what_it_says_without_a_cache(
    config: str, kind: str, more: dict[str, Any]
) -> None:
    model, text = made(config, kind, more), random_tokens(12, 0)
    refuse_other_layers("draft", model)
    lm = CachedLM(model)
    found = torch.cat([lm.forward(rows).logits for rows in text.split([5, 7])])
    close(found, without_cache(model, text))


def test_masks_of_single_heads_are_refused() -> None:
    lm = CachedLM(made("Doge", "DogeForCausalLM", {}))
    with pytest.raises(UserError, match=r"^pair: expected attention without .*masks of single"):
        lm.forward(random_tokens(5, 0))


# Text parts ---------------------------------------------------------------------------------------

SIDE = dict(
    hidden_size=16,
    intermediate_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    image_size=28,
    patch_size=14,
)
SLIDING = {"sliding_window": 5}
CLIP = {**SIDE, "model_type": "clip_vision_model"}
THREE = {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}}
QWEN = dict(depth=1, num_heads=2)
QWEN_OUT = {**QWEN, "hidden_size": 16, "out_hidden_size": 32}
# Per class: what its text part has besides `WINDOWED`, and its other part.
CLASSES: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
    "Gemma3": ({**KINDS["Gemma3"], **SLIDING}, SIDE),
    "Gemma4": ({}, None),
    "Llama4": (
        {**KINDS["Llama4"], "attention_chunk_size": 5},
        {**SIDE, **dict.fromkeys(("vision_output_dim", "projector_input_dim"), 16)},
    ),
    "Llava": ({"model_type": "llama"}, CLIP),
    "LlavaNext": ({"model_type": "mistral", **SLIDING}, CLIP),
    "LlavaOnevision": ({"model_type": "qwen2"}, {**SIDE, "model_type": "siglip_vision_model"}),
    "Mistral3": ({"model_type": "mistral", **SLIDING}, {**SIDE, "model_type": "pixtral"}),
    "InternVL": ({"model_type": "qwen2"}, {**SIDE, "image_size": [28, 28], "patch_size": [14, 14]}),
    "Idefics3": ({"model_type": "llama"}, SIDE),
    "SmolVLM": ({"model_type": "llama"}, SIDE),
    "Qwen2VL": (THREE, {**QWEN, "embed_dim": 16, "hidden_size": 32}),
    "Qwen2_5_VL": (THREE, {**QWEN_OUT, "fullatt_block_indexes": [0]}),
    "Qwen3VL": (THREE, {**QWEN_OUT, "deepstack_visual_indexes": [0]}),
}
PROMPT = torch.randint(1, 30, (9,), generator=torch.Generator().manual_seed(1))


def multimodal(name: str) -> PreTrainedModel:
    torch.manual_seed(5)
    text, other = CLASSES[name]
    parts = {"text_config": {**WINDOWED, **text}, "vision_config": other}
    config = getattr(transformers, f"{name}Config")(**parts)
    model: PreTrainedModel = getattr(transformers, f"{name}ForConditionalGeneration")(config)
    with torch.no_grad():
        for weights in model.parameters():
            if not weights.isfinite().all() or weights.abs().max() > 10:
                weights.normal_(0, 0.3)  # what is left uninitialised
    return model.eval()


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.few(1)
def test_the_text_part_says_what_the_whole_says(name: str) -> None:
    """Also inside `generate`."""
    model = multimodal(name)
    text = model.generate(PROMPT[None], max_new_tokens=12, do_sample=False)[0]
    logits = without_cache(model, text)
    lm = CachedLM(text_part("pair.target", model))
    found = [lm.forward(text[rows]).logits for rows in (slice(9), slice(9, 15), slice(15, None))]
    close(torch.cat(found), logits)
    lm.crop(9)
    tree = lm.forward(text[[9, 3, 10, 4]], torch.tensor([-1, -1, 0, 2])).logits
    close(tree[[0, 2]], logits[9:11])
    check_speculates(multimodal(name), multimodal(name), PROMPT)


def test_hooks_around_the_text_part_are_refused_and_others_kept() -> None:
    model = multimodal("Gemma3")
    model.get_output_embeddings().register_forward_hook(lambda _, __, out: out * 2)
    logits = without_cache(model, PROMPT)
    close(CachedLM(text_part("pair.target", model)).forward(PROMPT).logits, logits)
    model.model.register_forward_hook(lambda _, __, out: out)
    with pytest.raises(UserError, match="expected hooks and patches on the text part of Gemma3"):
        text_part("pair.target", model)


@pytest.mark.parametrize("name", ["Gemma3", "Llava", "Qwen3VL"])
def test_a_folder_is_loaded_as_its_text_part(name: str, tmp_path: Path) -> None:
    check_folder(multimodal(name), tmp_path, PROMPT)


def test_prompts_read_in_both_directions_are_refused() -> None:
    text = {**WINDOWED, "model_type": "gemma"}
    config = transformers.PaliGemmaConfig(text_config=text, vision_config=SIDE)
    model = transformers.PaliGemmaForConditionalGeneration(config)
    with pytest.raises(UserError, match=r"^pair\.draft: expected .* got PaliGemmaForCond"):
        text_part("pair.draft", model)


# Rotations ----------------------------------------------------------------------------------------

STEADY = 32
GREEDY = Warp(temperature=0)
SIZES: dict[str, Any] = {**SMALL, "vocab_size": VOCAB, "initializer_range": 0.35}
SIZES |= {"num_hidden_layers": 2, "max_position_embeddings": 128}
SIZES |= {"bos_token_id": None, "eos_token_id": EOS, "pad_token_id": EOS}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 100.0,
    "short_factor": [1.0, 1.3, 1.7, 2.0],
    "long_factor": [2.0, 3.0, 5.0, 9.0],
    "original_max_position_embeddings": STEADY,
}
DYNAMIC = {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 100.0}}
BY_TYPE = {"sliding_attention": {"rope_type": "default", "rope_theta": 100.0}}
GEMMA3 = {
    "head_dim": 8,
    "query_pre_attn_scalar": 8,
    "sliding_window": 64,
    "layer_types": ["sliding_attention", "full_attention"],
    "rope_parameters": BY_TYPE | {"full_attention": LONG},
}
PHIMOE = {"rope_parameters": LONG | {"short_mscale": 1.1, "long_mscale": 1.4}}
PHI3 = {"rope_parameters": LONG, "original_max_position_embeddings": STEADY}
UNSTEADY: dict[str, tuple[str, str, dict[str, Any]]] = {
    "phi3": ("Phi3", "Phi3", PHI3),
    "llama": ("Llama", "Llama", {"rope_parameters": LONG}),
    "phimoe": ("Phimoe", "Phimoe", {**PHIMOE, "num_local_experts": 2}),
    "dynamic": ("Llama", "Llama", DYNAMIC | {"max_position_embeddings": STEADY}),
    "gemma3": ("Gemma3Text", "Gemma3", GEMMA3),
}


def unsteady(kind: str, seed: int = 1) -> PreTrainedModel:
    config, model, more = UNSTEADY[kind]
    return made(config, f"{model}ForCausalLM", SIZES | more, seed)


def saved(folder: Path, target: PreTrainedModel, draft: PreTrainedModel) -> tuple[str, str]:
    for side, model in (("target", target), ("draft", draft)):
        model.save_pretrained(folder / side)
        tiny_tokenizer().save_pretrained(folder / side)
    return str(folder / "target"), str(folder / "draft")


@pytest.mark.parametrize("kind", UNSTEADY)
def test_up_to_where_rotations_change_tokens_are_those_of_generate(
    kind: str, tmp_path: Path
) -> None:
    folders = saved(tmp_path, unsteady(kind), unsteady(kind, 2))
    fault = f"expected pair.max_length of at most {STEADY}, .* Set pair.max_length={STEADY}"
    with pytest.raises(UserError, match=f"pair.target: {fault}"):
        open_pair(*folders, dtype="float32")
    model = AutoModelForCausalLM.from_pretrained(folders[0]).eval()
    pair = open_pair(*folders, dtype="float32", max_length=STEADY)
    parts: Any = Chain(6), Never(), TokenVerifier(), GREEDY, GREEDY
    ends = {"eos_ids": frozenset({EOS})}
    engines = AutoregressiveEngine(pair, GREEDY, **ends), SerialEngine(pair, *parts, **ends)
    for prompt in (random_words(STEADY - 4, 0), random_words(9, 1)):
        new = STEADY - len(prompt)
        options = {"max_new_tokens": new, "do_sample": False}
        right = model.generate(prompt[None], **options)[0]
        for engine in engines:
            trace = engine.decode(prompt, new, Sampler.seeded(0))
            assert trace.tokens == right[len(prompt) :].tolist()
        options |= {"custom_generate": speculate, "draft": folders[1]}
        assert torch.equal(model.generate(prompt[None], **options)[0], right)
    with pytest.raises(UserError, match=f"max_new_tokens: expected at most {STEADY} tokens"):
        model.generate(prompt[None], **options | {"max_new_tokens": STEADY})


@pytest.mark.filterwarnings("ignore:pair.draft. its context holds 32 tokens")
def test_a_draft_is_asked_as_well(tmp_path: Path) -> None:
    models = made("Llama", "LlamaForCausalLM", SIZES, 1), unsteady("phi3")
    folders = saved(tmp_path, *models)
    with pytest.raises(UserError, match=f"pair.draft: .* Set pair.max_length={STEADY}"):
        open_pair(*folders, max_length=STEADY + 1)
    open_pair(*folders, max_length=STEADY)
    for prompt in (random_words(5, 0), random_words(STEADY - 4, 1), random_words(STEADY + 1, 2)):
        for draft in (folders[1], models[1]):
            check_speculates(models[0], draft, prompt)


def test_a_batch_holds_no_longer_text() -> None:
    model = unsteady("phi3")
    with pytest.raises(UserError, match=f"pair: expected pair.max_length of at most {STEADY}"):
        CachedLM(model)
    lm, long, short = (
        CachedLM(model, max_length=STEADY),
        random_words(STEADY - 1, 0),
        random_words(5, 1),
    )
    alone = BatchedLM(lm, [short], 2).step(torch.tensor([3])).logits
    batch = BatchedLM(lm, [short, long], 2)
    torch.testing.assert_close(batch.step(torch.tensor([3, 4])).logits[:1], alone)
    with pytest.raises(UserError, match="pair.max_length"):
        batch.step(torch.tensor([3, 4]))
    with pytest.raises(UserError, match="pair.max_length"):
        BatchedLM(lm, [short, random_words(STEADY + 1, 0)], 2)


@pytest.mark.parametrize("rope_type", ["default", "linear", "llama3", "yarn"])
def test_other_rotations_are_taken_at_any_length(rope_type: str) -> None:
    scaled = {"factor": 4.0, "original_max_position_embeddings": STEADY}
    scaled |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0} if rope_type == "llama3" else {}
    rope = {"rope_type": rope_type, "rope_theta": 100.0} | scaled
    model = made("Llama", "LlamaForCausalLM", SIZES | {"rope_parameters": rope})
    assert CachedLM(model).max_length == 128
