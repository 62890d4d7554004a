"""Decoding and harvesting on a device and on the host: agreement, with near ties listed, and the
speed of the device."""

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor
from tqdm import tqdm

from data_gen.harvest import Progress, label_chunk, outputs_on
from data_gen.prompts import load_prompts
from data_gen.requests import Request, make_requests
from data_gen.settings import HarvestSettings
from decoding.engines.autoregressive import AutoregressiveEngine
from decoding.engines.overlapped import OverlappedEngine
from decoding.engines.serial import SerialEngine
from decoding.models.loading import ModelPair, load_pair, load_plain
from decoding.models.machine import setup_facts
from decoding.models.options import first_line
from decoding.models.recurrent import refuse_recurrent
from decoding.sampling import Sampler, Warp
from decoding.settings import Pair
from decoding.stopping.confidence import Confidence
from decoding.stopping.never import Never
from decoding.structures.branch_point import BranchPoint
from decoding.structures.chain import Chain
from decoding.structures.dyspec import DySpecHeap
from decoding.trace import Trace
from decoding.verifiers.block import BlockVerifier
from decoding.verifiers.rrsw import RrswVerifier
from decoding.verifiers.token import TokenVerifier
from evaluation.baselines.generate import GenerateEngine
from evaluation.decode import Engine
from evaluation.lossless import greedy_differences
from evaluation.table import markdown, summary, timed
from runtime.errors import UserError
from runtime.files import checked_folder, refuse_foreign, write_atomically
from runtime.job import command_line
from runtime.json_files import write_checksummed

NAME, PAGE = "device.json", "device.md"
GAMMA, NODES = 4, 12
GREEDY, SAMPLED = Warp(0.0), Warp()
CLOSE = 1e-3  # two numbers of a record, in float32, that differ by rounding
TIMED = ("plain", "chain, token-wise")
UNEQUAL = ("near_ties", "faults")
FAULT = (
    "A fault? Attach this page and the JSON file beside it to the report, with the output of"
    " `python -m torch.utils.collect_env` and the command."
)
Make = Callable[[ModelPair, Warp], Engine]


def _serial(structure: Any, verifier: Any) -> Make:
    def make(pair: ModelPair, warp: Warp) -> Engine:
        eos_ids = frozenset(pair.eos_ids)
        return SerialEngine(pair, structure, Never(), verifier, warp, SAMPLED, eos_ids)

    return make


def _overlapped(overlap: bool) -> Make:
    """Return the function that makes SpecBranch without H-RAD."""

    def make(pair: ModelPair, warp: Warp) -> Engine:
        parts: dict[str, Any] = {
            "structure": BranchPoint(GAMMA, 3),
            "stop": Confidence(0.4),
            "verifier": TokenVerifier(),
            "branch_verifier": RrswVerifier(),
            "eos_ids": frozenset(pair.eos_ids),
        }
        return OverlappedEngine(pair, **parts, warp=warp, draft_warp=SAMPLED, overlap=overlap)

    return make


ENGINES: Mapping[str, Make] = {
    "plain": lambda pair, warp: AutoregressiveEngine(pair, warp, frozenset(pair.eos_ids)),
    "chain, token-wise": _serial(Chain(GAMMA), TokenVerifier()),
    "chain, block": _serial(Chain(GAMMA), BlockVerifier()),
    "tree (DySpec), RRSw": _serial(DySpecHeap(NODES), RrswVerifier()),
    "SpecBranch, in turn": _overlapped(False),
}
RUNS_BESIDE = ("SpecBranch, in turn",)  # not with a draft that reads its target


def check(cfg: DictConfig) -> None:
    """Write `out`/device.json and device.md: first whether host and device agree, then speeds and
    memory. Raises UserError if there is no such device, or if it differs from the host."""
    out = checked_folder("out", cfg.out)
    refuse_foreign(out, NAME)
    device, second = chosen(cfg.device, cfg.second)
    settings = HarvestSettings.of(cfg.harvest, cfg, stride=1)
    requests, equal = compared(cfg, settings, device, second)
    name = "the host" if device == "cpu" else torch.cuda.get_device_name(device)
    facts: dict[str, Any] = {
        "device": f"{device} ({name})",
        "command": command_line(),
        "setup": {},
        "agreement": {what: asdict(each) for what, each in equal.items()},
        "speeds": {},
        "memory": {},
        "skipped": ["speeds and memory: the check ended before"],
        "verdict": verdict(equal),
    }
    report(out, facts)
    print(f"{facts['verdict']} Saved {out / PAGE}. Speeds follow", file=sys.stderr)
    try:
        facts |= measure(requests, settings, cfg, device, second)
    except torch.OutOfMemoryError as error:
        remedy = "Lower harvest.batch_size or take a smaller pair"
        raise UserError(f"harvest.batch_size: {first_line(error)}. {remedy}") from error
    print(f"\n{report(out, facts)}\nsaved {out / NAME} and {out / PAGE}")
    if any(each.faults for each in equal.values()):
        raise UserError(
            f"device: it differs from the host. See {out / PAGE}, and attach both files to a report"
        )


def chosen(device: str | None, second: str | None) -> tuple[str, str | None]:
    """Return the device to check and a second one, or None. Raises UserError if they do not
    exist."""
    gpus = [f"cuda:{number}" for number in range(torch.cuda.device_count())]
    if device is None and not gpus:
        raise UserError(
            "device: torch sees no GPU here. Install its build for yours, or give the device:"
            " device=cpu checks the host against itself"
        )
    first = device or gpus[0]
    for key, name in (("device", first), ("second", second)):
        if name is not None and name not in (*gpus, "cpu"):
            raise UserError(f"{key}: expected {' or '.join([*gpus, 'cpu'])}, got {name}. Give one")
    return first, second or next((name for name in gpus if name != first), None)


def on(pair: DictConfig, target: str, draft: str, dtype: str | None = None) -> Pair:
    """Return the pair on these devices. dtype: of both models; None: each in its own."""
    where = {"target_device": target, "draft_device": draft}
    dtypes = {name: dtype for name in ("dtype", "target_dtype", "draft_dtype") if dtype}
    return Pair.of(OmegaConf.merge(pair, where, dtypes))


# Do they agree? -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Agreement:
    """The result of a comparison. equal: number of equal ones of `of` outputs or records;
    near_ties: first differences that rounding may explain; faults: the others, a line each."""

    equal: int
    of: int
    near_ties: list[str]
    faults: list[str]


def compared(
    cfg: DictConfig, settings: HarvestSettings, device: str, second: str | None
) -> tuple[list[Request], dict[str, Agreement]]:
    """Return the prompts, and the agreement of host and device on them, by engine and for a
    harvest."""
    host = load_pair(on(cfg.pair, "cpu", "cpu", "float32"))
    for side, lm in (("target", host.target), ("draft", host.draft)):
        refuse_recurrent(f"pair.{side}", lm, "trees and batches. Check with pair=smollm2")
    longest = max(settings.max_new_tokens + settings.gamma, cfg.max_new_tokens + NODES)
    requests = make_requests(load_prompts(cfg.dataset), host, longest, 0.1, 0.1)
    equal: dict[str, Agreement] = {}
    for name, draft in (("in float32", device), ("in float32, on two devices", second)):
        if draft is not None:
            other = load_pair(on(cfg.pair, device, draft, "float32"))
            each = agreed(host, other, requests, settings, cfg.max_new_tokens, name)
            equal |= {f"{what}, {name}": agreement for what, agreement in each.items()}
            del other
    return requests, equal


def agreed(
    host: ModelPair,
    device: ModelPair,
    requests: Sequence[Request],
    settings: HarvestSettings,
    tokens: int,
    name: str,
) -> dict[str, Agreement]:
    """Compare every engine and a harvest. name: of the progress bar."""
    prompts = [request.tokens for request in requests]
    left_out = RUNS_BESIDE if host.draft.reads_target else ()
    engines = {engine: make for engine, make in ENGINES.items() if engine not in left_out}
    equal = {
        engine: decodes(host, device, make, prompts, tokens)
        for engine, make in tqdm(engines.items(), desc=name, unit=" engines")
    }
    greedy = replace(settings, warp=GREEDY, draft_warp=GREEDY)
    for kind, recipe in (("sampled", settings), ("greedy", greedy)):
        equal[f"harvest, {kind}"] = harvests(host, device, requests, recipe)
    return equal


def decodes(
    host: ModelPair, device: ModelPair, make: Make, prompts: Sequence[Tensor], tokens: int
) -> Agreement:
    """Compare greedy outputs of one engine, and sampled ones of the same seed. prompts: ids [n].

    A sampled output may also differ where a random number falls within rounding of a probability.
    p and q of the drafted tokens must agree up to rounding in any case."""

    def decoded(pair: ModelPair, warp: Warp) -> list[Trace]:
        return [
            make(pair, warp).decode(prompt, tokens, Sampler.seeded(seed))
            for seed, prompt in enumerate(prompts)
        ]

    plain, on_device = (decoded(pair, GREEDY) for pair in (host, device))
    ties, faults = list[str](), list[str]()
    differences = greedy_differences(host.target, prompts, on_device, plain)
    for each in differences:
        (ties if each.excused else faults).append(
            f"greedy, token {each.position}: {each.token} for {each.baseline_token}, logits"
            f" {each.gap:.1e} apart"
        )
    pairs = list(zip(*(decoded(pair, SAMPLED) for pair in (device, host)), strict=True))
    other = [
        f"sampled, prompt {number}: {first_difference(a.tokens, b.tokens)}"
        for number, (a, b) in enumerate(pairs)
        if a.tokens != b.tokens
    ]
    faults += [
        f"sampled, prompt {number}: {line}"
        for number, (a, b) in enumerate(pairs)
        if (line := far_probabilities(a, b))
    ]
    equal = 2 * len(prompts) - len(differences) - len(other)
    rare = len(other) <= len(prompts) // 2  # rounding rarely changes a draw
    (ties if rare else faults).extend(other)
    return Agreement(equal, 2 * len(prompts), ties, faults)


def far_probabilities(trace: Trace, host: Trace) -> str | None:
    """Return the first p or q of a draft token that is not the host's, in the rounds up to the
    first difference of the outputs."""
    for number, rounds in enumerate(zip(trace.rounds, host.rounds, strict=False)):
        drafts = (
            zip(each.draft_tokens, each.draft_parents, each.draft_q, each.draft_p, strict=True)
            for each in rounds
        )
        nodes = enumerate(zip(*drafts, strict=False))
        for place, ((*node, q, p), (*other, host_q, host_p)) in nodes:
            if node != other:
                return None
            for name, x, y in (("q", q, host_q), ("p", p, host_p)):
                if None not in (x, y) and not abs(x - y) <= CLOSE:
                    return f"{name} of draft token {place} in round {number} is {x:.4f} for {y:.4f}"
        a, b = rounds
        if a.tokens != b.tokens or a.draft_tokens != b.draft_tokens:
            return None
    return None


def first_difference(tokens: Sequence[int], host: Sequence[int]) -> str:
    for place, (a, b) in enumerate(zip(tokens, host, strict=False)):
        if a != b:
            return f"token {place}: {a} for {b}"
    return f"{len(tokens)} tokens for {len(host)}"


def harvests(
    host: ModelPair, device: ModelPair, requests: Sequence[Request], settings: HarvestSettings
) -> Agreement:
    """Compare records of the same prompts, by column; if a prompt's responses or draft tokens
    differ, only these: a draw at the edge of a token's probability changes all that follows."""
    expected, on_device = (_records(pair, requests, settings) for pair in (host, device))
    ties, faults, equal = list[str](), list[str](), 0
    for number, request in enumerate(requests):
        a, b = (
            kinds["responses"][number]["response_tokens"].tolist()
            for kinds in (on_device, expected)
        )
        if a != b:
            ties.append(f"{request.prompt_id}: another response, {first_difference(a, b)}")
            continue
        a, b = (kinds["rounds"][number]["token"].cpu() for kinds in (on_device, expected))
        if a.shape == b.shape and (drawn := int((a != b).any(-1).sum())):
            ties.append(f"{request.prompt_id}: another draft token in {drawn} of {len(a)} rounds")
            continue
        far = [
            f"{request.prompt_id}: {kind}.{column} is {gap:.1e} apart"
            for kind in expected
            for column, value in expected[kind][number].items()
            if (gap := distance(on_device[kind][number][column], value)) > CLOSE
        ]
        equal += not far
        faults += far
    if len(ties) > len(requests) // 2:
        ties, faults = [], ties + faults
    return Agreement(equal, len(requests), ties, faults)


def _records(
    pair: ModelPair, requests: Sequence[Request], settings: HarvestSettings
) -> dict[str, list[Any]]:
    with outputs_on(pair, pair.target.device):
        return label_chunk(pair, requests, settings, Progress())


def distance(value: Any, host: Any) -> float:
    """Return the largest difference of two values of a record, relative where they are large;
    infinite where they cannot be compared."""
    if not hasattr(host, "dtype"):
        return 0.0 if value == host else math.inf
    if value.shape != host.shape:
        return math.inf
    if isinstance(host, Tensor):
        a, b = value.detach().cpu().double(), host.detach().cpu().double()
        gaps = (a - b).abs() / b.abs().clamp(min=1)
        same = (a == b) | (a.isnan() & b.isnan())  # also equal infinities
        gaps = gaps.nan_to_num(nan=math.inf, posinf=math.inf).masked_fill(same, 0.0)
        return float(gaps.max()) if gaps.numel() else 0.0
    # hidden states, the bits of bfloat16
    a, b = (torch.from_numpy(x).view(torch.bfloat16).double() for x in (value, host))
    gap = float((a - b).norm() / b.norm().clamp(min=1e-9)) / 10  # rounded to 8 bits
    return gap if math.isfinite(gap) else math.inf


# How fast? ----------------------------------------------------------------------------------------


def measure(
    requests: Sequence[Request],
    settings: HarvestSettings,
    cfg: DictConfig,
    device: str,
    second: str | None,
) -> dict[str, Any]:
    """Return greedy speeds, the peak of memory, the setup, and the skipped checks with reasons.
    `generate` has a separate target while it is timed."""
    pair = load_pair(on(cfg.pair, device, second or device))
    prompts, tokens = [request.tokens for request in requests], cfg.max_new_tokens
    plain = load_plain(on(cfg.pair, device, device).model("target"))
    generate = GenerateEngine(plain, None, GREEDY, frozenset(pair.eos_ids), {})
    speeds = decoding_speeds(pair, generate, prompts, tokens, cfg.repeats)
    del generate, plain

    def work() -> None:
        decoding_speeds(pair, None, prompts, tokens, 1)
        rate = harvest_speed(pair, requests, settings, cfg.repeats)
        speeds["harvest, labels"] = {"rate": rate, "outside": None}

    return {
        "memory": peak_memory([pair.target.device, pair.draft.device], work),
        "speeds": speeds,
        "setup": {name: fact for name, fact in setup_facts(pair).items() if name != "machine"},
        "skipped": skipped(pair, device, second),
    }


def decoding_speeds(
    pair: ModelPair, generate: Engine | None, prompts: Sequence[Tensor], tokens: int, repeats: int
) -> dict[str, dict[str, float | None]]:
    """Time `generate` (the target alone, by transformers), plain and speculative decoding, in turn,
    after a warm-up. Return for each its tokens per second (`rate`) and the share of the time after
    the prefill outside of both models (`outside`, None if unknown)."""
    engines = {name: ENGINES[name](pair, GREEDY) for name in TIMED}
    if generate is not None:
        engines = {"generate": generate, **engines}
    if not pair.draft.reads_target:
        engines["side by side"] = _overlapped(True)(pair, GREEDY)
        engines["the same in turn"] = _overlapped(False)(pair, GREEDY)
    traces: dict[str, list[Trace]] = {name: [] for name in engines}
    for repeat in range(repeats + 1):
        for name, engine in engines.items():
            for seed, prompt in enumerate(prompts):
                trace = engine.decode(prompt, tokens, Sampler.seeded(seed))
                if repeat:
                    traces[name].append(trace)
    rows = summary(timed(traces))
    return {
        name: {
            "rate": rows[name]["tokens/s"].value,
            "outside": rows[name]["overhead"].value if name != "generate" else None,
        }
        for name in engines
    }


def harvest_speed(
    pair: ModelPair, requests: Sequence[Request], settings: HarvestSettings, repeats: int
) -> float:
    """Return draft tokens labelled per second, the median over repeats."""
    rates = []
    for _ in range(repeats + 1):
        start = perf_counter()
        rows = _records(pair, requests, settings)
        labels = sum(int(row["drafted"].sum()) for row in rows["rounds"])
        rates.append(labels / (perf_counter() - start))
    return median(rates[1:])


def peak_memory(devices: Sequence[torch.device], work: Callable[[], object]) -> dict[str, int]:
    """Run `work` and return the peak bytes of tensors on each GPU."""
    gpus = [device for device in dict.fromkeys(devices) if device.type == "cuda"]
    for gpu in gpus:
        torch.cuda.reset_peak_memory_stats(gpu)
    work()
    return {str(gpu): torch.cuda.max_memory_allocated(gpu) for gpu in gpus}


def skipped(pair: ModelPair, device: str, second: str | None) -> list[str]:
    """Return the checks that are not possible, and why."""
    lines = {
        "two devices: this machine has no second GPU": second is None,
        "SpecBranch, in turn and side by side: this draft reads its target's states. Give"
        " pair=smollm2": pair.draft.reads_target,
        f"memory: torch keeps no account of it on {device}": not device.startswith("cuda"),
    }
    return [line for line, holds in lines.items() if holds]


# The page -----------------------------------------------------------------------------------------


def report(out: Path, facts: Mapping[str, Any]) -> str:
    """Write both files. Return the page."""
    out.mkdir(parents=True, exist_ok=True)
    write_checksummed(out / NAME, facts)
    text = page(facts)
    write_atomically(out / PAGE, lambda temporary: temporary.write_text(text, encoding="utf-8"))
    return text


def verdict(equal: Mapping[str, Agreement]) -> str:
    """Return the answer in a line."""
    faults = sum(len(each.faults) for each in equal.values())
    ties = sum(len(each.near_ties) for each in equal.values())
    if faults:
        return f"**{faults} faults**: this device does not decode as the host does."
    return f"Equal to the host, {ties} near ties aside." if ties else "Equal to the host."


def page(facts: Mapping[str, Any]) -> str:
    """Return the facts that `scripts/check_device.py` writes as JSON as a page, the answer
    first."""
    agreement = facts["agreement"]
    rows = [
        [name, f"{each['equal']} of {each['of']}", *(str(len(each[kind])) for kind in UNEQUAL)]
        for name, each in agreement.items()
    ]
    lines = [
        f"- {name}: {line}"
        for name, each in agreement.items()
        for line in [*each["near_ties"], *each["faults"]]
    ]
    speeds = [
        [name, f"{each['rate']:.1f}", "" if each["outside"] is None else f"{each['outside']:.0%}"]
        for name, each in facts["speeds"].items()
    ]
    peaks = [[name, f"{size / 1e9:.2f}"] for name, size in facts["memory"].items()]
    setup = ", ".join(f"{name} {value}" for name, value in facts["setup"].items())
    parts = [f"# Device check: {facts['device']}", facts["verdict"], f"`{facts['command']}`", setup]
    parts += ["## Equal to the host", markdown(["", "equal", "near ties", "faults"], rows)]
    parts += ["\n".join(lines)]
    if speeds:
        header = ["", "tokens/s", "time outside the models"]
        parts += ["## Speed, measured", markdown(header, speeds)]
    if peaks:
        parts += ["## Memory", markdown(["device", "GB of tensors at the peak"], peaks)]
    if facts["skipped"]:
        parts += ["## Skipped", "\n".join(f"- {line}" for line in facts["skipped"])]
    return "\n\n".join(part for part in [*parts, FAULT] if part) + "\n"
