"""Make a draft faster by letting it propose fewer tokens: those its target says most often.

    python scripts/draft_vocabulary.py          # counted in data/starter
    python scripts/draft_vocabulary.py data=data/mine pair.target=my/target pair.draft=my/draft
    python scripts/draft_vocabulary.py chats=data/distill/smollm2-eagle/chats size=16384
    python scripts/gen_data.py pair.draft_vocabulary=data/starter/draft_vocabulary.safetensors

The table says for each size how many of the tokens of held-out responses it holds, what it costs in
acceptance and what it saves in time. What is decoded is lossless with any vocabulary. `--help`
lists every setting."""

from runtime.cli import Program
from runtime.settings.kinds import Group

main = Program(__file__, Group, "programs.draft_vocabulary")

if __name__ == "__main__":
    main()
