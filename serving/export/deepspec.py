"""DeepSpec: temperatures as its own fit writes them."""

from dataclasses import dataclass
from typing import Any

from serving.export.known import Export, Known, in_json, not_told, temperatures

STS = "sts_temperatures.json"


@dataclass(frozen=True)
class Deepspec:
    """The file of pull request 63, which is open."""

    def export(self, known: Known) -> Export:
        made = Export("DeepSpec afdfa7c with the fit of pull request 63 (29e4a0e)")
        if known.calibration is not None:
            found, lines = temperatures(known)
            made.files[STS] = in_json(sts(known.calibration, found))
            made.left_out += lines
            if known.calibration["sts"] is None:
                made.left_out.append(
                    "calibration: num_bins and grid are of no sequential fit. Write calibration=sts"
                    " for DeepSpec's own"
                )
        made.left_out += not_told(
            known,
            costs="DeepSpec prices nothing",
            schedule="DeepSpec evaluates one length",
            thresholds="--confidence-threshold is on DeepSpec's own confidence, of one token",
        )
        return made


def sts(calibration: Any, found: list[float]) -> dict[str, Any]:
    domains = next(iter(calibration["scores"].values()))
    positions = next(iter(domains.values()))["positions"]
    errors = [[v["deepspec"][0] for v in one["stages"].values()] for one in positions]
    fit = calibration["sts"] or {"bins": 20}
    return {
        "temperatures": found,
        "block_size": calibration["gamma"],
        "num_bins": fit["bins"],
        "grid": {name: value for name, value in fit.items() if name != "bins"},
        "num_records": calibration["proposals"],
        "sources": calibration["data"]["domains"],
        "cumulative_ece_before": [each[0] if each else None for each in errors],
        "cumulative_ece_after": [each[-1] if each else None for each in errors],
    }
