"""Expected acceptance: what a draft is worth in a given context, over every verdict it may get,
without a coin; methods compared in the same contexts, with the same random numbers."""

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from decoding.draft import Draft, RoundContext
from decoding.engines.serial import SerialEngine
from decoding.interfaces import LM, Pair
from decoding.sampling import Sampler
from evaluation.table import prompts, ratio_of, table
from runtime.errors import UserError
from runtime.intervals import Estimate


@dataclass(frozen=True)
class Text:
    """A recorded response. tokens: [P + T] int64, prompt and response; prompt: P."""

    dataset: str
    prompt_id: str
    tokens: Tensor
    prompt: int


@dataclass(frozen=True)
class Expected:
    """Of one call of the target, means over draws. accepted: draft tokens; tokens: those and the
    one that follows, where one does; nodes: of the draft; forwards: of the draft model.

    The first two are expectations over the verdicts of a draft, exact but for rounding."""

    accepted: float
    tokens: float
    nodes: float
    forwards: float

    def to_dict(self) -> dict[str, float]:
        return asdict(self)


FIGURES = {
    "tokens": "emitted",
    "accepted": "accepted",
    "nodes": "drafted",
    "forwards": "draft_forwards",
}
"""What is read off a context, and the column of the table that sums it."""
Found = Mapping[str, Sequence[Expected]]
"""method -> one for each context of a prompt."""


# In one context -----------------------------------------------------------------------------------


def expected_counts(
    draft: Draft, end_prob: Tensor, eos_ids: frozenset[int] = frozenset()
) -> tuple[float, float]:
    """Accepted tokens, and committed tokens, of a round whose path ends at row r with `end_prob`
    [n + 1]. Nothing follows an open leaf or an EOS."""
    depth = [0]
    for parent in draft.parent:
        depth.append(depth[parent] + 1)
    follows = [
        row <= draft.closed and (row == 0 or draft.token[row - 1] not in eos_ids)
        for row in range(len(depth))
    ]
    chances = end_prob.double()
    accepted = float(chances @ torch.tensor(depth, dtype=torch.float64))
    return accepted, accepted + float(chances @ torch.tensor(follows, dtype=torch.float64))


def in_context(engine: SerialEngine, context: RoundContext, seeds: Sequence[int]) -> Expected:
    """The mean over a draft for each seed. The caches are as `SerialEngine.outlook` has them."""
    found = []
    for seed in seeds:
        outlook = engine.outlook(context, Sampler.seeded(seed))
        counts = expected_counts(outlook.draft, outlook.verdict.end_prob, engine.eos_ids)
        found.append((*counts, float(len(outlook.draft)), float(outlook.forwards)))
    return Expected(*np.mean(found, axis=0).tolist())


# Along a response ---------------------------------------------------------------------------------


def positions(length: int, count: int) -> list[int]:
    """`count` numbers of response tokens before a context, in the middle of equal parts of a
    response of `length` tokens; all of them where it is shorter."""
    many = min(length, count)
    return [(2 * part + 1) * length // (2 * many) for part in range(many)]


@dataclass(frozen=True)
class Plan:
    """positions: contexts of a response; draws: drafts in each."""

    positions: int
    draws: int
    seed: int

    def lengths(self, text: Text) -> list[int]:
        """Tokens of each context, increasing."""
        length = len(text.tokens) - text.prompt
        return [text.prompt + place for place in positions(length, self.positions)]


def along(
    engines: Mapping[str, SerialEngine],
    pair: Pair,
    text: Text,
    plan: Plan,
    done: Collection[int] = (),
) -> Iterator[tuple[int, dict[str, Expected]]]:
    """Every method in contexts of a response, by their lengths, but for those `done`.

    A context begins a request: rules and structures that adapt know nothing of earlier rounds, and
    the output may be as long as the models' context. A method's draws depend on the seed, the
    context and the number of the draw, not on the method."""
    layers = sorted({layer for one in engines.values() for layer in one.target_layers})
    for length, hidden in contexts(pair, text, plan.lengths(text), layers):
        if length in done:
            continue
        seeds = [context_seed(plan.seed, text, length, draw) for draw in range(plan.draws)]
        room = pair.target.max_length - length
        found = {}
        for name, engine in engines.items():
            rows = [layers.index(layer) for layer in engine.target_layers]
            states = None if hidden is None or not rows else hidden[rows]
            context = RoundContext(
                text.tokens[:length],
                room,
                0,
                states,
                pair.target.embed,
                engine.eos_ids,
                draft_context=pair.draft.max_length if engine.structure.uses_draft else None,
            )
            found[name] = in_context(engine, context, seeds)
        yield length, found


@torch.inference_mode()
def contexts(
    pair: Pair, text: Text, lengths: Sequence[int], layers: Sequence[int]
) -> Iterator[tuple[int, Tensor | None]]:
    """The lengths (increasing) from the last to the first, the caches of both models holding all
    but the last token of each, the draft's no more than its context; with the target's states
    [len(layers), H] at the last of these. One forward of each model; what is run between two of
    them must leave the caches as they are.

    Raises UserError for a text that does not fit the target."""
    most = pair.target.max_length
    if len(text.tokens) > most:
        raise UserError(
            f"data: {text.prompt_id} has {len(text.tokens)} tokens with its response, which do not"
            f" fit pair.max_length {most}. Raise it"
        )
    rows = [length - 2 for length in lengths if length > 1]
    states = cached(pair.target, text.tokens[: lengths[-1] - 1], layers, rows)
    # after the target, whose states it may read
    cached(pair.draft, text.tokens[: min(lengths[-1] - 1, pair.draft.max_length)])
    for length in reversed(lengths):
        for model in (pair.target, pair.draft):
            model.crop(min(model.length, length - 1))
        known = states is not None and length > 1
        yield length, states[:, rows.index(length - 2)] if states is not None and known else None


def cached(
    model: LM, tokens: Tensor, layers: Sequence[int] = (), rows: Sequence[int] = ()
) -> Tensor | None:
    """Cache `tokens` alone; [len(layers), len(rows), H] of them, None where nothing is asked."""
    model.reset()
    if not len(tokens):
        return None
    return model.forward(tokens, hidden=layers, hidden_rows=rows, logits="none").hidden


def context_seed(seed: int, text: Text, length: int, draw: int) -> int:
    """Of a context that has `length` tokens."""
    named = f"{seed}/{draw}/{text.dataset}/{text.prompt_id}/{length}"
    return int.from_bytes(hashlib.sha256(named.encode()).digest()[:4], "big")


# As measurements ----------------------------------------------------------------------------------

Turns = Mapping[tuple[str, str], Found]
"""By dataset and prompt."""


def measured(turns: Turns) -> pd.DataFrame:
    """Return a row per method and prompt, sums over its contexts, each of which is a round."""
    rows = [
        {
            "policy": method,
            "dataset": dataset,
            "prompt": prompt,
            "emitted": sum(each.tokens for each in contexts),
            "rounds": len(contexts),
            "drafted": sum(each.nodes for each in contexts),
            "accepted": sum(each.accepted for each in contexts),
            "draft_forwards": sum(each.forwards for each in contexts),
        }
        for (dataset, prompt), found in turns.items()
        for method, contexts in found.items()
    ]
    return table("expected", rows)


def difference(measurements: pd.DataFrame, method: str, against: str, column: str) -> Estimate:
    """Return the mean over contexts of a column of `method` less that of `against` in the same
    contexts, with its interval over prompts."""
    first, second = (
        prompts(measurements[measurements["policy"] == name], column, "rounds")
        for name in (method, against)
    )
    less = first[column].to_numpy(float) - second[column].to_numpy(float)
    return ratio_of(less, first["rounds"].to_numpy(float))
