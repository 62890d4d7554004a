"""The page beside a calibration of imported confidences."""

from collections.abc import Mapping
from typing import Any

from runtime.text import printable

DEFINITIONS = {
    "deepspec": "20 bins of equal width (DeepSpec)",
    "sglang": "15 bins of equal width (SGLang)",
    "ours": "10 bins of equal mass (ours)",
}


def page(facts: Mapping[str, Any]) -> str:
    """facts: what `confidence_calibration.json` holds."""
    parts = [
        f"# Confidences of {printable(facts['data']['folder'])}, calibration={facts['method']}",
        f"{facts['proposals']} proposals of {facts['gamma']} tokens at most, {facts['groups']}"
        " groups. Intervals: 95 % bootstrap over groups. Errors are of the predicted survival (all"
        " tokens so far accepted); `fitted here` is fitted on other groups of the same data (five"
        " folds), `fitted elsewhere` on the data above. `by chance`: of labels that are drawn with"
        " the probabilities of the column before.",
        f"Temperatures ({facts['temperatures_fitted']}): "
        + ", ".join(f"{value:.3f}" for value in facts["temperatures"]),
    ]
    if facts["note"]:
        parts.append(f"{facts['note'].capitalize()}.")
    for data, domains in facts["scores"].items():
        for domain, found in domains.items():
            parts += _section(f"{printable(data)}, {printable(domain)}", found)
    parts.append(f"Made with: `{printable(facts['command'])}`")
    return "\n\n".join(parts)


def _section(name: str, found: Mapping[str, Any]) -> list[str]:
    changes = [
        f"{stage}: {_shown(value, 3)}{_change(found['change'][stage], number)}"
        for number, (stage, value) in enumerate(found["loss"].items())
    ]
    head = f"{found['proposals']} proposals, {found['groups']} groups. Log loss of the accepted"
    parts = [f"## {name}", f"{head} length: {'; '.join(changes)}."]
    return parts + [_table(found, key, title) for key, title in DEFINITIONS.items()]


def _change(value: list[float], number: int) -> str:
    return f" (change {_shown(value, 3, '+')})" if number else ""


def _table(found: Mapping[str, Any], key: str, title: str) -> str:
    stages = list(found["loss"])
    columns = [*stages, *(["by chance"] if key == "deepspec" else [])]
    lines = [
        [f"calibration error, %, {title}: position", "accepted", *columns],
        ["---"] * (len(columns) + 2),
    ]
    for one in found["positions"]:
        cells = [
            _shown([100 * value for value in one["stages"][stage][key]], 1)
            for stage in stages
            if one["stages"]
        ]
        if one["stages"] and key == "deepspec":
            cells.append(_shown([100 * value for value in one["stages"][stages[-1]]["perfect"]], 1))
        lines.append([str(one["position"]), f"{one['accepted']:.3f}", *cells])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _shown(value: list[float], digits: int, sign: str = "") -> str:
    form = f"{{:{sign}.{digits}f}}"
    middle, low, high = value
    if low != low or low is None:
        return form.format(middle)
    return f"{form.format(middle)} ({form.format(low)} to {form.format(high)})"
