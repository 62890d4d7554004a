"""The decode that a replay describes: chains, verified token by token, draft and target in turn."""

from typing import Any

from decoding.engines.serial import SerialEngine
from decoding.interfaces import StopRule
from decoding.models.loading import ModelPair
from decoding.sampling import Warp
from decoding.stopping.never import Never
from decoding.structures.chain import Chain
from decoding.verifiers.token import TokenVerifier


def engine(
    pair: ModelPair, stop: StopRule | None, gamma_max: int, warp: Warp, draft_warp: Warp
) -> SerialEngine:
    """stop: None for drafts of `gamma_max` tokens."""
    chain: Any = Chain(gamma_max)
    verifier: Any = TokenVerifier()
    eos_ids = frozenset(pair.eos_ids)
    return SerialEngine(pair, chain, stop or Never(), verifier, warp, draft_warp, eos_ids)


def _target(part: type) -> str:
    return f"{part.__module__}.{part.__qualname__}"


REPLAYED = {
    "engine": _target(SerialEngine),
    "structure": _target(Chain),
    "verifier": _target(TokenVerifier),
}
"""What a method is made of, as configs name it, where replay says what it counts."""
