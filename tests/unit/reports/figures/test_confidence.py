"""What the draft's probabilities say about acceptance, on hand-made tokens."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from papers.dyspec.acceptance import acceptance_by_probability
from reports.figure import Missing, save
from reports.figures.confidence import QUANTITIES, by_verdict
from reports.harvest_data import DraftTokens

TOKENS = DraftTokens(
    pair="toy",
    dataset="alpaca",
    temperature=1.0,
    draft_temperature=1.0,
    q=torch.tensor([0.05, 0.15, 0.95, 1.0]),
    max_q=torch.tensor([0.5, 0.6, 0.95, 1.0]),
    entropy=torch.tensor([3.0, 2.0, 1.0, 0.0]),
    accept=torch.tensor([0.2, 0.4, 1.0, 0.8]),
    accepted=torch.tensor([False, True, True, True]),
    group=torch.tensor([0, 0, 1, 1]),
)


def test_accepted_and_rejected_tokens_are_apart() -> None:
    drawn, highest, entropy = (by_verdict([TOKENS], quantity) for quantity in QUANTITIES)
    assert drawn.column("verdict") == ["accepted", "rejected"]
    assert drawn.column("tokens") == [3, 1] and drawn.column("prompts") == [2, 1]
    assert drawn.column("median") == pytest.approx([0.95, 0.05])
    assert drawn.column("mean q of the drawn token") == pytest.approx([0.7, 0.05])
    assert highest.column("mean highest q") == pytest.approx([0.85, 0.5])
    assert entropy.column("mean entropy (nats)") == pytest.approx([1.0, 3.0])
    assert entropy.column("95 %") == pytest.approx([1.9, 3.0])


def test_one_prompt_has_no_interval() -> None:
    low = by_verdict([TOKENS], QUANTITIES[0]).column("mean q of the drawn token low")
    assert low[0] is not None and low[1] is None


def test_every_dataset_and_temperature_has_its_rows() -> None:
    other = replace(TOKENS, temperature=0.0, dataset="gsm8k")
    figure = by_verdict([TOKENS, other], QUANTITIES[0])
    assert figure.column("temperatures") == ["T = 1"] * 2 + ["T = 0, draft 1"] * 2
    assert figure.column("dataset") == ["alpaca"] * 2 + ["gsm8k"] * 2
    assert figure.n == "toy, 4 prompts, 8 draft tokens"


def test_acceptance_is_averaged_within_bins_of_q() -> None:
    figure = acceptance_by_probability([TOKENS])
    assert figure.column("q from") == [0.0, 0.1, 0.9] and figure.column("q to") == [0.1, 0.2, 1.0]
    assert figure.column("acceptance") == pytest.approx([0.2, 0.4, 0.9])
    assert figure.column("mean q") == pytest.approx([0.05, 0.15, 0.975])
    assert figure.column("tokens, %") == [25, 25, 50]


def test_prompts_of_other_datasets_are_other_prompts() -> None:
    figure = acceptance_by_probability(
        [TOKENS, replace(TOKENS, dataset="gsm8k", accept=TOKENS.accept / 2)]
    )
    assert figure.column("acceptance") == pytest.approx([0.15, 0.3, 0.675])
    low, high = (figure.column(f"acceptance {end}")[0] for end in ("low", "high"))
    assert low < 0.15 < high  # type: ignore[operator]


def test_nothing_to_draw_from_says_what_is_needed() -> None:
    for build in (lambda: by_verdict([], QUANTITIES[0]), lambda: acceptance_by_probability([])):
        with pytest.raises(Missing, match="gen_data.py"):
            build()


def test_pictures_name_their_axes(tmp_path: Path) -> None:
    figures = [
        *(by_verdict([TOKENS], quantity) for quantity in QUANTITIES),
        acceptance_by_probability([TOKENS]),
    ]
    for figure in figures:
        assert figure.kind == "measured" and "bootstrap" in figure.interval
        assert all(path.stat().st_size > 100 for path in save(figure, tmp_path))
