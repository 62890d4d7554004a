"""What figures are drawn from, read from a small harvest and untrained checkpoints."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from data_gen.samples import read_inputs, read_samples
from data_gen.storage.dataset import Harvest
from papers.specbranch.activations import NEEDS
from papers.specbranch.hrad_data import (
    CLASSES,
    EVEN,
    LENGTHS,
    LONE,
    POSITIONS,
    PROBABLE,
    activations,
    aged,
    counterpart,
    heads,
    of_hrad,
    rounds_back,
)
from papers.specbranch.layers import FIGURES, by_layers
from predictors.base import load_predictor
from predictors.inputs import Inputs
from predictors.metrics import log_loss
from reports.artifacts import Artifacts, Checkpoint
from reports.checkpoint_data import predicted, unseen
from reports.figure import Figure, Missing
from reports.harvest_data import draft_tokens, rounds
from runtime.files import file_hash
from tests.helpers.data import harvests
from tests.helpers.data.harvests import (
    DIM,
    EMBEDDING,
    PAIR,
    PROMPTS,
    WARP,
    described_as,
    write_harvest,
)
from tests.helpers.training.checkpoints import write_checkpoint


def harvest(folder: Path, **other: Any) -> Harvest:
    return described_as(folder, **other)


def context_of(data: Path) -> Mapping[str, Any]:
    return {
        **{"pair": PAIR, "warp": WARP, "draft_warp": WARP},
        "provenance": {"data": {"sha256": file_hash(data / "manifest.json")}},
    }


def checkpoint(folder: Path, data: Path, name: str = "hrad", **settings: Any) -> Checkpoint:
    context = context_of(data)
    dim = DIM + EMBEDDING * (name == "hrad")
    write_checkpoint(folder, name, dim, gamma=3, context=context, settings=settings)
    return Checkpoint(folder, json.loads((folder / "config.json").read_text()))


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Harvest:
    return harvest(write_harvest(tmp_path_factory.mktemp("home")))


@pytest.fixture(scope="module")
def away(tmp_path_factory: pytest.TempPathFactory) -> Harvest:
    """Two of its prompts are those of `home`."""
    return harvest(write_harvest(tmp_path_factory.mktemp("away"), names="other-", shared=2))


def test_draft_tokens_are_those_with_a_verdict(home: Harvest) -> None:
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


def test_a_greedy_draft_is_read_at_temperature_1(home: Harvest) -> None:
    greedy = harvest(home.folder, draft_warp={**WARP, "temperature": 0.0})
    (tokens,) = draft_tokens([greedy])
    assert tokens.q.tolist() == tokens.max_q.tolist() and tokens.distributions == "T = 1, draft 0"


def test_harvests_of_one_dataset_are_one_row(home: Harvest, away: Harvest) -> None:
    (alone,), (both,) = draft_tokens([home]), draft_tokens([home, away])
    assert len(both.q) == 2 * len(alone.q) and len(both.group.unique()) == 2 * sum(PROMPTS.values())
    cold = harvest(away.folder, warp={**WARP, "temperature": 0.0})
    assert [tokens.distributions for tokens in draft_tokens([home, cold])] == [
        "T = 1",
        "T = 0, draft 1",
    ]


def test_rounds_are_kept_by_temperature(home: Harvest, away: Harvest) -> None:
    cold = harvest(away.folder, warp={**WARP, "temperature": 0.0})
    found = rounds([home, cold, home])
    assert {temperature: len(parts) for temperature, parts in found.items()} == {1.0: 2, 0.0: 1}
    assert (found[1.0][0].accepted <= found[1.0][0].most).all()


def test_predictions_are_of_prompts_that_were_not_trained_on(
    tmp_path: Path, home: Harvest, away: Harvest
) -> None:
    found = predicted(checkpoint(tmp_path / "h", home.folder), [away, home])
    assert [(one.dataset, one.in_domain) for one in found] == [
        (home.name, True),
        (away.name, False),
    ]
    assert [one.prompts for one in found] == [PROMPTS["test"], sum(PROMPTS.values()) - 2]
    assert unseen(away, home).tolist() == [False] * 2 + [True] * (sum(PROMPTS.values()) - 2)
    assert all((one.as_trained.sum(1) - 1).abs().max() < 1e-6 for one in found)


@pytest.mark.parametrize("name", ["hrad", "specdecpp"])
def test_they_are_those_of_the_checkpoint(tmp_path: Path, home: Harvest, name: str) -> None:
    ours = checkpoint(tmp_path / "h", home.folder, name)
    (one,) = predicted(ours, [home])
    predictor = load_predictor(ours.folder)
    samples = read_samples(home, predictor, "test")
    probs = predictor.predict_proba(samples["inputs"].float())
    assert torch.allclose(one.calibrated if name == "hrad" else one.calibrated[:, 1], probs)
    assert torch.equal(one.targets, predictor.targets(samples))


def test_nothing_is_said_where_the_training_prompts_are_not_known(
    tmp_path: Path, home: Harvest, away: Harvest
) -> None:
    ours = checkpoint(tmp_path / "h", home.folder)
    assert predicted(ours, [away]) == [] and aged(ours, [away], "positions") == []


def test_other_distributions_and_prompts_that_are_all_known_are_left_out(
    tmp_path: Path, home: Harvest, away: Harvest
) -> None:
    ours = checkpoint(tmp_path / "h", home.folder)
    cold = harvest(away.folder, warp={**WARP, "temperature": 0.0})
    same = harvest(write_harvest(tmp_path / "same", rows=20))
    assert [one.dataset for one in predicted(ours, [home, cold, same])] == [home.name]


def test_old_features_are_those_of_earlier_rounds_of_the_same_prompt(
    tmp_path: Path, home: Harvest
) -> None:
    ours = checkpoint(tmp_path / "h", home.folder)
    (one,) = aged(ours, [home], "positions")
    predictor = load_predictor(ours.folder)
    records = read_inputs(home, predictor, "rounds", "test", ("anchor", "known"))
    row = {
        (int(g), int(a)): n
        for n, (g, a) in enumerate(zip(records["group"], records["anchor"], strict=True))
    }
    kept = [key for key, n in row.items() if key[1] >= max(POSITIONS) and records["known"][n] >= 3]
    assert len(one.group) == len(kept) > 0 and list(one.probs) == list(POSITIONS)
    for age in (0, POSITIONS[-1]):
        wanted = records["inputs"][[row[group, anchor - age] for group, anchor in kept]].float()
        assert torch.allclose(one.probs[age], predictor.predict_proba(wanted))
    assert one.back == {age: age for age in POSITIONS}
    assert aged(ours, [harvest(home.folder, anchors={"stride": 4})], "positions") == []


def test_a_walk_goes_on_by_what_was_accepted_and_one_token() -> None:
    """Two responses; the first goes 0, 2, 3, 6, or with drafts of one token 0, 2, 3, 5, 7."""
    accepted = torch.tensor([1, 0, 0, 2, 5, 1, 3, 0] + [0, 0, 4])
    records = {
        "anchor": torch.tensor([*range(8), *range(3)]),
        "group": torch.tensor([0] * 8 + [1] * 3),
        "accepted": accepted,
    }
    second = [[10, 9, 8]]
    assert rounds_back(records, 3).tolist() == [[3, 2, 0], [6, 3, 2], *second]
    assert rounds_back(records, 1).tolist() == [[3, 2, 0], [5, 3, 2], [7, 5, 3], *second]
    assert rounds_back({**records, "accepted": accepted + 9}, 9).shape == (0, 3)


def test_ages_in_rounds_are_those_of_the_rounds_a_decode_comes_to(
    tmp_path: Path, home: Harvest
) -> None:
    ours = checkpoint(tmp_path / "h", home.folder)
    (one,) = aged(ours, [home], "rounds")
    predictor = load_predictor(ours.folder)
    records = read_inputs(home, predictor, "rounds", "test", predictor.columns)
    rows = rounds_back(records, 3)
    assert len(rows) == len(one.group) > 0 and one.back[0] == 0 and one.back[2] > one.back[1] > 1
    for place, age in enumerate((0, 1, 2)):
        wanted = predictor.predict_proba(records["inputs"][rows[:, place]].float())
        assert torch.allclose(one.probs[age], wanted)
    assert torch.equal(one.group, records["group"][rows[:, 0]])
    asked = {name: values[rows[:, 0]] for name, values in records.items()}
    assert torch.equal(one.targets, predictor.targets(predictor.samples(asked)))


def test_activations_are_those_of_both_heads_on_test_prompts(tmp_path: Path, home: Harvest) -> None:
    ours = checkpoint(tmp_path / "h", home.folder)
    lengths = checkpoint(tmp_path / "l", home.folder, predicts="lengths")
    found = activations(ours, lengths, [home])
    assert list(found.features) == ["inputs", CLASSES, LENGTHS]
    x, made = found.features["inputs"], found.features[CLASSES]
    assert x.shape[1] == DIM + EMBEDDING and made.shape == (len(x), 64)
    head = load_predictor(ours.folder).head
    assert torch.allclose(head.layers[-1](made), head(x))
    assert len(found.label) == len(found.group) == len(x) <= 400
    assert len(found.group.unique()) == PROMPTS["test"]
    assert list(activations(ours, None, [home]).features) == ["inputs", CLASSES]
    with pytest.raises(Missing, match="hidden states"):
        activations(ours, lengths, [harvest(home.folder, features_stored=False)])
    with pytest.raises(Missing, match="predictor=hrad"):
        activations(ours, lengths, [])


def test_lengths_are_held_against_the_classes_they_belong_to(
    tmp_path: Path, home: Harvest, away: Harvest
) -> None:
    ours = checkpoint(tmp_path / "h", home.folder)
    lengths = checkpoint(tmp_path / "l", home.folder, predicts="lengths")
    other = checkpoint(tmp_path / "o", home.folder, predicts="lengths", dropout=0.1)
    every = [other, ours, lengths]
    assert counterpart(ours, every) is lengths and counterpart(ours, [ours, other]) is None
    assert of_hrad(Artifacts(checkpoints=every)) == [ours] and "predictor=hrad" in NEEDS
    found = heads(ours, lengths, [away, home])
    assert [one.dataset for one in found] == [home.name, away.name]
    predictor, direct = (load_predictor(one.folder) for one in (ours, lengths))
    samples = read_samples(home, predictor, "test")
    x, one = samples["inputs"].float(), found[0]
    said = direct.predict_proba(x)
    assert torch.allclose(one.probs[CLASSES], predictor.predict_proba(x))
    pooled = torch.stack([said[:, 0], said[:, 1] + said[:, 2], said[:, 3]], dim=1)
    assert torch.allclose(one.probs[LENGTHS], pooled)
    assert torch.equal(one.decided[LENGTHS, PROBABLE], pooled.argmax(1))
    alone = torch.tensor([0, 1, 1, 2])[said.argmax(1)]
    assert torch.equal(one.decided[LENGTHS, LONE], alone)
    assert torch.equal(one.decided[LENGTHS, EVEN], alone), "no priors were divided into it"
    assert torch.equal(one.targets, predictor.targets(samples))


@pytest.fixture
def two_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Harvest:
    monkeypatch.setitem(harvests.INPUTS, "target_layers", [-2, -1])
    return harvest(write_harvest(tmp_path / "two"))


def of_layers(folder: Path, data: Harvest, layers: list[int], **settings: Any) -> Checkpoint:
    reads = Inputs((), layers, token=True)
    dim = DIM // 2 * len(layers) + EMBEDDING
    context = context_of(data.folder)
    write_checkpoint(
        folder,
        "hrad",
        dim,
        gamma=3,
        inputs=reads,
        context=context,
        settings={"layers": layers} | settings,
    )
    return Checkpoint(folder, json.loads((folder / "config.json").read_text()))


def test_layers_are_compared_on_the_same_rounds(tmp_path: Path, two_layers: Harvest) -> None:
    both = of_layers(tmp_path / "both", two_layers, [-2, -1])
    last = of_layers(tmp_path / "last", two_layers, [-1])
    figure = by_layers([both, last], [two_layers])
    assert figure.column("layers") == [1, 2] and figure.column("dataset") == ["two", "two"]
    assert figure.n.startswith(f"{PROMPTS['test']} prompts, ")
    predictor, other = (load_predictor(one.folder) for one in (last, both))
    losses = []
    for one in (predictor, other):
        samples = read_samples(two_layers, one, "test")
        probs = one.predict_proba(samples["inputs"].float()).double()
        losses.append(log_loss(probs, one.targets(samples).double()))
    assert figure.column("log loss") == pytest.approx([float(x.mean()) for x in losses])
    gain = float((losses[1] - losses[0]).mean())
    assert figure.column("difference") == pytest.approx([0.0, gain])
    with pytest.raises(Missing, match="gen_data.py"):
        by_layers([both, last], [])


def test_layers_are_compared_where_nothing_else_differs(
    tmp_path: Path, two_layers: Harvest
) -> None:
    both = of_layers(tmp_path / "both", two_layers, [-2, -1])
    last = of_layers(tmp_path / "last", two_layers, [-1])
    longer = of_layers(tmp_path / "longer", two_layers, [-1], dropout=0.1)
    lengths = of_layers(tmp_path / "lengths", two_layers, [-1], predicts="lengths")
    (entry,) = FIGURES

    def built(*checkpoints: Checkpoint) -> list[Figure]:
        artifacts = Artifacts(harvests=[two_layers], checkpoints=checkpoints)
        return [build() for build in entry.builders(artifacts)]

    (figure,) = built(longer, lengths, both, last)
    assert figure.column("layers") == [1, 2]
    with pytest.raises(Missing, match=r"predictor\.layers="):
        built(both, longer, lengths)
