"""Labelling several responses of a batch together, within memory: their cached rows are held until
there are enough, then joined one after another in the caches of both models."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import psutil
import torch

from data_gen.answers import Answer
from data_gen.columns import OwnTokens
from data_gen.requests import Request
from data_gen.settings import HarvestSettings
from data_gen.verdicts import STAGES
from decoding.models.cached_lm import CachedLM, Held
from decoding.models.loading import ModelPair
from decoding.processors import Processed
from decoding.sampling import Warp
from runtime.errors import UserError

GB = 1e9
WARPED = 12  # bytes for each token of the vocabulary: logits and p, in float32
JUDGED = 40  # bytes for each token of the vocabulary: p, q, their residuals and order


@dataclass(frozen=True)
class Room:
    """Limits of labelling. rollouts: most that one forward advances; joined, rows: most rollouts
    and cached rows of responses that are labelled together (a single response may have more).
    bytes: most memory that they take on the device."""

    rollouts: int
    joined: int
    rows: int
    bytes: int = 0


ON_A_CORE = Room(128, 32, 1024)  # with more, masked rows of other texts cost more than is saved
ON_A_DEVICE = Room(256, 256, 1 << 14)


def room_of(pair: ModelPair, requests: Sequence[Request], settings: HarvestSettings) -> Room:
    """Return the largest useful limits that fit `settings.label_gb`, or else half of the memory
    that is free beside the models and the batch that is answered.

    Raises UserError if the longest text and one rollout do not fit. Empties both caches."""
    device, longest = pair.target.device, 0
    best = ON_A_CORE if device.type == "cpu" else ON_A_DEVICE
    if requests:
        longest = max(max(len(r.tokens), r.longest) for r in requests) + settings.max_new_tokens
    for lm in (pair.target, pair.draft):  # the bytes of a row are known once there is one
        lm.reset()
        lm.forward(torch.zeros(1, dtype=torch.int64), logits="none")
        lm.reset()
    row = pair.target.row_bytes + pair.draft.row_bytes
    each = bytes_of_rollout(pair, settings)
    most = int((settings.label_gb or 0) * GB)
    if settings.label_gb is None:
        batch = min(len(requests), settings.batch_size) * longest * row
        most = max(0, free_bytes(device) - batch) // 2
    rollouts = min(best.rollouts, (most - 2 * longest * row) // each)
    if rollouts < 1:
        raise UserError(
            f"label_gb: expected at least {(2 * longest * row + each) / GB:.3g}, to label"
            f" {longest} tokens with gamma={settings.gamma}, got {most / GB:.3g}"
            f"{' free' if settings.label_gb is None else ''}. Raise it, or lower batch_size, gamma"
            " or max_new_tokens"
        )
    if rollouts < best.rollouts:
        rollouts = 1 << (rollouts.bit_length() - 1)  # a power of 2, steady under small changes
    rows = min(best.rows, (most - rollouts * each) // (2 * max(1, row)))
    if rows < best.rows:
        rows = max(longest, 1 << (rows.bit_length() - 1))
    taken = int(rollouts * each + 2 * rows * row)
    return replace(
        best, rollouts=rollouts, joined=min(best.joined, rollouts), rows=rows, bytes=taken
    )


def bytes_of_rollout(pair: ModelPair, settings: HarvestSettings) -> int:
    """Return the bytes of one rollout that a sampled target verifies: cached rows, hidden states,
    logits (the draft's twice while they are joined), and the distributions made of them, a few rows
    at a time on a CPU, all at once elsewhere."""
    draft, target = pair.draft, pair.target
    states = (
        len(settings.layers.draft_layers) * draft.model.config.get_text_config().hidden_size * 2
    )
    columns = OwnTokens.of(draft).columns
    reads = [isinstance(warp, Processed) for warp in (settings.draft_warp, settings.warp)]
    sizes = [
        torch.float32.itemsize if read else lm.model.dtype.itemsize
        for lm, read in zip((draft, target), reads, strict=True)
    ]
    logits = [columns * sizes[0], target.vocab_size * sizes[1]]
    depth, stage = settings.gamma, STAGES[-1]
    judged = 0 if target.device.type == "cpu" else JUDGED * columns
    if judged and columns < target.vocab_size:
        judged += (WARPED if settings.warp == Warp() else JUDGED) * target.vocab_size
    cached = depth * draft.row_bytes + max(depth, stage) * target.row_bytes
    return cached + depth * (states + 2 * logits[0]) + stage * (sum(logits) + judged)


def free_bytes(device: torch.device) -> int:
    if device.type == "cuda" and torch.cuda.is_available():
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + kept
    if device.type == "meta":  # memory is only counted there
        return 1 << 60
    return psutil.virtual_memory().available


class _Waiting(NamedTuple):
    """An answer, and the caches of the labelling models at the time it was yielded."""

    answer: Answer
    held: list[Held]
    rollouts: int
    rows: int


def joined(
    pair: ModelPair, answers: Iterable[Answer], settings: HarvestSettings, room: Room
) -> Iterator[list[Answer]]:
    """Yield answers in order, as many together as `room` allows. Meanwhile the draft, and a sampled
    target, hold their texts one after another, each without its last token."""
    # a greedy target's verdicts are known from the response
    models = [pair.draft] if settings.warp.temperature == 0 else [pair.draft, pair.target]
    waiting = list[_Waiting]()
    for answer in answers:
        count = -(-len(answer.distributions.response) // settings.stride)
        if not waiting and (count >= room.joined or pair.draft.length >= room.rows):
            yield [answer]  # both caches hold it as it is
            continue
        new = _Waiting(answer, [lm.held() for lm in models], count, pair.draft.length)
        rollouts = count + sum(each.rollouts for each in waiting)
        rows = new.rows + sum(each.rows for each in waiting)
        if waiting and (rollouts > room.joined or rows > room.rows):
            group, waiting = _together(models, waiting), []  # frees their copies
            yield group
        waiting.append(new)
    if waiting:
        group, waiting = _together(models, waiting), []
        yield group


def _together(models: list[CachedLM], waiting: list[_Waiting]) -> list[Answer]:
    for lm, parts in zip(models, zip(*(each.held for each in waiting), strict=True), strict=True):
        if len(parts) == 1:
            lm.load(*parts[0])
            continue
        layers = list[tuple[torch.Tensor, torch.Tensor]]()
        for layer in zip(*(part.rows for part in parts), strict=True):
            keys, values = (torch.cat(each, 2) for each in zip(*layer, strict=True))
            layers.append((keys, values))
        states = [part.states for part in parts if part.states is not None]
        lm.load(layers, torch.cat(states) if states else None)
    return [each.answer for each in waiting]
