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
`--help` lists every setting.

Records: mixed (draft tokens in a mix of response and candidates, SpecDec++'s) and rounds (gamma
draft tokens from every anchor, how many are accepted, the target's hidden states before them and
the draft's at each)."""

from typing import Annotated

from decoding.settings import Pair
from programs.groups import Dataset, DraftWarp, Harvest, Splits, Warp
from runtime.cli import Program
from runtime.settings.kinds import Count, Group, Output, Part


class Anchors(Group):
    stride: Annotated[
        Count,
        "response positions between two rounds; smaller: more records, more time; 1: decoding can"
        " be replayed exactly",
    ]


class Features(Group):
    stored: Annotated[bool, "hidden states on disk; false: train.py runs the models again"]


class GenData(Harvest):
    pair: Pair
    dataset: Dataset
    warp: Warp
    draft_warp: DraftWarp
    responses: Annotated[Part, "where the target's responses come from"]
    features: Features
    out: Annotated[Output, "folder of the dataset"]
    estimate: Annotated[bool, "answer one batch, print expected time and disk of the whole, stop"]
    verify: Annotated[bool, "read the dataset in `out`, name every bad file, stop"]
    anchors: Anchors
    splits: Splits


main = Program(__file__, GenData, "programs.gen_data", several=True)

if __name__ == "__main__":
    main()
