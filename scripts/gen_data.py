"""Harvest training data: the target answers prompts, the draft reads along, labels and features
become shards.

    python scripts/gen_data.py                      # starter prompts, the embedded pair
    python scripts/gen_data.py estimate=true        # how long and how large, then stop
    python scripts/gen_data.py verify=true out=data/starter     # is every byte as written?
    python scripts/gen_data.py dataset=jsonl dataset.path=prompts.jsonl out=data/mine
    python scripts/gen_data.py warp=greedy draft_warp.temperature=0 anchors.stride=1 out=data/greedy
    python scripts/gen_data.py workers=ray workers.count=4 workers.gpus=2      # one machine, 8 GPUs
    python scripts/gen_data.py workers=ray workers.address=auto workers.count=16 workers.gpus=2
    python scripts/gen_data.py push=me/harvest      # to the hub; then train.py data=hub:me/harvest

Several processes (Ray) divide the batches among themselves; this one writes them. Records are the
same for any number with as many threads each (workers.cpus). Interrupted, the same command
continues after the last finished batch; it also makes anew what is missing or damaged.
`--help` lists every setting.

Records: mixed (draft tokens in a mix of response and candidates, SpecDec++'s) and rounds (gamma
draft tokens from every anchor, how many are accepted, the target's hidden states before them and
the draft's at each)."""

import sys
import time
from collections.abc import Sequence
from datetime import date
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from hydra.utils import instantiate

from decoding.settings import Pair
from runtime.cli import program
from runtime.errors import UserError
from runtime.files import checked_folder, only_writer, refuse_foreign
from runtime.settings.groups import Dataset, DraftWarp, Harvest, Logger, Splits, Warp
from runtime.settings.kinds import Count, Group, Output, Part, Text

if TYPE_CHECKING:
    from data_gen.prompts import Prompt
    from data_gen.responses.external import ExternalResponse
    from data_gen.settings import HarvestSettings


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
    logger: Logger
    features: Features
    out: Annotated[Output, "folder of the dataset"]
    workers: Annotated[Part, "processes that harvest: this one, or several by Ray"]
    estimate: Annotated[bool, "answer one batch, print expected time and disk of the whole, stop"]
    push: Annotated[
        Text | None, "owner/name on the hub that the finished dataset is sent to; null: none"
    ]
    verify: Annotated[bool, "read the dataset in `out`, name every bad file, stop"]
    anchors: Anchors
    splits: Splits


@program(__file__, GenData)
def main(asked: GenData) -> None:
    """Harvest prompts with a pair into a dataset folder."""
    from data_gen.harvest import Maker, make_chunks, maker_of
    from data_gen.hub import cleaned, push
    from data_gen.requests import repeats
    from data_gen.run import MARKS, estimate, finish, print_results, progress_bar, report_faults
    from data_gen.settings import HarvestSettings
    from decoding.models.loading import load_tokenizer
    from predictors.hub import refuse_no_repository
    from runtime.tracking import tracked
    from runtime.workers import whole

    out, workers = checked_folder("out", asked.out), instantiate(asked.workers)
    if asked.verify:
        report_faults(out)
        return
    refuse_foreign(out, *MARKS)
    if asked.push is not None:
        refuse_no_repository(asked.push, "push")
    settings = HarvestSettings.of(asked, asked, asked.anchors.stride, asked.features.stored)
    prompts, given, too_long = responded(asked, settings, out)
    shares = asked.splits.calibration, asked.splits.test
    tokenizer = load_tokenizer(asked.pair.model("target"))  # else no folder is made
    make = partial(maker_of, asked.pair, prompts, given, settings, shares)
    start = time.perf_counter()
    with only_writer(out), workers.team(make) as team:
        if asked.estimate:
            ((_, found),) = whole(team.map(estimate, [None]))
            found.print(out, workers.count)
            return
        ((_, (plan, given_tokens)),) = whole(team.map(Maker.facts, [None]))
        if asked.push is not None:
            cleaned(plan)  # what must not be sent is not harvested for hours first
        bar, progress = progress_bar(sum(len(each.ids) for each in prompts), settings)
        tags = sorted({prompt.dataset for prompt in prompts})
        with tracked(asked.logger, "harvest", asked.plain(), [plan], tags) as logger:
            with bar:
                make_chunks(team, plan, out, progress)
            origin = asked.splits, asked.responses, repeats(prompts)
            template = None
            if prompts[0].chat:
                arguments = dict(prompts[0].template)
                template = {"text": tokenizer.chat_template, "arguments": arguments}
            made = finish(plan, given_tokens, out, *origin, too_long, template)
            seconds = time.perf_counter() - start
            measured = made.manifest.written["statistics"]
            logger.log({"seconds": seconds, "bytes": made.manifest.bytes, **measured})
            logger.artifact(*made.artifact)
    print_results(made, seconds, bool(given))
    if asked.push is not None:
        print(f"sent to {push(made, asked.push)}")


def responded(
    asked: GenData, settings: "HarvestSettings", out: Path
) -> tuple[list["Prompt"], dict[str, "ExternalResponse"] | None, dict[str, int]]:
    """Return the prompts as they are asked, their responses if others give these, and how many
    prompts were too long, by what became of them. Raises UserError for a folder with other data."""
    from data_gen.harvest import settings_of
    from data_gen.prompts import Prompt, load_prompts
    from data_gen.prompts.render import as_asked
    from data_gen.requests import fitted, split_prompts
    from data_gen.responses.external import GoingOn, fetched
    from data_gen.storage.claim import begun_on, refuse_others
    from decoding.models.loading import context_of, ends_of, load_tokenizer

    prompts, source = load_prompts(asked.dataset), instantiate(asked.responses)
    target, most, room = asked.pair.model("target"), settings.max_new_tokens, sys.maxsize
    tokenizer = partial(load_tokenizer, target)
    day, too_long = begun_on(out) or date.today().isoformat(), dict[str, int]()
    if any(prompt.then or prompt.too_long != "error" for prompt in prompts):
        room = context_of(asked.pair) - most - settings.gamma
        prompts, too_long = fitted(prompts, tokenizer(), room, day)
    if source.own_clock and any(prompt.date for prompt in prompts):
        raise UserError("dataset.template.date: the server renders prompts itself. Leave it away")
    splits = split_prompts(prompts, asked.splits.calibration, asked.splits.test)
    known = settings_of([splits[p.id] for p in prompts for _ in p.ids], settings)
    known["pair"] = {"name": asked.pair.name}
    known["responses"] = "external" if source.external else "generated"
    if source.external and any(prompt.then and prompt.too_long != "error" for prompt in prompts):
        known.pop("splits")  # which turns fit is known when those before are answered
    if not asked.estimate:
        refuse_others(out, known)

    def render(some: Sequence[Prompt]) -> list[Prompt]:
        read = any(prompt.chat for prompt in some)
        return as_asked(some, tokenizer(), day, source.external) if read else list(some)

    # Before loading models, whose memory a server may need.
    on = GoingOn(render, tokenizer, lambda: ends_of(target, tokenizer()), most, room)
    return *fetched(source, prompts, settings, out, not asked.estimate, on), too_long


if __name__ == "__main__":
    main()
