"""Make a draft for a target: the target writes chats, a few transformer layers learn to predict
them.

    python pairs/distill_draft.py                  # an ordinary draft
    python pairs/distill_draft.py draft=eagle      # an EAGLE-style one, from pair.draft on
    python pairs/distill_draft.py stage=generate   # only write chats
    python pairs/distill_draft.py stage=train      # only train, on the chats there are
    python pairs/distill_draft.py stage=finish     # only write the draft, as trained so far
    python pairs/distill_draft.py draft=eagle ship=pairs/smollm2

Interrupt it at any time and run the same command to go on. Several processes may write chats
(seed=1, 2, ...) while one trains. `out` is the folder of a draft: pair.draft=<out> of any command.
To train a draft further: draft.start=checkpoints/ordinary_draft out=checkpoints/more. With `ship`
nothing is trained: the small files that pairs/build_pair.py makes the draft in `out` from are
written there."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from hydra.utils import instantiate
from pydantic import Field

from decoding.settings import Pair
from runtime.cli import program
from runtime.files import checked_folder, only_writer, refuse_foreign
from runtime.job import result_folder
from runtime.settings.groups import Logger
from runtime.settings.kinds import (
    Count,
    Distinct,
    Group,
    NotNegative,
    Output,
    Part,
    Path,
    Says,
    Seed,
    Size,
)

Warmth = Annotated[float, Field(gt=0, le=1000)]
Temperatures = Annotated[
    list[Warmth], Field(min_length=1), Says("a list of numbers above 0, such as [1.0,0.6]")
]
KeptLayers = Annotated[
    list[Size], Distinct, Says("a list of different layers from 0 on, such as [10,20]")
]


class Chats(Group):
    folder: Annotated[Path, "chats the target writes with itself, and its hidden states"]
    tokens: Annotated[Count, "response tokens to generate"]
    slots: Annotated[Count, "conversations held at once"]
    prompt_tokens: Annotated[Count, "at most, of a user turn the target writes itself"]
    response_tokens: Annotated[Count, "at most, of a response"]
    responses: Annotated[Count, "per prompt"]
    prompt_temperature: Annotated[
        Warmth, "of user turns the target writes itself; lower is more coherent"
    ]
    temperatures: Annotated[
        Temperatures, "of the first, second, ... response; the loss is always at temperature 1"
    ]
    feature_layers: Annotated[
        KeptLayers,
        "hidden states of the target to keep besides the last one, which an EAGLE-style draft is"
        " given",
    ]
    prompts: Annotated[Path | None, "a JSONL file whose prompts are used before self-written ones"]
    openings: Annotated[
        Path | None,
        "a JSONL file with beginnings of user turns: the target completes one of them, drawn at"
        " random",
    ]
    shard_tokens: Annotated[Count, "response tokens of a file"]
    held_out: Annotated[Count, "first chats, for validation only"]

    @staticmethod
    def misfits(values: Mapping[str, Any]) -> Mapping[str, str]:
        if values["tokens"] <= values["shard_tokens"]:
            return {"tokens": f"more than chats.shard_tokens={values['shard_tokens']}"}
        if values["openings"] is not None and values["prompt_tokens"] < 2:
            return {"prompt_tokens": "2 or more, as chats.openings is given"}
        return {}


class DistillDraft(Group):
    pair: Pair
    logger: Logger
    draft: Annotated[Part, "the kind of draft"]
    stage: Annotated[
        Literal["all", "generate", "train", "finish"],
        "write chats and train in turn; one of them; or write the draft as trained so far",
    ]
    out: Annotated[
        Output | None,
        "folder of the draft; null: checkpoints/<kind>_draft, for a sweep"
        " checkpoints/<kind>_draft-sweep/<job>",
    ]
    ship: Annotated[
        Path | None,
        "a folder such as pairs/smollm2: nothing is trained, the draft in `out` is written there,"
        " for pairs/build_pair.py",
    ]
    seed: Annotated[Seed, "of chats and training; processes that write chats have different ones"]
    threads: Annotated[Count | None, "CPU threads of this process; null: torch's choice"]
    save_seconds: Annotated[
        NotNegative, "between two saved states; run the same command again to go on from the last"
    ]
    notes: Annotated[
        dict[str, Any],
        "kept with the draft and what is shipped of it, e.g. +notes.prompts='GSM8K training"
        " questions'",
    ]
    vocabulary: Annotated[
        Path | None,
        "tokens it is trained to say, kept beside it: a file (pairs/draft_vocabulary.py); auto:"
        " those of pair.draft; null: all",
    ]
    chats: Chats
    training: Annotated[Part, "the loop"]


@program(__file__, DistillDraft)
def main(settings: DistillDraft) -> None:
    """Run ``stage`` of the training configured by conf/distill_draft.yaml."""
    import torch

    from pairs.embedded import ship
    from pairs.run import MARKER, finish, load_target, start
    from pairs.self_chat import ChatWriter, first_round

    cfg = settings.composed
    kind = instantiate(cfg.draft)
    out = result_folder(cfg.out, f"{kind.name}_draft", MARKER)
    if cfg.ship is not None:
        into = checked_folder("ship", cfg.ship).expanduser()
        return ship(out.expanduser(), into, {str(name): note for name, note in cfg.notes.items()})
    if cfg.threads is not None:
        torch.set_num_threads(cfg.threads)
    torch.manual_seed(cfg.seed)
    if cfg.stage == "generate":
        target, tokenizer = load_target(cfg, kind)
        return ChatWriter(cfg.chats, cfg.seed, target, tokenizer).write(cfg.chats.tokens)
    refuse_foreign(out, MARKER)
    target, tokenizer = load_target(cfg, kind)
    writer = None
    if cfg.stage == "all":
        writer = ChatWriter(cfg.chats, cfg.seed, target, tokenizer)
        writer.write(first_round(cfg.chats))
    run = start(cfg, kind, target, out)
    with only_writer(out):
        finish(cfg, kind, run, writer, out)


if __name__ == "__main__":
    main()
