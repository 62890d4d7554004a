"""The page of a device check."""

from collections.abc import Mapping, Sequence
from typing import Any

from evaluation.device.memory import Peak
from evaluation.table import markdown

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
