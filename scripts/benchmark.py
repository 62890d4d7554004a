"""Measure a part of the toolkit against the plain way to do the same, side by side in one process.

    python scripts/benchmark.py                           # all positions at once, or one at a time
    python scripts/benchmark.py warp=greedy draft_warp.temperature=0
    python scripts/benchmark.py what=overlap pair=smollm2 repeats=30  # side by side, or in turn

What is compared takes turns, so that drift of the machine hits all of it alike. Methods of decoding
are compared by scripts/evaluate.py.
"""

from runtime.cli import Program
from runtime.settings.kinds import Group

main = Program(__file__, Group, "programs.benchmark")

if __name__ == "__main__":
    main()
