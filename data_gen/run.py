"""The run of a harvest: estimate of its cost, progress, and the manifest that finishes it."""

import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

from omegaconf import OmegaConf
from tqdm import tqdm

from data_gen.answers import Answer
from data_gen.harvest import Progress, answers_of, outputs_on, plan, split_into_chunks
from data_gen.prompts.prompt import spread
from data_gen.records import Row, label
from data_gen.requests import Request
from data_gen.responses.log import NAME as ANSWERS
from data_gen.room import joined, room_of
from data_gen.settings import HarvestSettings
from data_gen.statistics import small_splits, statistics, summary, surprisal, warning
from data_gen.storage import chunks, shards
from data_gen.storage.dataset import Harvest, verify
from data_gen.storage.sharing import LOCK
from decoding.models.loading import ModelPair
from runtime.errors import UserError
from runtime.job import as_called, command_line, shared_settings, versions_of
from runtime.json_files import write_checksummed
from runtime.settings.groups import Splits
from runtime.text import plural, printable

PACKAGES = ("draftpredict", "torch", "transformers", "pyarrow")
MARKS = (chunks.MANIFEST, chunks.PLAN, ANSWERS, LOCK)  # mark a harvest, finished or in progress


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


def progress_bar(
    requests: Sequence[Request], settings: HarvestSettings, shown: bool
) -> tuple[tqdm, Progress]:
    """Return a bar that counts response tokens, and the callbacks that move it. Its total, at most
    `max_new_tokens` per prompt, shrinks with short answers and with those of earlier runs. Prints
    few lines if there is no terminal."""
    bar = tqdm(
        total=len(requests) * settings.max_new_tokens,
        disable=not shown,
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
    pair: ModelPair,
    requests: Sequence[Request],
    settings: HarvestSettings,
    out: Path,
    splits: Splits,
    responses: Any,
    repeated: int = 0,
) -> Harvest:
    """Write the manifest, which makes the folder a dataset, and return that. responses: the setting
    of their source; repeated: number of prompts with the text of an earlier one."""
    whole = plan(pair, requests, settings)
    given = [row for marker in chunks.markers_of(out, whole) for row in marker.given]
    manifest = {
        **whole,
        "shares": {"calibration": splits.calibration, "test": splits.test},
        "repeated_texts": repeated,
        "responses_from": OmegaConf.to_container(responses),
        "given_tokens": sum(len(r.response) for r in requests if r.response is not None),
        **({"surprisal": surprisal(given)} if given else {}),
        "statistics": statistics(out, chunks.chunk_count(whole), settings.gamma).model_dump(),
        **chunks.inventory(out, whole),
        "command": command_line(),
        "versions": versions_of(PACKAGES),
    }
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


def print_estimate(
    pair: ModelPair, requests: Sequence[Request], settings: HarvestSettings, out: Path
) -> None:
    """Print an estimate of a harvest's time and size: answer one full batch of prompts, spread over
    all of them, label 8 of its answers, and scale both up.

    Prefill grows with the padded prompts of all batches, the rest with the number of prompts: the
    length of answers varies most, and is measured on the whole batch."""
    batches = split_into_chunks(requests, settings.batch_size)
    batch = spread([request for batch in batches for request in batch], len(batches[0]))
    chosen = {request.prompt_id for request in spread(batch, 8)}
    tokens, labelled_tokens, labelling = 0, 0, 0.0
    records = list[dict[str, Row]]()
    marks = list[float]()  # times of the start, of the first and of the second token

    def mark(_: int) -> None:
        if len(marks) < 3:
            marks.append(perf_counter())

    def to_label() -> Iterator[Answer]:
        nonlocal tokens
        for answer in answers_of(pair, batch, settings, mark):
            tokens += len(answer.distributions.response)
            if batch[answer.index].prompt_id in chosen:
                yield answer

    with outputs_on(pair, pair.target.device):
        room = room_of(pair, requests, settings)
        marks.append(perf_counter())
        for group in joined(pair, to_label(), settings, room):
            start = perf_counter()
            chosen_requests = [batch[answer.index] for answer in group]
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
    out.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(out.parent).free
    prompts = plural(len(requests), "prompt")
    print(f"{prompts}, about {scale * tokens:,.0f} response tokens, to {out}")
    print(f"time: about {seconds / 60:.1f} minutes on this machine as busy as it is now")
    print(
        f"memory: labelling takes up to {room.bytes / 1e9:.2f} GB beside the models and the batch,"
        f" {room.rollouts} rollouts in a forward (label_gb)"
    )
    print(f"disk: about {disk / 1e6:.2f} MB ({free / 1e9:.1f} GB free)")


def _padded(batch: Sequence[Request]) -> int:
    return len(batch) * max(len(request.tokens) for request in batch)


def _shard_bytes(records: list[dict[str, Row]]) -> int:
    """Return the bytes on disk of one chunk."""
    with TemporaryDirectory() as folder:
        written = [
            shards.write_shard(Path(folder), kind, 0, [rows[kind] for rows in records])
            for kind in shards.SCHEMAS
        ]
        return sum(shard.bytes for shard in written)
