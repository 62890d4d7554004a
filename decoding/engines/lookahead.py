"""Lookahead decoding: the target drafts for itself, with n-grams from guesses made in the same
calls that verify them."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import torch
from pydantic import Field

from decoding.draft import Draft, zeros
from decoding.engines.request import Engine, RequestState, prefill
from decoding.interfaces import Pair
from decoding.models.recurrent import refuse_recurrent
from decoding.sampling import Sampler, Warp
from decoding.trace import RoundTrace, Stopwatch
from decoding.verification import WarpedRows
from decoding.verifiers.point_mass import PointMassVerifier


@dataclass(eq=False)
class LookaheadEngine(Engine):
    """Draft n-grams that the target has guessed itself, without a draft model (Fu et al. 2024,
    2402.02057).

    One target call runs the last committed token, the known n-grams that begin with it, merged into
    a tree, and a window of guesses at later positions (`Window`), which advances by one Jacobi step
    and yields new n-grams.

    The output distribution is the target's after `warp`: n-grams and window are functions of what
    was committed before the round, and n-grams are verified as point masses, the paper's sampling
    rule. Greedy, the accepted path is the longest match. Unlike there, tokens that n-grams have in
    common from their beginning run once."""

    pair: Pair
    window: Annotated[int, Field(ge=1, le=128), "W: positions guessed at side by side"]
    ngram: Annotated[int, Field(ge=2, le=16), "N: tokens of an n-gram, its key included"]
    guesses: Annotated[int, Field(ge=1, le=128), "G: n-grams kept per key, all of them verified"]
    prompt_pool: Annotated[bool, "n-grams of the prompt and of the output so far are guesses too"]
    warp: Annotated[Warp, "of the target"]
    eos_ids: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        self.verifier = PointMassVerifier()
        remedy = "Use engine=serial with structure=chain or lookup"
        refuse_recurrent("engine, pair.target", self.pair.target, f"a window of guesses. {remedy}")

    @contextmanager
    def session(
        self, request: RequestState, sampler: Sampler
    ) -> Iterator[Callable[[], RoundTrace]]:
        prompt = request.committed.tolist()
        prefill(self.pair.target, request.committed)
        pool, window = NgramPool(self.guesses), Window(prompt, self.window, self.ngram)
        self._pool_text(pool, prompt, new=len(prompt))
        yield partial(self._round, request, pool, window, request.watch, sampler)

    def _round(
        self,
        request: RequestState,
        pool: "NgramPool",
        window: "Window",
        watch: Stopwatch,
        sampler: Sampler,
    ) -> RoundTrace:
        """Decode one round: one forward over the last committed token, the draft and the window's
        guesses."""
        target, last = self.pair.target, int(request.committed[-1])
        with watch.stage("sample"):
            parents, tokens = merged(pool.after(last), request.max_new - 1, self.eos_ids)
            none = zeros(target.vocab_size, torch.float32, target.output_device)
            draft = Draft(parents, tokens, [none] * (len(tokens) + 1))  # not drawn: no q to read
            fits = len(request.committed) + window.depth <= target.max_length
            guesses, links, newest = window.tree(len(draft) + 1) if fits else ([], [], [])
        rows = range(len(draft) + 1)
        with watch.stage("target"):
            logits = target.forward(
                torch.tensor([last, *draft.token, *guesses]),
                torch.tensor([-1, *draft.parent, *links]),
                logits=[*rows, *newest],
            ).logits
        with watch.stage("verify"):
            before = partial(draft.text, request.committed)
            warp = self.warp.within(request.prompt, self.eos_ids)
            p = WarpedRows(logits[: len(rows)], warp, before)
            verdict = self.verifier.verify(draft.on(p.device), p, sampler)
        committed = request.commit(verdict.emitted)
        path = draft.rows_to(verdict.row, kept=len(committed))
        target.keep_path([0, *path])
        target.crop(len(request.committed) - 1)
        with watch.stage("sample"):
            if fits:
                pool.add(window.step(last, logits[len(rows) :].argmax(-1).tolist()))
            text = request.committed[-len(committed) - self.ngram :].tolist()
            self._pool_text(pool, text, new=len(committed))
        return RoundTrace(
            draft_tokens=draft.token,
            draft_parents=draft.parent,
            draft_q=[1.0] * len(draft),
            row=[0, *path][-1],
            accepted=len(path),
            tokens=committed,
            predicted=[],
            draft_forwards=0,
            draft_p=p.drawn(draft.parent, draft.token),
            seconds=watch.lap(),
            extra_rows=len(guesses),
        )

    def _pool_text(self, pool: "NgramPool", text: Sequence[int], new: int) -> None:
        """Pool every n-gram of `text` that ends in one of its last `new` tokens."""
        if self.prompt_pool:
            first = max(len(text) - new + 1, self.ngram)
            pool.add(text[end - self.ngram : end] for end in range(first, len(text) + 1))


class NgramPool:
    """A pool of n-grams: at most `limit` continuations of each token; the oldest is dropped
    first."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        # key -> continuations, latest last
        self._following: dict[int, dict[tuple[int, ...], None]] = {}

    def add(self, ngrams: Iterable[Sequence[int]]) -> None:
        """Add n-grams, each a key and its continuation. A known one becomes the latest again."""
        for key, *rest in ngrams:
            pooled = self._following.setdefault(key, {})
            pooled.pop(tuple(rest), None)
            pooled[tuple(rest)] = None
            if len(pooled) > self.limit:
                del pooled[next(iter(pooled))]

    def after(self, key: int) -> list[tuple[int, ...]]:
        """Return the continuations of `key`, latest first."""
        return list(self._following.get(key, ()))[::-1]


class Window:
    """Guesses at the positions to come: the last N - 1 steps of a Jacobi iteration, W columns each.

    `rows[l][i]` is a guess at position l + i after the last committed token, made one step before
    those of rows[l + 1]. Column 0 of the oldest row is the last committed token itself and left
    out: `rows[0][i - 1]` is column i there.

    Attention as in the paper: a guess sees the committed text, the oldest row up to its own column,
    and the newer rows of its column up to its own. That is a tree whose depths are the positions:
    the oldest row is a path, and each of its nodes starts a path down the column. The target's
    argmax after the newest row is the next step; a column with its argmax is an n-gram.

    The oldest row begins as tokens of the prompt, over and over, and the others are filled one per
    step, for which it begins N - 2 columns too wide. A step moves the window by one position,
    however many tokens a round commits, as in the released code."""

    def __init__(self, prompt: Sequence[int], width: int, ngram: int) -> None:
        self.height = ngram - 1
        self.rows = [[prompt[column % len(prompt)] for column in range(width + ngram - 3)]]

    @property
    def depth(self) -> int:
        """Number of positions from the last committed token to the farthest guess."""
        return len(self.rows[0]) + len(self.rows) - 1

    def tree(self, start: int) -> tuple[list[int], list[int], list[int]]:
        """Return tokens, their parents, and the numbers of the newest row's columns, where 0 is the
        last committed token and `start` the first guess."""
        oldest, *newer = self.rows
        columns = [0, *range(start, start + len(oldest))]
        parents = columns[:-1]
        for row in newer:
            first = start + len(parents)
            parents += columns
            columns = list(range(first, first + len(row)))
        return [token for row in self.rows for token in row], parents, columns

    def step(self, last: int, guesses: list[int]) -> list[tuple[int, ...]]:
        """Take in `guesses`, the argmax after each column of the newest row, where `last` was the
        last committed token.

        Returns the n-grams the columns make with them, none before the window is filled.
        """
        oldest, *newer = self.rows
        if len(self.rows) < self.height:
            self.rows = [row[1:] for row in (*self.rows, guesses)]
            return []
        second, *rest = [*newer, guesses]
        self.rows = [second[1:], *rest]
        return list(zip([last, *oldest], *newer, guesses, strict=True))


def merged(
    paths: Iterable[Sequence[int]], depth: int, eos_ids: frozenset[int]
) -> tuple[list[int], list[int]]:
    """Return the tree with each of `paths` from its root on, as parents and tokens: no deeper than
    `depth`, nothing after EOS. Siblings are distinct, in the order of the paths."""
    parents, tokens = list[int](), list[int]()
    rows: dict[tuple[int, int], int] = {}
    for path in paths:
        row = 0
        for token in path[:depth]:
            if (row, token) not in rows:
                parents.append(row)
                tokens.append(token)
                rows[row, token] = len(tokens)
            row = rows[row, token]
            if token in eos_ids:
                break
    return parents, tokens
