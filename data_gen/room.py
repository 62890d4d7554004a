"""How much of a harvest is labelled together, and the memory that takes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import psutil
import torch

from data_gen.own_tokens import own_tokens
from data_gen.requests import Request
from data_gen.settings import HarvestSettings
from data_gen.verdicts import STAGES
from decoding.models.cached_lm import CachedLM
from decoding.models.loading import ModelPair
from decoding.sampling import Warp
from runtime.errors import UserError

GB = 1e9
WARPED = 12  # bytes for each token of the vocabulary: logits and p, in float32
JUDGED = 40  # the same: p, q, their residuals and order


@dataclass(frozen=True)
class Room:
    """rollouts: most that one forward advances; joined: responses are labelled together up to so
    many rollouts; rows: and up to so many cached rows. One response alone may have more of both.
    bytes: what they take at most, in the device's memory."""

    rollouts: int
    joined: int
    rows: int
    bytes: int = 0


ON_A_CORE = Room(128, 32, 1024)  # rows that see past more of other texts' take longer than alone
ON_A_DEVICE = Room(256, 256, 1 << 14)


def room_of(pair: ModelPair, requests: Sequence[Request], settings: HarvestSettings) -> Room:
    """As much as is of use and fits `settings.label_gb`, or else half of the memory that is free
    beside the models and the batch that is answered.

    Raises UserError where the longest text and one rollout do not fit. Empties both caches."""
    device, longest = pair.target.device, 0
    best = ON_A_CORE if device.type == "cpu" else ON_A_DEVICE
    if requests:
        longest = max(len(request.tokens) for request in requests) + settings.max_new_tokens
    row = sum(bytes_of_row(lm) for lm in (pair.target, pair.draft))
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
        rollouts = 1 << (rollouts.bit_length() - 1)  # so that a little more or less is the same
    rows = min(best.rows, (most - rollouts * each) // (2 * max(1, row)))
    if rows < best.rows:
        rows = max(longest, 1 << (rows.bit_length() - 1))
    taken = int(rollouts * each + 2 * rows * row)
    return replace(
        best, rollouts=rollouts, joined=min(best.joined, rollouts), rows=rows, bytes=taken
    )


def bytes_of_row(lm: CachedLM) -> int:
    """Return the bytes of keys and values, which are known once there are some."""
    lm.reset()
    lm.forward(torch.zeros(1, dtype=torch.int64), logits="none")
    found = lm.row_bytes
    lm.reset()
    return found


def bytes_of_rollout(pair: ModelPair, settings: HarvestSettings) -> int:
    """Return the bytes of one that a sampled target verifies: cached rows, hidden states, logits,
    the draft's twice while they are joined, and what comes of logits that are judged: a few rows at
    a time on a CPU, all at once elsewhere."""
    draft, target = pair.draft, pair.target
    config = draft.model.config.get_text_config()
    states = len(settings.layers.draft_layers) * config.hidden_size * 2
    columns = own_tokens(draft).columns
    logits = [columns * draft.model.dtype.itemsize, target.vocab_size * target.model.dtype.itemsize]
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
    if device.type == "meta":  # where it is only counted
        return 1 << 60
    return psutil.virtual_memory().available
