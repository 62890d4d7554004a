"""Make a draft faster by letting it propose fewer tokens: those its target says most often.

    python pairs/draft_vocabulary.py          # counted in data/starter
    python pairs/draft_vocabulary.py data=data/mine pair.target=my/target pair.draft=my/draft
    python pairs/draft_vocabulary.py chats=data/distill/smollm2-eagle/chats size=16384
    python scripts/gen_data.py pair.draft_vocabulary=data/starter/draft_vocabulary.safetensors

The table says for each size how many of the tokens of held-out responses it holds, what it costs in
acceptance and what it saves in time. What is decoded is lossless with any vocabulary. `--help`
lists every setting."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from decoding.settings import Pair
from runtime.cli import program
from runtime.errors import UserError
from runtime.files import checked_folder, refuse_foreign_file
from runtime.settings.groups import DraftWarp, Warp
from runtime.settings.kinds import Count, Distinct, Group, Output, Path, Says

Sizes = Annotated[list[Count], Distinct, Says("a list of different sizes, such as [4096,16384]")]


class DraftVocabulary(Group):
    pair: Pair
    warp: Warp
    draft_warp: DraftWarp
    data: Annotated[
        Path | None,
        "harvest whose responses are counted: the training split; the table is about the others",
    ]
    chats: Annotated[
        Path | None,
        "or a folder of chats of pairs/distill_draft.py, counted instead; the table is about the"
        " first `held_out`",
    ]
    held_out: Annotated[Count, "chats that are; as many as that distillation kept aside"]
    size: Annotated[Count, "tokens written, the most frequent ones"]
    sizes: Annotated[Sizes, "tried in the table, besides `size` and all tokens"]
    positions: Annotated[Count, "of held-out responses that both models are run on"]
    gammas: Annotated[
        int, Field(ge=1, le=1000), "longest fixed draft length of the modelled speed-up, in tokens"
    ]
    out: Annotated[
        Output | None, "file; null: draft_vocabulary.safetensors in the folder that is counted"
    ]

    @staticmethod
    def misfits(values: Mapping[str, Any]) -> Mapping[str, str]:
        if values["data"] is None and values["chats"] is None:
            return {"data": "a folder, as chats is null"}
        return {}


@program(__file__, DraftVocabulary)
def main(settings: DraftVocabulary) -> None:
    """Choose a draft vocabulary from responses; write a table and the file."""
    from data_gen.storage.dataset import Harvest
    from decoding.models.draft_vocabulary import FILE as VOCABULARY
    from decoding.models.draft_vocabulary import with_ends, write_vocabulary
    from decoding.models.loading import load_pair
    from decoding.models.mixed import refuse_mixed
    from evaluation.table import markdown
    from pairs.vocabulary import (
        HEADER,
        LEGEND,
        chats,
        count,
        harvested,
        provenance,
        ranked,
        refuse_other_target,
        table,
    )

    counted_in = "data" if settings.chats is None else "chats"
    folder = checked_folder(counted_in, getattr(settings, counted_in))
    out = checked_folder("out", settings.out or str(folder / VOCABULARY), "file")
    refuse_foreign_file(out, "draft_vocabulary")
    # Others are compared with the draft with all tokens.
    settings.pair.draft_vocabulary = None
    harvest = Harvest.open(folder) if settings.chats is None else None
    counted, held = harvested(harvest) if harvest else chats(folder, settings.held_out)
    pair = load_pair(settings.pair)
    refuse_mixed(pair.draft)
    if harvest:
        refuse_other_target(pair, harvest)
    counts = count(counted, pair.draft.vocab_size)
    tokens = ranked(counts)
    sizes = [size for size in sorted({*settings.sizes, settings.size}) if size < len(tokens)]
    if settings.size not in sizes:
        raise UserError(
            f"size: {settings.size} are all tokens of the pair, it has {len(tokens)}. Lower it"
        )
    rows = table(settings, pair, held, [with_ends(tokens[:size], pair.eos_ids) for size in sizes])
    shown = [[f"{size:,}", *row] for size, row in zip([*sizes, len(tokens)], rows, strict=True)]
    write_vocabulary(out, tokens[: settings.size], provenance(settings, pair, counts, len(counted)))
    known, total = int((counts > 0).sum()), int(counts.sum())
    print(f"\n{markdown(HEADER, shown)}\n\n{LEGEND}")
    print(
        f"saved {out}: {settings.size:,} tokens, {min(known, settings.size):,} of them said at"
        f" least once in {total:,} counted"
    )


if __name__ == "__main__":
    main()
