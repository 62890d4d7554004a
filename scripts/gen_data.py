"""Harvest training data: the target answers prompts, the draft reads along, labels and features
become shards.

    python scripts/gen_data.py                      # starter prompts, the embedded pair
    python scripts/gen_data.py estimate=true        # how long and how large, then stop
    python scripts/gen_data.py verify=true out=data/starter     # is every byte as written?
    python scripts/gen_data.py dataset=jsonl dataset.path=prompts.jsonl out=data/mine
    python scripts/gen_data.py warp=greedy draft_warp.temperature=0 anchors.stride=1 out=data/greedy
    accelerate launch --num_processes 8 scripts/gen_data.py

Several processes, also on machines that share a folder, divide the batches among themselves.
Interrupted, the same command continues after the last finished batch; it also makes anew what is
missing or damaged. On CPUs `accelerate launch` wants `--multi_gpu` to start more than one process.
`--help` lists every setting."""

from typing import Annotated

from pydantic import Field

from decoding.settings import Pair
from programs.groups import Dataset, DraftWarp, Splits, Warp
from runtime.cli import Program
from runtime.settings.kinds import Count, Group, Layers, Part, Path, Seed


class Inputs(Group):
    """Layers whose hidden states are recorded, -1: what the output layer reads; predictors read
    some of them."""

    draft_layers: Annotated[Layers, "at every drawn token"]
    target_layers: Annotated[Layers, "at the last verified position before every round"]


class Anchors(Group):
    stride: Annotated[
        Count,
        "response positions between two rounds; smaller: more records, more time; 1: decoding can"
        " be replayed exactly",
    ]


class Features(Group):
    stored: Annotated[bool, "hidden states on disk; false: train.py runs the models again"]


class GenData(Group):
    pair: Pair
    dataset: Dataset
    warp: Warp
    draft_warp: DraftWarp
    responses: Annotated[Part, "where the target's responses come from"]
    features: Features
    out: Annotated[Path, "folder of the dataset"]
    estimate: Annotated[bool, "answer one batch, print expected time and disk of the whole, stop"]
    verify: Annotated[bool, "read the dataset in `out`, name every bad file, stop"]
    seed: Seed
    max_new_tokens: Annotated[Count, "most tokens of a target response"]
    gamma: Annotated[
        Annotated[int, Field(ge=1, le=1000)],
        "draft tokens of a round, the most that any stop rule or predictor.gamma can be replayed or"
        " trained with",
    ]
    mixing: Annotated[
        Annotated[float, Field(ge=0, lt=1)],
        "share of response tokens in the mixed sequences that SpecDec++ learns from",
    ]
    batch_size: Annotated[
        Count, "prompts answered together; one batch is one set of shards and the unit of resuming"
    ]
    inputs: Inputs
    anchors: Anchors
    splits: Splits


main = Program(__file__, GenData, "programs.gen_data", several=True)

if __name__ == "__main__":
    main()
