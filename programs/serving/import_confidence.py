"""Import what a serving engine logged of its confidences."""

import shlex
from collections.abc import Iterator

from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from omegaconf import DictConfig

from predictors.confidences.table import MANIFEST, Confidences, joined, write_confidences
from runtime.files import checked_folder, only_writer, refuse_foreign
from runtime.text import printable


def main(cfg: DictConfig) -> None:
    """A log in, a folder out."""
    out = checked_folder("out", cfg.out)
    refuse_foreign(out, MANIFEST)
    source = instantiate(cfg.source)
    found = joined([source.read()], "gamma", cfg.gamma)
    overrides = HydraConfig.get().overrides.task
    command = shlex.join(["python", "scripts/import_confidence.py", *overrides])
    with only_writer(out):
        write_confidences(out, found, source.labels, command)
    print("\n".join(summary(found)))
    print(f"saved in {out}")


def summary(found: Confidences) -> Iterator[str]:
    """A line for each domain."""
    for number, name in enumerate(found.domains):
        rows = found.rows(found.domain == number)
        accepted = ", ".join(
            f"{rows.labels[rows.counts(i), i].mean():.3f}" for i in range(rows.gamma)
        )
        yield (
            f"{printable(name)}: {len(rows.logits)} proposals of {rows.gamma} tokens,"
            f" {len(rows.group.unique())} groups, accepted up to each {accepted}"
        )
