"""Choose the threshold of every stop rule for your hardware: replay a harvest, price the counts.

    python scripts/tune.py
    python scripts/tune.py cost=measured
    python scripts/tune.py cost=a100 methods=[fixed,confidence]

Needs a harvest with a round at every position (python scripts/gen_data.py anchors.stride=1
out=data/rounds) and, for specdecpp and hrad, their checkpoints (python train.py). cost=measure
decodes a few prompts to learn what forwards cost here; with any other `cost` no model runs.
Thresholds are chosen on one split and judged on another. Writes `out`: evaluate.py takes the
thresholds of measured costs by itself, those of other costs where `thresholds` names the file.

check=true chooses nothing: it decodes the prompts of a greedy harvest with some settings of every
rule and compares the counts with those of the replay, one by one. A difference is excused where two
numbers within rounding of each other decided it; exits with 1 where one is not.

    python scripts/tune.py check=true data=data/greedy warp=greedy draft_warp.temperature=0

Harvest with pair.dtype=float32, and set it here, too: in bfloat16 too many decisions of a greedy
decode rest on rounding."""

from runtime.cli import Program
from runtime.settings.kinds import Group

main = Program(__file__, Group, "programs.tune")

if __name__ == "__main__":
    main()
