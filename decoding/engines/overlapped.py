"""Speculative decoding with draft and target side by side: SpecBranch (2506.01979) in a lossless
form, and PEARL."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import torch
from pydantic import Field

from decoding.draft import RoundContext
from decoding.engines.branching import (
    Branches,
    Drafter,
    Pending,
    classes_of,
    tokens_after_candidate,
)
from decoding.engines.fit import check_overlap_fit, check_runs_beside
from decoding.engines.pipeline import check_pipeline, pipelined
from decoding.engines.request import Engine, RequestState, prefill
from decoding.engines.threads import Workers, both, threads_of_draft
from decoding.interfaces import Classes, DraftStructure, LMOutput, Pair, StopRule, Verifier
from decoding.sampling import Sampler, Warp
from decoding.stopping.policy import ALL
from decoding.trace import STAGES, RoundTrace, Span, Stage, StageTrace
from decoding.verification import DraftPath, WarpedRows
from decoding.verifiers.tree_walk import run_trials, trials_of


@dataclass(eq=False)
class OverlappedEngine(Engine):
    """While the target verifies the pending tokens, the draft goes on beyond them with several
    branches.

    Draft stage: the class of the verified context says how many tokens become pending. Branch
    stage: the target runs on them; the draft spawns branches after them, of at most
    structure.gamma_max tokens each (one more where a predictor of classes is asked after the first)
    and structure.candidates at most. If all pending tokens and then the first token of a branch are
    accepted, the class of the new context says how much of that branch is pending next (there is no
    bonus token). Anything rejected sends the engine back to the draft stage. PEARL (Liu et al.
    2024) is `pre_verify` (nothing is drawn first, the target never waits), one branch, all kept.

    a_priori: the class of the context at the start of a branch stage, one target call older, says
        how far its branches go, and all of the accepted one is kept (appendix G.2): less is drawn
        in vain, and the class knows less
    stop: HRADStop, or a confidence rule ("without H-RAD", class "some" everywhere), or Never (class
    "all")
    verifier: of the pending tokens, token or block; branch_verifier: of the candidates, which also
    draws them
    overlap: on two threads, a model on a GPU with a stream of its own; either way a seed gives the
        same tokens, but for logits that round differently with another number of CPU threads
    Raises UserError when these do not go together.
    """

    pair: Pair
    structure: Annotated[DraftStructure, "how long drafts and branches are, and how many"]
    stop: Annotated[StopRule | Classes, "how far to draft"]
    verifier: Annotated[Verifier, "of the pending tokens"]
    branch_verifier: Annotated[Verifier, "of the branches"]
    warp: Annotated[Warp, "of the target"]
    draft_warp: Annotated[Warp, "of the draft"]
    overlap: Annotated[bool, "side by side; false: in turn, with the same tokens"] = True
    pre_verify: Annotated[bool, "no draft stage, the target never waits"] = False
    a_priori: Annotated[
        bool,
        "the class known when a branch begins decides how long it gets, instead of cutting it"
        " afterwards",
    ] = False
    draft_threads: Annotated[
        Annotated[int, Field(ge=1, le=4096)] | None,
        "where both models are on the CPU: the draft's of its threads; null: a quarter",
    ] = None
    pipeline: Annotated[
        Annotated[float, Field(ge=0, le=10)] | None,
        "target in two halves on two CPU cores, the draft on the idle one: seconds of a hand-over",
    ] = None
    eos_ids: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        self.branching, self.chain_rule, self.branch_rule = check_overlap_fit(
            self.structure, self.verifier, self.branch_verifier
        )
        check_runs_beside(self.pair.draft, self.branching.candidates)
        self.classes = classes_of(self.stop, self.branching.gamma_max, self.a_priori)
        self.draft_threads = threads_of_draft(self.pair, self.draft_threads)
        if self.pipeline is not None:
            check_pipeline(self.pair)
        self._workers: Workers | None = None

    @property
    def runs_draft(self) -> bool:
        return True

    def join(self) -> None:
        if self._workers:
            self._workers.join()

    @contextmanager
    def session(
        self, request: RequestState, sampler: Sampler
    ) -> Iterator[Callable[[], RoundTrace]]:
        target, draft = self.pair.target, self.pair.draft
        self._workers = Workers(target, draft, request.began, self.overlap, self.draft_threads)
        with self._workers as workers, pipelined(self.pair, self.pipeline):
            yield _Session(self, request, workers, sampler).decode_round


@dataclass(frozen=True)
class _Outcome:
    """The outcome of a round. accepted: pending tokens accepted; branch: the accepted one; token:
    the one drawn after a rejection; ended: the response ends with the tokens kept here."""

    accepted: int
    branch: int | None
    token: int | None
    ended: bool = False

    def kept(self, tokens: int) -> "_Outcome":
        """Return the outcome cut to the first `tokens` committed tokens."""
        emitted = self.accepted + ((self.branch, self.token) != (None, None))
        return self if tokens == emitted else _Outcome(tokens, None, None, ended=True)


class _Session:
    """One request: its caches, its two streams of random numbers, and the round it is in."""

    def __init__(
        self, engine: OverlappedEngine, request: RequestState, workers: Workers, sampler: Sampler
    ) -> None:
        """Fill both caches with the prompt."""
        self.engine, self.request, self.workers = engine, request, workers
        self.target, self.draft = engine.pair.target, engine.pair.draft
        self.layers = engine.classes.target_layers
        self.drafter = Drafter(
            self.draft,
            deepcopy(engine.draft_warp),  # its processors may be asked while the target's are
            engine.branch_rule,
            engine.classes.confidence,
            engine.branching,
            sampler.fork(),
        )
        gamma, predicted = engine.branching.gamma_max, engine.classes.trained_gamma is not None
        self.continuation = tokens_after_candidate(gamma, predicted, engine.a_priori)
        self.sampler = sampler.fork()
        self.watch = request.watch
        self.round = 0
        self.pending: Pending | None = None
        prompt = request.committed
        verified = workers.target.submit("prefill", prefill, self.target, prompt, self.layers)
        both(verified, workers.draft.submit("prefill", prefill, self.draft, prompt))
        self.hidden = verified.result()
        workers.spans()

    def decode_round(self) -> RoundTrace:
        """Run one target call, after a draft stage if nothing is pending."""
        engine, request = self.engine, self.request
        forwards, alone = self.draft.forwards, 0
        context, pending = self._context(), self.pending
        if pending is None:
            limit = None if engine.pre_verify else self._classify(context)
            start = self.workers.draft.submit("draft stage", self.drafter.start, context, limit)
            pending = start.result()
            alone = self.draft.forwards - forwards
        goes_on = ALL
        if engine.a_priori:  # a draft stage has just asked
            asked = None if pending.continued else pending.outcome
            goes_on = self._classify(context) if asked is None else asked
        forward = self.workers.target.submit("verify", self._run_target, context, pending)
        spawned = self.workers.draft.submit(
            "branch stage", self.drafter.branch, pending, context, goes_on, self.continuation
        )
        both(forward, spawned)
        output, branches = forward.result(), spawned.result()
        with self.watch.stage("verify"):
            text = partial(pending.chain().text, context.committed)
            warp = engine.warp.within(request.prompt, engine.eos_ids)
            p = WarpedRows(output.logits, warp, text)
            outcome = self._verify(pending, branches, p)
        branched = outcome.branch is not None
        tested = outcome.accepted < pending.length or bool(branches.paths)
        request.note(outcome.accepted + branched, rejected=tested and not branched)
        emitted, drawn = pending.tokens[: outcome.accepted], outcome.token
        if outcome.branch is not None:
            drawn = pending.tree.token[branches.paths[outcome.branch][0] - 1]
        tokens = request.commit(emitted if drawn is None else [*emitted, drawn])
        outcome = outcome.kept(len(tokens))
        self.hidden = None if output.hidden is None else output.hidden[:, outcome.accepted]
        self.pending = self._settle(pending, branches, outcome, goes_on)
        trace = self._trace(pending, branches, p, outcome, tokens, alone)
        trace.draft_forwards = self.draft.forwards - forwards
        trace.beyond_draft = context.beyond_draft
        self.round += 1
        return trace

    def _run_target(self, context: RoundContext, pending: Pending) -> LMOutput:
        """Return logits [length + 1, V] after the last committed token and every pending one."""
        tokens = torch.cat([context.committed[-1:], torch.tensor(pending.tokens, dtype=torch.long)])
        return self.target.forward(tokens, hidden=self.layers)

    def _verify(self, pending: Pending, branches: Branches, p: WarpedRows) -> _Outcome:
        """Test the pending tokens by the chain rule, an unsure one with them; then the branches'
        first tokens."""
        chain, sampler = pending.chain().on(p.device), self.sampler
        path = DraftPath(chain, p, range(len(chain) + 1), p[0])
        accepted, left = self.engine.chain_rule.walk(path, sampler)
        if left is None:
            return _Outcome(pending.length, 0, None)
        if accepted < pending.length:
            return _Outcome(accepted, None, sampler.draw(left).token)
        if pending.ended:
            return _Outcome(accepted, None, None)
        first = int(pending.unsure)
        candidates = [pending.tree.token[rows[0] - 1] for rows in branches.paths[first:]]
        if candidates:
            q = branches.distribution.to(p.device)
            trials = trials_of(self.engine.branch_rule, left, q, candidates)
            branch, rest = run_trials(trials, sampler)
            if rest is None:
                return _Outcome(accepted, first + branch, None)
            left = rest
        return _Outcome(accepted, None, sampler.draw(left).token)

    def _settle(
        self, pending: Pending, branches: Branches, outcome: _Outcome, goes_on: int
    ) -> Pending | None:
        """Roll both caches back after a rejection; after an accepted branch, keep in the draft's
        cache what posterior selection retains of it (the target's cache is right already). Returns
        the next pending tokens, None after a rejection."""
        committed = len(self.request.committed)
        self.target.crop(min(self.target.length, committed - 1))
        submit = self.workers.draft.submit
        if outcome.branch is None or self.request.finished:
            back = self.drafter.roll_back, pending, outcome.accepted, committed
            submit("roll back", *back).result()
            return None
        context, path = self._context(), branches.paths[outcome.branch]
        kept = goes_on if self.engine.a_priori else self._classify(context)
        return submit("keep", self.drafter.keep, pending, path, context, kept).result()

    def _classify(self, context: RoundContext) -> int:
        with self.watch.stage("stop"):
            return self.engine.classes.classify(context)

    def _context(self) -> RoundContext:
        return self.request.context(self.engine.pair, self.round, self.hidden)

    def _trace(
        self,
        pending: Pending,
        branches: Branches,
        p: WarpedRows,
        outcome: _Outcome,
        tokens: list[int],
        alone: int,
    ) -> RoundTrace:
        """Return the trace of the round, which verified the pending tokens, then the first token of
        each branch."""
        tree, spans = pending.tree, self.workers.spans()
        rollback, waste = pending.length - outcome.accepted + branches.depth, 0
        if outcome.branch is not None:
            kept = self.pending.length if self.pending else 0
            rollback, waste = 0, branches.depth - 1 - kept
        elif outcome.ended:
            rollback, waste = 0, rollback
        overlap = StageTrace(
            stage=pending.stage,
            outcome=pending.outcome,
            pending=pending.length,
            draft_steps=pending.steps + branches.depth - pending.unsure,
            alone=alone,
            branches=[[tree.token[row - 1] for row in path] for path in branches.paths],
            rollback=rollback,
            waste=waste,
            spans=spans,
        )
        drawn = [*pending.tokens, *(path[0] for path in overlap.branches)]
        parents = [*range(pending.length), *[pending.length] * len(branches.paths)]
        firsts = [path[0] for path in branches.paths[int(pending.unsure) :]]
        rows = [*range(1, len(pending.q) + 1), *firsts]
        end = outcome.accepted if outcome.branch is None else pending.length + 1 + outcome.branch
        return RoundTrace(
            draft_tokens=drawn,
            draft_parents=parents,
            draft_q=[tree.drawn[row - 1] for row in rows],
            row=end,
            accepted=outcome.accepted + (outcome.branch is not None),
            tokens=tokens,
            predicted=[] if pending.outcome is None else [float(pending.outcome)],
            draft_forwards=0,
            draft_p=p.drawn(parents, drawn),
            seconds=self._seconds(spans),
            overlap=overlap,
        )

    def _seconds(self, spans: Sequence[Span]) -> dict[Stage, float]:
        """Return the seconds of the engine's stages, the draft's and the target's; `other` is the
        rest, where the models run in turn."""
        engine, models = self.watch.lap(), self.drafter.watch.lap()
        models["target"] = sum(span.end - span.start for span in spans if span.worker == "target")
        models["other"] = 0.0
        engine["other"] = max(0.0, engine["other"] - sum(models.values()))
        return {stage: engine[stage] + models[stage] for stage in STAGES}
