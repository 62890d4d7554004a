"""A target that is split over two devices, and a draft that runs on whichever of them is idle
(SpecBranch, 2506.01979, appendix G.1).

The devices are a CPU's cores, so only the schedule is measured: a device runs one network at a
time, and a hand-over between the halves takes a given time. Moving the draft costs nothing, since
both cores share one memory. The tokens do not depend on the schedule."""

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from threading import Condition
from typing import Any

from decoding.interfaces import Pair
from decoding.models.cached_lm import CachedLM
from decoding.models.cpu_llama import LlamaForward
from decoding.models.mixed import mix_of
from runtime.errors import UserError

KEY = "engine.pipeline"


class TwoDevices:
    """Assigns devices to one target and one draft, each called from one thread."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._busy = [False, False]
        self._wanted: int | None = None  # device that the target waits for: the draft leaves it

    def take(self, device: int) -> None:
        """Wait until `device` is idle and run the target on it."""
        with self._changed:
            self._wanted = device
            self._changed.wait_for(lambda: not self._busy[device])
            self._wanted, self._busy[device] = None, True

    def take_idle(self) -> int:
        """Wait for a device that is idle and not waited for, and run the draft on it."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._free()))
            device = self._free()[0]
            self._busy[device] = True
            return device

    def leave(self, device: int) -> None:
        with self._changed:
            self._busy[device] = False
            self._changed.notify_all()

    def _free(self) -> list[int]:
        return [n for n in (1, 0) if not self._busy[n] and n != self._wanted]


def check_pipeline(pair: Pair) -> tuple[CachedLM, CachedLM, LlamaForward]:
    """Return both models, and the target's forward, which can pause. Raises UserError if it cannot,
    or if the draft is no network of its own on the CPU."""
    target, draft = pair.target, pair.draft
    halves = target.in_halves() if isinstance(target, CachedLM) else None
    if not isinstance(target, CachedLM) or halves is None:
        raise UserError(
            f"{KEY}, pair.target: only a Llama, Mistral or Qwen2 with plain weights on the CPU,"
            f" without hooks and adapters, is split in halves. Set {KEY}=null"
        )
    if not isinstance(draft, CachedLM) or draft.device.type != "cpu" or mix_of(draft) < 1:
        raise UserError(
            f"{KEY}, pair.draft: expected an ordinary draft on the CPU, pair.draft_mix=1. Change"
            f" that, or set {KEY}=null"
        )
    return target, draft, halves


@contextmanager
def pipelined(pair: Pair, hand_over: float | None) -> Iterator[None]:
    """Run the target's forwards half on one of two devices and half on the other, `hand_over`
    seconds apart, and the draft's on the idle one. None: nothing changes.

    Each model is called from one thread at a time. Raises UserError as `check_pipeline` does."""
    if hand_over is None:
        yield
        return
    target, draft, halves = check_pipeline(pair)
    devices, whole, held = TwoDevices(), draft.network, 0

    def pause() -> None:
        nonlocal held
        devices.leave(0)
        time.sleep(hand_over)
        devices.take(1)
        held = 1

    def run_target(*arguments: Any, **options: Any) -> Any:
        nonlocal held
        devices.take(0)
        held = 0
        try:
            return halves(*arguments, **options)
        finally:
            devices.leave(held)

    def run_draft(*arguments: Any, **options: Any) -> Any:
        device = devices.take_idle()
        try:
            return whole(*arguments, **options)
        finally:
            devices.leave(device)

    with ExitStack() as stack:
        stack.enter_context(halves.pausing(pause))
        stack.callback(setattr, target, "network", halves)
        stack.callback(setattr, draft, "network", whole)
        target.network, draft.network = run_target, run_draft
        yield
