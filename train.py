"""Train a predictor on a harvest, calibrate it, score it against trivial predictors, save it.

    python train.py predictor=specdecpp
    python train.py predictor=hrad data=data/starter
    python train.py calibration=platt drift=[data/gsm8k]
    python train.py predictor=value data=data/rounds prompts=150
    python train.py calibration=sts data=data/served drift=[data/served-code]
    python train.py -m predictor.depth=0,1,2 predictor.w_rej=1,6 hydra/launcher=joblib
    accelerate launch --multi_gpu --num_processes 2 train.py predictor=hrad

Needs a harvest (python scripts/gen_data.py). Interrupted, the same command continues after the last
full epoch. A sweep skips finished jobs. Several processes share every batch and give the same
result as one, up to rounding."""

from __future__ import annotations

import math
import pathlib
import platform
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from hydra.utils import instantiate

from decoding.settings import Pair
from runtime.cli import program
from runtime.compatibility import differences
from runtime.errors import UserError
from runtime.files import only_writer, refuse_foreign, replaced_folder
from runtime.job import command_line, is_job, result_folder, versions_of
from runtime.settings.groups import Calibration, Logger
from runtime.settings.kinds import MOST, Field, Group, Output, Part, Path, Paths, Seed
from runtime.text import plural
from runtime.tracking import tracked

if TYPE_CHECKING:
    import torch

    from data_gen.storage.dataset import Harvest
    from predictors.base import Predictor, Records


class Train(Group):
    pair: Pair
    predictor: Annotated[Part, "what is trained"]
    calibration: Calibration
    trainer: Annotated[Part, "how"]
    logger: Logger
    data: Annotated[Path, "folder made by scripts/gen_data.py or scripts/import_confidence.py"]
    prompts: Annotated[
        Annotated[int, Field(ge=2, le=MOST)] | None,
        "prompts of the training split that it learns from, fewer being some of more; null: all",
    ]
    drift: Annotated[
        Paths,
        "other harvests of the same pair and distributions, or other imports of the same gamma, to"
        " see how calibration carries over",
    ]
    out: Annotated[
        Output | None,
        "checkpoint folder; null: checkpoints/<predictor>, for a sweep"
        " checkpoints/<predictor>-sweep/<job>, of imported confidences checkpoints/confidences",
    ]
    overwrite: Annotated[bool, "of a sweep, train finished jobs again"]
    verbose: Annotated[bool, "print all tables of the model card"]
    seed: Annotated[Seed, "of weights, order of rows and dropout"]


PACKAGES = (
    *("draftpredict", "torch", "accelerate"),
    *("imbalanced-learn", "scikit-learn", "safetensors"),
)
MARKER = "metrics.json"  # marks a checkpoint folder


@dataclass(frozen=True)
class Data:
    """Samples by split, those that are not trained on as they are scored, and the rounds of the
    splits on which prefix survival is fitted and judged."""

    samples: dict[str, Records]
    rounds: dict[str, Records | None]


class Judged(NamedTuple):
    """Data that predictions are scored on: samples, and rounds if there is prefix survival."""

    samples: Records
    rounds: Records | None


@program(__file__, Train, several=True)
def main(settings: Train) -> None:
    """Train a checkpoint on a harvest, or calibrate imported confidences."""
    from data_gen.samples import first_prompts, inputs_of, refuse_short_rounds, unseen_prompts
    from data_gen.storage.dataset import Harvest
    from data_gen.storage.shards import SPLITS
    from predictors.confidences import run as confidences
    from predictors.training.trainer import ResumeFile
    from runtime.processes import leave_others, this_process

    data, pair = settings.data, settings.pair
    if confidences.imported(data, settings.calibration):
        return confidences.main(settings)
    predictor: Predictor = instantiate(settings.predictor)
    harvest = Harvest.open(data)
    others = [Harvest.open(folder, "drift") for folder in settings.drift]
    out = result_folder(settings.out, predictor.name, MARKER)
    run = run_of(settings, harvest, others)
    if is_job() and not settings.overwrite and finished(out, run):
        return
    refuse_foreign(out, MARKER)
    refuse_short_rounds(harvest, predictor)
    inputs = inputs_of(harvest, predictor)  # every process refuses what the harvest does not hold
    first = this_process().is_main_process
    unseen = [unseen_prompts(other, harvest, predictor) for other in others]
    few = None if settings.prompts is None else first_prompts(harvest, settings.prompts)
    read = Reader(predictor, pair, out)
    samples = {"train": read.samples(harvest, "train", few)}
    samples |= {split: read.scored(harvest, split) for split in SPLITS[1:] if first}
    rounds = {split: read.rounds(harvest, split) for split in samples if split != "train"}
    with only_writer(out) if first else nullcontext():
        chosen = settings.logger if first else {"_target_": "runtime.tracking.NullLogger"}
        with tracked(
            chosen, "train", settings.plain(), [harvest.context], [predictor.name]
        ) as logger:
            for each in (harvest, *others):
                logger.used(*each.artifact)
            state = ResumeFile(out, run["training"])
            seed = settings.seed
            trainer = instantiate(settings.trainer, seed=seed, logger=logger, state=state)
            started = time.perf_counter()
            predictor.fit(samples["train"], inputs, trainer)
            metrics = {
                "epochs": len(trainer.history),
                "seconds": time.perf_counter() - started,
                "history": trainer.history,
            }
            leave_others()
            if first:
                elsewhere = {
                    str(folder): Judged(
                        read.scored(other, "all", prompts), read.rounds(other, "all", prompts)
                    )
                    for folder, other, prompts in zip(settings.drift, others, unseen, strict=True)
                }
                judge(predictor, Data(samples, rounds), elsewhere, settings, metrics)
                save(predictor, out, facts(predictor, samples, harvest, settings, run), metrics)
                trainer.forget()
                report(predictor, metrics, out, settings.verbose)
                log(logger, predictor, metrics, out)


def judge(
    predictor: Predictor,
    data: Data,
    elsewhere: Mapping[str, Judged],
    settings: Train,
    metrics: dict[str, Any],
) -> None:
    """Fit the calibration on its split, and add the scores on the test split and on harvests of
    other prompts, `elsewhere`, to `metrics`."""
    from data_gen.samples import reached
    from predictors.reliability import (
        compared,
        fit_calibration,
        fit_confidences,
        measured,
        test_scores,
        train_scores,
    )

    samples = data.samples
    learned = {name: values for name, values in samples["train"].items() if name != "inputs"}
    rounds, test = data.rounds["calibration"], Judged(samples["test"], data.rounds["test"])
    kept, fit = settings.calibration.survival, instantiate(settings.calibration.fit)
    fit_calibration(predictor, samples["calibration"], rounds if kept else None, fit)
    metrics["test"] = test_scores(predictor, reached(learned), test.samples)
    metrics["train"] = train_scores(predictor, samples["train"])
    judged = {f"{settings.data} (test split)": test, **elsewhere}
    metrics["reliability"] = {name: measured(predictor, *rows) for name, rows in judged.items()}
    if rounds is not None:
        confidences = fit_confidences(predictor, rounds)
        metrics["survival"] = {
            name: compared(predictor, confidences, rows.rounds)
            for name, rows in judged.items()
            if rows.rounds is not None
        }


@dataclass(frozen=True)
class Reader:
    """Reads samples and rounds of harvests, their inputs mapped from files beside `out`."""

    predictor: Predictor
    pair: Pair
    out: pathlib.Path

    def samples(self, harvest: Harvest, split: str, prompts: torch.Tensor | None = None) -> Records:
        """Return the samples of a split, of some `prompts` [n] or of all, in every process."""
        return self._mapped(self._parts(harvest, split, prompts), shared=True)

    def scored(self, harvest: Harvest, split: str, prompts: torch.Tensor | None = None) -> Records:
        """Return the samples that predictions are scored on, in this process."""
        from data_gen.samples import reached

        return self._mapped(map(reached, self._parts(harvest, split, prompts)))

    def _parts(
        self, harvest: Harvest, split: str, prompts: torch.Tensor | None
    ) -> Iterator[Records]:
        from data_gen.samples import sample_parts

        return sample_parts(harvest, self.predictor, split, self.pair, prompts)

    def rounds(
        self, harvest: Harvest, split: str, prompts: torch.Tensor | None = None
    ) -> Records | None:
        """Return the rounds of a split, for prefix survival; None where the predictor is not asked
        about single draft tokens."""
        from data_gen.samples import round_parts

        if self.predictor.when == "round":
            return None
        parts = round_parts(harvest, self.predictor, split, self.pair, prompts)
        return self._mapped(parts)

    def _mapped(self, parts: Iterable[Records], shared: bool = False) -> Records:
        from data_gen.storage.mapped import mapped

        return mapped(parts, self.out.with_name(f"{self.out.name}.rows"), shared)


def facts(
    predictor: Predictor,
    samples: Mapping[str, Records],
    harvest: Harvest,
    settings: Train,
    run: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the entries of the checkpoint's `config.json` besides the predictor's settings."""
    counts = {
        split: {"rows": len(records["group"]), "prompts": len(records["group"].unique())}
        for split, records in samples.items()
    }
    provenance = {
        "command": command_line(),
        "config": settings.plain(),
        "data": {"folder": str(settings.data), **harvest.origin, "splits": counts},
        "date": time.strftime("%Y-%m-%d"),
        "seed": settings.seed,
        "versions": {"python": platform.python_version(), **versions_of(PACKAGES)},
        "run": run,
    }
    return {
        **harvest.context,
        "gamma": predictor.gamma,
        "dim": samples["train"]["inputs"].shape[1],
        "provenance": provenance,
    }


def run_of(settings: Train, harvest: Harvest, others: Sequence[Harvest]) -> dict[str, Any]:
    """Return all that decides the checkpoint's content; `training`: that of the head alone."""
    values = settings.plain()
    groups = ["predictor", "trainer", *([] if harvest.features_stored else ["pair"])]
    training = {name: values[name] for name in (*groups, "seed", "prompts")}
    drift = {folder: other.identity for folder, other in zip(settings.drift, others, strict=True)}
    return {
        "training": {**training, "data": harvest.identity},
        "calibration": values["calibration"],
        "drift": drift,
    }


def finished(out: pathlib.Path, run: dict[str, Any]) -> bool:
    """Return whether `out` is a complete checkpoint of this run. Prints in one line that it is, or
    why it has to be made again."""
    from predictors.base import load_predictor, read_config

    if not out.exists():
        return False
    try:
        load_predictor(out, key="out")
        made = read_config(out, "out")["provenance"].get("run", {})
        reason = differences(made, run)
    except (UserError, OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        reason = str(error)
    again = f"trained again: {reason}" if reason else "finished, overwrite=true redoes it"
    print(f"out: {out} is {again}")
    return not reason


def save(
    predictor: Predictor, out: pathlib.Path, config: dict[str, Any], metrics: dict[str, Any]
) -> None:
    from predictors.base import described, save_predictor
    from predictors.card import model_card

    made = described(predictor, config)
    card = model_card(made, metrics, predictor.calibration, predictor.caveat)
    with replaced_folder(out, MARKER) as folder:
        save_predictor(predictor, folder, config, metrics, card)


def report(predictor: Predictor, metrics: dict[str, Any], out: pathlib.Path, verbose: bool) -> None:
    """Print the scores on the test split, with `verbose` all that the model card says, and last
    whether the predictor is worth asking."""
    from predictors.card import findings, score_table

    rows, prompts = tested(metrics)
    print(f"\nTest split: {plural(rows, 'row')} of {plural(prompts, 'prompt')}.")
    print(f"{findings(predictor, metrics) if verbose else score_table(metrics['test'])}\n")
    if note := predictor.calibration.note:
        print(f"Calibration: {note}.")
    epochs = plural(metrics["epochs"], "epoch")
    print(f"saved {out} ({epochs} in {metrics['seconds']:.0f} s)")
    print(verdict(predictor.name, metrics))


def tested(metrics: Mapping[str, Any]) -> tuple[int, int]:
    """Return the rows and prompts of the test split that predictions are scored on."""
    scores = next(iter(next(iter(metrics["reliability"].values())).values()))["calibrated"]
    return scores["rows"], scores["prompts"]


def verdict(name: str, metrics: Mapping[str, Any]) -> str:
    """Say whether a predictor tells more than the draft's own probability, the better of the two
    forms of it: by the log loss of survival where that is predicted (paired, 95 % interval over
    prompts of the test split), otherwise by the Brier score, which has no interval. One prompt
    decides nothing."""
    _, prompts = tested(metrics)
    undecided = (
        f"Undecided whether {name} is worth asking: the test split has {plural(prompts, 'prompt')};"
        " harvest more"
    )
    if "survival" in metrics:
        scores = next(iter(metrics["survival"].values()))
        best = min(scores["difference"], key=lambda confidence: scores["log_loss"][confidence][0])
        gap, low, high = scores["difference"][best]
        interval = "" if math.isnan(low) else f" ({low:+.4f} to {high:+.4f})"
        told = (
            f"log loss {gap:+.4f}{interval} beside the draft's own probability ({best}), lower is"
            " better"
        )
        if math.isnan(low):
            return f"{undecided}. {told[0].upper()}{told[1:]}."
        if low <= 0 <= high:
            return f"{name} is not shown to be worth asking: {told}."
        return f"{name} is {'worth asking' if high < 0 else 'not worth asking'}: {told}."
    brier: dict[str, float] = {row: scores["brier"] for row, scores in metrics["test"].items()}
    confidences = [row for row in brier if row.startswith("draft confidence")]
    if not confidences:
        return f"{name}: the harvest has no draft probability to compare it with."
    best = min(confidences, key=lambda row: brier[row])
    told = f"Brier score {brier[name]:.4f}, {best} {brier[best]:.4f}, lower is better"
    if prompts < 2:
        return f"{undecided}. {told}."
    better = "seems worth asking" if brier[name] < brier[best] else "seems not worth asking"
    return f"{name} {better}: {told}."


def log(logger: Any, predictor: Predictor, metrics: dict[str, Any], out: pathlib.Path) -> None:
    for name, row in metrics["test"].items():
        numbers = {score: value for score, value in row.items() if isinstance(value, float)}
        logger.log({f"test/{name}/{score}": value for score, value in numbers.items()})
    for data, scores in metrics.get("survival", {}).items():
        for name, (value, *_) in scores["difference"].items():
            logger.log({f"survival/{data}/above {name}": value})
    if logger.shows:
        from reports.trained import pictures

        with tempfile.TemporaryDirectory() as scratch:
            for picture in pictures(out, pathlib.Path(scratch)):
                logger.image(*picture)
    logger.artifact(predictor.name, "predictor", out)


if __name__ == "__main__":
    main()
