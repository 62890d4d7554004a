"""One table of many checkpoints: their settings, their scores, and the best threshold of each by
replay.

    python train.py -m predictor.depth=0,1,2,3,4 predictor.w_rej=1,3,6,12
    python scripts/collect.py folder=checkpoints/specdecpp-sweep data=data/rounds
    python scripts/collect.py folder=checkpoints/specdecpp-sweep thresholds=[0.2,0.4,0.6]
    python scripts/collect.py folder=checkpoints/specdecpp-sweep data=null

All of them are trained on one harvest, and replayed on one with a round at every position
(data=null: scores alone). Only settings in which they differ are shown."""

import shlex
import sys
from typing import Annotated

from omegaconf import DictConfig
from pydantic import Field

from decoding.settings import Pair
from runtime.cli import program
from runtime.files import checked_folder, refuse_foreign_file
from runtime.settings.groups import Replay, Warp
from runtime.settings.kinds import Distinct, Output, Part, Path, Probability, Says
from runtime.text import printable

Levels = Annotated[
    list[Probability], Field(min_length=1), Distinct,
    Says("a list of different numbers from 0 to 1, such as [0.2,0.4]"),
]  # fmt: skip


class Collect(Replay):
    pair: Pair
    warp: Warp
    cost: Annotated[Part, "what forwards cost"]
    rules: Annotated[
        dict[str, Part],
        "of each predictor, the stop rule that asks it; more with"
        " +stop@rules.<predictor>=<stop rule>",
    ]
    folder: Annotated[Path, "every folder in it that holds a checkpoint is a row"]
    data: Annotated[
        Path | None,
        "harvest with a round at every position, replayed with each of them; null: no replay,"
        " scores alone",
    ]
    thresholds: Annotated[Levels | None, "a row for each of these; null: one for the best"]
    out: Annotated[Output, "file of the table"]


@program(__file__, Collect)
def main(cfg: DictConfig) -> None:
    """Checkpoints and a harvest in, a table out."""
    from evaluation.replay.collect import (
        KEY,
        LEGEND,
        MARK,
        Cells,
        checkpoints,
        replayed,
        scores,
        settings,
        table,
    )

    out, folders = (
        checked_folder("out", cfg.out, "file"),
        checkpoints(checked_folder(KEY, cfg.folder)),
    )
    refuse_foreign_file(out, MARK)
    known = [(settings(folder), scores(folder)) for folder in folders]
    tuned = [[Cells()] for _ in folders] if cfg.data is None else replayed(cfg, folders)
    rows = [
        (named, measured | found)
        for (named, measured), each in zip(known, tuned, strict=True)
        for found in each
    ]
    text = table(rows)
    command = shlex.join(["python", "scripts/collect.py", *sys.argv[1:]])
    out.write_text(f"{text}\n\n<!-- {printable(command)} -->\n", encoding="utf-8")
    print(f"\n{text}\n\n{LEGEND}\nsaved {cfg.out}")


if __name__ == "__main__":
    main()
