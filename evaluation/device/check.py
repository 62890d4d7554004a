"""Decode and harvest on a device and on the host, and say whether they agree."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from data_gen.prompts import load_prompts
from data_gen.requests import Request, make_requests
from data_gen.settings import HarvestSettings
from decoding.models.context import context_limit
from decoding.models.draft_model import beside
from decoding.models.eagle.checkpoint import find_checkpoint
from decoding.models.eagle.draft import FILE as MAPS
from decoding.models.loading import ModelPair, load_pair, load_plain
from decoding.models.machine import setup_facts
from decoding.models.options import load_config, resolve_dtype, source_of
from decoding.models.recurrent import cached, refuse_recurrent
from decoding.models.support import auto_class, text_part
from decoding.sampling import Warp
from decoding.settings import ModelSettings, Pair
from evaluation.baselines.generate import GenerateEngine
from evaluation.device import agreement, memory, speeds
from evaluation.device.memory import Peak
from evaluation.table import markdown
from runtime.errors import UserError
from runtime.json_files import write_checksummed

NAME, PAGE = "device.json", "device.md"
LACKS = "{}: this machine has no {}"
UNTIMED = "speeds and memory: the check ended before"


def chosen(device: str | None, second: str | None) -> tuple[str, str | None]:
    """The device to check and another one, or None. Raises UserError where they are not there."""
    there = [f"cuda:{number}" for number in range(torch.cuda.device_count())]
    if device is None and not there:
        raise UserError(
            "device: torch sees no GPU here. Install its build for yours, or give the device:"
            " device=cpu checks the host against itself"
        )
    first = device or there[0]
    for key, name in (("device", first), ("second", second)):
        if name is not None and name not in (*there, "cpu"):
            raise UserError(f"{key}: expected {' or '.join([*there, 'cpu'])}, got {name}. Give one")
    return first, second or next((name for name in there if name != first), None)


def on(pair: DictConfig, target: str, draft: str, dtype: str | None = None) -> Pair:
    """The pair on these devices. dtype: of both models; None: each in its own."""
    where = {"target_device": target, "draft_device": draft}
    dtypes = {name: dtype for name in ("dtype", "target_dtype", "draft_dtype") if dtype}
    return Pair.of(OmegaConf.merge(pair, where, dtypes))


def compared(
    cfg: DictConfig, settings: HarvestSettings, device: str, second: str | None
) -> tuple[list[Request], dict[str, dict[str, Any]]]:
    """The prompts, and whether the host and the device do the same with them."""
    places = {"in float32": (device, device)} | (
        {"in float32, on two devices": (device, second)} if second else {}
    )
    host = load_pair(on(cfg.pair, "cpu", "cpu", "float32"))
    for side, lm in (("target", host.target), ("draft", host.draft)):
        refuse_recurrent(f"pair.{side}", lm, "trees and batches. Check with pair=smollm2")
    room = max(settings.max_new_tokens + settings.gamma, cfg.max_new_tokens + agreement.NODES)
    requests = make_requests(load_prompts(cfg.dataset), host, room, 0.1, 0.1)
    equal: dict[str, dict[str, Any]] = {}
    for name, (first, other) in places.items():
        there = load_pair(on(cfg.pair, first, other, "float32"))
        equal |= agreed(host, there, requests, settings, cfg.max_new_tokens, name)
        del there
    return requests, equal


def agreed(
    host: ModelPair,
    there: ModelPair,
    requests: Sequence[Request],
    settings: HarvestSettings,
    tokens: int,
    name: str,
) -> dict[str, dict[str, Any]]:
    """Every engine and a harvest on both, by what was compared."""
    prompts = [request.tokens for request in requests]
    found = {}
    for engine, make in tqdm(agreement.engines_for(host).items(), desc=name, unit=" engines"):
        compared = agreement.decodes(host, there, make, prompts, tokens)
        found[f"{engine}, {name}"] = asdict(compared)
    for kind, recipe in (("sampled", settings), ("greedy", greedy(settings))):
        compared = agreement.harvests(host, there, requests, recipe)
        found[f"harvest, {kind}, {name}"] = asdict(compared)
    return found


def greedy(settings: HarvestSettings) -> HarvestSettings:
    return replace(settings, warp=Warp(0.0), draft_warp=Warp(0.0))


def measure(
    found: dict[str, Any],
    requests: Sequence[Request],
    settings: HarvestSettings,
    cfg: DictConfig,
    devices: tuple[str, str | None],
) -> None:
    """Add speeds, greedy, and the peak of memory to what was found."""
    device, second = devices
    pair = load_pair(on(cfg.pair, device, second or device))
    prompts, tokens = [request.tokens for request in requests], cfg.max_new_tokens
    rates = beside_generate(pair, prompts, cfg, device)

    def work() -> None:
        speeds.decoding_speeds(pair, None, prompts, tokens, 1, Warp(0.0))
        rates["harvest, labels"] = speeds.harvest_speed(pair, requests, settings, cfg.repeats)

    found["memory"] = speeds.peak_memory([pair.target.device, pair.draft.device], work)
    found["speeds"] = {name: speed.to_dict() for name, speed in rates.items()}
    found["setup"] = {name: fact for name, fact in setup_facts(pair).items() if name != "machine"}
    found["skipped"] = skipped(pair, device, second)


def beside_generate(
    pair: ModelPair, prompts: Sequence[Tensor], cfg: DictConfig, device: str
) -> dict[str, speeds.Speed]:
    """Speeds of decoding, and of `generate`, which has a target of its own meanwhile."""
    plain = load_plain(on(cfg.pair, device, device).model("target"))
    generate = GenerateEngine(plain, None, Warp(0.0), frozenset(pair.eos_ids), {})
    tokens, repeats = cfg.max_new_tokens, cfg.repeats
    return speeds.decoding_speeds(pair, generate, prompts, tokens, repeats, Warp(0.0))


def skipped(pair: ModelPair, device: str, second: str | None) -> list[str]:
    """What could not be checked, and why."""
    lines = []
    if second is None:
        lines.append(LACKS.format("two devices", "second GPU"))
    if pair.draft.reads_target:
        beside = "SpecBranch, in turn and side by side"
        lines.append(f"{beside}: this draft reads its target's states. Give pair=smollm2")
    if not device.startswith("cuda"):
        lines.append(f"memory: torch keeps no account of it on {device}")
    return lines


def named(device: str) -> str:
    name = "the host" if device == "cpu" else torch.cuda.get_device_name(device)
    return f"{device} ({name})"


def needed(cfg: DictConfig) -> None:
    """Print what a decode and a harvest hold, by the length of a prompt, of two configurations:
    nothing is loaded. Raises UserError for a draft that reads its target's states, and for prompts
    that do not fit."""
    models = [Pair.of(cfg.pair).model(side) for side in ("target", "draft")]
    if find_checkpoint(models[1]) or beside(Path(source_of(models[1])), MAPS):
        raise UserError(
            "memory: this draft reads its target's states, which is not modelled. Give pair=smollm2"
            " or another ordinary draft"
        )
    settings = HarvestSettings.of(cfg.harvest, cfg, stride=1)
    target, draft = map(without_weights, models)
    for side, model in (("target", target), ("draft", draft)):
        refuse_recurrent(f"pair.{side}", cached(model), "harvests. Give pair=smollm2")
    if min(cfg.memory) < 2:
        raise UserError("memory: expected prompts of at least 2 tokens, got 1. Give longer ones")
    longest = max(cfg.memory) + settings.max_new_tokens + settings.gamma
    if longest > (limit := min(context_limit(each, None) for each in (target, draft))):
        raise UserError(f"memory: {longest} tokens with the response, of {limit}. Give fewer")
    lengths = tqdm(cfg.memory, desc="memory", unit=" lengths")
    found = list(memory.peaks(target, draft, settings, lengths))
    print(memory_page(found, [weights(target), weights(draft)]))


def without_weights(settings: ModelSettings) -> PreTrainedModel:
    """A model of the config alone, on the meta device."""
    config, trusted = load_config(settings), settings.trust_remote_code
    dtype = resolve_dtype(settings.dtype, "meta", config.get_text_config().dtype)
    with torch.device("meta"):
        whole = auto_class(config).from_config(config, dtype=dtype, trust_remote_code=trusted)
    return text_part(f"pair.{settings.side}", whole).eval().requires_grad_(False)


def weights(model: PreTrainedModel) -> int:
    return sum(part.nbytes for part in model.parameters())


def report(out: Path, found: dict[str, Any]) -> str:
    """Write both files. Returns the page."""
    out.mkdir(parents=True, exist_ok=True)
    write_checksummed(out / NAME, found)
    text = page(found)
    (out / PAGE).write_text(text, encoding="utf-8")
    return text


# The page -----------------------------------------------------------------------------------------


FAULT = (
    "A fault? Attach this page and the JSON file beside it to the report, with the output of"
    " `python -m torch.utils.collect_env` and the command."
)


def page(found: Mapping[str, Any]) -> str:
    """found: what `scripts/check_device.py` writes as JSON."""
    parts = [f"# Device check: {found['device']}", f"`{found['command']}`"]
    if found["setup"]:
        parts += [", ".join(f"{name} {value}" for name, value in found["setup"].items())]
    parts += ["## Equal to the host", _agreement(found["agreement"])]
    if found["speeds"]:
        parts += ["## Speed, measured", _speeds(found["speeds"])]
    if found["memory"]:
        peaks = [[name, f"{size / 1e9:.2f}"] for name, size in found["memory"].items()]
        parts += ["## Memory", markdown(["device", "GB of tensors at the peak"], peaks)]
    if found["skipped"]:
        parts += ["## Skipped", "\n".join(f"- {line}" for line in found["skipped"])]
    return "\n\n".join([*parts, found["verdict"], FAULT]) + "\n"


def memory_page(found: Sequence[Peak], weights: Sequence[int]) -> str:
    """found: by length; weights: bytes of target and draft."""
    parts = ("all_states", "asked", "caches", "decode", "harvest")
    rows = [
        [f"{peak.tokens:,}", *(f"{getattr(peak, part) / 1e9:.2f}" for part in parts)]
        for peak in found
    ]
    names = [
        *("prompt, tokens", "hidden states, all layers", "hidden states, layers read", "caches"),
        *("decode, peak", "harvest of a prompt, peak"),
    ]
    said = " and ".join(f"{size / 1e9:.1f}" for size in weights)
    return f"GB beside the weights ({said} GB), modelled:\n\n{markdown(names, rows)}"


def verdict(agreement: Mapping[str, Mapping[str, Any]]) -> str:
    """One line."""
    faults = sum(len(each["faults"]) for each in agreement.values())
    ties = sum(len(each["near_ties"]) for each in agreement.values())
    if faults:
        return f"**{faults} faults**: this device does not decode as the host does."
    return f"Equal to the host, {ties} near ties aside." if ties else "Equal to the host."


def _agreement(agreement: Mapping[str, Mapping[str, Any]]) -> str:
    rows = [
        [name, f"{each['equal']} of {each['of']}", str(len(each["near_ties"])),
         str(len(each["faults"]))]
        for name, each in agreement.items()
    ]  # fmt: skip
    lines = [
        f"- {name}: {line}"
        for name, each in agreement.items()
        for line in [*each["near_ties"], *each["faults"]]
    ]
    table = markdown(["", "equal", "near ties", "faults"], rows)
    return "\n\n".join([table, *(["\n".join(lines)] if lines else [])])


def _speeds(speeds: Mapping[str, Mapping[str, Any]]) -> str:
    rows = [
        [name, f"{each['rate']:.1f}", "" if each["outside"] is None else f"{each['outside']:.0%}"]
        for name, each in speeds.items()
    ]
    return markdown(["", "tokens/s", "time outside forwards"], rows)
