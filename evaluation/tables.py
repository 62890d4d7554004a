"""Tables in words and Markdown from metrics."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from omegaconf import DictConfig

from evaluation.lossless import Difference
from evaluation.metrics import Metrics, OverlapMetrics, Spread
from runtime.text import printable

BASELINE = "autoregressive"


def page(cfg: DictConfig, results: Mapping[str, Any]) -> str:
    """The table presentation: everything that a comparison of methods says. cfg: of
    scripts/evaluate.py."""
    parts = [heading(cfg), *simulated(cfg.pair)]
    drafting = [name for name, method in results["methods"].items() if method["speculates"]]
    for name, metrics in results["metrics"].shown():
        prompts = metrics[BASELINE].requests // cfg.repeats
        parts += [f"## {printable(name)}: {prompts} prompts, {cfg.repeats} repeats"]
        parts += [speed_table(metrics, results["against"], drafting)]
        parts += [summary(metrics, cfg.repeats, drafting), draft_table(metrics)]
    parts += remarks(results)
    if results["overlap"]:
        parts += ["## Draft and target side by side", overlap_table(results["overlap"])]
    if cfg.modelled:
        parts += ["## Speed-up, modelled: a device for each model"]
        parts += [modelled_table(results["modelled"])]
    parts += ["## Lossless", *results["lossless"]]
    if cfg.profile:
        parts += ["## Share of decode time", profile_table(results["profile"])]
    return "\n\n".join(parts)


def remarks(results: Mapping[str, Any]) -> list[str]:
    """What both presentations say about how the numbers came about."""
    parts = [
        f"{name}: {method['note']}."
        for name, method in results["methods"].items()
        if method["note"]
    ]
    for name, speeds in results["tried"].items():
        said = ", ".join(f"{what}: {speed:.1f}" for what, speed in speeds.items())
        parts += [f"{name}, tokens/s in the pass that chose: {said}"]
    for name, why in results["left_out"].items():
        parts += [f"{name}: left out, it did not compile ({why})."]
    if results["resumed"]:
        parts += [
            f"Decoded in more than one sitting ({results['resumed']} turns before the last one)."
            " The methods of a turn ran next to each other; tokens/s mix the sittings."
        ]
    return parts


def heading(cfg: DictConfig) -> str:
    return f"# {printable(f'{cfg.pair.name}: {cfg.dataset.name}')}, {setting(cfg)}"


def simulated(pair: Mapping[str, Any]) -> list[str]:
    """What every speed of a pair has to say whose draft stands for another one; nothing of any
    other. pair: its settings."""
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


def setting(cfg: DictConfig) -> str:
    draft = "" if cfg.draft_warp == cfg.warp else f" (draft {cfg.draft_warp.temperature})"
    filters = (
        f", top-k {cfg.warp.top_k}, top-p {cfg.warp.top_p}"
        if cfg.warp.top_k or cfg.warp.top_p < 1
        else ""
    )
    return f"temperature {cfg.warp.temperature}{draft}{filters}, up to {cfg.max_new_tokens} tokens"


def speed_table(
    metrics: Mapping[str, Metrics], against: Mapping[str, str], drafting: Collection[str]
) -> str:
    """tokens/s and speed-up as median (lowest-highest over repeats), the latter over the baseline
    of the same run.

    against: what else to compare with -> method; drafting: methods that no tuning made plain."""
    header = ["method", "tokens/s", "speed-up, measured", *(f"vs {what}" for what in against)]
    rows = [
        [
            name,
            _spread(m.tokens_per_second, ".1f"),
            _spread(m.speedup, ".2f", "x"),
            *(_versus(m, metrics[other]) for other in against.values()),
            f"{m.tokens_per_target_call:.2f}",
            f"{m.predictor_share:.1%}",
            verdict(name, m, drafting),
        ]
        for name, m in metrics.items()
    ]
    return markdown([*header, "tokens/target call", "predictor time", "verdict"], rows)


def draft_table(metrics: Mapping[str, Metrics]) -> str:
    """How much was drafted, and what became of it, where that is known."""
    header = [
        "method",
        "drafted/round",
        "acceptance",
        "per request",
        "accepted run",
        "accepted length M",
        "discard",
        "verification",
        "rollback RB",
    ]
    rows = [
        [
            name,
            f"{m.drafted_per_round:.2f}",
            f"{m.acceptance:.3f}",
            f"{m.acceptance_per_request:.3f} ± {m.acceptance_per_request_std:.3f}",
            f"{m.accepted_run:.2f}",
            f"{m.accepted_length:.2f}",
            f"{m.discard_rate:.3f}",
            f"{m.verification_rate:.3f}",
            f"{m.rollback_rate:.3f}",
        ]
        for name, m in metrics.items()
        if name != BASELINE and m.drafted_per_round
    ]
    return markdown(header, rows)


def overlap_table(metrics: Mapping[str, OverlapMetrics]) -> str:
    """How draft and target shared the work."""
    header = ["method", "waste", "target idle", "draft idle", "draft stages", "class none/some/all"]
    rows = [
        [
            name,
            f"{m.waste_rate:.3f}",
            *(f"{x:.1%}" for x in (m.target_bubbles, m.draft_bubbles, m.draft_stages)),
            " / ".join(f"{x:.0%}" for x in m.classes),
        ]
        for name, m in metrics.items()
    ]
    return markdown(header, rows)


def modelled_table(speedups: Mapping[str, Mapping[str, float]]) -> str:
    """Speed-ups over the first method, by cost table."""
    tables = list(next(iter(speedups.values())))
    header = ["method", *(table if table.isalpha() else f"c = {table}" for table in tables)]
    rows = [
        [name, *(f"{found[table]:.2f}x" for table in tables)] for name, found in speedups.items()
    ]
    note = (
        "Modelled: the counts of this run, priced; prefill, drawing, verification and the stop rule"
        " cost nothing; what runs side by side takes as long as the slower one. measured: seconds"
        " per forward on this machine, each model alone; pipeline: the same with the target split"
        " over two devices and the draft on the one that is idle; c: a target forward costs c draft"
        " forwards, however many rows it has."
    )
    return f"{markdown(header, rows)}\n\n{note}"


def profile_table(shares: Mapping[str, Mapping[str, float]]) -> str:
    """Where decode time goes. overhead: everything outside the two models' forwards."""
    stages = list(next(iter(shares.values())))
    return markdown(
        ["method", *stages],
        [[name, *(f"{share[stage]:.1%}" for stage in stages)] for name, share in shares.items()],
    )


NOT_WORTH_IT = "plain decoding: no draft is worth it here"


def verdict(name: str, metrics: Metrics, drafting: Collection[str] | None = None) -> str:
    """Whether the method beats the baseline in every repeat, in none, or in some; one repeat
    decides nothing. drafting: methods that no tuning made plain; None: all."""
    if metrics.speedup is None:
        return "baseline"
    if drafting is not None and name not in drafting:
        return NOT_WORTH_IT
    if metrics.tokens_per_target_call == 1 and metrics.drafted_per_round == 0:
        return "does not speculate"
    if metrics.repeats < 2:
        return "one repeat"
    if metrics.speedup.low > 1:
        return "faster"
    return "SLOWER" if metrics.speedup.high < 1 else "no clear difference"


def summary(metrics: Mapping[str, Metrics], repeats: int, drafting: Collection[str]) -> str:
    """One sentence on where speculation pays and where it does not."""
    groups: dict[str, list[str]] = {}
    for name, m in metrics.items():
        if m.speedup is not None:
            groups.setdefault(verdict(name, m, drafting), []).append(
                f"{name} ({m.speedup.median:.2f}x)"
            )
    words = {
        "faster": "Faster than autoregressive decoding in every repeat",
        "no clear difference": "Neither faster nor slower beyond the spread",
        "SLOWER": "Speculation LOSES against autoregressive decoding with",
        NOT_WORTH_IT: "Plain decoding, because tuning found no draft worth it here",
        "does not speculate": "Without a draft",
        "one repeat": "Measured once, so without a verdict",
    }
    said = [f"{text}: {', '.join(groups[key])}." for key, text in words.items() if key in groups]
    return " ".join(
        [*said, f"Speed-ups are measured in this run, {repeats} interleaved repeat(s)."]
    )


def lossless_lines(
    differences: Mapping[str, Sequence[Difference]],
    prompts: int,
    baseline: str = "autoregressive decoding",
) -> list[str]:
    """Greedy decoding: who equals the baseline token for token, and how near a tie every difference
    is."""
    lines = []
    for name, found in differences.items():
        wrong = sum(not difference.excused for difference in found)
        state = (
            "equal"
            if not found
            else f"NOT LOSSLESS on {wrong}"
            if wrong
            else "equal up to near ties"
        )
        lines.append(
            f"{name}: {prompts - len(found)} of {prompts} outputs equal {baseline} ({state})"
        )
        lines += [
            f"  {printable(d.prompt_id)}, token {d.position}: {d.token} instead of"
            f" {d.baseline_token}, logit gap {d.gap:.1e}"
            f" ({'near tie' if d.excused else 'too large'}, limit {d.limit:.0e})"
            for d in found
        ]
    return lines


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table whose columns also line up in a terminal."""
    cells = [[printable(cell) for cell in line] for line in (header, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [cells[0], ["-" * width for width in widths], *cells[1:]]
    return "\n".join(
        "| " + " | ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)) + " |"
        for line in lines
    )


def _versus(metrics: Metrics, other: Metrics) -> str:
    return f"{metrics.tokens_per_second.median / other.tokens_per_second.median:.2f}x"


def _spread(spread: Spread | None, form: str, unit: str = "") -> str:
    if spread is None:
        return "1"
    return f"{spread.median:{form}}{unit} ({spread.low:{form}}-{spread.high:{form}})"
