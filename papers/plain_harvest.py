"""The simple way to harvest rounds, one after another at every position, compared with the
toolkit's harvest in labels and speed."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor

from data_gen.answers import uniforms
from data_gen.columns import at
from data_gen.harvest import Progress, label_chunk, split_into_chunks
from data_gen.labels import acceptance
from data_gen.prompts import load_prompts
from data_gen.prompts.prompt import spread
from data_gen.records import Row
from data_gen.requests import Request, make_requests
from data_gen.settings import HarvestSettings
from decoding.draft import RoundContext
from decoding.engines.request import prefill
from decoding.engines.serial import SerialEngine
from decoding.models.loading import ModelPair, load_pair
from decoding.picking import Draw, Pool, pool_of
from decoding.sampling import Sampler
from decoding.settings import Pair
from decoding.stopping.fixed import Fixed
from decoding.structures.chain import Chain
from decoding.trace import Stopwatch
from decoding.verification import WarpedRows
from decoding.verifiers.token import TokenVerifier
from predictors.features.draft_statistics import Q_STATS, q_stats
from predictors.outcomes import NEGLIGIBLE

ALL, ONE = "all positions", "one at a time"


class RecordedDraws(Sampler):
    """Draws and accepts by given random numbers, in order; later draws are random and ignored
    here."""

    def __init__(self, draws: Tensor, accepts: Tensor) -> None:
        super().__init__(torch.Generator())
        self._draws, self._accepts = iter(draws.tolist()), iter(accepts.tolist())

    def draw(self, distribution: Tensor | Pool) -> Draw:
        return pool_of(distribution).pick(next(self._draws, 0.5))

    def accept(self, p: float, q: float) -> bool:
        return next(self._accepts) * q < p


class OneByOne(SerialEngine):
    """The serial engine with rounds of gamma tokens, after each of which it commits only the
    response's next token.

    Between rounds both caches hold the committed tokens, as in a decode: nothing is recomputed for
    the next position."""

    def __init__(self, pair: ModelPair, settings: HarvestSettings) -> None:
        self.settings = settings
        chain: Any = Chain(settings.gamma)
        verifier: Any = TokenVerifier()
        warps, eos_ids = (settings.warp, settings.draft_warp), frozenset(pair.eos_ids)
        super().__init__(pair, chain, Fixed(settings.gamma), verifier, *warps, eos_ids)

    @torch.inference_mode()
    def rounds(self, request: Request, response: Tensor) -> list[Row]:
        """Return the label of each position's round, with a column for each fact of its drafted
        tokens.

        response: [T], the harvest's: a response decoded here would sooner or later differ by
        rounding. The random numbers are those of a harvest with an anchor at every position."""
        settings, name = self.settings, request.prompt_id
        shape = (len(response), settings.gamma)
        draws = uniforms(settings.seed, name, "rollouts", *shape)
        first = uniforms(settings.seed, name, "candidates", settings.max_new_tokens)
        draws[:, 0] = first[: len(response)]
        accepts = uniforms(settings.seed, name, "verdicts", *shape)
        for model in (self.pair.target, self.pair.draft):
            model.reset()
            prefill(model, request.tokens)
        committed, labels = request.tokens, list[Row]()
        for position, token in enumerate(response):
            context = RoundContext(committed, settings.gamma + 1, eos_ids=self.eos_ids)
            sampler = RecordedDraws(draws[position], accepts[position])
            tree, draft, output = self._draft(context, Stopwatch(), sampler)
            p = WarpedRows(output.logits, self.warp)
            verdict = self.verifier.verify(draft, p, sampler)
            q, tokens = torch.tensor(draft.drawn_q), torch.tensor(draft.token, dtype=torch.long)
            unwarped = torch.stack([tree.unwarped_q(row) for row in range(len(draft))])
            target = self.warp.probs(output.logits[: len(draft)])
            labels.append(
                {
                    "accepted": verdict.accepted,
                    "token": tokens,
                    "q": q,
                    **q_stats(unwarped, tokens),
                    "accept_prob": acceptance(at(target, tokens), q),
                }
            )
            committed = torch.cat([committed, token[None]])
            self._roll_back(tree, draft, [], len(committed))
        return labels


def all_positions(
    pair: ModelPair, requests: list[Request], settings: HarvestSettings
) -> dict[str, Row]:
    """Return responses and rounds of a harvest by prompt id; its other records are made as well,
    but nothing is written to disk."""
    rows = {}
    for chunk in split_into_chunks(requests, settings.batch_size):
        records = label_chunk(pair, chunk, settings, Progress())
        for responses, rounds in zip(records["responses"], records["rounds"], strict=True):
            rows[responses["prompt_id"]] = responses | rounds
    return rows


@dataclass
class Agreement:
    """Agreement of the labels of two ways: numbers of rounds, of those with the same draft tokens,
    and of those with the same accepted length as well; difference: the largest of any other number
    in rounds with the same tokens."""

    rounds: int = 0
    same_tokens: int = 0
    same_accepted: int = 0
    difference: float = 0.0

    def add(self, harvested: Row, plain: Row) -> None:
        """Add one round. Acceptance is compared as the probability that a token and all before it
        are accepted, which the harvest writes as 0 where it may be `NEGLIGIBLE`."""
        drafted = int(harvested["drafted"])
        self.rounds += 1
        if harvested["token"][:drafted].tolist() != plain["token"].tolist():
            return
        self.same_tokens += 1
        known = min(drafted, int(harvested["known"]))
        self.same_accepted += min(known, plain["accepted"]) == int(harvested["accepted"])
        survival, expected = (
            row["accept_prob"][:known].cpu().cumprod(0) for row in (harvested, plain)
        )
        pairs = [(harvested[name][:drafted], plain[name]) for name in ("q", *Q_STATS)]
        pairs += [(survival, expected.where((survival > 0) | (expected >= NEGLIGIBLE), 0.0))]
        for a, b in pairs:
            self.difference = max(self.difference, float((a.cpu() - b.cpu()).abs().max()))


def agreed(harvested: Mapping[str, Row], plain: Mapping[str, list[Row]]) -> Agreement:
    """Compare the rounds of some prompts. harvested: columns of all positions by prompt id."""
    agreement = Agreement()
    for name, rounds in plain.items():
        columns = ("known", "drafted", "accepted", *rounds[0])
        for place, label in enumerate(rounds):
            agreement.add({key: harvested[name][key][place] for key in columns}, label)
    return agreement


def take_turns(ways: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Return the seconds of each way in each repeat, in alternating order. Prints progress."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for repeat in range(repeats):
        for name in list(ways)[:: 1 if repeat % 2 == 0 else -1]:
            start = time.perf_counter()
            ways[name]()
            seconds[name].append(time.perf_counter() - start)
            print(f"repeat {repeat + 1}/{repeats}: {name} {seconds[name][-1]:.1f} s", flush=True)
    return seconds


def compare_harvests(cfg: DictConfig) -> str:
    """Return labelled draft tokens per second, all positions at once against one round at a time.

    The simple way runs on `plain_prompts` of the prompts: unlike that of batches, its rate does not
    depend on their number."""
    settings = HarvestSettings.of(cfg.harvest, cfg, stride=1)
    pair, shares = load_pair(Pair.of(cfg.pair)), cfg.splits
    longest = settings.max_new_tokens + settings.gamma
    prompts = load_prompts(cfg.dataset)
    requests = make_requests(prompts, pair, longest, shares.calibration, shares.test)
    # the harvest also warms up, and gives the lengths of the responses
    harvested = all_positions(pair, requests, settings)
    plain: dict[str, list[Row]] = {}

    def one_by_one() -> None:
        engine = OneByOne(pair, settings)
        for request in spread(requests, cfg.plain_prompts):
            response = harvested[request.prompt_id]["response_tokens"]
            plain[request.prompt_id] = engine.rounds(request, response)

    ways = {ALL: lambda: all_positions(pair, requests, settings), ONE: one_by_one}
    seconds = take_turns(ways, cfg.repeats)
    labels = {
        way: sum(int(harvested[name]["drafted"].sum()) for name in names)
        for way, names in ((ALL, harvested), (ONE, plain))
    }
    return report(seconds, labels, agreed(harvested, plain))


def report(seconds: dict[str, list[float]], labels: dict[str, int], agreement: Agreement) -> str:
    """Return the answer and the figures. labels: draft tokens that each way labels in one
    repeat."""
    rates = {name: [labels[name] / value for value in values] for name, values in seconds.items()}
    ratios = [a / b for a, b in zip(rates[ALL], rates[ONE], strict=True)]
    each = ", ".join(f"{name} {median(values):.1f}" for name, values in rates.items())
    return (
        f"\nAll positions at once label {median(ratios):.1f} times as many draft tokens a second as"
        f" one round at a time ({min(ratios):.1f} to {max(ratios):.1f}, {len(ratios)} paired"
        f" repeats).\nlabels/s: {each}\n"
        f"agreement: {agreement.same_tokens} of {agreement.rounds} rounds have the same draft"
        f" tokens, {agreement.same_accepted} of those the same accepted length; largest difference"
        f" of q, its statistics, P(accepted so far) in those: {agreement.difference:.1e}"
    )
