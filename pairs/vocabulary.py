"""Choice of a draft's vocabulary: tokens counted in its target's responses, their coverage of other
responses, and the time they save.

Tokens are ranked by frequency as in FR-Spec (2502.14856), over the target's own responses instead
of a corpus.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from hydra.utils import instantiate
from torch import Tensor, nn

from data_gen.columns import blocks
from data_gen.labels import overlap
from data_gen.storage.dataset import Harvest
from decoding.models.cached_lm import CachedLM
from decoding.models.draft_vocabulary import rows_of
from decoding.models.loading import ModelPair, pair_identity
from decoding.picking import largest
from decoding.sampling import Warp
from evaluation.replay.read import refuse_other_pair
from pairs.chats import Chat, load_chats, shards
from runtime.errors import UserError
from runtime.job import command_line

HEADER = ["tokens", "of what was said", "of p", "acceptance", "agreement"]
HEADER += ["draft forward", "modelled speed-up"]
LEGEND = (
    "of what was said, of p: share of held-out response tokens, mean of the target's distribution,"
    " that the vocabulary holds. Acceptance: sum(min(p, q)). Draft forward: measured here, one row."
    " Speed-up: the best fixed draft length's, modelled from these and the measured target, as if"
    " every token were accepted independently."
)
CONTEXT, WARM_UP, REPEATS = 128, 5, 30  # timed forwards: rows in the cache, numbers of runs


@dataclass(frozen=True)
class Text:
    """A text. tokens: [n], a prompt and its response; start: index of the first response token, at
    least 1."""

    tokens: Tensor
    start: int

    @classmethod
    def of(cls, chat: Chat) -> "Text":
        return cls(chat.tokens.long(), chat.start)

    @classmethod
    def joined(cls, prompt: Tensor, response: Tensor) -> "Text":
        return cls(torch.cat([prompt, response]), len(prompt))

    @property
    def response(self) -> Tensor:
        return self.tokens[self.start :]


def count(texts: Iterable[Text], vocab_size: int) -> Tensor:
    """Return how often each token occurs in the responses, [V]."""
    tokens = torch.cat([text.response for text in texts])
    return torch.bincount(tokens, minlength=vocab_size)


def ranked(counts: Tensor) -> Tensor:
    """Return the tokens by decreasing frequency, [V]; of equally frequent ones the lowest id first:
    byte pairs are numbered in the order of their merges, so of tokens that never occurred the more
    common ones come first."""
    return counts.argsort(descending=True, stable=True)


@dataclass(frozen=True)
class Fit:
    """The quality of a draft vocabulary at held-out positions. mass: of the target's distribution p
    on it; acceptance: sum(min(p, q)); agreement: share of positions where both distributions have
    the same most probable token."""

    mass: float
    acceptance: float
    agreement: float


@torch.inference_mode()
def fits(
    pair: ModelPair, texts: Iterable[Text], vocabularies: Sequence[Tensor], warps: tuple[Warp, Warp]
) -> list[Fit]:
    """Return the fit of each of `vocabularies` ([k] tokens). The draft of `pair` must have all
    tokens; warps: those of target and draft."""
    sums, positions = torch.zeros(len(vocabularies), 3), 0
    for text in texts:
        ours, theirs = (_logits(lm, text) for lm in (pair.target, pair.draft))
        positions += len(ours)
        for p_logits, q_logits in blocks(ours, theirs):
            p = warps[0].probs(p_logits)
            for row, tokens in enumerate(vocabularies):
                # as a draft of that vocabulary gives them: -inf for all other tokens
                narrow = torch.full_like(q_logits, -torch.inf)
                q = warps[1].probs(narrow.index_copy_(-1, tokens, q_logits[:, tokens]))
                same = largest(p) == largest(q)
                parts = [p[:, tokens].sum(), overlap(p, q).sum(), same.sum()]
                sums[row] += torch.stack(parts).cpu()
    return [Fit(*row) for row in (sums / positions).tolist()]


def _logits(lm: CachedLM, text: Text) -> Tensor:
    """Return the logits before each token of the response, [n, V]."""
    lm.reset()
    lm.forward(text.tokens[: text.start - 1], logits="none")
    return lm.forward(text.tokens[text.start - 1 : -1]).logits


def shortened(texts: Iterable[Text], positions: int) -> list[Text]:
    """Return the first of `texts` with `positions` response tokens in all; the last of them is
    cut."""
    kept: list[Text] = []
    for text in texts:
        if positions <= 0:
            break
        kept.append(Text(text.tokens[: text.start + positions], text.start))
        positions -= len(text.response)
    return kept


# Speed --------------------------------------------------------------------------------------------


def draft_seconds(draft: CachedLM, vocabularies: Sequence[Tensor]) -> list[float]:
    """Return the seconds of a forward on one row with each of `vocabularies` ([k] tokens), then
    with all tokens; in turns, medians."""
    head: Any = draft.model.get_output_embeddings()
    ways = [*((rows_of(head, tokens), tokens) for tokens in vocabularies), (head, draft.vocabulary)]
    seconds: list[list[float]] = [[] for _ in ways]
    _fill(draft)
    for _ in range(REPEATS):
        for way, taken in zip(ways, seconds, strict=True):
            with _speaking(draft, *way):
                taken.append(_seconds(draft, 1))
    return [median(taken[WARM_UP:]) for taken in seconds]


def target_seconds(target: CachedLM, rows: int) -> list[float]:
    """Return the seconds of a forward on 1, 2, ..., `rows` rows; in turns, medians."""
    _fill(target)
    taken = [[_seconds(target, n) for n in range(1, rows + 1)] for _ in range(REPEATS)]
    return [median(column) for column in zip(*taken[WARM_UP:], strict=True)]


@contextmanager
def _speaking(draft: CachedLM, head: nn.Module, tokens: Tensor | None) -> Iterator[None]:
    """Give the draft the output layer `head`, whose rows are those of `tokens`."""
    before = draft.model.get_output_embeddings(), draft.vocabulary
    draft.model.set_output_embeddings(head)
    draft.vocabulary = tokens
    try:
        yield
    finally:
        draft.model.set_output_embeddings(before[0])
        draft.vocabulary = before[1]


def _fill(lm: CachedLM) -> None:
    lm.reset()
    lm.forward(torch.zeros(min(CONTEXT, lm.max_length // 2), dtype=torch.long), logits="none")


def _seconds(lm: CachedLM, rows: int) -> float:
    """Return the seconds of one forward after the context, which is left as it was."""
    before, context = lm.seconds, lm.length
    lm.forward(torch.zeros(rows, dtype=torch.long))
    lm.crop(context)
    return lm.seconds - before


def modelled_speedup(acceptance: float, draft: float, target: Sequence[float]) -> tuple[float, int]:
    """Return the best fixed draft length's speed-up over plain decoding, and that length
    (2211.17192, theorem 3.8, with the cost of each number of rows). Every token is accepted with
    the same probability, independently of the others.

    draft: seconds of a forward; target: seconds of one with 1, 2, ... rows.
    """
    lengths = range(1, len(target))
    tokens = [sum(acceptance**depth for depth in range(gamma + 1)) for gamma in lengths]
    speeds = [
        target[0] * n / (gamma * draft + target[gamma])
        for gamma, n in zip(lengths, tokens, strict=True)
    ]
    return max(zip(speeds, lengths, strict=True))


# The table ----------------------------------------------------------------------------------------


def harvested(harvest: Harvest) -> tuple[list[Text], list[Text]]:
    """Return the responses to count, and held-out ones."""
    splits = {name: texts(harvest, name) for name in ("train", "calibration", "test")}
    if not splits["train"] or not (held := splits["calibration"] + splits["test"]):
        raise UserError(
            f"data: {harvest.folder} has no responses to count, or none held out. Harvest"
            " more prompts"
        )
    return splits["train"], held


def texts(harvest: Harvest, split: str) -> list[Text]:
    rows = harvest.by_prompt("responses", split, ["prompt_tokens", "response_tokens"])
    return [Text.joined(row["prompt_tokens"], row["response_tokens"]) for row in rows]


def chats(folder: Path, held_out: int) -> tuple[list[Text], list[Text]]:
    """Return the texts to count, and held-out ones, from the chats a draft was trained on; the
    first ones are held out."""
    texts = [Text.of(chat) for path in shards(folder) for chat in load_chats(path)]
    if len(texts) <= held_out:
        raise UserError(
            f"chats: {folder} has {len(texts)} chats, held_out={held_out} leaves none. Generate"
            " more"
        )
    return texts[held_out:], texts[:held_out]


def refuse_other_target(pair: ModelPair, harvest: Harvest) -> None:
    """Raise UserError for a harvest of another target; one of the same target with another draft is
    accepted, since its responses are the same."""
    sides = harvest.pair.model_dump(include={"name", "target", "tokenizer"})
    refuse_other_pair(pair_identity(pair), sides, "pair.target: it")


def table(
    settings: Any, pair: ModelPair, held: Sequence[Text], vocabularies: Sequence[Tensor]
) -> list[list[str]]:
    """Return a row for each of `vocabularies`, and one for all tokens."""
    warps = instantiate(settings.warp), instantiate(settings.draft_warp)
    every = [*vocabularies, torch.arange(pair.draft.vocab_size)]
    target = target_seconds(pair.target, settings.gammas + 1)
    drafting = draft_seconds(pair.draft, vocabularies)
    fitting = fits(pair, shortened(held, settings.positions), every, warps)
    counts, rows = count(held, pair.draft.vocab_size), list[list[str]]()
    for tokens, fit, seconds in zip(every, fitting, drafting, strict=True):
        speedup, gamma = modelled_speedup(fit.acceptance, seconds, target)
        of_responses = counts[tokens].sum().item() / counts.sum().item()
        shares = of_responses, fit.mass, fit.acceptance, fit.agreement
        times = f"{seconds * 1e3:.2f} ms", f"{speedup:.2f}x at {gamma}"
        rows.append([*(f"{share:.4f}" for share in shares), *times])
    return rows


def provenance(settings: Any, pair: ModelPair, counts: Tensor, responses: int) -> dict[str, Any]:
    return {
        "command": command_line(),
        "pair": {name: part for name, part in pair_identity(pair).items() if name != "draft"},
        "counted_on": "chats of a distillation" if settings.chats is not None else "a harvest",
        "responses": responses,
        "tokens_counted": int(counts.sum()),
        "distinct_tokens": int((counts > 0).sum()),
        "size": settings.size,
    }


if __name__ == "__main__":
    raise SystemExit("error: this is no program. Run: python pairs/draft_vocabulary.py")
