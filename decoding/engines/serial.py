"""Speculative decoding, draft and target in turn: grow a draft, run the target on it once, verify,
roll back."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Annotated

import torch
from torch import Tensor

from decoding.draft import Draft, RoundContext, Verdict
from decoding.draft_tree import DraftTree
from decoding.engines.autoregressive import plain_round
from decoding.engines.fit import check_fit
from decoding.engines.request import Engine, RequestState, prefill
from decoding.interfaces import DraftStructure, LMOutput, Pair, StopRule, Verifier
from decoding.sampling import Sampler, Warp
from decoding.structures.chain import Chain
from decoding.trace import RoundTrace, Stopwatch
from decoding.verification import VerdictDistribution, WarpedRows


@dataclass(frozen=True)
class ExpectedVerdict:
    """A draft, the distribution of its verdict, and the forwards of the draft model that made
    it."""

    draft: Draft
    verdict: VerdictDistribution
    forwards: int


@dataclass(eq=False)
class SerialEngine(Engine):
    """Leviathan et al. 2023 with the structure, stop rule and verifier of your choice.

    Beyond the draft's context the target decodes alone, with copies of the text where a structure
    makes them.

    The output distribution is the target's after `warp`, whatever the draft, `draft_warp` and the
    stop rule are, as long as the verifier is lossless. Between rounds the target's cache holds
    every committed token except the last. Raises UserError when structure, stop rule and verifier
    do not go together."""

    pair: Pair
    structure: Annotated[DraftStructure, "which draws a draft consists of"]
    stop: Annotated[StopRule, "when drafting ends"]
    verifier: Annotated[Verifier, "what of a draft is kept"]
    warp: Annotated[Warp, "of the target"]
    draft_warp: Annotated[Warp, "of the draft"]
    eos_ids: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        check_fit(self.structure, self.stop, self.verifier)
        self.target_layers = (*self.stop.target_layers, *self.structure.target_layers)

    @property
    def runs_draft(self) -> bool:
        return self.structure.uses_draft

    @property
    def caution(self) -> str:
        return self.stop.caution

    @contextmanager
    def session(
        self, request: RequestState, sampler: Sampler
    ) -> Iterator[Callable[[], RoundTrace]]:
        hidden = prefill(self.pair.target, request.committed, self.target_layers)
        if self.runs_draft and not self.stop.abstains:  # else it reads the prompt when it is run
            prefill(self.pair.draft, request.committed)
        watch, rounds = request.watch, count()
        warp = self.warp.within(request.prompt, self.eos_ids)
        plain = isinstance(self.structure, Chain) and not self.target_layers

        def decode_round() -> RoundTrace:
            nonlocal hidden
            if plain and not request.beyond_draft and self.stop.rests():
                return plain_round(request, self.pair.target, warp, sampler)
            context = request.context(self.pair, next(rounds), hidden)
            hidden, trace = self._round(request, context, watch, sampler)
            return trace

        try:
            yield decode_round
        finally:
            self.stop.end_request()

    def _round(
        self, request: RequestState, context: RoundContext, watch: Stopwatch, sampler: Sampler
    ) -> tuple[Tensor | None, RoundTrace]:
        """Run one draft and one target call. Returns the target's hidden states
        [len(target_layers), H] at the new last verified position (if the stop rule reads any) and
        the round's trace."""
        tree, draft, output = self._draft(context, watch, sampler)
        with watch.stage("verify"):
            p = self._warped(context, draft, output)
            if len(draft):
                verdict = self.verifier.verify(draft, p, sampler)
            else:
                verdict = Verdict(0, [], sampler.draw(p[0]).token, 0)
        with watch.stage("stop"):
            self.stop.end_round(verdict)
        request.note(verdict.accepted, rejected=verdict.row in draft.parent)
        tokens = request.commit(verdict.emitted)
        path = draft.rows_to(verdict.row, kept=len(tokens))
        self._roll_back(tree, draft, path, len(request.committed))
        hidden = None if output.hidden is None else output.hidden[:, [0, *path][len(tokens) - 1]]
        return hidden, RoundTrace(
            draft_tokens=draft.token,
            draft_parents=draft.parent,
            draft_q=list(draft.drawn_q),
            row=[0, *path][-1],
            accepted=len(path),
            tokens=tokens,
            predicted=list(self.stop.predicted),
            draft_forwards=tree.forwards,
            draft_p=p.drawn(draft.parent, draft.token),
            seconds=watch.lap(),
            beyond_draft=context.beyond_draft,
        )

    @torch.inference_mode()
    def expected(self, context: RoundContext, sampler: Sampler) -> ExpectedVerdict:
        """Draw one draft and return every verdict it may get. Both caches must hold
        `context.committed` except its last token (less for a draft that is not run), and do so
        afterwards."""
        tree, draft, output = self._draft(context, Stopwatch(), sampler)
        rows = self._warped(context, draft, output)
        p = torch.stack([rows[row] for row in range(draft.closed + 1)])
        verdict = self.verifier.distribution(draft, p)
        self._roll_back(tree, draft, [], len(context.committed))
        return ExpectedVerdict(draft, verdict, tree.forwards)

    def _draft(
        self, context: RoundContext, watch: Stopwatch, sampler: Sampler
    ) -> tuple[DraftTree, Draft, LMOutput]:
        """Grow a draft, and run the target once on the last committed token and every node that is
        no open leaf."""
        with watch.stage("stop"):
            self.stop.begin_round(context)
        layers = (*self.stop.draft_layers, *self.structure.draft_layers)
        tree = DraftTree(
            self.pair.draft,
            context,
            self.draft_warp,
            watch,
            layers,
            self.stop,
            self.verifier.siblings,
            sampler,
        )
        self.structure.grow(tree)
        draft = tree.draft()
        with watch.stage("target"):
            above, drawn = draft.parent[: draft.closed], draft.token[: draft.closed]
            tokens = context.committed[-1:]
            if drawn:
                tokens = torch.cat([tokens, torch.tensor(drawn, dtype=torch.long)])
            parents = None if above == list(range(len(above))) else torch.tensor([-1, *above])
            output = self.pair.target.forward(tokens, parents, hidden=self.target_layers)
        return tree, draft.on(output.logits.device), output

    def _warped(self, context: RoundContext, draft: Draft, output: LMOutput) -> WarpedRows:
        """Return the target's distributions after each row."""
        warp = self.warp.within(context.prompt, context.eos_ids)
        return WarpedRows(output.logits, warp, partial(draft.text, context.committed))

    def _roll_back(self, tree: DraftTree, draft: Draft, path: list[int], committed: int) -> None:
        """Keep the accepted path in both caches and drop everything from the last committed token
        on; the draft may lag behind and catches up later."""
        target = self.pair.target
        if not len(draft) and target.length < committed:
            return
        target.keep_path([0, *(row for row in path if row <= draft.closed)])
        target.crop(committed - 1)
        tree.settle(path, committed)
