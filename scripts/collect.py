"""One table of many checkpoints: their settings, their scores, and the best threshold of each by
replay.

    python train.py -m predictor.depth=0,1,2,3,4 predictor.w_rej=1,3,6,12
    python scripts/collect.py folder=checkpoints/specdecpp-sweep data=data/rounds
    python scripts/collect.py folder=checkpoints/specdecpp-sweep thresholds=[0.2,0.4,0.6]
    python scripts/collect.py folder=checkpoints/specdecpp-sweep data=null

All of them are trained on one harvest, and replayed on one with a round at every position
(data=null: scores alone). Only settings in which they differ are shown."""

from runtime.cli import Program
from runtime.settings.kinds import Group

main = Program(__file__, Group, "programs.collect")

if __name__ == "__main__":
    main()
