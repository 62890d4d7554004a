"""Engines whose models are on a device, a pretend one, enumerated: drafts are drawn there, verified
there, and the output has the target's distribution."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from decoding.interfaces import LMOutput
from decoding.models.table_lm import TableLM
from decoding.sampling import Warp
from tests.contract.covering import covering, crossed
from tests.contract.engines import OFF, Case, Size, checked, engine, toy_pair
from tests.helpers.device.pretend_device import pretend

CASES = [
    Case("block", {}, "chain", Size(3, 3, {"gamma_max": 2})),
    Case("rrsw", {}, "tree", Size(3, 2, {"widths": [2, 1]})),
    Case("spechub", {}, "tree", Size(3, 2, {"widths": [2, 1]})),
    Case("rrsw", {}, "dyspec", Size(2, 4, {"budget": 4})),
    Case("block", {}, "sources", Size(2, 4, {"gamma_max": 2, "stretch": 1})),
]


class PlacedLM(TableLM):
    """Its outputs are on `output_device`, as a `CachedLM`'s are; one engine uses it at a time."""

    def __init__(self, lm: TableLM, device: str) -> None:
        super().__init__(lm.table)
        self.device, self.output_device = torch.device(device), torch.device("cpu")

    def forward(self, *args: Any, **options: Any) -> LMOutput:
        found = super().forward(*args, **options)
        hidden = None if found.hidden is None else found.hidden.to(self.output_device)
        return LMOutput(found.logits.to(self.output_device), hidden)

    def embed(self, token: int) -> Tensor:
        return super().embed(token).to(self.output_device)


@pytest.mark.parametrize(
    ("case", "draft_warp", "draft"),
    covering(
        crossed(
            [pytest.param(case, id=case.label) for case in CASES],
            [OFF, Warp(1.5)],
            ["cuda:1", "cuda:0"],
        ),
        lambda case, *_: case.label,
        lambda _, draft_warp, __: draft_warp,
        lambda *values: values[-1],
    ),
)
def test_engine_distribution_on_a_device(
    case: Case, draft_warp: Warp, draft: str, tmp_path: Path
) -> None:
    plain = toy_pair(case.size.vocab, 9, 0.2)  # rejected often: every coin and trial counts
    with pretend() as counts:
        pair = SimpleNamespace(
            target=PlacedLM(plain.target, "cuda:0"), draft=PlacedLM(plain.draft, draft)
        )
        traces = checked(engine(pair, case, tmp_path, draft_warp=draft_warp), case.size.length)
    assert max(len(trace.rounds) for trace in traces) > 1
    assert counts.transfers["to host"] > len(traces)
