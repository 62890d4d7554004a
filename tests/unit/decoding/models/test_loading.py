"""Loading a pair: what is refused, what identifies it, which tokens end a response, and which of
them closes an answer given as text."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedTokenizerFast

from decoding.models import machine
from decoding.models.draft_vocabulary import FILE as VOCABULARY
from decoding.models.draft_vocabulary import write_vocabulary
from decoding.models.ends import closing_id, end_ids
from decoding.models.loading import check_same_vocabulary, load_pair, pair_identity
from decoding.models.options import resolve_dtype
from decoding.pair import pair_settings
from decoding.settings import Pair
from runtime.errors import UserError
from tests.helpers.damage.refusals import refuses
from tests.helpers.models.cached import close
from tests.helpers.models.tiny_pair import EOS, tiny_tokenizer

TURN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}END{% endfor %}"
PARTS = "{% for m in messages %}{% for p in m.content %}{{ p.text }}END{% endfor %}{% endfor %}"
SILENT = "{% for m in messages %}{{ m.content }}{% endfor %}"
STRICT = "{{ raise_exception('no assistant') }}"


def pair_config(folder: Path, **changes: Any) -> Pair:
    models = {side: str(folder / side) for side in ("target", "draft")}
    fields = {"dtype": "float64", "max_length": 64, "draft_vocabulary": None}
    return pair_settings(**models | fields | changes)


def tokenizer(words: list[str]) -> PreTrainedTokenizerFast:
    vocab = {word: index for index, word in enumerate(words)}
    backend = Tokenizer(models.WordLevel(vocab, unk_token=words[0]))
    return PreTrainedTokenizerFast(tokenizer_object=backend)


@pytest.mark.smoke
def test_pair_loads_and_generates(tiny_pair_dir):
    pair = load_pair(pair_config(tiny_pair_dir))
    assert pair.target.max_length == pair.draft.max_length == 64
    assert pair.eos_ids == (0,)
    output = pair.target.forward(torch.tensor([1, 2, 3]), hidden=range(-5, 0))
    assert output.logits.shape == (3, 32) and output.logits.dtype == torch.float32
    assert output.hidden is not None and output.hidden.shape == (5, 3, 24)


@pytest.mark.parametrize("side", ["target", "draft"])
def test_missing_models_name_key_and_remedy(tiny_pair_dir, tmp_path, side):
    for missing in (str(tmp_path / "nowhere"), "~/no/such/folder", str(tmp_path)):
        line = rf"^pair\.{side}: no model in .*python pairs/build_pair\.py"
        refuses(line, load_pair, pair_config(tiny_pair_dir, **{side: missing}))


def test_damaged_model_is_one_line(tiny_pair_dir, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(tiny_pair_dir / "draft", broken)
    (broken / "config.json").write_text("{")
    refuses(r"^pair\.draft: ", load_pair, pair_config(tiny_pair_dir, draft=str(broken)))
    shutil.copytree(tiny_pair_dir / "draft", broken, dirs_exist_ok=True)
    weights = load(Path(broken / "model.safetensors").read_bytes())
    (broken / "model.safetensors").write_bytes(b"half a file")
    refuses(r"^pair\.draft: cannot load", load_pair, pair_config(tiny_pair_dir, draft=str(broken)))
    weights.pop("model.norm.weight")
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"^pair\.draft: .* lacks 1 weights, model\.norm\.weight"):
        load_pair(pair_config(tiny_pair_dir, draft=str(broken)))


def test_unavailable_device_and_unknown_dtype(tiny_pair_dir):
    if not torch.accelerator.is_available():
        with pytest.raises(UserError, match=r"^pair\.draft_device: cuda:0"):
            load_pair(pair_config(tiny_pair_dir, draft_device="cuda:0"))
    refuses("int9", load_pair, pair_config(tiny_pair_dir, target_dtype="int9"))


@pytest.mark.parametrize("fast", [False, True])
def test_dtype_auto_is_that_of_files_where_it_is_fast(fast, tiny_pair_dir, tmp_path, monkeypatch):
    monkeypatch.setattr("decoding.models.options.fast_bfloat16", lambda: fast)
    narrow = torch.bfloat16 if fast else torch.float32
    for stored in ("bfloat16", torch.bfloat16, None, torch.float16, torch.float64):
        kept = narrow if "bfloat16" in str(stored) else torch.float32
        assert resolve_dtype("auto", "cpu", stored) == kept
    for device in ("cuda:0", "auto"):
        for stored in (None, "float32", torch.float64, torch.bfloat16):
            assert resolve_dtype("auto", device, stored) == torch.bfloat16
        assert resolve_dtype("auto", device, "float16") == torch.float16
    folder = shutil.copytree(tiny_pair_dir, tmp_path / "pair")
    draft = AutoModelForCausalLM.from_pretrained(folder / "draft", dtype=torch.bfloat16)
    draft.save_pretrained(folder / "draft")
    pair = load_pair(pair_config(folder, target_dtype="auto", draft_dtype="auto"))
    assert machine.dtypes(pair) == {"target": "torch.float32", "draft": str(narrow)}


def test_a_draft_proposes_the_tokens_kept_beside_it(tiny_pair_dir, tmp_path):
    folder = shutil.copytree(tiny_pair_dir, tmp_path / "pair")
    assert load_pair(pair_config(folder, draft_vocabulary="auto")).draft.vocabulary is None
    write_vocabulary(folder / "draft" / VOCABULARY, torch.arange(3, 9), {})
    found = load_pair(pair_config(folder, draft_vocabulary="auto")).draft.vocabulary
    assert found is not None and found.tolist() == [0, *range(3, 9)]
    assert load_pair(pair_config(folder, draft_vocabulary=None)).draft.vocabulary is None
    (folder / "draft" / VOCABULARY).write_bytes(b"cut")
    with pytest.raises(UserError, match=r"^pair\.draft_vocabulary: .* holds no draft vocabulary"):
        load_pair(pair_config(folder, draft_vocabulary="auto"))


def test_context_length_is_the_smaller_of_asked_and_possible(tiny_pair_dir):
    assert load_pair(pair_config(tiny_pair_dir, max_length=None)).target.max_length == 96
    assert load_pair(pair_config(tiny_pair_dir, max_length=200)).draft.max_length == 96
    refuses(r"^pair\.max_length: -3", load_pair, pair_config(tiny_pair_dir, max_length=-3))


def test_vocabularies_are_compared_token_by_token():
    words = ["<s>", "a", "b", "c"]
    check_same_vocabulary(tokenizer(words), tokenizer(words), 4)
    check_same_vocabulary(tokenizer(words), tokenizer(words[:3]), 4)  # one leaves an id unnamed
    with pytest.raises(UserError, match=r"^pair\.draft: .*token 1 is 'b' there, 'a' here"):
        check_same_vocabulary(tokenizer(words), tokenizer(["<s>", "b", "a", "c"]), 4)
    with pytest.raises(UserError, match=r"token 3 is 'c' there"):  # beyond the smaller model's
        check_same_vocabulary(tokenizer(words), tokenizer(words), 3)


def test_identity_follows_content_not_place_or_dtype(tiny_pair_dir, tmp_path):
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
    **{f"model.{name}": "cpu" for name in ("embed_tokens", "norm", "rotary_emb")},
    "lm_head": "disk",
}


OPTIONS, TAKEN = r"^pair\.target_options: ", "cannot be given there"
CHECK = r"Check pair\.target_options="


@pytest.mark.smoke
@pytest.mark.filterwarnings("ignore:Some parameters are on the meta device")
def test_a_model_that_is_partly_on_disk_says_the_same(tiny_pair_dir, tmp_path):
    whole = load_pair(pair_config(tiny_pair_dir))
    options = {"offload_folder": str(tmp_path / "offload")}
    parts = load_pair(pair_config(tiny_pair_dir, target_device=ON_DISK, target_options=options))
    assert pair_identity(parts) == pair_identity(whole)
    for pair in (whole, parts):
        pair.target.forward(torch.tensor([3, 4, 5]), logits="none")
    tokens, parents = torch.tensor([6, 7, 8]), torch.tensor([-1, 0, 0])
    asked = {"hidden": (-2, -1), "logits": [0, 2]}
    found, right = (pair.target.forward(tokens, parents, **asked) for pair in (parts, whole))
    close(found.logits, right.logits, 1e-5)
    close(found.hidden, right.hidden, 1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device_map": "auto"}, rf"{OPTIONS}device_map {TAKEN}\. Set pair\.target_device"),
        ({"dtype": "float16"}, rf"{OPTIONS}dtype {TAKEN}\. Set pair\.target_dtype"),
        ({"attn_implementation": "sdpa"}, rf"{OPTIONS}attn_implementation {TAKEN}"),
        ({"colour": "red"}, rf"cannot load .*colour.*{CHECK}\{{'colour': 'red'\}}"),
        ({"quantization_config": {"bits": 4}}, rf"cannot load .*quant_method.*{CHECK}"),
        ({"quantization_config": {"quant_method": "magic"}}, rf"cannot load .*magic.*{CHECK}"),
        ({"gguf_file": "none.gguf"}, r"^pair\.target: no model in "),
    ],
)
def test_bad_options_are_named(options, message, tiny_pair_dir):
    refuses(message, load_pair, pair_config(tiny_pair_dir, target_options=options))


def test_quantisation_becomes_the_class_of_its_method(tiny_pair_dir, monkeypatch):
    given: dict[str, Any] = {}

    def loading(source: str, **options: Any) -> None:
        given.update(options)
        raise ImportError("no such package")

    monkeypatch.setattr("decoding.models.loading.AutoModelForCausalLM.from_pretrained", loading)
    options = {"quantization_config": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}}
    with pytest.raises(UserError, match=rf"^pair\.target: cannot load .*such package.* {CHECK}"):
        load_pair(pair_config(tiny_pair_dir, target_options=options))
    assert isinstance(given["quantization_config"], BitsAndBytesConfig)
    assert given["quantization_config"].bnb_4bit_quant_type == "nf4"
    assert given["device_map"] == "cpu" and given["dtype"] == torch.float64


def test_a_cpu_is_named_as_linux_names_it_and_a_gpu_by_its_driver(tmp_path, monkeypatch):
    text = "processor\t: 0\nmodel name\t: Fast CPU @ 3 GHz\nmodel name\t: Another\n"
    (tmp_path / "cpuinfo").write_text(text)
    monkeypatch.setattr(machine, "CPUINFO", tmp_path / "cpuinfo")
    assert machine.hardware(torch.device("cpu")) == "Fast CPU @ 3 GHz"
    monkeypatch.setattr(machine, "CPUINFO", tmp_path / "nowhere")
    assert machine.processor()
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU {device.index}")
    assert machine.hardware(torch.device("cuda:1")) == "GPU 1"


def bytewise(template: str | None = None, eos: str | None = "<eos>") -> PreTrainedTokenizerFast:
    """Bytes, and the special tokens <user> 256, <pad> 257, <end> 258, <eos> 259."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({each: place for place, each in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.add_special_tokens(["<user>", "<pad>", "<end>", "<eos>"])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=eos, chat_template=template)


def model(generation: Any = None, config: Any = None, text: Any = None) -> Any:
    part = SimpleNamespace(eos_token_id=text)
    whole = SimpleNamespace(eos_token_id=config, get_text_config=lambda: part)
    return SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=generation), config=whole)


@pytest.mark.parametrize(
    ("given", "eos", "expected"),
    [
        ({}, None, ()),
        ({}, "<eos>", (259,)),
        ({"generation": 0}, None, (0,)),
        ({"generation": [0, 7], "config": 0, "text": [3]}, "<end>", (0, 3, 7, 258)),
        ({"config": -1, "text": 5}, None, (5,)),
    ],
)
def test_every_source_says_which_tokens_end(given, eos, expected):
    assert end_ids(model(**given), bytewise(eos=eos)) == expected
    assert set(end_ids(model(**given), None)) <= set(expected)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (TURN.replace("END", "<end>\n"), (258, 259)),
        (TURN.replace("END", " \n<end><pad>"), (258, 259)),
        (PARTS.replace("END", "<end>"), (258, 259)),
        (TURN.replace("END", "<eos>"), (259,)),
        (TURN.replace("END", ". <end>"), (259,)),  # text of the template's own
        (TURN.replace("END", "\n"), (259,)),
        (SILENT, (259,)),
        (STRICT, (259,)),
    ],
)
def test_the_end_of_an_assistants_turn_ends_a_response(template, expected):
    """Whatever eos the config and the tokenizer name."""
    tokenizer = bytewise(template, "<eos>")
    assert end_ids(model(config=259), tokenizer) == expected
    assert closing_id(tokenizer, expected) == expected[0], "so does that of an answer given as text"


def test_a_pair_ends_where_its_template_ends_a_turn(tiny_pair_dir, tmp_path):
    folder = shutil.copytree(tiny_pair_dir, tmp_path / "pair")
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["w7"]})
    for template, ends in (("w7", (EOS, 7)), ("unheard", (EOS,)), ("w8 w7", (EOS,))):
        tokenizer.chat_template = TURN.replace("END", f" {template} ")
        for side in ("target", "draft"):
            tokenizer.save_pretrained(folder / side)
        assert load_pair(pair_config(folder)).eos_ids == ends


@pytest.mark.parametrize(
    ("template", "eos", "ends", "expected"),
    [
        (TURN.replace("END", "<end>\n"), "<eos>", (0, 258, 259), 258),
        (TURN.replace("END", "<end>\n<eos>"), "<eos>", (258, 259), 258),
        (TURN.replace("END", "<end>"), "<eos>", (0, 259), 259),  # no chat of it ends with <end>
        (TURN.replace("END", " \n<end>"), "<eos>", (258, 259), 258),
        (PARTS.replace("END", "<end>"), "<eos>", (258, 259), 258),
        (SILENT, "<eos>", (0, 259), 259),
        (STRICT, "<eos>", (0, 259), 259),
        (None, "<eos>", (0, 259), 259),
        (None, None, (7,), 7),
    ],
)
def test_the_chat_template_says_what_closes_an_answer(template, eos, ends, expected):
    assert closing_id(bytewise(template, eos), ends) == expected


def test_no_end_is_guessed_and_what_is_no_id_is_refused_in_a_line():
    for ends in ((0, 7), ()):
        with pytest.raises(UserError, match=r"^pair\.target: which of the tokens \[.*\] ends"):
            closing_id(bytewise(TURN.replace("END", "<end>")), ends)
    for named in ("5", [None, 5], [[5]], True):
        refuses(r"^pair\.target: its eos_token_id is", end_ids, model(config=named), None)
