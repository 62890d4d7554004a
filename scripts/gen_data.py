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

import sys
import time
from datetime import date
from typing import Annotated

from hydra.utils import instantiate

from decoding.settings import Pair
from runtime.cli import program
from runtime.files import checked_folder, refuse_foreign
from runtime.settings.groups import Dataset, DraftWarp, Harvest, Splits, Warp
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


@program(__file__, GenData, several=True)
def main(asked: GenData) -> None:
    """Harvest prompts with a pair into a dataset folder."""
    from data_gen.harvest import harvest, settings_of
    from data_gen.prompts import load_prompts
    from data_gen.prompts.render import as_asked
    from data_gen.requests import make_requests, repeats, split_prompts
    from data_gen.responses.external import asked_on, with_responses
    from data_gen.run import (
        MARKS,
        finish,
        print_estimate,
        print_results,
        progress_bar,
        report_faults,
    )
    from data_gen.settings import HarvestSettings
    from data_gen.storage import chunks
    from data_gen.storage.sharing import Worker, begun_on, refuse_others
    from decoding.models.loading import load_pair, load_tokenizer

    worker, out = Worker.of_launcher(), checked_folder("out", asked.out)
    if asked.verify:
        if worker.rank == 0:
            report_faults(out)
        return
    refuse_foreign(out, *MARKS)
    settings = HarvestSettings.of(asked, asked, asked.anchors.stride, asked.features.stored)
    prompts, source = load_prompts(asked.dataset), instantiate(asked.responses)
    shares = asked.splits.calibration, asked.splits.test
    known = settings_of(list(split_prompts(prompts, *shares).values()), settings)
    known["pair"] = {"name": asked.pair.name}
    known["responses"] = "external" if source.external else "generated"
    if not asked.estimate:
        refuse_others(out, known)
    if any(prompt.chat for prompt in prompts):
        day, tokenizer = begun_on(out) or date.today().isoformat(), asked.pair.model("target")
        prompts = as_asked(prompts, load_tokenizer(tokenizer), day, source.external)
    # Before loading models, whose memory a server may need.
    given = source.fetch(prompts, settings, out, ask=not asked.estimate)
    prompts = asked_on(prompts, given)
    worker.share_cores()
    pair = load_pair(asked.pair)
    pair.draft.refuse_missing(settings.layers.draft_layers)
    pair.target.refuse_missing(settings.layers.target_layers)
    requests = make_requests(prompts, pair, settings.max_new_tokens + settings.gamma, *shares)
    requests = with_responses(requests, given, pair, settings.max_new_tokens)
    if asked.estimate:
        if worker.rank == 0:
            print_estimate(pair, requests, settings, out)
        return
    start = time.perf_counter()
    bar, progress = progress_bar(requests, settings, shown=worker.rank == 0)
    with worker.reporting(), bar:
        harvest(pair, requests, settings, out, progress, worker)
    if worker.rank == 0:
        origin = asked.splits, asked.responses, repeats(prompts)
        made = finish(pair, requests, settings, out, *origin)
        print_results(made, time.perf_counter() - start, bool(given))
    elif not (out / chunks.MANIFEST).exists():
        print(
            f"process {worker.rank + 1} of {worker.size} is done. The first one (RANK=0) writes"
            " manifest.json; if there is none, run the same command without WORLD_SIZE",
            file=sys.stderr,
        )


if __name__ == "__main__":
    main()
