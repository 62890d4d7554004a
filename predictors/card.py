"""How a trained predictor is shown: the table of scores and the model card."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from predictors.calibration import Calibration
from predictors.survival import Survival

if TYPE_CHECKING:
    from predictors.base import Predictor

COLUMNS = ("kl", "brier", "ece", "auroc", "accuracy")
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
    """One line per predictor, markdown. test: predictor -> its `metrics.scores`."""
    columns = [name for name in COLUMNS if any(name in row for row in test.values())]
    width = max(map(len, test))
    lines = [
        _line("predictor", columns, width),
        _line("-" * width, ["-" * 8] * len(columns), width),
    ]
    lines += [
        _line(name, [f"{row[column]:.4f}" for column in columns], width)
        for name, row in test.items()
    ]
    return "\n".join(lines)


def _line(name: str, cells: list[str], width: int) -> str:
    return f"| {name:<{width}} | " + " | ".join(f"{cell:>8}" for cell in cells) + " |"


def confusion(name: str, metrics: Mapping[str, Any]) -> list[list[int]] | None:
    """Of the classes that decide: with the priors divided out where there are any."""
    test = metrics["test"]
    counts: list[list[int]] | None = test.get(f"{name}, {DECISION}", test[name]).get("confusion")
    return counts


def confusion_table(counts: list[list[int]], classes: tuple[str, ...]) -> str:
    """Counts, markdown: rows are the true classes, columns the predicted ones."""
    width = len("true \\ predicted")
    lines = [
        _line("true \\ predicted", list(classes), width),
        _line("-" * width, ["-" * 8] * len(classes), width),
    ]
    lines += [
        _line(name, [str(n) for n in row], width) for name, row in zip(classes, counts, strict=True)
    ]
    return "\n".join(lines)


def calibration_text(calibration: Calibration) -> str:
    """What was fitted on the calibration split and what it is worth there: a line for the head, one
    for prefixes."""
    numbers = {"offset": calibration.offset, "scale": calibration.scale, "bias": calibration.bias}
    fitted = [f"{name} {_list(values)}" for name, values in numbers.items() if values]
    fitted += [f"{len(x)} knots" for x, _ in calibration.curves]
    lines = [_fit_line(", ".join([calibration.method, *fitted]), calibration)]
    survival = calibration.survival
    if survival.rows:
        form = f"scale {survival.scale:.3f}, bias {survival.bias:.3f}, depth {survival.depth:.3f}"
        lines.append(
            _fit_line(f"prefix survival: {'product' if survival.is_product else form}", survival)
        )
    return "\n".join(lines)


def _list(values: Sequence[float]) -> str:
    return "(" + ", ".join(f"{value:.3f}" for value in values) + ")"


def _fit_line(what: str, fitted: Calibration | Survival) -> str:
    note = f" ({fitted.note})" if fitted.note else ""
    worth = f"cross-entropy {fitted.nll_before:.4f} before, {fitted.nll_after:.4f} after"
    return f"- {what}{note}: {worth}, on {fitted.rows} rows of {fitted.prompts} prompts"


def reliability_table(measured: Mapping[str, Mapping[str, Any]]) -> str:
    """Calibration by stage, markdown, a line for each probability. measured: its name ->
    `reliability.stages`."""
    columns = [stage for stage in STAGES if any(stage in stages for stages in measured.values())]
    header = ["rows (prompts)", *(f"ece {stage}" for stage in columns), "log loss", "last change"]
    return _table(
        header, {name: _reliability_cells(stages, columns) for name, stages in measured.items()}
    )


def _table(header: list[str], rows: Mapping[str, list[str]]) -> str:
    first = max(map(len, rows))
    widths = [max(len(cells[i]) for cells in (header, *rows.values())) for i in range(len(header))]
    lines = [("", header), ("-" * first, ["-" * width for width in widths]), *rows.items()]
    padded = [
        [cell.rjust(width) for cell, width in zip(cells, widths, strict=True)] for _, cells in lines
    ]
    return "\n".join(
        f"| {' | '.join([name.ljust(first), *cells])} |"
        for (name, _), cells in zip(lines, padded, strict=True)
    )


def _reliability_cells(stages: Mapping[str, Any], columns: Sequence[str]) -> list[str]:
    last = list(stages.values())[-1]
    return [
        f"{last['rows']} ({last['prompts']})",
        *(interval(stages[stage]["ece"]) if stage in stages else "" for stage in columns),
        " / ".join(f"{stage['log_loss'][0]:.3f}" for stage in stages.values()),
        interval(last["change"]["log_loss"], " to "),
    ]


def interval(estimate: Sequence[float], to: str = "-") -> str:
    """0.031 (0.020-0.044)"""
    value, low, high = estimate
    return f"{value:.3f} ({low:.3f}{to}{high:.3f})"


def reliability_tables(measured: Mapping[str, Mapping[str, Any]]) -> str:
    """The first harvest's table in full; where there are others, one that compares them. measured:
    harvest -> `reliability.measured`, the one trained on first."""
    tables = [reliability_table(next(iter(measured.values())))]
    if len(measured) > 1:
        brief = {
            f"{data}: {what}": found[what]
            for data, found in measured.items()
            for what in ACROSS
            if what in found
        }
        tables.append(reliability_table(brief))
    return "\n\n".join(tables)


def survival_table(measured: Mapping[str, Mapping[str, Any]]) -> str:
    """Against the draft's own confidence, markdown, a line for each harvest. measured: harvest ->
    `against_draft.compared`."""
    others = next(iter(measured.values()))["difference"]
    header = ["rows (prompts)", "log loss"]
    header += [name for other in others for name in (other, "difference")]
    return _table(header, {data: _survival_cells(found) for data, found in measured.items()})


def _survival_cells(found: Mapping[str, Any]) -> list[str]:
    losses, differences = found["log_loss"], found["difference"]
    ours = next(iter(losses.values()))
    pairs = ((f"{losses[name][0]:.4f}", _four(differences[name])) for name in differences)
    return [
        f"{found['rows']} ({found['prompts']})",
        f"{ours[0]:.4f}",
        *(cell for pair in pairs for cell in pair),
    ]


def _four(estimate: Sequence[float]) -> str:
    value, low, high = estimate
    return f"{value:.4f} ({low:.4f} to {high:.4f})"


def survival_part(metrics: Mapping[str, Any]) -> list[str]:
    """The table and what it says; nothing where no survival is predicted."""
    measured = metrics.get("survival")
    return [survival_table(measured), SURVIVAL_LEGEND] if measured else []


def bins_table(measured: Mapping[str, Mapping[str, Any]]) -> str:
    """Mean prediction and mean outcome in each bin, markdown, a line for each probability and
    stage."""
    rows = {
        f"{name}, {stage}": [
            f"{predicted:.2f} / {outcome:.2f}" for _, predicted, outcome in found["bins"]
        ]
        for name, stages in measured.items()
        if name in ACROSS
        for stage, found in stages.items()
    }
    count = max(map(len, rows.values()))
    header = [f"bin {number}" for number in range(1, count + 1)]
    return _table(
        header, {name: cells + [""] * (count - len(cells)) for name, cells in rows.items()}
    )


def findings(predictor: "Predictor", metrics: Mapping[str, Any]) -> str:
    """What training prints: scores, confusion, calibration and reliability."""
    counts = confusion(predictor.name, metrics)
    return "\n\n".join(
        [
            f"{score_table(metrics['test'])}\n{LEGEND}",
            *([confusion_table(counts, predictor.classes)] if counts else []),
            f"{calibration_text(predictor.calibration)}\n{predictor.caveat}",
            f"{reliability_tables(metrics['reliability'])}\n{RELIABILITY_LEGEND}",
            *(["\n".join(survival_part(metrics))] if metrics.get("survival") else []),
        ]
    )


def model_card(
    config: Mapping[str, Any], metrics: Mapping[str, Any], calibration: Calibration, caveat: str
) -> str:
    """`README.md` of a checkpoint folder. caveat: what the calibration does not mend."""
    made = f"Made by `{config['provenance']['command']}` on {config['provenance']['date']}."
    parts = [
        hub_header(config),
        f"# {config['predictor']} for {config['pair']['name']}",
        made,
        "\n".join(f"- {name}: {value}" for name, value in card_facts(config, metrics).items()),
        *_test_part(config, metrics),
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


def hub_header(config: Mapping[str, Any]) -> str:
    """The lines from which a hub knows what a repository is; the models are named where they are
    repositories themselves."""
    pair = config["provenance"].get("config", {}).get("pair", {})
    models = [str(pair.get(side)) for side in ("target", "draft")]
    known = [it for it in models if REPOSITORY.fullmatch(it) and not Path(it).exists()]
    tags = ["speculative-decoding", "calibration", config["predictor"]]
    lines = ["---", "library_name: draftpredict", "tags:", *(f"- {tag}" for tag in tags)]
    lines += ["base_model:", *(f"- {model}" for model in known)] if known else []
    return "\n".join([*lines, "---"])


def card_facts(config: Mapping[str, Any], metrics: Mapping[str, Any]) -> dict[str, Any]:
    """The list at the top of a model card."""
    provenance, data = config["provenance"], config["provenance"]["data"]
    return {
        "Pair": config["pair"]["name"],
        "Settings": json.dumps(config["settings"]),
        "Inputs": json.dumps(config["inputs"]),
        "Classes": ", ".join(config["classes"]),
        "Label": config["label"],
        "Gamma": config["gamma"],
        "Target warp": json.dumps(config["warp"]),
        "Draft warp": json.dumps(config["draft_warp"]),
        "Data": f"{data['folder']} (manifest sha256 {data['sha256'][:16]})",
        "Training": (
            f"{metrics['epochs']} epochs, {metrics['seconds']:.0f} s, seed {provenance['seed']}"
        ),
    }


def _test_part(config: Mapping[str, Any], metrics: Mapping[str, Any]) -> list[str]:
    counts = confusion(config["predictor"], metrics)
    rows = ", ".join(
        f"{split} {count['rows']} rows of {count['prompts']} prompts"
        for split, count in config["provenance"]["data"]["splits"].items()
    )
    return [
        "## Test split",
        f"{rows}. The test split took no part in training, early stopping or calibration.",
        score_table(metrics["test"]),
        *([confusion_table(counts, tuple(config["classes"]))] if counts else []),
        LEGEND,
    ]
