"""scripts/evaluate.py from its command line on a tiny pair: what runs it."""

from functools import partial
from pathlib import Path
from typing import Any

from hydra.core.global_hydra import GlobalHydra

from decoding.models.loading import load_pair, pair_identity
from decoding.settings import Pair
from scripts import evaluate
from tests.helpers.programs import programs
from tests.helpers.training.checkpoints import write_checkpoint

LEARNED = ("specdecpp", "hrad")
METHODS = ["autoregressive", "fixed", "confidence", "product", "adaedl", *LEARNED]


run = partial(programs.run, evaluate)


def identity(settings: list[str]) -> dict[str, Any]:
    GlobalHydra.instance().clear()
    return pair_identity(load_pair(Pair.of(programs.composed("evaluate", *settings).pair)))


def write_checkpoints(settings: list[str], warp: dict[str, Any], **changes: Any) -> None:
    context = {"pair": identity(settings), "warp": warp, "draft_warp": warp, **changes}
    for name, dim in zip(LEARNED, (24, 48), strict=True):
        write_checkpoint(Path("checkpoints") / name, name, dim, gamma=3, context=context)


def refused(*arguments: str) -> str:
    message = programs.refused(evaluate, *arguments)
    assert not Path("runs").exists()
    return message
