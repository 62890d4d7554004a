"""What the scheduler is told of a harvest: confidences as logged, calibrated, or the true ones."""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from decoding.stopping.rollout_table import Array, RolloutTable
from predictors.calibration import Calibration, Fit
from predictors.confidences.maps import PositionMaps, fit_maps
from predictors.confidences.sts import Sts
from predictors.confidences.table import Confidences, table

LOGGED, POSITION, ORACLE = "as logged", "position alone", "oracle"


def confidences(rounds: RolloutTable, gamma: int) -> Confidences:
    """The draft's own probability of each of the first `gamma` tokens of every round, as log-odds;
    labels are expected. Prompts are the groups."""
    inside = torch.from_numpy(np.arange(rounds.tokens.shape[1]) < rounds.length[:, None])
    labels = torch.from_numpy(rounds.accept[..., :gamma]).double().cumprod(-1)
    length = torch.from_numpy(rounds.limit(gamma))
    group = torch.arange(len(rounds.length))[:, None].expand_as(inside)
    columns = (logits(rounds, gamma), labels, length, group)
    return table("data", "harvest", *(each[inside] for each in columns))


def fitted(
    rows: Confidences, fit: Fit | None, sts: Sts | None, survival: bool
) -> PositionMaps | None:
    """As train.py fits the calibrations of imported confidences; None where nothing is fitted."""
    return None if fit is None and sts is None else fit_maps(rows, fit, sts, survival)


def by_position(rows: Confidences) -> PositionMaps:
    """Maps that look at no confidence: how many of the tokens that are reached are accepted, at
    each position. What is gained beyond them is what confidences know of single drafts; not that a
    budget, unlike one length, need not be a multiple of the requests."""
    inside = torch.arange(rows.gamma) < rows.length[:, None]
    accepted, came = ((each * inside).sum(0) for each in (rows.labels, rows.before()))
    odds = torch.logit(accepted / came.clamp_min(1e-9), 1e-7).tolist()
    constants = (Calibration("constant", scale=(0.0, 0.0), bias=(0.0, one)) for one in odds)
    return PositionMaps(tuple(constants))


def said(
    rounds: RolloutTable, gamma: int, maps: Mapping[str, PositionMaps | None]
) -> dict[str, Array]:
    """By who says it: P(a token is accepted, if those before it are), [B, T, gamma]: the draft's
    probability as logged, by each of `maps`, and min(1, p/q) itself (the oracle)."""
    z = logits(rounds, gamma)
    found = {LOGGED: rounds.confidence[..., :gamma].astype(np.float64)}
    for name, one in maps.items():
        if one is not None:
            found[name] = conditional(one.surviving(z.reshape(-1, gamma))).reshape(z.shape).numpy()
    return {**found, ORACLE: rounds.accept[..., :gamma].astype(np.float64)}


def logits(rounds: RolloutTable, gamma: int) -> Tensor:
    """[B, T, gamma]"""
    return torch.logit(torch.from_numpy(rounds.confidence[..., :gamma]).double(), 1e-7)


def conditional(survival: Tensor) -> Tensor:
    """c_i of the survival of prefixes, both [n, gamma]; 0 where none is left."""
    before = torch.cat([torch.ones_like(survival[:, :1]), survival[:, :-1]], 1)
    return torch.where(before > 0, survival / before.clamp_min(1e-300), 0.0).clamp_max(1)
