"""Loading a pair: what is refused, and what identifies it."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedTokenizerFast

from decoding.models.draft_vocabulary import FILE as VOCABULARY
from decoding.models.draft_vocabulary import write_vocabulary
from decoding.models.loading import check_same_vocabulary, load_pair, pair_identity
from decoding.models.machine import dtypes
from decoding.models.options import resolve_dtype
from decoding.pair import pair_settings
from decoding.settings import Pair
from runtime.errors import UserError


def pair_config(folder: Path, **changes: Any) -> Pair:
    models = {side: str(folder / side) for side in ("target", "draft")}
    fields = {"dtype": "float64", "max_length": 64, "draft_vocabulary": None}
    return pair_settings(**models | fields | changes)


def tokenizer(words: list[str]) -> PreTrainedTokenizerFast:
    vocab = {word: index for index, word in enumerate(words)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(vocab, unk_token=words[0]))
    )


@pytest.mark.smoke
def test_pair_loads_and_generates(tiny_pair_dir: Path) -> None:
    pair = load_pair(pair_config(tiny_pair_dir))
    assert pair.target.max_length == pair.draft.max_length == 64
    assert pair.eos_ids == (0,)
    output = pair.target.forward(torch.tensor([1, 2, 3]), hidden=range(-5, 0))
    assert output.logits.shape == (3, 32) and output.logits.dtype == torch.float32
    assert output.hidden is not None and output.hidden.shape == (5, 3, 24)


@pytest.mark.parametrize("side", ["target", "draft"])
def test_missing_models_name_key_and_remedy(tiny_pair_dir: Path, tmp_path: Path, side: str) -> None:
    for missing in (str(tmp_path / "nowhere"), "~/no/such/folder", str(tmp_path)):
        with pytest.raises(
            UserError, match=rf"^pair\.{side}: no model in .*python pairs/build_pair\.py"
        ):
            load_pair(pair_config(tiny_pair_dir, **{side: missing}))


def test_damaged_model_is_one_line(tiny_pair_dir: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(tiny_pair_dir / "draft", broken)
    (broken / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"^pair\.draft: ") as refusal:
        load_pair(pair_config(tiny_pair_dir, draft=str(broken)))
    assert "\n" not in str(refusal.value)
    shutil.copytree(tiny_pair_dir / "draft", broken, dirs_exist_ok=True)
    weights = {
        name: tensor.clone() for name, tensor in load_file(broken / "model.safetensors").items()
    }
    (broken / "model.safetensors").write_bytes(b"half a file")
    with pytest.raises(UserError, match=r"^pair\.draft: cannot load"):
        load_pair(pair_config(tiny_pair_dir, draft=str(broken)))
    weights.pop("model.norm.weight")
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"^pair\.draft: .* lacks 1 weights, model\.norm\.weight"):
        load_pair(pair_config(tiny_pair_dir, draft=str(broken)))


def test_unavailable_device_and_unknown_dtype(tiny_pair_dir: Path) -> None:
    if not torch.accelerator.is_available():
        with pytest.raises(UserError, match=r"^pair\.draft_device: cuda:0"):
            load_pair(pair_config(tiny_pair_dir, draft_device="cuda:0"))
    with pytest.raises(UserError, match="int9"):
        load_pair(pair_config(tiny_pair_dir, target_dtype="int9"))


@pytest.mark.parametrize("fast", [False, True])
def test_dtype_auto_is_that_of_the_files_where_the_processor_multiplies_it(
    fast: bool, tiny_pair_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("decoding.models.options.fast_bfloat16", lambda: fast)
    narrow = torch.bfloat16 if fast else torch.float32
    assert (
        resolve_dtype("auto", "cpu", torch.bfloat16)
        == resolve_dtype("auto", "cpu", "bfloat16")
        == narrow
    )
    assert {
        resolve_dtype("auto", "cpu", stored) for stored in (None, torch.float16, torch.float64)
    } == {torch.float32}
    for device in ("cuda:0", "auto"):
        for stored in (None, "float32", torch.float64, torch.bfloat16):
            assert resolve_dtype("auto", device, stored) == torch.bfloat16
        assert resolve_dtype("auto", device, "float16") == torch.float16
    shutil.copytree(tiny_pair_dir, tmp_path / "pair")
    AutoModelForCausalLM.from_pretrained(
        tiny_pair_dir / "draft", dtype=torch.bfloat16
    ).save_pretrained(tmp_path / "pair/draft")
    pair = load_pair(pair_config(tmp_path / "pair", target_dtype="auto", draft_dtype="auto"))
    assert dtypes(pair) == {"target": "torch.float32", "draft": str(narrow)}


def test_a_draft_proposes_the_tokens_kept_beside_it(tiny_pair_dir: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_pair_dir, tmp_path / "pair")
    assert load_pair(pair_config(folder, draft_vocabulary="auto")).draft.vocabulary is None
    write_vocabulary(folder / "draft" / VOCABULARY, torch.arange(3, 9), {})
    found = load_pair(pair_config(folder, draft_vocabulary="auto")).draft.vocabulary
    assert found is not None and found.tolist() == [0, *range(3, 9)]
    assert load_pair(pair_config(folder, draft_vocabulary=None)).draft.vocabulary is None
    (folder / "draft" / VOCABULARY).write_bytes(b"cut")
    with pytest.raises(UserError, match=r"^pair\.draft_vocabulary: .* holds no draft vocabulary"):
        load_pair(pair_config(folder, draft_vocabulary="auto"))


def test_context_length_is_the_smaller_of_asked_and_possible(tiny_pair_dir: Path) -> None:
    assert load_pair(pair_config(tiny_pair_dir, max_length=None)).target.max_length == 96
    assert load_pair(pair_config(tiny_pair_dir, max_length=200)).draft.max_length == 96
    with pytest.raises(UserError, match=r"^pair\.max_length: -3"):
        load_pair(pair_config(tiny_pair_dir, max_length=-3))


def test_vocabularies_are_compared_token_by_token() -> None:
    words = ["<s>", "a", "b", "c"]
    check_same_vocabulary(tokenizer(words), tokenizer(words), 4)
    check_same_vocabulary(
        tokenizer(words), tokenizer(words[:3]), 4
    )  # an id one of them leaves unnamed
    with pytest.raises(UserError, match=r"^pair\.draft: .*token 1 is 'b' there, 'a' here"):
        check_same_vocabulary(tokenizer(words), tokenizer(["<s>", "b", "a", "c"]), 4)
    with pytest.raises(UserError, match=r"token 3 is 'c' there"):
        check_same_vocabulary(
            tokenizer(words), tokenizer(words), 3
        )  # beyond the smaller model's vocabulary


def test_identity_follows_content_not_place_or_dtype(tiny_pair_dir: Path, tmp_path: Path) -> None:
    first = load_pair(pair_config(tiny_pair_dir))
    moved = shutil.copytree(tiny_pair_dir, tmp_path / "moved")
    second = load_pair(pair_config(moved, target_dtype="float32"))
    assert pair_identity(first) == pair_identity(second)
    with torch.no_grad():
        second.draft.model.model.norm.weight[3] += 1
    changed = pair_identity(second)
    assert changed.pop("draft") != pair_identity(first)["draft"]
    assert changed.items() <= pair_identity(first).items()


ON_DISK = {
    **{f"model.layers.{layer}": "disk" if layer in (1, 2) else "cpu" for layer in range(4)},
    **{
        "model.embed_tokens": "cpu",
        "model.norm": "cpu",
        "model.rotary_emb": "cpu",
        "lm_head": "disk",
    },
}


@pytest.mark.smoke
@pytest.mark.filterwarnings("ignore:Some parameters are on the meta device")
def test_a_model_that_is_partly_on_disk_says_the_same(tiny_pair_dir: Path, tmp_path: Path) -> None:
    """A device for each part of the model, and an option for where the parts go that have none."""
    whole = load_pair(pair_config(tiny_pair_dir))
    options = {"offload_folder": str(tmp_path / "offload")}
    parts = load_pair(pair_config(tiny_pair_dir, target_device=ON_DISK, target_options=options))
    assert pair_identity(parts) == pair_identity(whole)
    for pair in (whole, parts):
        pair.target.forward(torch.tensor([3, 4, 5]), logits="none")
    tokens, parents = torch.tensor([6, 7, 8]), torch.tensor([-1, 0, 0])
    ours, theirs = (
        pair.target.forward(tokens, parents, hidden=(-2, -1), logits=[0, 2])
        for pair in (parts, whole)
    )
    assert ours.hidden is not None and theirs.hidden is not None
    torch.testing.assert_close(ours.logits, theirs.logits, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(ours.hidden, theirs.hidden, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"device_map": "auto"},
            r"^pair\.target_options: device_map cannot be given there\. Set pair\.target_device",
        ),
        (
            {"dtype": "float16"},
            r"^pair\.target_options: dtype cannot be given there\. Set pair\.target_dtype",
        ),
        (
            {"attn_implementation": "sdpa"},
            r"^pair\.target_options: attn_implementation cannot be given there",
        ),
        (
            {"colour": "red"},
            r"cannot load .*colour.*Check pair\.target_options=\{'colour': 'red'\}",
        ),
        (
            {"quantization_config": {"bits": 4}},
            r"cannot load .*quant_method.*Check pair\.target_options=",
        ),
        (
            {"quantization_config": {"quant_method": "magic"}},
            r"cannot load .*magic.*Check pair\.target_options=",
        ),
        ({"gguf_file": "none.gguf"}, r"^pair\.target: no model in "),
    ],
)
def test_bad_options_are_named(options: dict[str, Any], message: str, tiny_pair_dir: Path) -> None:
    with pytest.raises(UserError, match=message) as refusal:
        load_pair(pair_config(tiny_pair_dir, target_options=options))
    assert "\n" not in str(refusal.value)


def test_quantisation_becomes_the_class_of_its_method(
    tiny_pair_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {}

    def loading(source: str, **options: Any) -> None:
        given.update(options)
        raise ImportError("no such package")

    monkeypatch.setattr("decoding.models.loading.AutoModelForCausalLM.from_pretrained", loading)
    options = {"quantization_config": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}}
    with pytest.raises(
        UserError,
        match=r"^pair\.target: cannot load .*no such package.* Check pair\.target_options=",
    ):
        load_pair(pair_config(tiny_pair_dir, target_options=options))
    assert isinstance(given["quantization_config"], BitsAndBytesConfig)
    assert given["quantization_config"].bnb_4bit_quant_type == "nf4"
    assert given["device_map"] == "cpu" and given["dtype"] == torch.float64
