"""How a trained predictor is shown: the table of scores and the model card."""

import json
from collections.abc import Mapping
from typing import Any

from predictors.calibration import Temperature

COLUMNS = ("kl", "brier", "ece", "auroc", "accuracy")
LEGEND = (
    "kl: mean CE - entropy of the label (log loss if it is hard). brier: mean squared error. ece: 15 equal bins. auroc:"
    " soft labels count as weighted rows. draft confidence: logistic regression on one draft probability."
)


def score_table(test: Mapping[str, Mapping[str, Any]]) -> str:
    """One line per predictor, markdown. test: predictor -> its `metrics.scores`."""
    columns = [name for name in COLUMNS if any(name in row for row in test.values())]
    width = max(map(len, test))
    lines = [_line("predictor", columns, width), _line("-" * width, ["-" * 8] * len(columns), width)]
    lines += [_line(name, [f"{row[column]:.4f}" for column in columns], width) for name, row in test.items()]
    return "\n".join(lines)


def _line(name: str, cells: list[str], width: int) -> str:
    return f"| {name:<{width}} | " + " | ".join(f"{cell:>8}" for cell in cells) + " |"


def confusion_table(confusion: list[list[int]], classes: tuple[str, ...]) -> str:
    """Counts, markdown: rows are the true classes, columns the predicted ones."""
    width = len("true \\ predicted")
    lines = [_line("true \\ predicted", list(classes), width), _line("-" * width, ["-" * 8] * len(classes), width)]
    lines += [_line(name, [str(count) for count in row], width) for name, row in zip(classes, confusion, strict=True)]
    return "\n".join(lines)


def model_card(config: Mapping[str, Any], metrics: Mapping[str, Any], calibration: Temperature, caveat: str) -> str:
    """`README.md` of a checkpoint folder. caveat: what the calibration does not mend."""
    provenance, data = config["provenance"], config["provenance"]["data"]
    facts = {
        "Pair": config["pair"]["name"],
        "Settings": json.dumps(config["settings"]),
        "Features": json.dumps(config["features"]),
        "Classes": ", ".join(config["classes"]),
        "Label": config["label"],
        "Gamma": config["gamma"],
        "Target warp": json.dumps(config["warp"]),
        "Draft warp": json.dumps(config["draft_warp"]),
        "Data": f"{data['folder']} (manifest sha256 {data['sha256'][:16]})",
        "Training": f"{metrics['epochs']} epochs, {metrics['seconds']:.0f} s, seed {provenance['seed']}",
    }
    confusion = metrics["test"][config["predictor"]].get("confusion")
    matrix = f"\n{confusion_table(confusion, tuple(config['classes']))}\n" if confusion else ""
    rows = ", ".join(
        f"{split} {count['rows']} rows of {count['prompts']} prompts" for split, count in data["splits"].items()
    )
    return f"""# {config["predictor"]} for {config["pair"]["name"]}

Made by `{provenance["command"]}` on {provenance["date"]}.

{chr(10).join(f"- {name}: {value}" for name, value in facts.items())}

## Test split

{rows}. Every number below is on the test split, which took no part in training, early stopping or calibration.

{score_table(metrics["test"])}
{matrix}
{LEGEND}

## Calibration

Temperature {calibration.temperature:.4f}, fitted on the calibration split ({calibration.rows} rows), after adding
{list(calibration.offset) or "nothing"} to the logits: cross-entropy
{calibration.nll_before:.4f} before, {calibration.nll_after:.4f} after. {caveat}

## Limits

It is valid for this pair, these features and these sampling laws only; loading it for others is refused.
"""
