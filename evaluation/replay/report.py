"""What tuning has found, as tables."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from evaluation.replay.tuning import Choice, span
from runtime.intervals import METHOD

HEAD = (
    "| rule | threshold | speculate | speed-up, modelled | 95 % interval | regret to the oracle |"
    " over the best other | discard | verification |\n" + "|---" * 9 + "|"
)


def answer(facts: Mapping[str, Any]) -> str:
    """Return two lines: which rule to use with which threshold, then how sure that is."""
    found = facts["results"]["chosen"]
    choices = {name: Choice(**choice) for name, choice in found["rules"].items()}
    best = choices.get(found["advice"])
    if best is None:
        first = "Use plain decoding: no rule pays beyond the noise at these costs."
        if choices:
            top = next(iter(choices.values()))
            first += f" The best, {at(top)}, is at {times(top.speedup, top.interval)}."
    else:
        first = f"Use {at(best)}: {times(best.speedup, best.interval)} plain decoding, modelled."
        others = {c.rule: c.gain_interval for c in choices.values() if c.other == best.rule}
        alike = [name for name, (low, high) in others.items() if low <= 1 <= high]
        slower = [name for name, (_, high) in others.items() if high < 1]
        first += f" Not told apart from it: {', '.join(alike)}." if alike else ""
        first += f" Slower than it: {', '.join(slower)}." if slower else ""
    return (
        f"{first}\nThreshold chosen on {facts['chosen_on']} prompts of {facts['data']['folder']},"
        f" speed of {facts['judged_on']} prompts ({METHOD}), costs {facts['cost']}; a rule that"
        f" knew every verdict would reach {found['oracle_speedup']:.2f} times."
    )


def at(choice: Choice) -> str:
    return f"{choice.rule} at {choice.threshold:.3g}"


def times(speedup: float, interval: Sequence[float]) -> str:
    low, high = interval
    known = not (math.isnan(low) or math.isnan(high))
    return f"{speedup:.2f} times" + (f" ({low:.2f} to {high:.2f})" if known else "")


def short(facts: Mapping[str, Any]) -> str:
    """Return the answer and the table of the chosen costs."""
    return f"{answer(facts)}\n\n{table(facts, 'chosen', facts['results']['chosen'])}"


def report(facts: Mapping[str, Any]) -> str:
    """Return everything: a table per cost table and set of prompts, and what the frontiers say."""
    parts = [answer(facts)]
    parts += [table(facts, name, found) for name, found in facts["results"].items()]
    for folder, results in facts["elsewhere"].items():
        parts += [table(facts, name, found, folder) for name, found in results.items()]
    parts += [*transfers(facts), *left_out(facts)]
    for rule, edge in facts["frontier"].items():
        if edge["fixed_dominated"] is not None:
            parts.append(
                f"{rule}: its frontier dominates {edge['fixed_dominated']:.0%} of that of fixed"
                " lengths"
            )
    if facts["oracle_calls"]:
        draft, target = facts["oracle_calls"]
        parts.append(
            f"oracle of SpecDec++, drafts of any length: {draft} draft and {target} target calls"
        )
    parts.append(
        f"thresholds and advice chosen on {facts['chosen_on']}, figures of {facts['judged_on']};"
        " prefill is left out"
    )
    return "\n\n".join(parts)


def table(
    facts: Mapping[str, Any], cost: str, found: Mapping[str, Any], folder: str | None = None
) -> str:
    """Of one cost table. folder: of the prompts it is judged on; None: those of the harvest that it
    is chosen on."""
    called = f"{cost} ({facts['cost']})" if cost == "chosen" else cost
    where = f", {folder}" if folder else ""
    choices = {**found["rules"], **found["structures"], **found["bounds"]}
    rows = (row(Choice(**choice)) for choice in choices.values())
    return "\n".join([f"## cost {called}{where}{heading(found)}", HEAD, *rows])


def heading(found: Mapping[str, Any]) -> str:
    """The advice and how it does on the prompts it is judged on."""
    advised = found["rules"].get(found["advice"])
    speed = f" {advised['speedup']:.2f}x" if advised else ""
    return f": {found['advice']}{speed}; oracle {found['oracle_speedup']:.2f}x{unpriced(found)}"


def unpriced(found: Mapping[str, Any]) -> str:
    """Whose predictions have no price."""
    calls = found["cost"]["calls"]
    names = ", ".join(name for name in found["structures"] if name not in calls)
    if not (names or not calls):
        return ""
    return f"; predictions{f' of {names}' if calls else ''} cost nothing here"


def row(choice: Choice) -> str:
    rates = f"{choice.discard_rate:.3f} | {choice.verification_rate:.3f}"
    speed = f"{choice.speedup:.3f} | {span(choice.interval)}"
    worth = "yes" if choice.speculate else "no"
    gain = "-"
    if choice.other is not None:
        gain = f"{choice.other}: {choice.gain:.3f}, {span(choice.gain_interval)}"
    return (
        f"| {choice.rule} | {choice.threshold:.3g} | {worth} | {speed} | {choice.regret:.1%} |"
        f" {gain} | {rates} |"
    )


def transfers(facts: Mapping[str, Any]) -> list[str]:
    """What it costs a structure that its rate is not tuned; nothing where there is none."""
    sets = {facts["judged_on"]: facts["results"], **facts["elsewhere"]}
    rows = [
        f"| {structure} | {cost} | {prompts} | {said['rate']:.3g} | {said['regret']:.2%} |"
        f" {said['chain_regret']:.2%} |"
        for prompts, results in sets.items()
        for cost, found in results.items()
        for structure, said in found["untuned"].items()
    ]
    if not rows:
        return []
    head = [
        "## without tuning: seconds over those at the best rate for the same prompts",
        "| structure | cost | prompts | rate | regret | of a chain |",
        "|---|---|---|---|---|---|",
    ]
    return ["\n".join([*head, *rows])]


def left_out(facts: Mapping[str, Any]) -> list[str]:
    """What replay does not know of a structure; nothing where there is none."""
    if not any(found["structures"] for found in facts["results"].values()):
        return []
    sampled = facts["draft_warp"]["temperature"] > 0
    law = (
        "drawn without replacement (RRSw)" if sampled else "the most probable tokens, point masses"
    )
    return [
        f"structures are replayed as a harvest has them: a path of {facts['gamma']} tokens at most,"
        f" at most two leaves beside each of them, {law}, and nothing drawn after a leaf"
    ]
