"""What would have been copied at every position of harvested responses, and how much of it was right."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from data_gen.dataset import read_responses
from decoding.structures.lookup import following, longest_match
from predictors.base import Records
from predictors.errors import UserError


def copied_tokens(folder: str | Path, split: str, ngrams: Sequence[int], longest: int) -> Records:
    """One row per copied token whose predecessors in its copy all agree with the response.

    `match`: tokens that matched before the copy; `depth`: place in the copy, from 1 on; `group`: the prompt, all int64;
    `accepted`: float32, 1 where the response has the same token, else 0. ngrams: sizes looked for, the longest first;
    longest: tokens of a copy. Raises UserError as `read_responses`, and where nothing repeats.
    """
    parts = []
    for group, row in enumerate(read_responses(folder, split)):
        text = torch.tensor(row["prompt_tokens"] + row["response_tokens"])
        for match, agreed, known in copies(text, len(row["prompt_tokens"]), ngrams, longest):
            depth = torch.arange(1, min(agreed + 1, known) + 1)
            parts.append(
                torch.stack([torch.full_like(depth, match), depth, depth <= agreed, torch.full_like(depth, group)])
            )
    if not parts:
        raise UserError(f"data: no text repeats itself in split {split} of {folder}. Harvest more or longer responses")
    match, depth, accepted, prompt = torch.cat(parts, dim=1)
    return {"match": match, "depth": depth, "accepted": accepted.float(), "group": prompt}


def copies(text: Tensor, start: int, ngrams: Sequence[int], longest: int) -> Iterator[tuple[int, int, int]]:
    """At every index of `text` [n] from `start` on that follows a match: its length, how many copied tokens agree with
    what comes, and how many could be looked at, `longest` at most."""
    for index in range(start, len(text)):
        if (match := longest_match(text[:index], ngrams)) is not None:
            end, size = match
            known = min(longest, len(text) - index)
            same = torch.tensor(following(text[:index], end, known)) == text[index : index + known]
            yield size, int(same.long().cumprod(0).sum()), known
