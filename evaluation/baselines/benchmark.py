"""Measure a part of the toolkit against the plain way to do the same, side by side."""

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median

import torch
from omegaconf import DictConfig
from torch import Tensor
from tqdm import tqdm

from data_gen.harvest import Progress, label_chunk, split_into_chunks
from data_gen.prompts import load_prompts
from data_gen.prompts.prompt import spread
from data_gen.prompts.render import prompt_ids
from data_gen.records import Row
from data_gen.requests import Request, make_requests
from data_gen.settings import HarvestSettings
from decoding.engines.overlapped import threads_of_draft
from decoding.models.loading import ModelPair, load_pair
from decoding.models.mixed import refuse_mixed
from decoding.settings import Pair
from evaluation.baselines.plain_harvest import Coins, OneByOne
from evaluation.baselines.side_by_side import branch_bytes, measure_step, model_bytes
from evaluation.table import markdown
from predictors.features.draft_statistics import Q_STATS
from predictors.outcomes import NEGLIGIBLE
from runtime.errors import UserError


def take_turns(ways: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Seconds of each way in each repeat; who goes first alternates. Progress is printed."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for repeat in range(repeats):
        for name in list(ways)[:: 1 if repeat % 2 == 0 else -1]:
            start = time.perf_counter()
            ways[name]()
            seconds[name].append(time.perf_counter() - start)
            print(f"repeat {repeat + 1}/{repeats}: {name} {seconds[name][-1]:.1f} s", flush=True)
    return seconds


# Harvest ------------------------------------------------------------------------------------------


ALL, ONE = "all positions", "one at a time"
COMPARED = ("known", "drafted", "accepted", "token", "q", *Q_STATS, "accept_prob")


@dataclass
class Agreement:
    """Labels of two ways compared. rounds: of which so many have the same draft tokens, and so many
    of those the same accepted length; difference: the largest of any other number in rounds with
    the same tokens."""

    rounds: int = 0
    same_tokens: int = 0
    same_accepted: int = 0
    difference: float = 0.0

    def add(self, ours: Row, theirs: Row) -> None:
        """One round. Acceptance is compared as the probability that a token and all before it are
        accepted, which the harvest writes as 0 from where it may be `NEGLIGIBLE`."""
        drafted = int(ours["drafted"])
        self.rounds += 1
        if ours["token"][:drafted].tolist() != theirs["token"].tolist():
            return
        self.same_tokens += 1
        known = min(drafted, int(ours["known"]))
        self.same_accepted += min(known, theirs["accepted"]) == int(ours["accepted"])
        for name in ("q", *Q_STATS):
            self._compare(ours[name][:drafted], theirs[name])
        survival, expected = (row["accept_prob"][:known].cpu().cumprod(0) for row in (ours, theirs))
        self._compare(survival, expected.where((survival > 0) | (expected >= NEGLIGIBLE), 0.0))

    def _compare(self, ours: Tensor, theirs: Tensor) -> None:
        self.difference = max(self.difference, float((ours.cpu() - theirs.cpu()).abs().max()))


def benchmark_harvest(cfg: DictConfig) -> str:
    """Labelled draft tokens per second, all positions at once against one round at a time.

    The plain way works on `plain_prompts` of the prompts: unlike that of batches, its rate does not
    depend on how many."""
    settings = HarvestSettings.of(cfg.harvest, cfg, stride=1)
    pair = load_pair(Pair.of(cfg.pair))
    room = settings.max_new_tokens + settings.gamma
    requests = make_requests(
        load_prompts(cfg.dataset), pair, room, cfg.splits.calibration, cfg.splits.test
    )
    ours = all_positions(
        pair, requests, settings
    )  # also warms up, and tells how long the responses are
    some = spread(requests, cfg.plain_prompts)
    responses = [ours[request.prompt_id]["response_tokens"] for request in some]
    coins = [
        Coins.of(request, settings, len(response))
        for request, response in zip(some, responses, strict=True)
    ]
    plain: dict[str, list[Row]] = {}

    def one_by_one() -> None:
        engine = OneByOne(pair, settings)
        for request, *given in zip(some, responses, coins, strict=True):
            plain[request.prompt_id] = list(engine.rounds(request, *given))

    ways = {ALL: lambda: all_positions(pair, requests, settings), ONE: one_by_one}
    seconds = take_turns(ways, cfg.repeats)
    labels = {ALL: sum(int(row["drafted"].sum()) for row in ours.values())}
    labels[ONE] = sum(int(ours[name]["drafted"].sum()) for name in plain)
    return harvest_report(seconds, labels, agreed(ours, plain))


def agreed(ours: Mapping[str, Row], plain: Mapping[str, list[Row]]) -> Agreement:
    """ours: columns of all positions by prompt id; plain: rounds of some prompts."""
    agreement = Agreement()
    for name, rounds in plain.items():
        columns = {column: ours[name][column] for column in COMPARED}
        for place, theirs in enumerate(rounds):
            agreement.add({column: values[place] for column, values in columns.items()}, theirs)
    return agreement


def all_positions(
    pair: ModelPair, requests: list[Request], settings: HarvestSettings
) -> dict[str, Row]:
    """By prompt id, responses and rounds of a harvest, whose other records are made as well;
    nothing goes to disk."""
    found = {}
    for chunk in split_into_chunks(requests, settings.batch_size):
        records = label_chunk(pair, chunk, settings, Progress())
        for responses, rounds in zip(records["responses"], records["rounds"], strict=True):
            found[responses["prompt_id"]] = responses | rounds
    return found


def harvest_report(
    seconds: dict[str, list[float]], labels: dict[str, int], agreement: Agreement
) -> str:
    """labels: draft tokens that each way labels in one repeat."""
    rates = {name: [labels[name] / value for value in values] for name, values in seconds.items()}
    ratios = [ours / theirs for ours, theirs in zip(rates[ALL], rates[ONE], strict=True)]
    lines = [f"{name:16}{median(values):8.1f} labels/s" for name, values in rates.items()]
    lines += [
        (
            f"ratio           {median(ratios):8.1f} ({min(ratios):.1f} to {max(ratios):.1f},"
            f" {len(ratios)} paired repeats)"
        ),
        (
            f"agreement: {agreement.same_tokens} of {agreement.rounds} rounds have the same draft"
            f" tokens, {agreement.same_accepted} of those the same accepted length;"
        ),
        (
            "largest difference of q, its statistics, P(accepted so far) in those:"
            f" {agreement.difference:.1e}"
        ),
    ]
    return "\n".join(["", *lines])


# Overlap ------------------------------------------------------------------------------------------


def benchmark_overlap(cfg: DictConfig) -> str:
    """A branch stage with so many branches: what overlapping costs in time, and branches in
    memory."""
    settings, pair = cfg.overlap, load_pair(Pair.of(cfg.pair))
    refuse_mixed(pair.draft)
    refuse_unfit_pair(pair, settings)
    context = some_context(cfg, pair)
    threads = threads_of_draft(pair, settings.draft_threads, "overlap.draft_threads")
    models = model_bytes(pair.target) + model_bytes(pair.draft)
    held = branch_bytes(pair, context, settings.gamma, settings.branches)
    rows = []
    for k in tqdm(settings.branches, desc="overlap", unit="width"):
        step = measure_step(pair, context, settings.gamma, k, threads, cfg.repeats)
        seconds = [f"{1e3 * value:.1f}" for value in (step.target, step.draft, step.together)]
        memory = [f"{held[k] / 1e6:.1f}", f"{held[k] / models:.1%}"]
        rows.append([str(k), *seconds, f"{step.slowdown:.2f}", *memory])
    milliseconds = ["target alone, ms", "draft alone, ms", "side by side, ms", "over the slower"]
    note = (
        f"{settings.gamma} pending tokens, branches of {settings.gamma}, context of {len(context)},"
        f" medians of {cfg.repeats}; CPU threads: {threads or 'not divided'} of"
        f" {torch.get_num_threads()} for the draft. MB: held at the end of the stage (cache rows,"
        f" logits, distributions); the models' weights are {models / 1e6:.0f} MB"
    )
    return f"{markdown(['branches', *milliseconds, 'MB', 'of models'], rows)}\n\n{note}"


def refuse_unfit_pair(pair: ModelPair, settings: DictConfig) -> None:
    """Raise UserError for a draft that cannot run beside its target, or too short a context."""
    if pair.draft.reads_target:
        raise UserError(
            "what, pair.draft: an EAGLE-style draft that reads its target's hidden states cannot"
            " run beside it. Use an ordinary one: pair=smollm2"
        )
    room = min(lm.max_length for lm in (pair.target, pair.draft)) - 2 * settings.gamma
    if settings.context > room:
        raise UserError(
            f"overlap.context: {settings.context} and two drafts exceed the models' context. Use"
            f" {room}"
        )


def some_context(cfg: DictConfig, pair: ModelPair) -> Tensor:
    """[overlap.context] tokens: the longest prompt, as often as it takes."""
    longest = max(load_prompts(cfg.dataset), key=lambda prompt: len(prompt.text))
    tokens = prompt_ids(longest, pair.tokenizer, sys.maxsize)
    return tokens.repeat(-(-cfg.overlap.context // len(tokens)))[: cfg.overlap.context]
