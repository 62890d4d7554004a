"""The stop rule that asks a trained predictor, by the predictor's name alone."""

import importlib
from pathlib import Path

from decoding.interfaces import StopRule
from decoding.sampling import Warp
from predictors.base import read_config, refuse_changed, refuse_mismatch
from predictors.hub import local_folder
from runtime.errors import UserError
from serving.models import SpeculativePair

KEY = "predictor"


def rule_of(
    source: str | Path, threshold: float | None, pair: SpeculativePair, warp: Warp, draft_warp: Warp
) -> StopRule:
    """`RULE.of(folder, threshold)` of `decoding.stopping.<name of the predictor>`. source: folder
    or hub id; threshold: None for the rule's own.

    Raises UserError for a checkpoint that is missing or damaged, was trained for another pair or
    other warps, or has no such rule."""
    folder = local_folder(source, KEY)
    config = read_config(folder, KEY)
    refuse_changed(folder, config, KEY)
    wanted = {"warp": warp.to_dict(), "draft_warp": draft_warp.to_dict()}
    refuse_mismatch(config, {"pair": pair.identity, **wanted}, f"{KEY}: {folder}")
    name = f"decoding.stopping.{config['predictor']}"
    if importlib.util.find_spec(name) is None or not hasattr(
        module := importlib.import_module(name), "RULE"
    ):
        raise UserError(
            f"{KEY}: {folder} holds {config['predictor']!r}, for which {name} has no RULE. Give a"
            " stop rule or a structure that asks it: stop=..."
        )
    rule: StopRule = module.RULE.of(folder, threshold)
    return rule
