"""Speculative decoding with draft and target side by side: SpecBranch (2506.01979) in a lossless
form, and PEARL."""

from dataclasses import dataclass
from time import perf_counter
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from decoding.draft import RoundContext
from decoding.engines.branching import (
    Branches,
    Drafter,
    Pending,
    classes_of,
    tokens_after_candidate,
)
from decoding.engines.fit import check_overlap_fit, check_runs_beside
from decoding.engines.overlap_trace import Outcome, drafted, stage_seconds, stage_trace
from decoding.engines.pipeline import check_pipeline, pipelined
from decoding.engines.request import Ends, Prompt, RequestState, on_own_devices, prefill
from decoding.engines.threads import Workers, both, threads_of_draft
from decoding.interfaces import Classes, DraftStructure, LMOutput, Pair, StopRule, Verifier
from decoding.sampling import Sampler, Warp
from decoding.stopping.policy import ALL
from decoding.trace import RoundTrace, Stopwatch, Trace
from decoding.verification import DraftPath, WarpedRows
from decoding.verifiers.tree_walk import run_trials, trials_of


@dataclass(eq=False)
class OverlappedEngine:
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

    @torch.inference_mode()
    @on_own_devices
    def decode(
        self, prompt_ids: Prompt, max_new_tokens: int, sampler: Sampler, ends: Ends | None = None
    ) -> Trace:
        """Continue `prompt_ids` [n] until EOS, `max_new_tokens`, the end of the context, or where
        `ends` says so."""
        begin = perf_counter()
        if self._workers:
            self._workers.join()
        target, draft = self.pair.target, self.pair.draft
        request = RequestState.open(
            prompt_ids, max_new_tokens, self.eos_ids, target, draft, ends=ends
        )
        prompt_tokens = len(request.committed)
        self._workers = Workers(target, draft, begin, self.overlap, self.draft_threads)
        with self._workers as workers, pipelined(self.pair, self.pipeline):
            session = _Session(self, request, workers, sampler)
            session.prefill()
            prefill_seconds = perf_counter() - begin
            rounds = session.rounds()
        tokens = request.committed[prompt_tokens:].tolist()
        return Trace(prompt_tokens, tokens, rounds, prefill_seconds, perf_counter() - begin)


class _Session:
    """One request: its caches, its two streams of random numbers, and the round it is in."""

    def __init__(
        self, engine: OverlappedEngine, request: RequestState, workers: Workers, sampler: Sampler
    ) -> None:
        self.engine = engine
        self.request = request
        self.workers = workers
        self.layers = engine.classes.target_layers
        self.drafter = Drafter(
            engine.pair.draft,
            engine.draft_warp,
            engine.branch_rule,
            engine.classes.confidence,
            engine.branching,
            sampler.fork(),
        )
        gamma, predicted = engine.branching.gamma_max, engine.classes.trained_gamma is not None
        self.continuation = tokens_after_candidate(gamma, predicted, engine.a_priori)
        self.sampler = sampler.fork()
        self.watch = Stopwatch()
        self.hidden: Tensor | None = None
        self.round = 0
        self.forwards = 0  # of the draft, up to this round
        self.alone = 0

    def prefill(self) -> None:
        target, draft = self.engine.pair.target, self.engine.pair.draft
        prompt = self.request.committed
        verified = self.workers.target.submit("prefill", prefill, target, prompt, self.layers)
        both(verified, self.workers.draft.submit("prefill", prefill, draft, prompt))
        self.hidden = verified.result()
        self.forwards = self.engine.pair.draft.forwards
        self.workers.spans()

    def rounds(self) -> list[RoundTrace]:
        found, pending = list[RoundTrace](), None
        while not self.request.finished:
            self.alone = 0
            pending, trace = self._branch_stage(self._draft_stage() if pending is None else pending)
            found.append(trace)
            self.round += 1
        return found

    def _draft_stage(self) -> Pending:
        context = self._context()
        outcome = None if self.engine.pre_verify else self._classify(context)
        pending = self.workers.draft.submit(
            "draft stage", self.drafter.start, context, outcome
        ).result()
        self.alone = self.engine.pair.draft.forwards - self.forwards
        return pending

    def _branch_stage(self, pending: Pending) -> tuple[Pending | None, RoundTrace]:
        """One target call. Returns what is pending next, None after a rejection."""
        context = self._context()
        goes_on = self._class_ahead(pending, context)
        forward = self.workers.target.submit("verify", self._run_target, context, pending)
        spawned = self.workers.draft.submit(
            "branch stage", self.drafter.branch, pending, context, goes_on, self.continuation
        )
        both(forward, spawned)
        output, branches = forward.result(), spawned.result()
        with self.watch.stage("verify"):
            p = WarpedRows(output.logits, self.engine.warp)
            outcome = self._verify(pending, branches, p)
        self._note(pending, branches, outcome)
        tokens = self.request.commit(self._emitted(pending, branches, outcome))
        outcome = outcome.kept(len(tokens))
        self.hidden = None if output.hidden is None else output.hidden[:, outcome.accepted]
        following = self._settle(pending, branches, outcome, goes_on)
        trace = self._trace(pending, branches, p, outcome, tokens, following)
        trace.beyond_draft = context.beyond_draft
        return following, trace

    def _run_target(self, context: RoundContext, pending: Pending) -> LMOutput:
        """Logits [length + 1, V] after the last committed token and every pending one."""
        tokens = torch.cat([context.committed[-1:], torch.tensor(pending.tokens, dtype=torch.long)])
        return self.engine.pair.target.forward(tokens, hidden=self.layers)

    def _verify(self, pending: Pending, branches: Branches, p: WarpedRows) -> Outcome:
        """The pending tokens by the chain rule, an unsure one with them; then the branches' first
        tokens."""
        chain, sampler = pending.chain().on(p.device), self.sampler
        path = DraftPath(chain, p, range(len(chain) + 1), p[0])
        accepted, left = self.engine.chain_rule.walk(path, sampler)
        if left is None:
            return Outcome(pending.length, 0, None)
        if accepted < pending.length:
            return Outcome(accepted, None, sampler.draw(left).token)
        if pending.ended:
            return Outcome(accepted, None, None)
        first = int(pending.unsure)
        candidates = [pending.tree.token[rows[0] - 1] for rows in branches.paths[first:]]
        if candidates:
            q = branches.distribution.to(p.device)
            trials = trials_of(self.engine.branch_rule, left, q, candidates)
            branch, rest = run_trials(trials, sampler)
            if rest is None:
                return Outcome(accepted, first + branch, None)
            left = rest
        return Outcome(accepted, None, sampler.draw(left).token)

    def _note(self, pending: Pending, branches: Branches, outcome: Outcome) -> None:
        branched = outcome.branch is not None
        tested = outcome.accepted < pending.length or bool(branches.paths)
        self.request.note(outcome.accepted + branched, rejected=tested and not branched)

    def _emitted(self, pending: Pending, branches: Branches, outcome: Outcome) -> list[int]:
        accepted = pending.tokens[: outcome.accepted]
        if outcome.branch is not None:
            return [*accepted, pending.tree.token[branches.paths[outcome.branch][0] - 1]]
        return accepted if outcome.token is None else [*accepted, outcome.token]

    def _settle(
        self, pending: Pending, branches: Branches, outcome: Outcome, goes_on: int
    ) -> Pending | None:
        """Roll both caches back after a rejection; after an accepted branch the draft keeps what
        posterior selection retains of it, and the target's cache is as it should be."""
        committed = len(self.request.committed)
        self.engine.pair.target.crop(min(self.engine.pair.target.length, committed - 1))
        if outcome.branch is None or self.request.finished:
            self.workers.draft.submit(
                "roll back", self.drafter.roll_back, pending, outcome.accepted, committed
            ).result()
            return None
        context, path = self._context(), branches.paths[outcome.branch]
        kept = goes_on if self.engine.a_priori else self._classify(context)
        return self.workers.draft.submit(
            "keep", self.drafter.keep, pending, path, context, kept
        ).result()

    def _class_ahead(self, pending: Pending, context: RoundContext) -> int:
        if not self.engine.a_priori:
            return ALL
        if pending.outcome is None or pending.continued:
            return self._classify(context)
        return pending.outcome  # a draft stage has just asked

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
        outcome: Outcome,
        tokens: list[int],
        following: Pending | None,
    ) -> RoundTrace:
        draft, spans = self.engine.pair.draft, self.workers.spans()
        forwards, self.forwards = draft.forwards - self.forwards, draft.forwards
        stages = stage_trace(pending, branches, outcome, following, self.alone, spans)
        drawn, parents, q = drafted(pending, branches)
        end = outcome.accepted if outcome.branch is None else pending.length + 1 + outcome.branch
        return RoundTrace(
            draft_tokens=drawn,
            draft_parents=parents,
            draft_q=q,
            row=end,
            accepted=outcome.accepted + (outcome.branch is not None),
            tokens=tokens,
            predicted=[] if pending.outcome is None else [float(pending.outcome)],
            draft_forwards=forwards,
            draft_p=p.drawn(parents, drawn),
            seconds=stage_seconds(self.watch.lap(), self.drafter.watch.lap(), spans),
            overlap=stages,
        )
