"""The table of a trained predictor's scores, and its model card."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from predictors.calibration import Calibration
from predictors.survival import Survival
from runtime.text import plural

if TYPE_CHECKING:
    from predictors.base import Predictor

COLUMNS = ("kl", "brier", "ece", "auroc", "accuracy")
HIGHER = ("auroc", "accuracy")  # is better, of the others lower
LEGEND = (
    "kl: mean CE - entropy of the label (log loss if it is hard). brier: mean squared error. ece:"
    " 15 equal bins. auroc: soft labels count as weighted rows. draft confidence: logistic"
    " regression on one draft probability."
)

RELIABILITY_LEGEND = (
    "95 % intervals: bootstrap over prompts. ece: 10 bins of equal mass. prefix k: the first k"
    " tokens of a draft are all accepted. as trained: softmax of the head, for prefixes its"
    " product; calibrated: the same of calibrated probabilities; survival: calibrated prefixes. log"
    " loss: at these stages, and how the last differs from the one before. An ece of few rows is"
    " mostly noise, which its interval allows for."
)
SURVIVAL_LEGEND = (
    "Log loss of survival: whether a draft is accepted so far, or also its next token where that is"
    " predicted, by the predictor and by the probabilities that the draft gave its tokens, all"
    " calibrated on the same prompts in the same way. difference: the predictor's minus the other,"
    " paired; below 0 it is better. 95 % intervals: bootstrap over prompts."
)
STAGES = ("as trained", "calibrated", "survival")
REPOSITORY = re.compile(r"[\w-][\w.-]*/[\w.-]+")  # owner/name on a hub
DECISION = "priors divided out"
ACROSS = ("class", "token", "prefix 2", "prefix 4", "prefix all")  # compared between harvests


def score_table(test: Mapping[str, Mapping[str, Any]]) -> str:
    """Return which scores are better, and one line per predictor, markdown. test: predictor -> its
    `metrics.scores`."""
    columns = [name for name in COLUMNS if any(name in row for row in test.values())]
    rows = {name: [f"{row[column]:.4f}" for column in columns] for name, row in test.items()}
    lower, higher = (
        ", ".join(name for name in columns if (name in HIGHER) == high) for high in (False, True)
    )
    better = f"Lower is better: {lower}; higher is better: {higher}."
    return f"{better}\n\n{_table(columns, rows, 'predictor', least=8)}"


def confusion(name: str, metrics: Mapping[str, Any]) -> list[list[int]] | None:
    """Return the confusion counts of the classes that decisions use: those with the priors divided
    out, if there are any."""
    test = metrics["test"]
    counts: list[list[int]] | None = test.get(f"{name}, {DECISION}", test[name]).get("confusion")
    return counts


def confusion_table(counts: list[list[int]], classes: Sequence[str]) -> str:
    """Return counts, markdown: rows are the true classes, columns the predicted ones."""
    rows = {name: list(map(str, row)) for name, row in zip(classes, counts, strict=True)}
    return _table(list(classes), rows, "true \\ predicted", least=8)


def _table(
    header: list[str], rows: Mapping[str, list[str]], corner: str = "", least: int = 0
) -> str:
    """Return markdown in columns of `least` characters or more. corner: head of the names."""
    first = max(map(len, (corner, *rows)))
    widths = [max(least, *map(len, cells)) for cells in zip(header, *rows.values(), strict=True)]
    rule = ["-" * width for width in widths]
    lines = [(corner, header), ("-" * first, rule), *rows.items()]
    return "\n".join(
        f"| {' | '.join([name.ljust(first), *map(str.rjust, cells, widths)])} |"
        for name, cells in lines
    )


def calibration_text(calibration: Calibration) -> str:
    """Return what was fitted on the calibration split and how much it lowers the cross-entropy
    there: a line for the head, and one for prefixes."""
    parts, survival = [calibration.method], calibration.survival
    for name in ("offset", "scale", "bias"):
        if values := getattr(calibration, name):
            parts.append(f"{name} ({', '.join(f'{value:.3f}' for value in values)})")
    parts += [f"{len(x)} knots" for x, _ in calibration.curves]
    lines: list[tuple[str, Calibration | Survival]] = [(", ".join(parts), calibration)]
    if survival.rows:
        form = f"scale {survival.scale:.3f}, bias {survival.bias:.3f}, depth {survival.depth:.3f}"
        lines.append((f"prefix survival: {'product' if survival.is_product else form}", survival))
    return "\n".join(
        f"- {what}{f' ({fit.note})' if fit.note else ''}: cross-entropy {fit.nll_before:.4f}"
        f" before, {fit.nll_after:.4f} after, on {plural(fit.rows, 'row')} of"
        f" {plural(fit.prompts, 'prompt')}"
        for what, fit in lines
    )


def reliability_table(measured: Mapping[str, Mapping[str, Any]]) -> str:
    """Return calibration by stage, markdown, a line for each probability. measured: its name ->
    `reliability.stages`."""
    columns = [stage for stage in STAGES if any(stage in stages for stages in measured.values())]
    rows = {}
    for name, stages in measured.items():
        last = list(stages.values())[-1]
        rows[name] = [
            f"{last['rows']} ({last['prompts']})",
            *(interval(stages[stage]["ece"]) if stage in stages else "" for stage in columns),
            " / ".join(f"{stage['log_loss'][0]:.3f}" for stage in stages.values()),
            interval(last["change"]["log_loss"], " to "),
        ]
    header = ["rows (prompts)", *(f"ece {stage}" for stage in columns), "log loss", "last change"]
    return _table(header, rows)


def interval(estimate: Sequence[float], to: str = "-", digits: int = 3) -> str:
    """Return 0.031 (0.020-0.044), without an interval where its ends are NaN."""
    value, low, high = (f"{number:.{digits}f}" for number in estimate)
    return value if math.isnan(estimate[1]) else f"{value} ({low}{to}{high})"


def reliability_tables(measured: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the first harvest's table in full and, where there are others, one that compares them.
    measured: harvest -> `reliability.measured`, the one trained on first."""
    tables = [reliability_table(next(iter(measured.values())))]
    if len(measured) > 1:
        across = {
            f"{data}: {what}": probabilities[what]
            for data, probabilities in measured.items()
            for what in ACROSS
            if what in probabilities
        }
        tables.append(reliability_table(across))
    return "\n\n".join(tables)


def survival_part(metrics: Mapping[str, Any]) -> list[str]:
    """Return the table of predicted survival against the draft's own confidence, a line for each
    harvest (`reliability.compared`), and its explanation; [] if no survival is predicted."""
    if not (measured := metrics.get("survival")):
        return []
    header, rows = ["rows (prompts)", "log loss"], {}
    for other in next(iter(measured.values()))["difference"]:
        header += [other, "difference"]
    for data, scores in measured.items():
        losses = {name: f"{value:.4f}" for name, (value, *_) in scores["log_loss"].items()}
        rows[data] = [f"{scores['rows']} ({scores['prompts']})", next(iter(losses.values()))]
        for name, difference in scores["difference"].items():
            rows[data] += [losses[name], interval(difference, " to ", 4)]
    return [_table(header, rows), SURVIVAL_LEGEND]


def bins_table(measured: Mapping[str, Mapping[str, Any]]) -> str:
    """Return mean prediction and mean outcome in each bin, markdown, a line for each probability
    and stage."""
    rows = {
        f"{name}, {stage}": [f"{f:.2f} / {outcome:.2f}" for _, f, outcome in scores["bins"]]
        for name, stages in measured.items()
        if name in ACROSS
        for stage, scores in stages.items()
    }
    count = max(map(len, rows.values()))
    padded = {name: cells + [""] * (count - len(cells)) for name, cells in rows.items()}
    return _table([f"bin {number}" for number in range(1, count + 1)], padded)


def findings(predictor: "Predictor", metrics: Mapping[str, Any]) -> str:
    """Return what training prints: scores, confusion, calibration and reliability."""
    counts, survival = confusion(predictor.name, metrics), survival_part(metrics)
    parts = [
        f"{score_table(metrics['test'])}\n{LEGEND}",
        confusion_table(counts, predictor.classes) if counts else "",
        f"{calibration_text(predictor.calibration)}\n{predictor.caveat}",
        f"{reliability_tables(metrics['reliability'])}\n{RELIABILITY_LEGEND}",
        "\n".join(survival),
    ]
    return "\n\n".join(part for part in parts if part)


def model_card(
    config: Mapping[str, Any], metrics: Mapping[str, Any], calibration: Calibration, caveat: str
) -> str:
    """Return `README.md` of a checkpoint folder. caveat: what calibration leaves wrong."""
    made, counts = config["provenance"], confusion(config["predictor"], metrics)
    data, pair = made["data"], made.get("config", {}).get("pair", {})
    # metadata for a hub; it names models that are repositories
    models = [str(pair.get(side)) for side in ("target", "draft")]
    models = [name for name in models if REPOSITORY.fullmatch(name) and not Path(name).exists()]
    known = data.get("identity") or data["sha256"]  # what earlier versions wrote
    tags = ["speculative-decoding", "calibration", config["predictor"]]
    header = ["---", "library_name: draftpredict", "tags:", *(f"- {tag}" for tag in tags)]
    header += ["base_model:", *(f"- {name}" for name in models)] if models else []
    facts = {
        "Pair": config["pair"]["name"],
        "Settings": json.dumps(config["settings"]),
        "Inputs": json.dumps(config["inputs"]),
        "Classes": ", ".join(config["classes"]),
        "Label": config["label"],
        "Gamma": config["gamma"],
        "Target warp": json.dumps(config["warp"]),
        "Draft warp": json.dumps(config["draft_warp"]),
        "Data": f"{data['folder']} (harvest {known[:16]})",
        "Training": (
            f"{plural(metrics['epochs'], 'epoch')}, {metrics['seconds']:.0f} s, seed {made['seed']}"
        ),
    }
    splits = ", ".join(
        f"{split} {plural(count['rows'], 'row')} of {plural(count['prompts'], 'prompt')}"
        for split, count in data["splits"].items()
    )
    parts = [
        "\n".join([*header, "---"]),
        f"# {config['predictor']} for {config['pair']['name']}",
        f"Made by `{made['command']}` on {made['date']}.",
        "\n".join(f"- {name}: {value}" for name, value in facts.items()),
        "## Test split",
        f"{splits}. The test split took no part in training, early stopping or calibration.",
        score_table(metrics["test"]),
        *([confusion_table(counts, config["classes"])] if counts else []),
        LEGEND,
        "## Calibration",
        "Fitted on the calibration split:",
        calibration_text(calibration),
        caveat,
        "Measured on the test split, and on all of any other harvest:",
        reliability_tables(metrics["reliability"]),
        RELIABILITY_LEGEND,
        *survival_part(metrics),
        "Predicted / observed, in bins of equal mass of the test split:",
        bins_table(next(iter(metrics["reliability"].values()))),
        "## Limits",
        "It is valid for this pair, these inputs and these sampling distributions only; loading it"
        " for\nothers is refused.",
    ]
    return "\n\n".join(parts) + "\n"
