"""The run of a harvest: estimate of its cost, progress, and the manifest that finishes it."""

import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

from omegaconf import OmegaConf
from tqdm import tqdm

from data_gen.answers import Answer
from data_gen.harvest import Maker, Progress, answers_of, outputs_on
from data_gen.prompts.prompt import spread
from data_gen.records import Row, label
from data_gen.requests import Request
from data_gen.responses.log import NAME as ANSWERS
from data_gen.room import Room, joined
from data_gen.settings import HarvestSettings
from data_gen.statistics import small_splits, statistics, summary, surprisal, warning
from data_gen.storage import chunks, shards
from data_gen.storage.dataset import Harvest, verify
from runtime.errors import UserError
from runtime.job import as_called, command_line, shared_settings, versions_of
from runtime.json_files import write_checksummed
from runtime.settings.groups import Splits
from runtime.text import plural, printable

PACKAGES = ("draftpredict", "torch", "transformers", "pyarrow")
MARKS = (chunks.MANIFEST, chunks.PLAN, ANSWERS)  # mark a harvest, finished or in progress


def report_faults(out: Path) -> None:
    """Print every bad file. Raises UserError where there is one."""
    bad = verify(out)
    for line in bad:
        print(printable(line))
    if bad:
        raise UserError(
            f"out: {plural(len(bad), 'bad file')} in {out}. Run the command that harvested it"
            " again: it makes anew what is bad"
        )
    manifest = Harvest.open(out, "out").manifest
    prompts = plural(manifest.prompts.count, "prompt")
    print(f"{out} is whole: {plural(len(manifest.shards), 'shard')}, {prompts}")
    print(f"content sha256 {manifest.content}")


def progress_bar(prompts: int, settings: HarvestSettings) -> tuple[tqdm, Progress]:
    """Return a bar that counts response tokens, and the callbacks that move it. Its total, at most
    `max_new_tokens` per prompt, shrinks with short answers and with those of earlier runs. Prints
    few lines if there is no terminal."""
    bar = tqdm(
        total=prompts * settings.max_new_tokens,
        unit=" response tokens",
        desc="harvest",
        mininterval=0.5 if sys.stderr.isatty() else 30.0,
        dynamic_ncols=True,
    )
    done = 0

    def finished(prompts: int, tokens: int) -> None:
        nonlocal done
        done += prompts
        bar.total -= prompts * settings.max_new_tokens - tokens
        bar.set_postfix_str(f"{plural(done, 'prompt')} labelled", refresh=False)

    return bar, Progress(sampled=bar.update, finished=finished)


def finish(
    whole: dict[str, Any],
    given_tokens: int,
    out: Path,
    splits: Splits,
    responses: Any,
    repeated: int = 0,
    too_long: Mapping[str, int] | None = None,
    template: Any = None,
) -> Harvest:
    """Write the manifest, which makes the folder a dataset, and return that. whole: the plan;
    given_tokens: of external responses; responses: the setting of their source; repeated: number of
    prompts with the text of an earlier one; too_long: of those that were left out and cut;
    template: the chat template that rendered prompts, if one did."""
    markers = list(chunks.markers_of(out, whole))
    given = [row for marker in markers for row in marker.given]
    left_out = whole["prompts"]["count"] - sum(marker.prompts for marker in markers)
    if left_out == whole["prompts"]["count"]:
        raise UserError("workers.lost: every batch was left out. Mend what the warnings name")
    manifest = {
        **whole,
        "shares": {"calibration": splits.calibration, "test": splits.test},
        "repeated_texts": repeated,
        "responses_from": OmegaConf.to_container(responses),
        "given_tokens": given_tokens,
        **({"left_out": left_out} if left_out else {}),
        **({"chat_template": template} if template else {}),
        **({"too_long": too_long} if too_long else {}),
        **({"surprisal": surprisal(given)} if given else {}),
        "statistics": statistics(out, len(markers), whole["gamma"]).model_dump(),
        **chunks.inventory(out, whole),
        "command": command_line(),
        "versions": versions_of(PACKAGES),
    }
    with suppress(UserError):  # there is one: nothing was made since
        old = Harvest.open(out, "out").manifest.written
        manifest |= {name: old[name] for name in ("command", "versions") if name in old}
    write_checksummed(out / chunks.MANIFEST, manifest)
    return Harvest.open(out, "out")


def print_results(made: Harvest, seconds: float, given: bool) -> None:
    """Print the statistics of a harvest, warnings and the command that comes next. given: whether
    its responses are not the target's own"""
    manifest = made.manifest
    print(f"\n{summary(manifest)}\n{'seconds (this run)':24}{seconds:.0f}\nsaved {made.folder}")
    greedy = manifest.warp.temperature == 0
    warnings = [small_splits(manifest.splits)]
    warnings += [warning(manifest.surprisal, greedy)] if given else []
    print("".join(f"{line}\n" for line in warnings if line), end="")
    models = [] if made.features_stored else shared_settings("pair")
    train = ["python", "train.py", "predictor=specdecpp", *models, f"data={made.folder}"]
    print(as_called(f"next: {shlex.join(train)}"))


class Estimate(NamedTuple):
    """What a harvest takes: of one process, seconds; bytes on disk; memory of labelling."""

    prompts: int
    tokens: float
    seconds: float
    disk: float
    room: Room

    def print(self, out: Path, workers: int) -> None:
        out.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(out.parent).free
        print(
            f"{plural(self.prompts, 'prompt')}, about {self.tokens:,.0f} response tokens, to {out}"
        )
        minutes = self.seconds / 60 / workers
        where = "on this machine as busy as it is now"
        if workers > 1:
            where = f"with {workers} processes like the one that tried"
        print(f"time: about {minutes:.1f} minutes {where}")
        print(
            f"memory: labelling takes up to {self.room.bytes / 1e9:.2f} GB beside the models and"
            f" the batch, {self.room.rollouts} rollouts in a forward (label_gb)"
        )
        print(f"disk: about {self.disk / 1e6:.2f} MB ({free / 1e9:.1f} GB free)")


def estimate(maker: Maker, _: None = None) -> Estimate:
    """Estimate a harvest's time and size: answer one full batch of prompts, spread over all of
    them, label 8 of its answers, and scale both up.

    Prefill grows with the padded prompts of all batches, the rest with the number of prompts: the
    length of answers varies most, and is measured on the whole batch."""
    pair, requests, settings = maker.pair, maker.requests, maker.settings
    batches = maker.batches
    batch = spread([request for batch in batches for request in batch], len(batches[0]))
    asked, chosen = list(batch), {request.prompt_id for request in spread(batch, 8)}
    tokens, labelled_tokens, labelling = 0, 0, 0.0
    records = list[dict[str, Row]]()
    marks = list[float]()  # times of the start, of the first and of the second token

    def mark(_: int) -> None:
        if len(marks) < 3:
            marks.append(perf_counter())

    def to_label() -> Iterator[Answer]:
        nonlocal tokens
        for answer in answers_of(pair, asked, settings, mark):
            tokens += len(answer.distributions.response)
            if asked[answer.index].prompt_id in chosen:
                yield answer

    with outputs_on(pair, pair.target.device, settings.draft_warp):
        room = maker.room
        marks.append(perf_counter())
        for group in joined(pair, to_label(), settings, room):
            start = perf_counter()
            chosen_requests = [asked[answer.index] for answer in group]
            records += label(pair, chosen_requests, group, settings, room)
            labelling += perf_counter() - start
            labelled_tokens += sum(len(answer.distributions.response) for answer in group)
    reading = perf_counter() - marks[0] - labelling
    opening = max(0.0, 2 * marks[1] - marks[0] - marks[-1])  # to the first token, less one step
    start, empty = perf_counter(), _shard_bytes([])
    size = _shard_bytes(records) - empty
    labelling += perf_counter() - start
    scale = len(requests) / len(batch)
    prefill = opening * sum(map(_padded, batches)) / _padded(batch)
    seconds = prefill + scale * (reading - opening + tokens * labelling / labelled_tokens)
    disk = len(batches) * empty + scale * tokens * size / labelled_tokens
    prompts = sum(len(request.ids) for request in requests)
    return Estimate(prompts, scale * tokens, seconds, disk, room)


def _padded(batch: Sequence[Request]) -> int:
    return len(batch) * max(len(request.tokens) for request in batch)


def _shard_bytes(records: list[dict[str, Row]]) -> int:
    """Return the bytes on disk of one chunk."""
    kinds = {kind: [rows[kind] for rows in records] for kind in shards.SCHEMAS}
    return sum(shards.encoded_shard(kind, 0, rows)[1].size for kind, rows in kinds.items())
