"""Harvest training data: the target answers prompts, the draft reads along, labels and features
become shards."""

import shutil
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from tqdm import tqdm

from data_gen.harvest import Progress, outputs_on, plan, settings_of
from data_gen.prompts import Prompt
from data_gen.requests import Request, split_prompts
from data_gen.responses import surprisal
from data_gen.responses.external import Source
from data_gen.responses.log import NAME as ANSWERS
from data_gen.settings import HarvestSettings
from data_gen.statistics import estimate, statistics
from data_gen.storage import chunks
from data_gen.storage.dataset import Harvest, verify
from data_gen.storage.sharing import LOCK, Worker
from decoding.models.loading import ModelPair
from runtime.errors import UserError
from runtime.job import command_line
from runtime.json_files import write_checksummed
from runtime.settings.groups import Splits
from runtime.text import printable

PACKAGES = ("draftpredict", "torch", "transformers", "pyarrow")
MARKS = (chunks.MANIFEST, chunks.PLAN, ANSWERS, LOCK)  # of a harvest, finished or under way
WRITER = (
    "The first one (RANK=0) writes manifest.json; if there is none, run the same command without"
    " WORLD_SIZE"
)


def report_faults(out: Path, place: Worker) -> None:
    """Print every bad file. Raises UserError where there is one."""
    if place.rank > 0:
        return
    bad = verify(out)
    print(*map(printable, bad), sep="\n", end="\n" if bad else "")
    if bad:
        raise UserError(
            f"out: {len(bad)} bad files in {out}. Run the command that harvested it again: it makes"
            " anew what is bad"
        )
    manifest = Harvest.open(out, "out").manifest
    print(f"{out} is whole: {len(manifest.shards)} shards, {manifest.prompts.count} prompts")
    print(f"content {manifest.content}")


def known_settings(
    pair: str, splits: Splits, prompts: list[Prompt], settings: HarvestSettings, source: Source
) -> dict:
    """What of the plan is known before a response is asked for or a model is loaded. Raises
    UserError for shares that cannot be. pair: its name."""
    shared = split_prompts(prompts, splits.calibration, splits.test)
    kind = "external" if source.external else "generated"
    return {
        **settings_of(list(shared.values()), settings),
        "pair": {"name": pair},
        "responses": kind,
    }


def progress_bar(requests: list[Request], settings: HarvestSettings, place: Worker) -> tqdm:
    """Counts response tokens, at most `max_new_tokens` per prompt; sparing with lines where there
    is no terminal. Of several processes the first shows it, for all of them."""
    interval = 0.5 if sys.stderr.isatty() else 30.0
    total = len(requests) * settings.max_new_tokens
    shown = {"unit": " tokens", "desc": "harvest", "mininterval": interval, "dynamic_ncols": True}
    return tqdm(total=total, disable=place.rank > 0, **shown)


def watch(bar: tqdm, settings: HarvestSettings) -> Progress:
    """Callbacks that move the bar: its total shrinks by what short answers and earlier runs leave
    undone."""
    done = {"prompts": 0}

    def finished(prompts: int, tokens: int) -> None:
        done["prompts"] += prompts
        bar.total -= prompts * settings.max_new_tokens - tokens
        bar.set_postfix_str(f"{done['prompts']} prompts labelled", refresh=False)

    return Progress(sampled=bar.update, finished=finished)


def finish(
    pair: ModelPair,
    requests: list[Request],
    settings: HarvestSettings,
    out: Path,
    splits: Splits,
    responses: Any,
    repeated: int = 0,
) -> Harvest:
    """Write the manifest, which makes the folder a dataset, and return that. responses: where they
    come from, as it was set; repeated: prompts with the text of one before them."""
    whole = plan(pair, requests, settings)
    given = chunks.given_rows(out, whole)
    manifest = {
        **whole,
        "shares": {"calibration": splits.calibration, "test": splits.test},
        "repeated_texts": repeated,
        "responses_from": OmegaConf.to_container(responses),
        "given_tokens": sum(len(r.response) for r in requests if r.response is not None),
        **({"surprisal": surprisal.surprisal(given)} if given else {}),
        "statistics": statistics(out, chunks.chunk_count(whole), settings.gamma).model_dump(),
        **chunks.inventory(out, whole),
        "command": command_line(),
        "versions": {name: version(name) for name in PACKAGES},
    }
    write_checksummed(out / chunks.MANIFEST, manifest)
    return Harvest.open(out, "out")


def print_estimate(
    pair: ModelPair, requests: list[Request], settings: HarvestSettings, out: Path, place: Worker
) -> None:
    if place.rank > 0:
        return
    with outputs_on(pair, pair.target.device):
        expected = estimate(pair, requests, settings)
    out.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(out.parent).free
    print(f"{len(requests)} prompts, about {expected.tokens:,.0f} response tokens, to {out}")
    print(f"time: about {expected.seconds / 60:.1f} minutes on this machine as busy as it is now")
    room = expected.room
    print(
        f"memory: labelling takes up to {room.bytes / 1e9:.2f} GB beside the models and the batch,"
        f" {room.rollouts} rollouts in a forward (label_gb)"
    )
    print(f"disk: about {expected.bytes / 1e6:.2f} MB ({free / 1e9:.1f} GB free)")
