"""What would have been copied along harvested responses, and how much of it was right."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from data_gen.storage.dataset import read_responses
from decoding.structures.lookup import following, longest_match
from predictors.base import Records
from runtime.errors import UserError

STRETCH = 2  # of structure=sources


def copied_tokens(folder: str | Path, split: str, ngrams: Sequence[int], longest: int) -> Records:
    """One row per copied token whose predecessors in its copy all agree with the response.

    `match`: tokens that matched before the copy; `depth`: place in the copy, from 1 on; `group`:
    the prompt, all int64;
    `accepted`: float32, 1 where the response has the same token, else 0. ngrams: sizes looked for,
    the longest first;
    longest: tokens of a copy. Raises UserError as `read_responses`, and where nothing repeats.
    """
    parts = []
    for group, row in enumerate(read_responses(folder, split)):
        text = torch.tensor(row["prompt_tokens"] + row["response_tokens"])
        for match, agreed, known in copies(text, len(row["prompt_tokens"]), ngrams, longest):
            depth = torch.arange(1, min(agreed + 1, known) + 1)
            parts.append(
                torch.stack(
                    [
                        torch.full_like(depth, match),
                        depth,
                        depth <= agreed,
                        torch.full_like(depth, group),
                    ]
                )
            )
    if not parts:
        raise UserError(
            f"data: no text repeats itself in split {split} of {folder}. Harvest more or longer"
            " responses"
        )
    match, depth, accepted, prompt = torch.cat(parts, dim=1)
    return {"match": match, "depth": depth, "accepted": accepted.float(), "group": prompt}


def copies(
    text: Tensor, start: int, ngrams: Sequence[int], longest: int
) -> Iterator[tuple[int, int, int]]:
    """Walks through `text` [n] from index `start` as a decoder does that copies `STRETCH` tokens
    for each that matched: past those that agree and the token after them, or by one token where
    nothing matches.

    Yields of each copy the length of the match, how many copied tokens agree with what comes, and
    how many could be looked at, `longest` at most. Copies from every index would nearly all begin
    in the middle of long repetitions, of which a decoder copies much in one go."""
    index = start
    while index < len(text):
        match, step = longest_match(text[:index], ngrams), 1
        if match is not None:
            end, size = match
            known = min(longest, len(text) - index)
            same = torch.tensor(following(text[:index], end, known)) == text[index : index + known]
            agreed = int(same.long().cumprod(0).sum())
            yield size, agreed, known
            step += min(agreed, STRETCH * size)
        index += step
