"""Requests made from prompts: tokens that fit the models, and a split for every prompt."""

import hashlib
import sys
import unicodedata
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from data_gen.prompts import Prompt
from data_gen.prompts.prompt import select
from data_gen.prompts.render import prompt_ids, refuse_unread
from data_gen.storage.shards import SPLITS
from decoding.models.loading import ModelPair
from runtime.errors import UserError

SPLIT_BY = "text"  # prompts are split by their text; plans record it


@dataclass(frozen=True)
class Request:
    """A prompt ready for the models, to be harvested or decoded. tokens: [P] int64, at least 2 of
    them for a harvest; split: "train", "calibration" or "test", or "all" if no split was asked for;
    response: [T >= 1] int64, the target's external response (`data_gen.responses`), or None;
    prompt: what it was made from; longest: most tokens of its conversation before the last
    response, as far as can be told; kept: of its tokens, those that the turn before left in
    caches."""

    prompt_id: str
    dataset: str
    tokens: Tensor
    split: str
    response: Tensor | None = None
    prompt: Prompt | None = None
    longest: int = 0
    kept: int = 0

    @property
    def ids(self) -> list[str]:
        """Return its id and those of the turns that follow the target's answers."""
        return [self.prompt_id] if self.prompt is None else self.prompt.ids

    @property
    def category(self) -> str:
        return "" if self.prompt is None else self.prompt.category


def fitted(
    prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase, room: int, day: str | None = None
) -> tuple[list[Prompt], Counter[str]]:
    """Return the prompts, of those with more than `room` tokens what their `too_long` says, and how
    many were left out ("skip") and cut ("cut"): as much is kept of the beginning of their text as
    fits. "error": they stay, to be refused by name. day: that a chat template reads.

    Raises UserError if none is left, and for arguments that no chat template reads."""
    kept, counts = list[Prompt](), Counter[str]()
    for prompt in prompts:
        refuse_unread(prompt, tokenizer)

        def tokens(characters: int, prompt: Prompt = prompt) -> int:
            part = replace(prompt, text=prompt.text[:characters], date=day)
            return len(prompt_ids(part, tokenizer, sys.maxsize))

        what, size = prompt.too_long, len(prompt.text)
        if what == "error" or tokens(size) <= room:
            kept.append(prompt)
            continue
        if what == "cut":
            size = bisect_right(range(1, size), room, key=tokens)
            while size and tokens(size) > room:  # a longer text may have fewer tokens
                size -= 1
            cut = replace(prompt, text=prompt.text[:size], whole=prompt.whole or prompt.text)
            kept += [cut] if size else []
        counts["cut" if what == "cut" and size else "skip"] += 1
    if not kept:
        raise UserError(
            f"dataset.too_long: none of {len(prompts)} prompts has {room} tokens or fewer. Raise"
            " pair.max_length, or ask for shorter responses"
        )
    return kept, counts


def make_requests(
    prompts: Sequence[Prompt], pair: ModelPair, new_tokens: int, calibration: float, test: float
) -> list[Request]:
    """Tokenise and split prompts. new_tokens: room to leave after each prompt; calibration, test:
    shares of the prompts.

    Raises UserError for prompts that do not fit either model's context, or of a single token."""
    context = min(pair.target.max_length, pair.draft.max_length)
    if context - new_tokens < 2:
        raise UserError(
            f"max_new_tokens: with gamma, {new_tokens} tokens fill the context of {context}. Lower"
            " it"
        )
    splits, requests = split_prompts(prompts, calibration, test), list[Request]()
    for prompt in prompts:
        tokens, split = fitting(prompt, pair, new_tokens), splits[prompt.id]
        if len(tokens) < 2:
            raise UserError(
                f"dataset: the prompt {prompt.id} is a single token. Remove it or make it longer"
            )
        longest = min(
            reach(prompt, lambda: pair.tokenizer, new_tokens, context), context - new_tokens
        )
        requests.append(
            Request(prompt.id, prompt.dataset, tokens, split, prompt=prompt, longest=longest)
        )
    return requests


def reach(
    prompt: Prompt, tokenizer: Callable[[], PreTrainedTokenizerBase], answer: int, context: int
) -> int:
    """Return the tokens of the last turn of a conversation, if each of the target's answers has
    `answer` tokens; 0 for a prompt of one turn.

    Raises UserError if one more answer would exceed the `context` and `Prompt.too_long` says so."""
    if not prompt.then:
        return 0
    last, count = prompt, len(prompt.then)
    while (after := last.answered("a")) is not None:
        last = after
    longest = len(prompt_ids(last, tokenizer(), sys.maxsize)) + count * answer
    if longest + answer > context and prompt.too_long == "error":
        raise UserError(
            f"pair.max_length: the conversation {prompt.id} may come to {longest + answer} tokens"
            f" with the target's answers, {context} fit. Raise it, ask for shorter responses, or"
            " set dataset.too_long=skip: it then ends before the turn that does not fit"
        )
    return longest


def following(
    request: Request, response: Sequence[int] | Tensor, pair: ModelPair, room: int
) -> Request | None:
    """Return the request for the next turn of a conversation, after the target's `response`; None
    after the last, and where it has more tokens than `room`."""
    if request.prompt is None or not request.prompt.then:
        return None
    answer = response.tolist() if isinstance(response, Tensor) else response
    prompt = request.prompt.answered(said(answer, pair))
    assert prompt is not None
    tokens = prompt_ids(prompt, pair.tokenizer, sys.maxsize)
    if len(tokens) > room:
        return None
    kept = shared([*request.tokens.tolist(), *answer], tokens.tolist())
    return replace(request, prompt_id=prompt.id, tokens=tokens, prompt=prompt, kept=kept)


def shared(before: Sequence[int], after: Sequence[int]) -> int:
    """Return how many tokens both texts begin with."""
    pairs = enumerate(zip(before, after, strict=False))
    return next((n for n, (one, two) in pairs if one != two), min(len(before), len(after)))


def kept_before(prompt: Prompt, tokens: Tensor, tokenizer: PreTrainedTokenizerBase) -> int:
    """Return how many of a prompt's `tokens` caches hold after the turn before it, whose answer was
    given."""
    *earlier, asked, given = prompt.earlier if len(prompt.earlier) > 1 else ({}, {})
    if (asked.get("role"), given.get("role")) != ("user", "assistant"):
        return 0
    before = replace(prompt, text=asked["content"], instruction="", earlier=earlier)
    ids = prompt_ids(before, tokenizer, sys.maxsize).tolist()
    return shared(
        [*ids, *tokenizer(given["content"], add_special_tokens=False)["input_ids"]], tokens.tolist()
    )


def said(response: Sequence[int], pair: ModelPair) -> str:
    """Return the text of a response, as it stands in the conversation afterwards."""
    ids = [token for token in response if token not in pair.eos_ids]
    return str(pair.tokenizer.decode(ids, skip_special_tokens=True))


def requests_of_split(
    prompts: Sequence[Prompt],
    pair: ModelPair,
    new_tokens: int,
    split: str,
    shares: Mapping[str, float],
    limit: int | None,
    drafted: bool = True,
) -> list[Request]:
    """Return `limit` prompts of a split ("all": of the whole set), evenly spaced, ready to be
    decoded. shares: of the prompts, "calibration" and "test"; drafted: the draft runs along the
    whole of each.

    Raises UserError for an unknown split, prompts that do not fit, and as `split_prompts`."""
    if split not in ("all", *SPLITS):
        raise UserError(f"split: {split!r} is unknown. Use all, {', '.join(SPLITS)}")
    context = min(pair.target.max_length, pair.draft.max_length if drafted else sys.maxsize)
    prompts, _ = fitted(prompts, pair.tokenizer, context - new_tokens)
    for prompt in prompts:
        reach(prompt, lambda: pair.tokenizer, new_tokens, context)
    if split != "all":
        splits = split_prompts(prompts, shares["calibration"], shares["test"])
        prompts = [prompt for prompt in prompts if splits[prompt.id] == split]
    return [
        Request(
            prompt.id,
            prompt.dataset,
            fitting(prompt, pair, new_tokens, drafted),
            split,
            prompt=prompt,
        )
        for prompt in select(prompts, limit)
    ]


def fitting(prompt: Prompt, pair: ModelPair, new_tokens: int, drafted: bool = True) -> Tensor:
    """Return the ids [n] of a prompt. Raises UserError if it leaves no room for `new_tokens` in the
    target's context or, if the draft runs along all of them (`drafted`), in the draft's."""
    tokens = prompt_ids(prompt, pair.tokenizer, pair.target.max_length - new_tokens)
    context = pair.draft.max_length
    if drafted and len(tokens) > context - new_tokens:
        raise UserError(
            f"pair.draft: its context holds {context} tokens, and the prompt {prompt.id} has"
            f" {len(tokens)} before {new_tokens} new ones. Ask for shorter responses, or set"
            " dataset.too_long to skip or cut"
        )
    return tokens


def refuse_other_shares(data: Mapping[str, Any], shares: Mapping[str, float], where: str) -> None:
    """Raise UserError if a harvest was split by other shares than these, so that its training and
    test prompts are not those of this run.

    data: `folder` of the harvest, and its `origin`; where: what was made of it.
    """
    if "shares" in data and data.get("split_by") != SPLIT_BY:
        raise UserError(
            f"splits: {data['folder']}, on which {where}, was split by the ids of its prompts, here"
            " their texts decide: what is kept for tests differs. Harvest it anew, or, where it has"
            " seen none of the prompts, set split=all"
        )
    for name, share in data.get("shares", {}).items():
        if shares[name] != share:
            raise UserError(
                f"splits.{name}: {shares[name]} here, {share} in {data['folder']}, on which"
                f" {where}: what is kept for tests differs. Set splits.{name}={share}, or, where"
                " it has seen none of the prompts, split=all"
            )


def split_prompts(prompts: Sequence[Prompt], calibration: float, test: float) -> dict[str, str]:
    """Return the split of each prompt id, by a hash of the prompt's `normalised` text: prompts with
    one text share a split, and stay in it whatever their ids and whatever set is around them.

    Only in sets so small that a split would be empty are the nearest texts moved over. calibration,
    test: shares of the texts. Raises UserError for fewer than three texts or impossible shares."""
    if calibration <= 0 or test <= 0 or calibration + test >= 1:
        raise UserError(
            f"splits: calibration={calibration} and test={test} must be positive and leave room for"
            " train"
        )
    texts = {prompt.id: identifying(prompt) for prompt in prompts}
    digests = {text: hashlib.sha256(text.encode()).digest() for text in texts.values()}
    place = {text: int.from_bytes(full[:6], "big") / 2**48 for text, full in digests.items()}
    if len(place) < len(SPLITS):
        raise UserError(
            f"dataset: {len(prompts)} prompts cannot be split three ways, different texts among"
            f" them: {len(place)}. Give 3 different texts or more"
        )
    ranked = sorted(place, key=lambda text: (place[text], text))
    last = len(ranked) - 1
    train = min(max(1, sum(place[text] < 1 - calibration - test for text in ranked)), last - 1)
    known = min(max(train + 1, sum(place[text] < 1 - test for text in ranked)), last)
    sizes = (train, known - train, len(ranked) - known)
    names = [split for split, size in zip(SPLITS, sizes, strict=True) for _ in range(size)]
    split_of = dict(zip(ranked, names, strict=True))
    return {name: split_of[text] for name, text in texts.items()}


def normalised(text: str) -> str:
    """Return `text` without details that distinguish no tasks: case, compatibility forms, blanks
    and punctuation; a text of these alone only loses the blanks at its ends."""
    folded = unicodedata.normalize("NFKC", text).casefold()
    told = "".join(c for c in folded if unicodedata.category(c)[0] not in "PZC")
    return told or folded.strip()


def identifying(prompt: Prompt) -> str:
    """Return the text that says which prompts are the same: how much of it is kept does not
    matter."""
    return normalised(prompt.whole or prompt.text)


def repeats(prompts: Sequence[Prompt]) -> int:
    """Return how many prompts have the `identifying` text of one before them, in a conversation as
    the turn that one is."""
    turns = {(identifying(prompt), len(prompt.earlier)) for prompt in prompts}
    return len(prompts) - len(turns)
