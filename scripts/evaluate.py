"""Decode real prompts with several methods and compare them: speed, acceptance, losslessness.

    python scripts/evaluate.py
    python scripts/evaluate.py warp=greedy draft_warp.temperature=0 limit=20
    python scripts/evaluate.py methods=[custom] stop=adaedl verifier=block profile=true
    python scripts/evaluate.py methods=[custom] engine=lookahead
    python scripts/evaluate.py experiment=generate dataset=jsonl dataset.path=prompts.jsonl

Needs the pair (python scripts/build_pair.py) and, for rules that learn, their checkpoints (python
train.py). Takes the thresholds of scripts/tune.py where there are some for this pair and these
warps, unless others are given; other settings are tried on calibration prompts (`tried`). Writes
results.json, table.md, the traces of every method and the texts of their tokens (vocabulary.json)
to `out`. An interrupted run goes on when started again.

presentation=table shows the spread over repeats; presentation=paired the medians of ratios on the
same prompt, with intervals over prompts, and what the draft's acceptance and the costs of forwards
allow.
"""

from runtime.cli import Program
from runtime.settings.kinds import Group

main = Program(__file__, Group, "programs.evaluate")

if __name__ == "__main__":
    main()
