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

from typing import Annotated

from decoding.settings import Pair
from programs.groups import Calibration, Logger
from runtime.cli import Program
from runtime.settings.kinds import MOST, Field, Group, Output, Part, Path, Paths, Seed


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
    seed: Annotated[Seed, "of weights, order of rows and dropout"]


main = Program(__file__, Train, "programs.train", several=True)

if __name__ == "__main__":
    main()
