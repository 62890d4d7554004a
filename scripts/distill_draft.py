"""Make a draft for a target: the target writes chats, a few transformer layers learn to predict
them.

    python scripts/distill_draft.py                  # an ordinary draft
    python scripts/distill_draft.py draft=eagle      # an EAGLE-style one, from pair.draft on
    python scripts/distill_draft.py stage=generate   # only write chats
    python scripts/distill_draft.py stage=train      # only train, on the chats there are
    python scripts/distill_draft.py stage=finish     # only write the draft, as trained so far
    python scripts/distill_draft.py draft=eagle ship=pairs/smollm2

Interrupt it at any time and run the same command to go on. Several processes may write chats
(seed=1, 2, ...) while one trains. `out` is the folder of a draft: pair.draft=<out> of any command.
To train a draft further: draft.start=checkpoints/ordinary_draft out=checkpoints/more. With `ship`
nothing is trained: the small files that scripts/build_pair.py makes the draft in `out` from are
written there."""

from runtime.cli import Program
from runtime.settings.kinds import Group

main = Program(__file__, Group, "programs.distill_draft")

if __name__ == "__main__":
    main()
