"""Published EAGLE drafts: what is read is what was written, and all else is one line; rows do not
depend on how they came into the cache, and are those of the definition."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F
from transformers import PhiConfig
from transformers.models.phi.modeling_phi import PhiRotaryEmbedding, apply_rotary_pos_emb

from decoding.engines.serial import SerialEngine
from decoding.models.cached_lm import CachedLM
from decoding.models.cpu_llama import rotate
from decoding.models.eagle.published import Flavour, PublishedDraft, PublishedModel
from decoding.models.loading import ModelPair, pair_identity
from decoding.pair import open_pair
from decoding.sampling import Sampler, Warp
from decoding.stopping.never import Never
from decoding.structures.chain import Chain
from decoding.structures.dyspec import DySpecHeap
from decoding.verifiers.rrsw import RrswVerifier
from decoding.verifiers.token import TokenVerifier
from runtime.errors import UserError
from tests.helpers.damage.refusals import refuses
from tests.helpers.models.eagles import (
    FLAVOURS,
    SAYS,
    published_pair,
    random_model,
    write_eagle1,
    write_flat,
    write_speculators,
)
from tests.invariant.test_eagle_draft import cache

TEXT = torch.tensor([3, 4, 5, 6, 7, 8])
PROMPT = torch.randint(1, 32, (12,), generator=torch.Generator().manual_seed(3))
CLOSE = dict(rtol=1e-5, atol=1e-6)
KINDS = [*FLAVOURS.items(), ("two_layers", FLAVOURS["each"]), ("qwen3", FLAVOURS["residual"])]


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
def test_what_is_read_has_the_logits_of_what_was_written(name, form, tiny_pair_dir, tmp_path):
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


def test_each_flag_is_another_draft(tiny_pair_dir, tmp_path):
    folder = written(tmp_path / "draft", "plain", "speculators")
    one = pair_identity(opened(tiny_pair_dir, folder))["draft"]
    change(folder, norm_before_residual=True, eagle_aux_hidden_state_layer_ids=None)
    other = opened(tiny_pair_dir, folder)
    assert other.draft.model.flavour.norm_before_residual
    assert other.draft.model.flavour.layers == (2, 2, 1), "the usual ones, where none are named"
    assert pair_identity(other)["draft"] != one


@pytest.mark.parametrize("kind", ["default", "linear", "yarn"])
def test_the_first_dimensions_of_a_head_are_rotated_where_it_says_so(kind, tiny_pair_dir, tmp_path):
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


def test_rotations_as_older_files_say_them(tiny_pair_dir, tmp_path):
    newer, older = (written(tmp_path / name, "plain", "speculators") for name in ("new", "old"))
    rope(newer, rope_type="linear", factor=2.0, rope_theta=500.0, partial_rotary_factor=2 / 3)
    scaling = {"type": "linear", "factor": 2.0}
    inner(older, rope_parameters=None, rope_scaling=scaling, rope_theta=500.0)
    inner(older, partial_rotary_factor=2 / 3)
    wanted, found = (logits(opened(tiny_pair_dir, folder)) for folder in (newer, older))
    assert torch.equal(wanted, found)


def test_a_window_as_long_as_the_context_is_none(tiny_pair_dir, tmp_path):
    folder = written(tmp_path / "draft", "plain", "speculators")
    plain = logits(opened(tiny_pair_dir, folder))
    inner(folder, sliding_window=16)
    assert torch.equal(logits(opened(tiny_pair_dir, folder, max_length=16)), plain)
    inner(folder, sliding_window=16, use_sliding_window=False)
    assert torch.equal(logits(opened(tiny_pair_dir, folder)), plain)


def test_a_tied_output_layer_is_the_target_s_or_refused(tiny_pair_dir, tmp_path):
    folder = write_eagle1(tmp_path / "draft", random_model(FLAVOURS["eagle1"]))
    change(folder, tie_word_embeddings=True)
    refuses("expected tie_word_embeddings false", opened, tiny_pair_dir, folder)


def change(folder: Path, **values: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def reshape(folder: Path, **changed: torch.Tensor | None) -> None:
    tensors = load_file(folder / "model.safetensors") | changed
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, folder / "model.safetensors")


def overwrite(folder: Path, **files: bytes | None) -> None:
    for name, content in files.items():
        (folder / name).write_bytes(content) if content else (folder / name).unlink()


def inner(folder: Path, **values: object) -> None:
    config = json.loads((folder / "config.json").read_text())["transformer_layer_config"]
    change(folder, transformer_layer_config=config | values)


def rope(folder: Path, **values: object) -> None:
    inner(folder, rope_parameters={"rope_type": "default", "rope_theta": 10000.0} | values)


SLIDING, TYPES = {"sliding_window": 16}, "bfloat16, float16 or float32"
WEIGHTS, WINDOW = "model.safetensors", "the whole context of 96 tokens, got sliding_window 16"
NAMED = "eagle_aux_hidden_state_layer_ids"
NO_LLAMA, FC = "its config.json is none of a Llama's", "fc.weight"
ANOTHER: list[tuple[Callable[..., None], dict[str, Any], str]] = [
    (change, {"speculators_model_type": "mlp"}, "a speculator of kind eagle3, got 'mlp'"),
    (change, {"norm_before_fc": True, "fc_norm": True}, "norm_before_fc or fc_norm .* got both"),
    (change, {NAMED: [1, 2, 4]}, rf"{NAMED} from 0 to 3, .* got \[1, 2, 4\]"),
    (change, {NAMED: 3}, f"{NAMED} from 0 to 3, .* got 3"),
    (change, {"transformer_layer_config": None}, "transformer_layer_config .* got none"),
    (change, {"norm_before_lm_head": True}, "no norm_before_lm_head .* got True"),
    (change, {"norm_output": "yes"}, "norm_output to be true or false .* got 'yes'"),
    (inner, {"hidden_act": "gelu"}, "hidden_act silu .* got gelu"),
    (inner, {"hidden_activation": "gelu_new"}, "hidden_activation silu .* got gelu_new"),
    (inner, {"logit_scale": 0.5}, "no logit_scale .* got 0.5"),
    (inner, {"attention_multiplier": 0.1}, "no attention_multiplier .* got 0.1"),
    (inner, {"final_logit_softcapping": 30.0}, "no final_logit_softcapping .* got 30"),
    (inner, {"num_hidden_layers": 2}, "num_hidden_layers 1, as its weights have .* got 2"),
    (inner, SLIDING, f"{WINDOW}.* Set pair.max_length"),
    *((inner, {**SLIDING, "use_sliding_window": use}, WINDOW) for use in (None, True)),
    (inner, {**SLIDING, "use_sliding_window": False, "layer_types": ["sliding_attention"]}, WINDOW),
    (inner, {"rope_parameters": {"full_attention": {"rope_theta": 500.0}}}, "the same for all"),
    (inner, {"rope_theta": 500.0}, "rope_parameters alone .* got other values in rope_theta"),
    (inner, {"vocab_size": 40}, "vocab_size 32, as of pair.target, got 40"),
    (inner, {"hidden_size": "big"}, f"{NO_LLAMA} .*expected int, got str"),
    (inner, {"num_attention_heads": 0}, NO_LLAMA),
    (inner, {"num_attention_heads": -1}, rf"{NO_LLAMA} \(num_attention_heads -1\)"),
    (rope, {"partial_rotary_factor": 0.5}, "partial_rotary_factor of an even number of 6 .* got 0"),
    (rope, {"rope_type": "dynamic", "factor": 2.0}, "of default, linear, llama3, yarn .* dynamic"),
    (reshape, {FC: torch.zeros(24, 72).char()}, rf"{FC} in {TYPES}, got int8 of shape \[24, 72\]"),
    (reshape, {"lm_head.weight": torch.tensor(1.0)}, rf"in {TYPES}, got float32 of shape \[\]"),
    (reshape, {FC: torch.zeros(24, 96)}, rf"{FC} of shape \[24, 72\] .*target, got \[24, 96\]"),
    (reshape, {"norm.weight": None}, r"norm.weight of shape \[24\] for pair.target, got None"),
    (reshape, {"d2t": None}, "expected d2t, for its output layer has 16"),
    (reshape, {"d2t": torch.zeros(3).long()}, r"d2t with 16 .* got torch.int64 of shape \[3\]"),
    (reshape, {"d2t": torch.ones(16).bool()}, r"d2t with 16 .* got torch.bool of shape \[16\]"),
    (reshape, {"d2t": torch.full((16,), 30)}, "d2t to name 16 different tokens from 0 to 31"),
    (overwrite, {"config.json": b"[]"}, "cannot read a model from"),
    (overwrite, {"config.json": b"null"}, "cannot read a model from"),
    (overwrite, {WEIGHTS: b"no"}, f"{WEIGHTS} is damaged"),
    (overwrite, {WEIGHTS: None}, f"expected {WEIGHTS} or pytorch_model.bin in .*, got neither"),
]


@pytest.mark.parametrize(("damage", "values", "message"), ANOTHER)
def test_damage_and_another_target_are_one_line(damage, values, message, tiny_pair_dir, tmp_path):
    folder = written(tmp_path / "d", "plain", "speculators")
    damage(folder, **values)
    refuses(rf"^pair\.draft: .*{message}", opened, tiny_pair_dir, folder)


class Evil:
    def __reduce__(self) -> tuple:
        return exec, ("raise SystemExit('it was run')",)


def test_an_older_pickle_is_read_and_others_are_a_line_and_not_run(tiny_pair_dir, tmp_path):
    folder = written(tmp_path / "draft", "usual", "safeailab")
    path = folder / "pytorch_model.bin"
    state = torch.load(path, weights_only=True)
    torch.save(state, path, _use_new_zipfile_serialization=False)
    assert opened(tiny_pair_dir, folder).draft.reads_target
    change(folder, architectures=["LlamaForCausalLMEagle3"])
    others = torch.ones(3), [torch.ones(2)], {1: torch.ones(2)}, {"midlayer.a": {}}
    faults = [(whole, ".*it holds other things than tensors") for whole in others]
    for whole, fault in (*faults, (state | {"evil": Evil()}, "")):
        torch.save(whole, path)
        refuses(rf"^pair\.draft: .*_model\.bin is damaged{fault}", opened, tiny_pair_dir, folder)


def test_what_belongs_to_other_drafts_is_refused(tiny_pair_dir, tmp_path):
    folder = written(tmp_path / "draft", "plain", "speculators")
    save_file({"tokens": torch.arange(5)}, tmp_path / "some.safetensors")
    with pytest.raises(UserError, match=r"^pair\.draft_vocabulary: expected null"):
        opened(tiny_pair_dir, folder, draft_vocabulary=str(tmp_path / "some.safetensors"))
    with pytest.raises(UserError, match=r"^pair\.draft_options: expected none .* got quantiz"):
        opened(tiny_pair_dir, folder, draft_options={"quantization_config": {"a": 1}})

    assert not opened(tiny_pair_dir, tiny_pair_dir / "draft").draft.reads_target, "an ordinary one"


def pair_of(name: str, flavour: Flavour, vocabulary: Tensor | None = SAYS) -> ModelPair:
    """Two layers, or Qwen3's, where the name says so."""
    more = {"layers": 2} if name == "two_layers" else {"qwen": name == "qwen3"}
    return published_pair(flavour, vocabulary, attention_bias=name == "each", **more)


def rms(x: Tensor, norm: torch.nn.Module) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], norm.weight, 1e-6)


@torch.no_grad()
def written_out(model: PublishedModel, states: Tensor, tokens: Tensor, drafted: int) -> Tensor:
    """Logits [n] of the last of `tokens` [n + 1], whose first one has no row; the last `drafted`
    rows are fed what came before. states: [n - drafted, L + 1, H]. One layer, EAGLE-3."""
    flavour, layer = model.flavour, model.layers[0]
    g = states[:, :-1]
    if flavour.fc_norm:
        g = torch.stack([rms(g[:, i], norm) for i, norm in enumerate(model.fc_norm)], 1)
    g = g.flatten(1)
    features = list(model.fc(rms(g, model.input_norm) if flavour.norm_before_fc else g))
    keys, values, attention = [], [], layer.self_attn
    for position, token in enumerate(tokens[1:], 1):
        f, e = features[position - 1], model.embed_tokens.weight[token]
        normed = rms(f, layer.hidden_norm)
        u = torch.cat([rms(e, layer.input_layernorm), normed])
        angle = position * 10000.0 ** (-torch.arange(0, 6, 2) / 6).double()
        turn = torch.polar(torch.ones(3).double(), angle)

        def heads(linear: torch.nn.Module, turned: bool = True, u=u, turn=turn) -> Tensor:
            x = linear(u).view(-1, 6)
            if not turned:
                return x
            found = torch.complex(x[:, :3], x[:, 3:]) * turn
            return torch.cat([found.real, found.imag], 1)

        keys.append(heads(attention.k_proj).repeat_interleave(2, 0))
        values.append(heads(attention.v_proj, False).repeat_interleave(2, 0))
        scores = torch.einsum("hd,khd->hk", heads(attention.q_proj), torch.stack(keys)) / 6**0.5
        read = torch.einsum("hk,khd->hd", scores.softmax(-1), torch.stack(values)).flatten()
        x = (normed if flavour.norm_before_residual else f) + attention.o_proj(read)
        x = x + layer.mlp(rms(x, layer.post_attention_layernorm))
        out = rms(x, model.norm) if flavour.final_norm else x
        if position > len(states) - 1:
            features.append(out if flavour.norm_output else x)
    return model.lm_head(out)


@pytest.mark.parametrize("name", [name for name in FLAVOURS if name != "eagle1"])
def test_logits_are_those_of_the_definition(name):
    pair = published_pair(FLAVOURS[name], SAYS, attention_bias=name == "each")
    pair.target.forward(PROMPT[:8])
    expected = written_out(pair.draft.model, pair.target.states[:8], PROMPT[:12], drafted=3)
    pair.draft.forward(PROMPT[:9])
    for row in (9, 10, 11):
        found = pair.draft.forward(PROMPT[row : row + 1]).logits[-1]
    torch.testing.assert_close(found[SAYS].double(), expected, **CLOSE)
    assert found.isfinite().nonzero().flatten().tolist() == SAYS.tolist()


@pytest.mark.parametrize(("name", "flavour"), KINDS)
def test_one_by_one_is_all_at_once(name, flavour):
    pair = pair_of(name, flavour)
    pair.target.forward(PROMPT)
    whole = pair.draft.forward(PROMPT).logits
    pair.draft.reset()
    parts = [pair.draft.forward(PROMPT[i : i + 1]).logits for i in range(len(PROMPT))]
    torch.testing.assert_close(torch.cat(parts), whole, **CLOSE)
    assert len(whole.argmax(-1).unique()) > 1


@pytest.mark.parametrize(("name", "flavour"), KINDS)
def test_a_tree_is_its_paths(name, flavour):
    pair, parents = pair_of(name, flavour), [[-1, -1], [0, 0, 1], [2, 4]]
    tokens, grown, found = [[5, 9], [3, 4, 6], [8, 2]], [], []
    pair.target.forward(PROMPT[:6])
    pair.draft.forward(PROMPT[:7])
    for some, of, extend in zip(tokens, parents, (False, True, True), strict=True):
        output = pair.draft.forward(torch.tensor(some), torch.tensor(of), extend=extend)
        grown += [[*(grown[p] if p >= 0 else []), t] for t, p in zip(some, of, strict=True)]
        found.append(output.logits)
    for path, logits in zip(grown, torch.cat(found), strict=True):
        pair.draft.crop(7)
        for token in path:
            alone = pair.draft.forward(torch.tensor([token])).logits[-1]
        torch.testing.assert_close(logits, alone, **CLOSE)


@pytest.mark.parametrize(("name", "flavour"), KINDS)
def test_what_a_text_begins_with_only_it_sees(name, flavour):
    """Published drafts have no row for the first token."""
    pair = pair_of(name, flavour)
    pair.target.forward(PROMPT)
    before = pair.draft.forward(PROMPT).logits
    pair.draft.reset()
    other = PROMPT.clone()
    other[0] = 31 - other[0]
    after = pair.draft.forward(other).logits  # the target's states are the same
    torch.testing.assert_close(before[1:], after[1:], rtol=0, atol=0)
    assert not torch.equal(before[0], after[0])


@pytest.mark.parametrize("builds", [Chain(3), DySpecHeap(6)])
@pytest.mark.parametrize(("name", "flavour"), KINDS)
def test_greedy_output_is_the_targets_and_nothing_stays_of_a_round(name, flavour, builds):
    pair = pair_of(name, flavour)
    verifier = TokenVerifier() if isinstance(builds, Chain) else RrswVerifier()
    engine = SerialEngine(pair, builds, Never(), verifier, Warp(0.0), Warp())
    prompt = PROMPT[:4]
    found, text = engine.decode(prompt, 16, Sampler.seeded(0)).tokens, prompt
    for _ in found:
        last = CachedLM(pair.target.model).forward(text, logits="last").logits[-1]
        text = torch.cat([text, last.argmax()[None]])
    assert found == text[len(prompt) :].tolist()
    length = pair.draft.length
    left = cache(pair.draft)
    pair.draft.reset()
    pair.draft.forward(text[:length])
    for ours, fresh in zip(left, cache(pair.draft), strict=True):
        torch.testing.assert_close(ours, fresh, **CLOSE)
