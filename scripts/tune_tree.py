"""Find the static tree that decodes fastest on your pair and machine: measure, solve, save.

    python scripts/tune_tree.py
    python scripts/tune_tree.py nodes=64
    python scripts/evaluate.py methods=[custom] structure=sequoia verifier=rrsw stop=never

Measures how often the b-th sibling is the accepted one along responses of the target, and what
forwards of 1 to max_nodes + 1 rows cost; a dynamic programme then gives the best tree of every size
and depth. What it promises is modelled: it leaves out drawing and verification. Writes
`structure.tree`, which structure=sequoia reads."""

from runtime.cli import Program
from runtime.settings.kinds import Group

main = Program(__file__, Group, "programs.tune_tree")

if __name__ == "__main__":
    main()
