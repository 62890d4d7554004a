"""What figures are drawn from, read from a small harvest and untrained checkpoints, and which
figures they give."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from data_gen.samples import read_samples, unseen
from data_gen.storage.dataset import Harvest
from papers.specbranch.hrad_data import aged
from predictors.base import load_predictor
from reports.artifacts import Artifacts, Checkpoint
from reports.figure import Figure, Missing, save
from reports.harvest_data import Predicted, draft_tokens, one_of_each, predicted, rounds
from tests.helpers.data import harvests
from tests.helpers.data.harvests import PAIR, PROMPTS, WARP, described_as, write_harvest
from tests.helpers.reports.artifacts import checkpoint, rounds_hold
from tests.unit.papers.test_exact import COST
from tests.unit.reports.test_figures import SCHEDULE, TUNING
from tests.unit.reports.test_report import LISTED, WITHOUT_INPUT

ONE_EACH = {"train": 1, "calibration": 1, "test": 1}
TWO_TESTED = {**ONE_EACH, "test": 2}


def cold(harvest: Harvest) -> Harvest:
    """Of the same prompts with a greedy target."""
    return described_as(harvest.folder, warp={**WARP, "temperature": 0.0})


def predictions(ours: Checkpoint, *of: Harvest) -> list[Predicted]:
    return predicted(ours, Artifacts(harvests=of))


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Harvest:
    return described_as(write_harvest(tmp_path_factory.mktemp("home")))


@pytest.fixture(scope="module")
def away(tmp_path_factory: pytest.TempPathFactory) -> Harvest:
    """Two of its prompts are those of `home`."""
    return described_as(write_harvest(tmp_path_factory.mktemp("away"), names="other-", shared=2))


def test_draft_tokens_are_those_with_a_verdict(home):
    (tokens,) = draft_tokens([home])
    records = home.rounds("all")
    kept, accepted = [], []
    for row in range(len(records["group"])):
        most = int(min(records["drafted"][row], records["known"][row]))
        for depth in range(min(int(records["accepted"][row]) + 1, most)):
            kept.append(float(records["q"][row, depth]))
            accepted.append(depth < int(records["accepted"][row]))
    assert tokens.q.tolist() == pytest.approx(kept) and tokens.accepted.tolist() == accepted
    assert (tokens.dataset, tokens.distributions) == ("toy", "T = 1")
    assert len(tokens.group.unique()) == sum(PROMPTS.values())


def test_a_greedy_draft_is_read_at_temperature_1(home):
    greedy = described_as(home.folder, draft_warp={**WARP, "temperature": 0.0})
    (tokens,) = draft_tokens([greedy])
    assert tokens.q.tolist() == tokens.max_q.tolist() and tokens.distributions == "T = 1, draft 0"


def test_harvests_of_one_dataset_are_one_row(home, away):
    (alone,), (both,) = draft_tokens([home]), draft_tokens([home, away])
    assert len(both.q) == 2 * len(alone.q) and len(both.group.unique()) == 2 * sum(PROMPTS.values())
    apart = [tokens.distributions for tokens in draft_tokens([home, cold(away)])]
    assert apart == ["T = 1", "T = 0, draft 1"]


def test_rounds_are_kept_by_temperature(home, away):
    found = rounds([home, cold(away), home])
    assert {temperature: len(parts) for temperature, parts in found.items()} == {1.0: 2, 0.0: 1}
    assert (found[1.0][0].accepted <= found[1.0][0].most).all()


def test_predictions_are_of_prompts_that_were_not_trained_on(tmp_path, home, away):
    found = predictions(checkpoint(tmp_path / "h", home.folder), away, home)
    domains = [(one.dataset, one.in_domain) for one in found]
    assert domains == [(home.name, True), (away.name, False)]
    assert [one.prompts for one in found] == [PROMPTS["test"], sum(PROMPTS.values()) - 2]
    assert unseen(away, home).tolist() == [False] * 2 + [True] * (sum(PROMPTS.values()) - 2)
    assert all((one.as_trained.sum(1) - 1).abs().max() < 1e-6 for one in found)


@pytest.mark.parametrize("name", ["hrad", "specdecpp"])
def test_they_are_those_of_the_checkpoint(tmp_path, home, name):
    ours = checkpoint(tmp_path / "h", home.folder, name)
    (one,) = predictions(ours, home)
    predictor = load_predictor(ours.folder)
    samples = read_samples(home, predictor, "test")
    probs = predictor.predict_proba(samples["inputs"].float())
    assert torch.allclose(one.calibrated if name == "hrad" else one.calibrated[:, 1], probs)
    assert torch.equal(one.targets, predictor.targets(samples))


def test_harvests_that_do_not_fit_are_left_out(tmp_path, home, away):
    ours = checkpoint(tmp_path / "h", home.folder)
    assert predictions(ours, away) == [] and aged(ours, [away], "positions") == []
    same = described_as(write_harvest(tmp_path / "same", rows=20))
    assert [one.dataset for one in predictions(ours, home, cold(away), same)] == [home.name]


ACCEPTANCE, SIBLINGS = "Acceptance against draft probability", "What siblings are worth"
LATENCY, HIDDEN = "Time per token by draft length", "What H-RAD makes of what it reads"
AGE, AGE_IN_ROUNDS = (f"Prediction against the age of features{end}" for end in ("", " in rounds"))
OF_A_CHECKPOINT = ("Reliability before and after calibration", "Drift across datasets")
DRAWN = (
    *(ACCEPTANCE, SIBLINGS, LATENCY, HIDDEN, AGE, AGE_IN_ROUNDS),
    "Draft probability of accepted and rejected tokens",
    "Highest draft probability at accepted and rejected tokens",
    "Entropy of the draft at accepted and rejected tokens",
    "Whether the best stop rule is a threshold on survival",
    "Forward times by regression",
    "Frontiers of discarded tokens and target calls",
    "Best threshold of every rule",
    "A budget of rows shared by all requests",
    "Confusion of classes",
)
SCORED = {"reliability": {"train": {"token": {"calibrated": {"log_loss": [0.6, 0.5, 0.7]}}}}}


def built(artifacts: Artifacts) -> tuple[dict[str, list[Figure]], dict[str, str]]:
    """Figures and needs by title, of those that are not drawn from an evaluation alone or from
    nothing."""
    figures: dict[str, list[Figure]] = {}
    lacking: dict[str, str] = {}
    for _, entry in LISTED:
        for builder in entry.builders(artifacts) if entry.title not in WITHOUT_INPUT else ():
            try:
                figure = builder()
                figures.setdefault(entry.title, []).append(figure)
            except Missing as missing:
                lacking[entry.title] = str(missing)
    return figures, lacking


def test_everything_is_there_or_says_what_it_needs(tmp_path, home):
    confusion = {"specdecpp": {}, "hrad": {"confusion": [[6, 2, 2], [1, 3, 1], [0, 1, 4]]}}
    heads = [checkpoint(tmp_path / name, home.folder, name) for name in ("hrad", "specdecpp")]
    data = {**heads[0].config["provenance"]["data"], "splits": {"test": {"prompts": 4, "rows": 20}}}
    more = {"provenance": {"data": data}, "metrics": {"test": confusion, **SCORED}}
    known = [Checkpoint(one.folder, {**one.config, **more}) for one in heads]
    cost: dict[str, Any] = {**COST, "pair": PAIR}
    schedules = [SCHEDULE, {**SCHEDULE, "details": {"scheduler": {}}}]
    rest = {"costs": [cost], "thresholds": [TUNING], "schedules": schedules}
    figures, lacking = built(Artifacts(harvests=[home], checkpoints=known, **rest))
    counts = {title: len(found) for title, found in figures.items()}
    assert counts == dict.fromkeys(DRAWN, 1) | dict.fromkeys(OF_A_CHECKPOINT, 2)
    assert {"Energy per token", "SpecDec++ heads by depth and weight"} <= lacking.keys()


def test_pairs_are_kept_apart(tmp_path, home):
    other = described_as(write_harvest(tmp_path / "other"), pair={**PAIR, "name": "renamed"})
    third = described_as(other.folder, pair={**PAIR, "draft": "dd"})
    figures, _ = built(Artifacts(harvests=[home, other, third]))
    found = figures[ACCEPTANCE]
    assert [figure.n.split(",")[1] for figure in found] == [" 40 prompts", " 20 prompts"]


def test_of_a_sweep_one_head_is_shown(tmp_path, home):
    first, second = (checkpoint(tmp_path / name, home.folder, "specdecpp") for name in ("a", "b"))
    third = checkpoint(tmp_path / "c", home.folder, "hrad")
    assert one_of_each([first, second, third]) == [first, third]


def unscored(folder: Path, home: Harvest, name: str) -> Checkpoint:
    made = checkpoint(folder, home.folder, name)
    return Checkpoint(folder, {**made.config, "metrics": {"test": {name: {}}}})


@pytest.mark.parametrize(
    ("rows", "prompts", "changes", "lacks"),
    [
        (1, ONE_EACH, {}, {AGE}),
        (1, TWO_TESTED, {}, {AGE_IN_ROUNDS}),
        (9, ONE_EACH, {}, {HIDDEN}),
        (9, TWO_TESTED, {}, set()),
        (30, ONE_EACH, {"known": 1, "accepted": 0}, {AGE, HIDDEN}),
        (30, ONE_EACH, {"known": 0, "accepted": 0}, {ACCEPTANCE, LATENCY, SIBLINGS}),
        (30, ONE_EACH, {"drafted": 0, "accepted": 0}, {LATENCY}),
        (30, ONE_EACH, {"accepted": 0}, set()),
        (30, ONE_EACH, {"accepted": 4}, set()),
        (30, {**ONE_EACH, "test": 0}, {}, {AGE}),
    ],
)
@pytest.mark.slow
def test_a_harvest_too_small_for_a_figure_is_named_and_the_others_are_drawn(
    rows, prompts, changes, lacks, tmp_path, monkeypatch
):
    rounds_hold(monkeypatch, **changes)
    monkeypatch.setattr(harvests, "PROMPTS", prompts)
    home = described_as(write_harvest(tmp_path / "tiny", rows=rows))
    heads = [unscored(tmp_path / name, home, name) for name in ("hrad", "specdecpp")]
    cost: dict[str, Any] = {**COST, "pair": PAIR}
    known = {"costs": [cost], "thresholds": [TUNING]}
    figures, lacking = built(Artifacts(harvests=[home], checkpoints=heads, **known))
    assert not lacks & figures.keys()
    for title in lacks:
        assert str(home.folder) in lacking[title] and "gen_data.py" in lacking[title]
    for number, figure in enumerate(one for found in figures.values() for one in found):
        save(replace(figure, name=str(number)), tmp_path)


@pytest.mark.slow
def test_a_harvest_too_small_does_not_hide_another(tmp_path, home):
    small = described_as(write_harvest(tmp_path / "small", rows=1, names="other-"))
    hrad = unscored(tmp_path / "hrad", home, "hrad")
    figures, _ = built(Artifacts(harvests=[small, home], checkpoints=[hrad]))
    (figure,) = figures[AGE]
    assert figure.column("dataset") == [home.name] * len(figure.rows)
