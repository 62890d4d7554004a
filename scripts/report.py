"""Draw every figure and table that evaluations, harvests, checkpoints and tunings allow, as one
page to look at.

    python scripts/report.py                      # of all that is in runs, data and checkpoints
    python scripts/report.py run=runs/smollm2-eagle-starter-T1.0
    python scripts/report.py run=[runs,data/rounds] out=runs/rounds-report
    python scripts/report.py trace=runs/smollm2-eagle-starter-T1.0/traces-hrad.jsonl prompt=3

Folders are searched with the folders in them. Writes index.html, which needs no network and none of
the other files, a PNG and a CSV of each figure, and report.json, which lists them; an earlier
report in `out` is replaced. What lacks its input is named at the end of the page, with the command
that makes it. `trace` and `prompt` print the rounds of one request instead, and write nothing."""

from runtime.cli import Program
from runtime.settings.kinds import Group

main = Program(__file__, Group, "programs.report")

if __name__ == "__main__":
    main()
