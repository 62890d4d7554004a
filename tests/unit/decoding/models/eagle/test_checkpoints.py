"""The formats of published EAGLE drafts: what is read is what was written, and all else is one
line."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PhiConfig
from transformers.models.phi.modeling_phi import PhiRotaryEmbedding, apply_rotary_pos_emb

from decoding.models.cpu_llama import rotate
from decoding.models.eagle.published import PublishedDraft
from decoding.models.loading import ModelPair, load_pair, pair_identity
from decoding.pair import open_pair, pair_settings
from runtime.errors import UserError
from tests.helpers.models.eagles import (
    FLAVOURS,
    SAYS,
    published_pair,
    random_model,
    write_eagle1,
    write_flat,
    write_speculators,
)

TEXT = torch.tensor([3, 4, 5, 6, 7, 8])


def opened(tiny_pair_dir: Path, draft: Path, **settings: object) -> ModelPair:
    settings = {"dtype": "float64", "draft_vocabulary": None} | settings
    return open_pair(str(tiny_pair_dir / "target"), str(draft), **settings)


def logits(pair: ModelPair) -> torch.Tensor:
    pair.target.forward(TEXT[:-1])
    rows = [pair.draft.forward(TEXT).logits, pair.draft.forward(TEXT[:1]).logits]
    return torch.cat(rows)


def written(folder: Path, name: str, form: str) -> Path:
    model = random_model(FLAVOURS[name], qwen=name == "residual")
    if form == "eagle1":
        return write_eagle1(folder, model)
    if form == "speculators":
        return write_speculators(folder, model, SAYS)
    return write_flat(folder, model, SAYS, forge=form == "specforge")


READ = [
    *[(name, "speculators") for name in ("plain", "residual", "before_fc", "each")],
    ("usual", "safeailab"),
    *[(name, "specforge") for name in ("plain", "no_norm")],
    ("eagle1", "eagle1"),
]


@pytest.mark.parametrize(("name", "form"), READ)
def test_what_is_read_has_the_logits_of_what_was_written(
    name: str, form: str, tiny_pair_dir: Path, tmp_path: Path
) -> None:
    found = opened(tiny_pair_dir, written(tmp_path / "draft", name, form))
    assert isinstance(found.draft, PublishedDraft)
    expected = published_pair(FLAVOURS[name], qwen=name == "residual")
    model, target = expected.draft.model, expected.target.model
    if form == "safeailab":
        model.embed_tokens.weight.copy_(target.model.embed_tokens.weight)
    if form == "eagle1":
        model.lm_head.weight.copy_(target.lm_head.weight)
    wanted, got = logits(expected), logits(found)
    said = torch.arange(32) if form == "eagle1" else SAYS
    torch.testing.assert_close(got[:, said], wanted[:, said], rtol=1e-5, atol=1e-6)
    assert got.isfinite().any(0).nonzero().flatten().tolist() == said.tolist()
    assert found.draft.model.flavour == FLAVOURS[name]


def test_how_many_states_are_joined_is_said_where_engines_look(tmp_path: Path) -> None:
    folder = written(tmp_path / "draft", "before_fc", "speculators")
    layer = json.loads((folder / "config.json").read_text())["transformer_layer_config"]
    assert layer["num_aux_hidden_states"] == len(FLAVOURS["before_fc"].layers) == 2


def test_each_flag_is_another_draft(tiny_pair_dir: Path, tmp_path: Path) -> None:
    """Another fingerprint, too: harvests belong to one of them."""
    folder = written(tmp_path / "draft", "plain", "speculators")
    one = pair_identity(opened(tiny_pair_dir, folder))["draft"]
    change(folder, norm_before_residual=True)
    other = opened(tiny_pair_dir, folder)
    assert other.draft.model.flavour.norm_before_residual
    assert pair_identity(other)["draft"] != one


@pytest.mark.parametrize("kind", ["default", "linear", "yarn"])
def test_the_first_dimensions_of_a_head_are_rotated_where_it_says_so(
    kind: str, tiny_pair_dir: Path, tmp_path: Path
) -> None:
    """By the angles that another family's own module gives, over as many dimensions."""
    folder = written(tmp_path / "draft", "plain", "speculators")
    scaling = {"rope_type": kind, "rope_theta": 500.0, "partial_rotary_factor": 2 / 3}
    scaling |= {} if kind == "default" else {"factor": 2.0}
    rope(folder, **scaling)
    draft = opened(tiny_pair_dir, folder).draft
    sizes = {"hidden_size": 24, "num_attention_heads": 4, "max_position_embeddings": 96}
    config = PhiConfig(**sizes, rope_parameters=scaling)
    x, position = torch.randn(1, 4, 1, 6).double(), torch.tensor([[7]])
    cos, sin = PhiRotaryEmbedding(config)(x, position)
    query, _ = apply_rotary_pos_emb(x[..., :4], x[..., :4], cos, sin)
    found = rotate(x, *draft.network._rotation[:, position].unsqueeze(2))
    torch.testing.assert_close(found, torch.cat([query, x[..., 4:]], -1))
    whole = written(tmp_path / "whole", "plain", "speculators")
    rope(whole, **scaling | {"partial_rotary_factor": 1.0})
    pairs = [opened(tiny_pair_dir, path) for path in (folder, whole)]
    assert not torch.allclose(*map(logits, pairs))
    assert pair_identity(pairs[0])["draft"] != pair_identity(pairs[1])["draft"]


def test_rotations_as_older_files_say_them(tiny_pair_dir: Path, tmp_path: Path) -> None:
    newer, older = (written(tmp_path / name, "plain", "speculators") for name in ("new", "old"))
    rope(newer, rope_type="linear", factor=2.0, rope_theta=500.0, partial_rotary_factor=2 / 3)
    scaling = {"type": "linear", "factor": 2.0}
    inner(older, rope_parameters=None, rope_scaling=scaling, rope_theta=500.0)
    inner(older, partial_rotary_factor=2 / 3)
    wanted, found = (logits(opened(tiny_pair_dir, folder)) for folder in (newer, older))
    assert torch.equal(wanted, found)


def test_a_window_as_long_as_the_context_is_none(tiny_pair_dir: Path, tmp_path: Path) -> None:
    folder = written(tmp_path / "draft", "plain", "speculators")
    plain = logits(opened(tiny_pair_dir, folder))
    inner(folder, sliding_window=16)
    assert torch.equal(logits(opened(tiny_pair_dir, folder, max_length=16)), plain)
    inner(folder, sliding_window=16, use_sliding_window=False)
    assert torch.equal(logits(opened(tiny_pair_dir, folder)), plain)


def test_a_tied_output_layer_is_the_target_s_or_refused(
    tiny_pair_dir: Path, tmp_path: Path
) -> None:
    folder = write_eagle1(tmp_path / "draft", random_model(FLAVOURS["eagle1"]))
    change(folder, tie_word_embeddings=True)
    with pytest.raises(UserError, match="expected tie_word_embeddings false"):
        opened(tiny_pair_dir, folder)


def test_layers_that_are_not_named_are_the_usual_ones(tiny_pair_dir: Path, tmp_path: Path) -> None:
    folder = written(tmp_path / "draft", "plain", "speculators")
    change(folder, eagle_aux_hidden_state_layer_ids=None)
    assert opened(tiny_pair_dir, folder).draft.model.flavour.layers == (2, 2, 1)


def change(folder: Path, **values: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def reshape(folder: Path, name: str, tensor: torch.Tensor | None) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors.pop(name, None)
    save_file(tensors | ({} if tensor is None else {name: tensor}), folder / "model.safetensors")


def inner(folder: Path, **values: object) -> None:
    config = json.loads((folder / "config.json").read_text())["transformer_layer_config"]
    change(folder, transformer_layer_config=config | values)


def rope(folder: Path, **values: object) -> None:
    inner(folder, rope_parameters={"rope_type": "default", "rope_theta": 10000.0} | values)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut": (lambda f: (f / "model.safetensors").write_bytes(b"no"), "model.safetensors is damaged"),
    "no weights": (
        lambda f: (f / "model.safetensors").unlink(),
        "expected model.safetensors or pytorch_model.bin in .*, got neither",
    ),
    "another kind": (
        lambda f: change(f, speculators_model_type="mlp"),
        "expected a speculator of kind eagle3, got 'mlp'",
    ),
    "both norms": (
        lambda f: change(f, norm_before_fc=True, fc_norm=True),
        "expected norm_before_fc or fc_norm in its config.json, got both",
    ),
    "deep layers": (
        lambda f: change(f, eagle_aux_hidden_state_layer_ids=[1, 2, 4]),
        r"expected eagle_aux_hidden_state_layer_ids from 0 to 3, .* got \[1, 2, 4\]",
    ),
    "no layers": (
        lambda f: change(f, transformer_layer_config=None),
        "expected transformer_layer_config in its config.json, got none",
    ),
    "another activation": (
        lambda f: inner(f, hidden_act="gelu"),
        "expected hidden_act silu in its config.json, got gelu",
    ),
    "an activation under another name": (
        lambda f: inner(f, hidden_activation="gelu_pytorch_tanh"),
        "expected hidden_activation silu in its config.json, got gelu_pytorch_tanh",
    ),
    "a scale of the logits": (
        lambda f: inner(f, logit_scale=0.5),
        "expected no logit_scale in its config.json, got 0.5",
    ),
    "a scale of attention": (
        lambda f: inner(f, attention_multiplier=0.1),
        "expected no attention_multiplier in its config.json, got 0.1",
    ),
    "a cap": (
        lambda f: inner(f, final_logit_softcapping=30.0),
        "expected no final_logit_softcapping in its config.json, got 30",
    ),
    "more layers": (
        lambda f: inner(f, num_hidden_layers=2),
        "expected num_hidden_layers 1, as its weights have in its config.json, got 2",
    ),
    "a norm that is none here": (
        lambda f: change(f, norm_before_lm_head=True),
        "expected no norm_before_lm_head in its config.json, got True",
    ),
    "a window": (
        lambda f: inner(f, sliding_window=16),
        "the whole context of 96 tokens, got sliding_window 16.* Set pair.max_length",
    ),
    "a window of which nobody says whether it is used": (
        lambda f: inner(f, sliding_window=16, use_sliding_window=None),
        "the whole context of 96 tokens, got sliding_window 16",
    ),
    "a window that is used": (
        lambda f: inner(f, sliding_window=16, use_sliding_window=True),
        "the whole context of 96 tokens, got sliding_window 16",
    ),
    "a layer with a window": (
        lambda f: inner(
            f, sliding_window=16, use_sliding_window=False, layer_types=["sliding_attention"]
        ),
        "the whole context of 96 tokens, got sliding_window 16",
    ),
    "half of three dimensions": (
        lambda f: rope(f, partial_rotary_factor=0.5),
        "expected partial_rotary_factor of an even number of 6 in its config.json, got 0.5",
    ),
    "rotations by layer": (
        lambda f: inner(f, rope_parameters={"full_attention": {"rope_theta": 500.0}}),
        "expected rope_parameters that are the same for all layers",
    ),
    "rotations that follow the text": (
        lambda f: rope(f, rope_type="dynamic", factor=2.0),
        "expected a rope_type of default, linear, llama3, yarn in its config.json, got dynamic",
    ),
    "two rotations": (
        lambda f: inner(f, rope_theta=500.0),
        "expected rope_parameters alone in its config.json, got other values in rope_theta",
    ),
    "another vocabulary": (
        lambda f: inner(f, vocab_size=40),
        "expected vocab_size 32, as of pair.target, got 40",
    ),
    "layers that are no list": (
        lambda f: change(f, eagle_aux_hidden_state_layer_ids=3),
        "expected eagle_aux_hidden_state_layer_ids from 0 to 3, .* got 3",
    ),
    "a flag that is none": (
        lambda f: change(f, norm_output="yes"),
        "expected norm_output to be true or false in its config.json, got 'yes'",
    ),
    "a size that is none": (
        lambda f: inner(f, hidden_size="big"),
        "its config.json is none of a Llama's .*expected int, got str",
    ),
    "no heads": (lambda f: inner(f, num_attention_heads=0), "its config.json is none of a Llama's"),
    "less than no heads": (
        lambda f: inner(f, num_attention_heads=-1),
        r"is none of a Llama's \(num_attention_heads -1\)",
    ),
    "a list": (lambda f: (f / "config.json").write_text("[]"), "cannot read a model from"),
    "nothing": (lambda f: (f / "config.json").write_text("null"), "cannot read a model from"),
    "quantised": (
        lambda f: reshape(f, "fc.weight", torch.zeros(24, 72, dtype=torch.int8)),
        r"expected fc.weight in bfloat16, float16 or float32, got int8 of shape \[24, 72\]",
    ),
    "a number": (
        lambda f: reshape(f, "lm_head.weight", torch.tensor(1.0)),
        r"expected lm_head.weight in bfloat16, float16 or float32, got float32 of shape \[\]",
    ),
    "another size": (
        lambda f: reshape(f, "fc.weight", torch.zeros(24, 96)),
        r"expected fc.weight of shape \[24, 72\] for pair.target, got \[24, 96\]",
    ),
    "a missing weight": (
        lambda f: reshape(f, "norm.weight", None),
        r"expected norm.weight of shape \[24\] for pair.target, got None",
    ),
    "no d2t": (lambda f: reshape(f, "d2t", None), "expected d2t, for its output layer has 16"),
    "a short d2t": (
        lambda f: reshape(f, "d2t", torch.zeros(3).long()),
        r"expected d2t with 16 whole numbers, got torch.int64 of shape \[3\]",
    ),
    "a d2t of bits": (
        lambda f: reshape(f, "d2t", torch.ones(16, dtype=torch.bool)),
        r"expected d2t with 16 whole numbers, got torch.bool of shape \[16\]",
    ),
    "a foreign d2t": (
        lambda f: reshape(f, "d2t", torch.full((16,), 30)),
        "expected d2t to name 16 different tokens from 0 to 31, got others",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_what_is_damaged_or_of_another_target_is_one_line(
    name: str, tiny_pair_dir: Path, tmp_path: Path
) -> None:
    folder, (damage, message) = written(tmp_path / "d", "plain", "speculators"), DAMAGES[name]
    damage(folder)
    with pytest.raises(UserError, match=rf"^pair\.draft: .*{message}") as error:
        opened(tiny_pair_dir, folder)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "whole", [torch.ones(3), [torch.ones(2)], {1: torch.ones(2)}, {"midlayer.a": {}}]
)
def test_a_pickle_of_something_else_is_a_line(
    whole: object, tiny_pair_dir: Path, tmp_path: Path
) -> None:
    folder = written(tmp_path / "draft", "usual", "safeailab")
    change(folder, architectures=["LlamaForCausalLMEagle3"])
    torch.save(whole, folder / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"^pair\.draft: .*it holds other things than tensors"):
        opened(tiny_pair_dir, folder)


def test_a_pickle_of_the_older_kind_is_read(tiny_pair_dir: Path, tmp_path: Path) -> None:
    folder = written(tmp_path / "draft", "usual", "safeailab")
    path = folder / "pytorch_model.bin"
    torch.save(torch.load(path, weights_only=True), path, _use_new_zipfile_serialization=False)
    assert opened(tiny_pair_dir, folder).draft.reads_target


class Evil:
    def __reduce__(self) -> tuple:
        return exec, ("raise SystemExit('it was run')",)


def test_a_pickle_is_not_run(tiny_pair_dir: Path, tmp_path: Path) -> None:
    folder = written(tmp_path / "draft", "usual", "safeailab")
    state = torch.load(folder / "pytorch_model.bin", weights_only=True)
    change(folder, architectures=["LlamaForCausalLMEagle3"])
    torch.save(state | {"evil": Evil()}, folder / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"^pair\.draft: .*pytorch_model\.bin is damaged"):
        opened(tiny_pair_dir, folder)


def test_what_belongs_to_other_drafts_is_refused(tiny_pair_dir: Path, tmp_path: Path) -> None:
    folder = written(tmp_path / "draft", "plain", "speculators")
    save_file({"tokens": torch.arange(5)}, tmp_path / "some.safetensors")
    with pytest.raises(UserError, match=r"^pair\.draft_vocabulary: expected null"):
        opened(tiny_pair_dir, folder, draft_vocabulary=str(tmp_path / "some.safetensors"))
    with pytest.raises(UserError, match=r"^pair\.draft_options: expected none .* got quantiz"):
        opened(tiny_pair_dir, folder, draft_options={"quantization_config": {"a": 1}})


def test_an_ordinary_draft_is_none(tiny_pair_dir: Path) -> None:
    folders = {name: str(tiny_pair_dir / name) for name in ("target", "draft")}
    found = load_pair(pair_settings(**folders))
    assert not found.draft.reads_target
