"""Train a predictor on a harvest, calibrate it, score it against trivial predictors, save it.

    python train.py predictor=specdecpp
    python train.py predictor=hrad data=data/starter
    python train.py calibration=platt drift=[data/gsm8k]
    python train.py -m predictor.depth=0,1,2 predictor.w_rej=1,6 hydra/launcher=joblib
    accelerate launch --multi_gpu --num_processes 2 train.py predictor=hrad

Needs a harvest (python scripts/gen_data.py). Interrupted, the same command continues after the last
full epoch. A sweep skips finished jobs. Several processes share every batch and give the same
result as one, up to rounding."""

from runtime.cli import Program
from runtime.settings.kinds import Group

main = Program(__file__, Group, "programs.train", several=True)

if __name__ == "__main__":
    main()
