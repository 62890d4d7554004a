"""The plain way to harvest rounds: the serial engine drafts and verifies one after another, at
every position.

What `data_gen.records.rounds` is held against, for labels and for speed. It is given the coins of
the harvest, so the labels are the same up to rounding."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from data_gen.answers import uniforms
from data_gen.columns import at
from data_gen.labels import acceptance
from data_gen.records import Row
from data_gen.requests import Request
from data_gen.settings import HarvestSettings
from decoding.draft import Draft, RoundContext
from decoding.draft_tree import DraftTree
from decoding.engines.request import prefill
from decoding.engines.serial import SerialEngine
from decoding.models.loading import ModelPair
from decoding.picking import Draw, Pool, pool_of
from decoding.sampling import Sampler, Warp
from decoding.stopping.fixed import Fixed
from decoding.structures.chain import Chain
from decoding.trace import Stopwatch
from decoding.verification import WarpedRows
from decoding.verifiers.token import TokenVerifier
from predictors.features.draft_statistics import q_stats


@dataclass(frozen=True)
class Coins:
    """Of the rounds of one prompt: draft, verdict [T, gamma]."""

    draft: Tensor
    verdict: Tensor

    @classmethod
    def of(cls, request: Request, settings: HarvestSettings, length: int) -> "Coins":
        """Those the harvest uses for a response of `length` tokens, with an anchor at every
        position."""
        seed, name, shape = settings.seed, request.prompt_id, (length, settings.gamma)
        draft = uniforms(seed, name, "rollouts", *shape)
        draft[:, 0] = uniforms(seed, name, "candidates", settings.max_new_tokens)[:length]
        return cls(draft, uniforms(seed, name, "verdicts", *shape))


class RecordedDraws(Sampler):
    """Draws and accepts by given coins, in order; what comes after them is drawn anew and means
    nothing here."""

    def __init__(self, draws: Tensor, accepts: Tensor) -> None:
        super().__init__(torch.Generator())
        self._draws, self._accepts = iter(draws.tolist()), iter(accepts.tolist())

    def draw(self, distribution: Tensor | Pool) -> Draw:
        return pool_of(distribution).pick(next(self._draws, 0.5))

    def accept(self, p: float, q: float) -> bool:
        return next(self._accepts) * q < p


class OneByOne(SerialEngine):
    """The serial engine with rounds of gamma tokens, of which it commits nothing but the response's
    next token.

    Between rounds both caches hold what is committed, as in a decode: nothing is computed again for
    the next position."""

    def __init__(self, pair: ModelPair, settings: HarvestSettings) -> None:
        self.gamma, eos_ids = settings.gamma, frozenset(pair.eos_ids)
        chain: Any = Chain(self.gamma)
        verifier: Any = TokenVerifier()
        super().__init__(
            pair, chain, Fixed(self.gamma), verifier, settings.warp, settings.draft_warp, eos_ids
        )

    @torch.inference_mode()
    def rounds(self, request: Request, response: Tensor, coins: Coins) -> Iterator[Row]:
        """The label of each position's round; its columns end with the drafted tokens.

        response: [T], the harvest's. One of its own would sooner or later round differently and go
        another way."""
        for model in (self.pair.target, self.pair.draft):
            model.reset()
            prefill(model, request.tokens)
        committed = request.tokens
        for position, token in enumerate(response):
            context = RoundContext(committed, self.gamma + 1, eos_ids=self.eos_ids)
            sampler = RecordedDraws(coins.draft[position], coins.verdict[position])
            tree, draft, output = self._draft(context, Stopwatch(), sampler)
            logits = output.logits
            verdict = self.verifier.verify(draft, WarpedRows(logits, self.warp), sampler)
            yield {"accepted": verdict.accepted, **_columns(tree, draft, logits, self.warp)}
            committed = torch.cat([committed, token[None]])
            self._roll_back(tree, draft, [], len(committed))


def _columns(tree: DraftTree, draft: Draft, logits: Tensor, warp: Warp) -> Row:
    """What a round's record says about each of its tokens."""
    q, tokens = torch.tensor(draft.drawn_q), torch.tensor(draft.token, dtype=torch.long)
    unwarped = torch.stack([tree.unwarped_q(row) for row in range(len(draft))])
    return {
        "token": tokens,
        "q": q,
        **q_stats(unwarped, tokens),
        "accept_prob": acceptance(at(warp.probs(logits[: len(draft)]), tokens), q),
    }
