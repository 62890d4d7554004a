"""Plain decoding with the target alone: what every speed-up is measured against."""

from time import perf_counter
from typing import Annotated

import torch

from decoding.engines.request import Ends, Prompt, RequestState, on_own_devices, prefill
from decoding.interfaces import Pair
from decoding.sampling import Sampler, Warp
from decoding.trace import RoundTrace, Stopwatch, Trace


class AutoregressiveEngine:
    """One target call, one token."""

    def __init__(
        self,
        pair: Pair,
        warp: Annotated[Warp, "of the target"],
        eos_ids: frozenset[int] = frozenset(),
    ) -> None:
        self.pair = pair
        self.warp = warp
        self.eos_ids = eos_ids

    @torch.inference_mode()
    @on_own_devices
    def decode(
        self, prompt_ids: Prompt, max_new_tokens: int, sampler: Sampler, ends: Ends | None = None
    ) -> Trace:
        """Continue `prompt_ids` [n] until EOS, `max_new_tokens`, the end of the context, or where
        `ends` says so."""
        start = perf_counter()
        request = RequestState.open(
            prompt_ids, max_new_tokens, self.eos_ids, self.pair.target, ends=ends
        )
        prompt_tokens = len(request.committed)
        prefill(self.pair.target, request.committed)
        prefill_seconds = perf_counter() - start
        watch, rounds = Stopwatch(), list[RoundTrace]()
        while not request.finished:
            rounds.append(self._round(request, watch, sampler))
        tokens = request.committed[prompt_tokens:].tolist()
        return Trace(prompt_tokens, tokens, rounds, prefill_seconds, perf_counter() - start)

    def _round(self, request: RequestState, watch: Stopwatch, sampler: Sampler) -> RoundTrace:
        with watch.stage("target"):
            logits = self.pair.target.forward(request.committed[-1:]).logits[-1]
        with watch.stage("sample"):
            token = sampler.draw(self.warp.probs(logits)).token
        tokens = request.commit([token])
        return RoundTrace([], [], [], 0, 0, tokens, [], 0, watch.lap())
