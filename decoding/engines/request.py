"""One request from its prompt to its trace: the base of all engines, and the state of a request
(committed tokens, tokens left, end)."""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from threading import Condition, get_ident
from time import perf_counter

import torch
from torch import Tensor

from decoding.draft import RoundContext
from decoding.interfaces import LM, Pair
from decoding.sampling import Sampler
from decoding.trace import RoundTrace, Stopwatch, Trace
from runtime.errors import UserError

Prompt = Sequence[int] | Tensor
"""Token ids [n]."""
Ends = Callable[[Tensor], bool]
"""Asked after each committed token, with prompt and output so far [n] int64: whether the response
ends there. What follows in the same round is dropped, as after an EOS: the decision rests on
committed text alone, so the distribution stays that of the target stopped in the same way."""


@dataclass
class RequestState:
    """The state of a request. text: [n + max_new] int64, prompt and output so far, then room for
    the rest; committed: its first n; max_new: tokens that may still be committed; verdicts,
    draft_context, prompt: as in `RoundContext`; began: `perf_counter` at the start; watch: times
    rounds."""

    text: Tensor
    committed: Tensor
    max_new: int
    eos_ids: frozenset[int]
    ended: bool = False
    verdicts: list[bool] = field(default_factory=list)
    ends: Ends | None = None
    draft_context: int | None = None
    prompt: int = 0
    warned: bool = False
    began: float = field(default_factory=perf_counter)
    watch: Stopwatch = field(default_factory=Stopwatch)

    @classmethod
    def open(
        cls,
        prompt_ids: Prompt,
        max_new_tokens: int,
        eos_ids: frozenset[int],
        target: LM,
        draft: LM | None = None,
        *,
        ends: Ends | None = None,
        kept: int = 0,
    ) -> "RequestState":
        """Fill the caches with the first `kept` tokens of the prompt and check that it fits the
        target; the output is shortened to what the context leaves. draft: None if none is run.

        Raises UserError for an empty prompt, one that fills the context, or max_new_tokens < 1.
        """
        began = perf_counter()
        prompt = torch.as_tensor(prompt_ids, dtype=torch.long).cpu()
        context = target.max_length
        if not len(prompt):
            raise UserError("prompt: empty, there is nothing to continue. Give at least one token")
        if len(prompt) >= context:
            raise UserError(
                f"prompt: {len(prompt)} tokens do not fit pair.max_length {context}. Shorten the"
                " prompt or raise it"
            )
        if max_new_tokens < 1:
            raise UserError(f"max_new_tokens: {max_new_tokens} asks for no output. Give at least 1")
        kept = min(kept, len(prompt) - 2)
        for lm in (target, draft):
            if lm is not None:
                lm.reset()
                if 0 < kept < lm.max_length:
                    lm.forward(prompt[:kept], logits="none")
                    if lm.device.type == "cuda":
                        torch.cuda.synchronize(lm.device)
        began = perf_counter() if kept > 0 else began
        max_new = min(max_new_tokens, context - len(prompt))
        text = torch.cat([prompt, prompt.new_zeros(max_new)])
        return cls(
            text,
            text[: len(prompt)],
            max_new,
            eos_ids,
            ends=ends,
            draft_context=None if draft is None else draft.max_length,
            prompt=len(prompt),
            began=began,
        )

    @property
    def finished(self) -> bool:
        return self.ended or self.max_new == 0

    @property
    def beyond_draft(self) -> bool:
        """Return whether the text fills the draft's context."""
        return self.draft_context is not None and self.draft_context <= len(self.committed)

    def context(self, pair: Pair, round_: int, hidden: Tensor | None) -> RoundContext:
        """Return the facts verified before a round. hidden: `RoundContext.target_hidden`.

        Warns if the draft's context is full: from there on the target decodes alone."""
        context = RoundContext(
            self.committed,
            self.max_new,
            round_,
            hidden,
            pair.target.embed,
            self.eos_ids,
            self.verdicts,
            pair.draft.output_device,
            self.draft_context,
            self.prompt,
        )
        if context.beyond_draft and not self.warned:
            self.warned = True
            warnings.warn(
                f"pair.draft: its context holds {self.draft_context} tokens; beyond them nothing is"
                " drafted, and the target decodes alone",
                stacklevel=2,
            )
        return context

    def note(self, accepted: int, rejected: bool) -> None:
        """Add a round's verdicts: `accepted` draft tokens accepted in a row and, if `rejected`, one
        rejected."""
        self.verdicts += [True] * accepted + [False] * rejected

    def commit(self, tokens: list[int]) -> list[int]:
        """Append `tokens` up to the first that ends the response and return those that were
        appended."""
        appended = list[int]()
        for token in tokens:
            assert self.max_new, "a round committed more tokens than were asked for"
            self.text[len(self.committed)] = token
            self.committed = self.text[: len(self.committed) + 1]
            self.max_new -= 1
            appended.append(token)
            if (self.ends and self.ends(self.committed)) or token in self.eos_ids:
                self.ended = True
                break
        return appended


class Engine(ABC):
    """Decodes one request after another with the models of `pair`.

    records_drafts: whether a trace says what was drafted; caution: warning for use without tuning,
    "" for none"""

    pair: Pair
    eos_ids: frozenset[int]
    records_drafts = True

    @property
    def caution(self) -> str:
        return ""

    @property
    def runs_draft(self) -> bool:
        """Return whether it uses the draft model of its pair."""
        return False

    @abstractmethod
    def session(
        self, request: RequestState, sampler: Sampler
    ) -> AbstractContextManager[Callable[[], RoundTrace]]:
        """Return a context manager that fills the caches with the prompt and gives a function, each
        call of which decodes one round: it commits tokens to `request` and returns the trace."""

    def join(self) -> None:
        """Wait for forwards of an interrupted request that are still running."""
        return

    @torch.inference_mode()
    def decode(
        self,
        prompt_ids: Prompt,
        max_new_tokens: int,
        sampler: Sampler,
        ends: Ends | None = None,
        kept: int = 0,
    ) -> Trace:
        """Continue `prompt_ids` [n] until EOS, `max_new_tokens`, the end of the context, or where
        `ends` says so. kept: of the prompt's tokens, those that the caches hold from the turn
        before in a conversation: they are read before time begins.

        Meanwhile the outputs of both models stay on the devices that made them, and other threads
        that want to decode with either wait. Raises UserError if the same thread does so, inside a
        callback of the first call."""
        unrecorded = getattr(self.pair.target, "unrecorded", nullcontext)
        unread = nullcontext() if self.runs_draft else unrecorded()
        with alone((self.pair.target, self.pair.draft)), unread:
            self.join()
            request = RequestState.open(
                prompt_ids,
                max_new_tokens,
                self.eos_ids,
                self.pair.target,
                self.pair.draft if self.runs_draft else None,
                ends=ends,
                kept=kept,
            )
            prompt_tokens, rounds = len(request.committed), list[RoundTrace]()
            with self.session(request, sampler) as decode_round:
                prefill_seconds = perf_counter() - request.began
                request.watch.lap()
                while not request.finished:
                    rounds.append(decode_round())
            tokens = request.committed[prompt_tokens:].tolist()
            seconds = perf_counter() - request.began
            return Trace(prompt_tokens, tokens, rounds, prefill_seconds, seconds)


_idle = Condition()


@contextmanager
def alone(models: Sequence[LM]) -> Iterator[None]:
    """Wait until no other thread decodes with one of `models`, each of which has one cache, and
    leave their outputs on their devices."""
    thread = get_ident()
    with _idle:
        if any(lm.user == thread for lm in models):
            raise UserError(
                "pair: its caches hold a response that is still being decoded. Open another pair"
                " for what decodes inside a callback"
            )
        _idle.wait_for(lambda: all(lm.user is None for lm in models))
        for lm in models:
            lm.user = thread
    before = [lm.output_device for lm in models]
    try:
        for lm in models:
            lm.output_device = lm.device
        yield
    finally:
        with _idle:
            for lm, device in zip(models, before, strict=True):
                lm.user, lm.output_device = None, device
            _idle.notify_all()


def prefill(model: LM, prompt: Tensor, layers: Sequence[int] = ()) -> Tensor | None:
    """Cache every prompt token except the last, after those that are cached. Returns the hidden
    states [len(layers), H] at the last cached one; None if no layer is asked for or nothing is
    cached (the prompt fills a draft's context)."""
    if len(prompt) < 2 or len(prompt) >= model.max_length:
        return None
    output = model.forward(
        prompt[model.length : -1], hidden=layers, hidden_rows="last", logits="none"
    )
    return None if output.hidden is None else output.hidden[:, -1]
