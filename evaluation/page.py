"""The page of a comparison of methods: the answer first, then one table, then everything else."""

import inspect
import re
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from statistics import fmean
from typing import Any

import pandas as pd
from hydra.utils import get_object
from omegaconf import DictConfig

from decoding.engines.serial import SerialEngine
from decoding.models.machine import in_words
from decoding.structures.chain import Chain
from decoding.trace import STAGES
from evaluation.methods import CHOSEN_HERE, chosen_here, origin, rule_of
from evaluation.table import (
    ALL,
    BASELINE,
    FEW,
    OVERLAP,
    SPEEDUP,
    Row,
    Summary,
    compare,
    count_prompts,
    markdown,
    ratio,
    with_interval,
)
from runtime.intervals import METHOD, Estimate
from runtime.text import plural, printable

PLAIN = "plain decoding"  # the baseline, as it is called wherever it is shown
NOT_WORTH_IT = "plain decoding: no draft is worth it here"
NO_GAIN = "no clear difference"
NOISE = 1.1  # fastest over slowest repeat of plain decoding on a machine that is not quiet


# The answer ---------------------------------------------------------------------------------------


def answer_of(
    results: Mapping[str, Any], measurements: pd.DataFrame, advice: Mapping[str, str] | None
) -> list[str]:
    """Return two lines on what to use. advice: the `rule` that tuning advises, and its `file`."""
    drafting = [name for name, method in results["methods"].items() if method["speculates"]]
    rule, config = advice["rule"] if advice else None, results["run"]["config"]
    settings = {name: method["settings"] for name, method in results["methods"].items()}
    how = (
        f"Chosen by tuning on other prompts ({advice['file']})"
        if advice
        else chosen_here(settings, results["run"]["command"])
    )
    return answer(measurements, labels_of(results), drafting, rule, how, config)


def answer(
    measurements: pd.DataFrame,
    labels: Mapping[str, str],
    drafting: Collection[str],
    advised: str | None = None,
    how_chosen: str = CHOSEN_HERE,
    config: Mapping[str, Any] | None = None,
) -> list[str]:
    """Return what to use and how much faster it is, and how sure that is, with how it was chosen in
    a line of its own.

    labels: policy -> its name with the numbers of its stop rule; drafting: policies that tuning has
    not replaced by plain decoding; advised: the one that tuning advises, None: the fastest that is
    shown to be faster; config: of the comparison, for advice on too few prompts."""
    speeds = compare(measurements)
    drafts = [name for name in speeds if name in drafting and name != BASELINE]
    best = chosen(speeds, drafting, advised)
    fastest = best or max(drafts, key=lambda name: speeds[name].value, default=None)
    why = basis(measurements, fastest, config or {})
    if fastest is None:
        return [f"Nothing to choose: {PLAIN} alone was decoded. Name methods=[...]", why]
    why += f"\n{how_chosen}."
    if best is None:
        first = f"Use {PLAIN}: no method is shown to be faster here."
        first += f" The fastest, {labels[fastest]}, is at {times(speeds[fastest])} its speed."
        return [first, why]
    first = f"Use {labels[best]}: {times(speeds[best])} plain decoding."
    if lower(speeds[best]) <= 1:
        first += (
            " That is slower: tune again, on a quiet machine."
            if upper(speeds[best]) < 1
            else " The interval holds 1, so these prompts do not show a gain."
        )
    others = compare(measurements, best)
    rest = {labels[name]: others[name] for name in drafts if name != best}
    return [" ".join([first, *beside(rest, labels[best])]), why]


def beside(speeds: Mapping[str, Estimate], best: str = "it") -> list[str]:
    """Return a sentence that compares other policies with the one to use, `best`; none where there
    are none. speeds: theirs over its."""
    each = [
        f"{name} is at {with_interval(speed, unit='x')}, {words_for(speed)}"
        for name, speed in speeds.items()
        if speed.low is not None
    ]
    return [f"Beside {best}: {'; '.join(each)}."] if each else []


def words_for(speed: Estimate) -> str:
    """Return what the interval of a ratio of speeds shows."""
    return "slower" if upper(speed) < 1 else "faster" if lower(speed) > 1 else NO_GAIN


def chosen(
    speeds: Mapping[str, Estimate], drafting: Collection[str], advised: str | None
) -> str | None:
    """Return the policy to use, None for plain decoding: the advised one or, without advice, the
    fastest that is shown to be faster. speeds: over plain decoding."""
    drafts = [name for name in speeds if name in drafting and name != BASELINE]
    if advised is not None:
        return advised if advised in drafts else None
    faster = [name for name in drafts if speeds[name].low is not None and lower(speeds[name]) > 1]
    return max(faster, key=lambda name: speeds[name].value, default=None)


def basis(measurements: pd.DataFrame, policy: str | None, config: Mapping[str, Any]) -> str:
    """Return the basis of the answer, in a line. policy: the one it is about; config: of the
    comparison."""
    repeats, prompts = int(measurements["repeat"].max()) + 1, count_prompts(measurements)
    few = (
        f" Provisional: {prompts} is too few for a trustworthy interval; {more(prompts, config)}."
        if prompts < FEW
        else ""
    )
    return (
        f"Measured on {plural(prompts, unit(config))}, {plural(repeats, 'repeat')}; speeds include"
        f" the prefill; {method(config)}.{by_repeat(measurements, policy)}{few}"
    )


def unit(config: Mapping[str, Any]) -> str:
    """Return what counts as one observation: a prompt, or those that are decoded at once."""
    return "prompt" if config.get("batch", 1) == 1 else "group"


def method(config: Mapping[str, Any]) -> str:
    """Return how intervals are made."""
    return METHOD if config.get("batch", 1) == 1 else METHOD.replace("prompts", "groups")


def more(prompts: int, config: Mapping[str, Any]) -> str:
    """Return how to compare on more prompts than these."""
    split = config.get("split", "test")
    if prompts >= (config.get("limit") or FEW) or split == "all":
        return f"set limit={FEW * config.get('batch', 1)} or more"
    return f"the {split} split has no more: take a larger dataset, or split=all"


def by_repeat(measurements: pd.DataFrame, policy: str | None) -> str:
    """Return the range of a policy's speed-up and of plain decoding's speed over the repeats, which
    intervals over prompts leave out, with a warning where plain decoding varies; "" for one
    repeat."""
    rows = measurements[measurements["policy"].isin([BASELINE, policy])]
    repeats = [each for _, each in rows.groupby("repeat")]
    if len(repeats) < 2:
        return ""
    plain = [
        ratio(each[each["policy"] == BASELINE], "emitted", "seconds").value for each in repeats
    ]
    slow, fast = min(plain), max(plain)
    speeds = [compare(each)[policy].value for each in repeats if policy]
    told = f"speed-up {min(speeds):.2f} to {max(speeds):.2f}, " if speeds else ""
    told = (
        f" By repeat (noise of the machine and of sampling): {told}{PLAIN} {slow:.1f} to {fast:.1f}"
        " tokens/s."
    )
    if fast > NOISE * slow:
        told += (
            f" Warning: the speed of {PLAIN} itself differs by {fast / slow - 1:.0%} between"
            " repeats, so the machine was not quiet: differences smaller than that show nothing."
        )
    return told


def times(speed: Estimate) -> str:
    return with_interval(speed, unit=" times")


def lower(estimate: Estimate) -> float:
    """Return the lower end of the interval, or the value if there is none."""
    return estimate.value if estimate.low is None else estimate.low


def upper(estimate: Estimate) -> float:
    return estimate.value if estimate.high is None else estimate.high


def labels_of(results: Mapping[str, Any]) -> dict[str, str]:
    return {name: labelled(name, each["settings"]) for name, each in results["methods"].items()}


def labelled(name: str, settings: Mapping[str, Any]) -> str:
    """Return a method's name with the number of its stop rule that tuning settles, such as
    `confidence at 0.4`."""
    if name == BASELINE:
        return PLAIN
    stop = settings.get("stop") or {}
    nested = [inner for inner in stop.values() if isinstance(inner, Mapping)]
    for group in (stop, *nested):
        for key in ("threshold", "gamma"):
            if isinstance(group.get(key), int | float):
                return f"{name} at {group[key]:.3g}"
    return name


def legend(methods: Mapping[str, Any], command: str = "") -> str:
    """Return a description of each method, from the docstrings of its decisive parts: an engine
    that is not serial, a structure that is no chain, a stop rule that has a setting to tune (if
    there is none of them, the chain), and where that setting comes from. command: the whole"""
    lines, given = [], shlex.split(command)
    for name, method in methods.items():
        settings = method["settings"]
        engine, structure = (
            get_object(settings[part]["_target_"]) if part in settings else None
            for part in ("engine", "structure")
        )
        usual = (SerialEngine, Chain, None)
        decisive = [part for part in (engine, structure, rule_of(settings)) if part not in usual]
        told = [first_sentence(part) for part in decisive or [structure]]
        told += filter(None, [origin(name, method, given)])
        label = f"{PLAIN} ({name})" if name == BASELINE else name
        lines.append(f"- {label}: {'. '.join(told)}.")
    return "\n".join(lines)


def first_sentence(part: Any) -> str:
    sentence = re.split(r"\.(?=\s+[A-Z]|\s*$)", inspect.getdoc(part) or "")[0]
    return " ".join(sentence.split())


# The tables ---------------------------------------------------------------------------------------

DRAFTS = {
    "drafted/round": ".2f",
    "draft forwards/round": ".2f",
    "acceptance": ".3f",
    "acceptance length": ".2f",
    "accepted length M": ".2f",
    "rollback RB": ".3f",
}
OVERLAPS = {"waste": ".3f"} | {name: ".1%" for name in OVERLAP if name != "waste"}
DRAFTS_LEGEND = (
    "tokens/target call: of all rounds, the target's own token included (EAGLE's tau, Spec-Bench's"
    " mean accepted tokens). acceptance length: the same of rounds that drafted, 1 + accepted"
    " tokens per draft (vLLM's mean acceptance length); it is tau where every round drafts."
    " acceptance: accepted of all draft tokens, those that nobody judged included (vLLM's draft"
    " acceptance rate). accepted length M (SpecBranch): mean length of a run of accepted draft"
    " tokens; with draft and target in turn, a run is a round that drafted. rollback RB: share of"
    " draft steps that a rejection took."
)
PLACES = 8  # positions of a draft that are shown
POSITIONS = {
    "drafts": "Of all drafts, those whose token at this position was accepted (vLLM's per-position"
    " acceptance). A draft that ended before counts as one whose token was not; the shares of all"
    " positions add up to the acceptance length - 1.",
    "judged_at": "Of the drafts that had a token at this position and those before it accepted, the"
    " ones whose token there was accepted as well (EAGLE's 0-alpha, 1-alpha, ..., which are of"
    " fixed lengths: a stop rule leaves the tokens that it is sure of). n: such drafts.",
}
TREES = "In a tree a position is a depth, whose siblings count once: accepted if one of them was."
TAU = "tokens/target call (tau)"
NONE = Estimate(0.0)  # of no draft
TASKS = {"tokens/s": ".1f", "acceptance length": ".2f", "tokens/target call": ".2f"}
PROFILE = dict.fromkeys([*STAGES, "overhead"], ".1%")
PROFILE_LEGEND = (
    "overhead: decode time outside both models' forwards, whatever stage it is in. sample: drawing"
    " tokens. Where draft and target run side by side, shares add up to more than 100 %."
)
COSTS = (
    "Modelled: the counts of this run, priced; prefill, drawing, verification and the stop rule"
    " cost nothing; what runs side by side takes as long as the slower one. measured: seconds per"
    " forward on this machine, each model alone; pipeline: the same with the target split over two"
    " devices and the draft on the one that is idle; c: a target forward costs c draft forwards,"
    " however many rows it has."
)


def page(
    cfg: DictConfig, results: Mapping[str, Any], lines: Sequence[str], whole: bool = True
) -> str:
    """Return the page of a comparison: the answer and one table, with further parts that were asked
    for, or the `whole` page. lines: of `answer`."""
    labels, draft = labels_of(results), results["draft"]
    drafting = [labels[name] for name, each in results["methods"].items() if each["speculates"]]
    rows = {
        dataset: {labels[name]: row for name, row in summary.items()}
        for dataset, summary in results["summary"].items()
    }
    repeats = plural(cfg.repeats, "repeat")
    parts = ["\n".join(lines), f"# {heading(cfg)}", *simulated(cfg.pair), hardware(results["run"])]
    if whole:
        parts += [
            "Measured: tokens/s of whole requests, prefill included, until EOS or"
            f" {cfg.max_new_tokens} tokens; a speed-up is the ratio of tokens/s on the same"
            f" prompts, on which the methods take turns, {repeats}; {method(cfg)}."
        ]
    for dataset in rows if whole else (ALL,):
        if whole:
            prompts = plural(results["prompts"][dataset], unit(cfg))
            parts += [f"## {printable(dataset)}: {prompts}, {repeats}"]
        table = speed_table(
            rows[dataset], results["against"], drafting, results["prompts"][dataset]
        )
        parts += [table, *([draft_table(rows[dataset])] if whole else [])]
        parts += [DRAFTS_LEGEND] if whole and dataset == ALL else []
        parts += draft_lines(draft["match"][dataset]) if draft else []
    parts += [legend(results["methods"], results["run"]["command"])]
    if whole:
        parts += remarks(results)
        parts += task_parts(results, unit(cfg))
        parts += position_parts(results["positions"], labels)
    parts += [
        f"{name}: left out, it did not compile ({why})."
        for name, why in results["left_out"].items()
    ]
    shared = {name: row for name, row in rows[ALL].items() if "waste" in row}
    if whole and shared:
        parts += ["## Draft and target side by side", figure_table(shared, OVERLAPS)]
    if cfg.modelled:
        parts += ["## Speed-up, modelled: a device for each model"]
        costs = [figure for figure in rows[ALL][PLAIN] if figure.startswith(f"{SPEEDUP}, ")]
        written = partial(with_interval, unit="x")
        parts += [figure_table(rows[ALL], dict.fromkeys(costs, ".2f"), written), COSTS]
    if whole:
        parts += ["## Lossless", *results["lossless"]]
        if cfg.batch == 1:  # else requests wait for each other
            parts += ["## Share of decode time", figure_table(rows[ALL], PROFILE)]
            parts += [PROFILE_LEGEND]
    else:
        parts += ["\n".join(lossless_in_short(results["lossless"]))]
    return "\n\n".join(parts)


def remarks(results: Mapping[str, Any]) -> list[str]:
    """Return remarks on the origin of the numbers."""
    parts = list[str]()
    for name, speeds in results["tried"].items():
        each = ", ".join(f"{what}: {speed:.1f}" for what, speed in speeds.items())
        parts += [f"{name}, tokens/s in the pass that chose: {each}"]
    if count := results.get("turns_left_out"):
        parts += [f"Conversations that ended before a turn that does not fit the context: {count}."]
    if results.get("kept"):
        parts += [
            "Later turns of conversations begin with what the turns before left in the caches,"
            f" {results['kept']:,} tokens of prompts in all, as in a chat server; methods of other"
            " libraries read their whole prompts."
        ]
    if results["resumed"]:
        parts += [
            f"Decoded in more than one sitting ({plural(results['resumed'], 'turn')} before the"
            " last one)."
            " The methods of a turn ran next to each other; tokens/s mix the sittings."
        ]
    if results["draft"]:
        seconds = results["draft"]["seconds"]
        rows = [f"{count}: {1e3 * value:.1f}" for count, value in seconds["target"].items()]
        parts += [
            f"Measured: ms of a draft forward {1e3 * seconds['draft']:.1f}, of a target forward by"
            f" its rows {', '.join(rows)}."
        ]
    return parts


def heading(cfg: DictConfig) -> str:
    target, draft = _said(cfg.warp), _said(cfg.draft_warp)
    own = "" if draft == target else f" (draft: {draft})"
    return (
        f"{printable(f'{cfg.pair.name}: {cfg.dataset.name}')}, {target}{own},"
        f" up to {cfg.max_new_tokens} tokens"
    )


def _said(warp: Mapping[str, Any]) -> str:
    """Return a warp in words: its temperature, and what it does besides."""
    nothing = {"top_k": 0, "top_p": 1.0, "typical_p": 1.0, "repetition_penalty": 1.0}
    others = {
        name: value
        for name, value in warp.items()
        if name not in ("_target_", "temperature") and value and value != nothing.get(name)
    }
    parts = {"temperature": warp["temperature"], **others}
    return ", ".join(f"{name.replace('_', '-')} {value}" for name, value in parts.items())


def hardware(facts: Mapping[str, Any]) -> str:
    """Return the hardware and software of the measurement."""
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    count = facts.get("config", {}).get("workers", {}).get("count", 1)
    shared = f" {count} processes at once, threads as Ray gives them," if count > 1 else ""
    if (batch := facts.get("config", {}).get("batch", 1)) and batch > 1:
        shared += f" {batch} prompts at once,"
    return (
        f"{in_words(facts['hardware'])}, threads: {facts['threads']},{shared}"
        f" {in_words(facts['dtypes'])}; {versions}."
    )


def simulated(pair: Mapping[str, Any]) -> list[str]:
    """Return the remark on all speeds of a pair whose draft simulates another one; nothing for
    other pairs. pair: its settings."""
    mix, bits = pair.get("draft_mix", 1), pair.get("bits")
    how = [f"the target with weights of {bits} bits"] if bits else []
    how += [f"mixed with the target, pair.draft_mix={mix}"] if mix < 1 else []
    if not how:
        return []
    return [
        f"Simulated draft: {', '.join(how)}. It takes as long as its target, or longer: measured"
        " times say nothing of speed; modelled ones, at costs that are given, say what a draft that"
        " is accepted as often would gain."
    ]


def speed_table(
    summary: Summary,
    against: Mapping[str, str],
    drafting: Collection[str] | None = None,
    prompts: int = FEW,
) -> str:
    """Return the table of the speeds of all methods.

    against: heading -> further method to compare with; drafting: methods that tuning has not
    replaced by plain decoding, None: all; prompts: number of them"""
    rows = [
        [
            name,
            with_interval(row[SPEEDUP], unit="x"),
            f"{row['tokens/s'].value:.1f}",
            *(with_interval(row[f"over {other}"], unit="x") for other in against.values()),
            f"{row['tokens/target call'].value:.2f}",
            f"{row['acceptance'].value:.3f}" if row["drafted/round"].value else "-",
            f"{row['stop rule time'].value:.1%}" if "stop rule time" in row else "-",
            verdict(name, row, drafting, prompts),
        ]
        for name, row in summary.items()
    ]
    beside = [
        f"vs {what}" if what == other else f"vs {what} ({other})" for what, other in against.items()
    ]
    header = ["method", "speed-up, measured", "tokens/s", *beside, TAU]
    return markdown([*header, "acceptance", "stop rule time", "verdict"], rows)


def verdict(
    name: str, row: Row, drafting: Collection[str] | None = None, prompts: int = FEW
) -> str:
    """Return whether the method is faster than plain decoding, by the interval over prompts; few
    of them decide nothing."""
    speed = row[SPEEDUP]
    if name in (BASELINE, PLAIN):
        return "-"
    if drafting is not None and name not in drafting:
        return NOT_WORTH_IT
    if row["tokens/target call"].value == 1 and row["drafted/round"].value == 0:
        return "does not speculate"
    if speed.low is None or prompts < FEW:
        return "few prompts"
    return words_for(speed).replace("slower", "SLOWER")


def draft_table(summary: Summary) -> str:
    """Return the table of drafted tokens and their acceptance, where these are known."""
    plain = [name for name, row in summary.items() if not row["drafted/round"].value]
    drafts = {name: row for name, row in summary.items() if name not in (BASELINE, *plain)}
    return figure_table(drafts, DRAFTS, with_interval)


def task_parts(results: Mapping[str, Any], unit: str) -> list[str]:
    """Return the figures of each set and category and the mean of the sets, a row for each task
    and method; nothing for a single set without categories."""
    labels, summaries, categories = labels_of(results), results["summary"], results["categories"]
    sets = {name: (results["prompts"][name], summaries[name]) for name in summaries if name != ALL}
    every = results["prompts"][ALL]
    tasks = list[tuple[str, int, Summary]]()
    for dataset in sets or categories:
        tasks += [(dataset, *sets.get(dataset, (every, summaries[ALL])))]
        for name, part in categories.get(dataset, {}).items():
            tasks += [(f"{dataset} - {name}", part["prompts"], part["summary"])]
    if sets:
        tasks += [("mean of the sets", every, mean_of([summary for _, summary in sets.values()]))]
    rows = list[list[str]]()
    for task, prompts, summary in tasks:
        for name, row in summary.items():
            figures = [  # 0: of no draft
                with_interval(row[figure], form) if figure in row and row[figure].value else "-"
                for figure, form in TASKS.items()
            ]
            speed = with_interval(row[SPEEDUP], unit="x")
            rows.append([task, str(prompts), labels[name], speed, *figures])
    named = [TAU if figure == "tokens/target call" else figure for figure in TASKS]
    header = ["task", f"{unit}s", "method", "speed-up", *named]
    return ["## By set and category", markdown(header, rows)] if rows else []


def mean_of(sets: Sequence[Summary]) -> Summary:
    """Return the mean over the sets of every figure that each of them has, for methods in all of
    them, as EAGLE's tables have it: every set counts once, however many prompts it has."""
    return {
        name: {
            figure: Estimate(fmean(each[name][figure].value for each in sets))
            for figure in row
            if all(each[name].get(figure, NONE).value for each in sets)
        }
        for name, row in sets[0].items()
        if all(name in each for each in sets)
    }


def position_parts(positions: Mapping[str, Any], labels: Mapping[str, str]) -> list[str]:
    """Return the tables of acceptance by position of the draft, of the first ones."""
    drafts = {labels[name]: each for name, each in positions.items() if each["judged"]}
    most = min(PLACES, max((len(each["judged"]) for each in drafts.values()), default=0))
    parts = list[str]()
    for below, told in POSITIONS.items():
        rows = []
        for name, each in drafts.items():
            cells = [with_interval(one, ".3f") for one in each[below]]
            if below == "judged_at":
                cells = [f"{cell}, n={n}" for cell, n in zip(cells, each["judged"], strict=True)]
            rows.append([name, *cells, *[""] * most][: most + 1])
        parts += [told, markdown(["method", *map(str, range(1, most + 1))], rows)]
    return ["## Acceptance by position of the draft", *parts, TREES] if drafts else []


def without_interval(estimate: Estimate, form: str) -> str:
    return f"{estimate.value:{form}}"


def figure_table(
    summary: Summary,
    forms: Mapping[str, str],
    written: Callable[[Estimate, str], str] = without_interval,
) -> str:
    """Return a table of figures by method. forms: of the figures that are shown."""
    rows = [
        [name, *(written(row[each], form) if each in row else "-" for each, form in forms.items())]
        for name, row in summary.items()
    ]
    header = [figure.removeprefix(f"{SPEEDUP}, ") for figure in forms]
    return markdown(["method", *header], rows)


def lossless_in_short(lines: Sequence[str]) -> list[str]:
    """Return the lines of `evaluation.lossless`, shortened to one if every output equals plain
    decoding's."""
    equal = [line for line in lines if line.endswith("(equal)")]
    if len(equal) < 2:
        return list(lines)
    others = [line for line in lines if line not in equal]
    return [*others, f"greedy: outputs of {len(equal)} methods equal plain decoding, every token"]


def draft_lines(match: Mapping[str, Any]) -> list[str]:
    """Return lines on how well the draft matches the target. match: of `speedup_bound.draft_along`,
    for one dataset."""
    best, later = match["speedup_bound"], ", ".join(f"{p:.3f}" for p in match["accepted_after"])
    reads = " (then {}, for it reads its own states after the first token of a draft)"
    return [
        (
            f"The draft along the {match['positions']} tokens of plain decoding: acceptance sum"
            f" min(p, q) at temperature 1 {match['overlap']:.3f}, greedy agreement"
            f" {match['greedy']:.3f}."
        ),
        (
            f"Modelled: a token accepted with probability {match['accepted']:.3f} under these"
            f" warps{reads.format(later) if later else ''}, drafts of {best['gamma']} would make"
            f" {best['tokens_per_round']:.2f} tokens per target call and {best['speedup']:.2f}x the"
            " speed of our plain decoding, if nothing but forwards cost time."
        ),
    ]
