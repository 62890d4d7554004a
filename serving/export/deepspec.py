"""DeepSpec: temperatures in the form in which its own fit writes them."""

from dataclasses import dataclass

from serving.export.base import Export, Given, calibration_errors, temperatures

STS = "sts_temperatures.json"


@dataclass(frozen=True)
class Deepspec:
    """Exports the file of pull request 63, which is open."""

    def export(self, given: Given) -> Export:
        made = Export("DeepSpec afdfa7c with the fit of pull request 63 (29e4a0e)")
        if (calibration := given.calibration) is not None:
            fitted, made.left_out = temperatures(calibration)
            errors = calibration_errors(calibration, "deepspec")
            fit = calibration["sts"] or {"bins": 20}
            content = {
                "temperatures": fitted,
                "block_size": calibration["gamma"],
                "num_bins": fit["bins"],
                "grid": {name: value for name, value in fit.items() if name != "bins"},
                "num_records": calibration["proposals"],
                "sources": calibration["data"]["domains"],
                "cumulative_ece_before": [each[0] if each else None for each in errors],
                "cumulative_ece_after": [each[-1] if each else None for each in errors],
            }
            made.add_json(STS, content)
            if calibration["sts"] is None:
                made.left_out.append(
                    "calibration: num_bins and grid are of no sequential fit. Write calibration=sts"
                    " for DeepSpec's own"
                )
        made.left_out += given.left_out(
            costs="DeepSpec prices nothing",
            schedule="DeepSpec evaluates one length",
            thresholds="--confidence-threshold is on DeepSpec's own confidence, of one token",
        )
        return made
