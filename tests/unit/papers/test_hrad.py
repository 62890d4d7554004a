"""What H-RAD heads make of rounds: figures of features made by hand, and what they are drawn from,
of a small harvest and untrained checkpoints."""

import json
from dataclasses import replace
from math import log
from pathlib import Path
from typing import Any

import pytest
import torch

from data_gen.samples import read_inputs, read_samples
from data_gen.storage.dataset import Harvest
from papers.specbranch.hrad import (
    FIGURES,
    NEEDS,
    by_layers,
    feature_age,
    lengths_table,
    same_class,
    tsne,
)
from papers.specbranch.hrad_data import (
    CLASSES,
    EVEN,
    LENGTHS,
    LONE,
    POSITIONS,
    PROBABLE,
    Activations,
    Aged,
    Heads,
    activations,
    aged,
    counterpart,
    heads,
    of_hrad,
    rounds_back,
)
from papers.specdecpp.heads import sweep
from predictors.base import load_predictor
from predictors.inputs import Inputs
from predictors.metrics import log_loss
from reports.artifacts import Artifacts, Checkpoint
from reports.figure import Figure
from tests.helpers.data import harvests
from tests.helpers.data.harvests import DIM, EMBEDDING, PROMPTS, described_as, write_harvest
from tests.helpers.evaluation.evaluations import drawn, interval, lacks, records_by
from tests.helpers.reports.artifacts import checkpoint, context_of
from tests.helpers.training.checkpoints import write_checkpoint

GENERATOR = torch.Generator().manual_seed(0)
GAIN = f"{CLASSES} - {LENGTHS}"


def hidden(apart: float) -> Activations:
    """Two classes whose features lie `apart`, 12 rounds of each, of 4 prompts."""
    label = torch.tensor([0, 2] * 12)
    noise = torch.randn(24, 5, generator=GENERATOR)
    features = {"inputs": noise, CLASSES: noise + apart * label[:, None]}
    return Activations("h", 3, features, label, torch.arange(24) // 6)


def with_lengths(found: Activations) -> Activations:
    return replace(found, features={**found.features, LENGTHS: found.features["inputs"]})


def test_neighbours_of_other_prompts_are_counted():
    found = hidden(50.0)
    # of the 18 rounds of other prompts 9 are of the same class, and the 10th neighbour is not
    shares = same_class(found.features[CLASSES], found)
    assert interval(shares, "share") == pytest.approx([0.9] * 3)
    nothing = same_class(torch.randn(24, 5, generator=GENERATOR), hidden(0.0))["share"]
    assert 0.3 < nothing < 0.7


def test_every_round_is_a_point_in_both_panels():
    found = hidden(50.0)
    figure = tsne(found)
    assert figure.column("features") == ["inputs"] * 24 + [CLASSES] * 24
    assert figure.column("class")[:4] == ["none", "all", "none", "all"]
    assert figure.n == "4 prompts, 24 rounds" and figure.kind == "modelled"
    for words in ("three classes 0.900 (0.900-0.900)", "by chance 0.500", "predicts=lengths"):
        assert words in figure.how_to_read
    assert "predictor.predicts" not in tsne(with_lengths(found)).how_to_read
    assert tsne(found).rows == figure.rows


def both_heads() -> Heads:
    """The classes are known to the one head, and only their shares to the other."""
    targets = torch.tensor([[1.0, 0, 0], [1, 0, 0], [0, 1, 0], [0.5, 0.5, 0]])
    shares = torch.tensor([0.625, 0.375, 0.0]).expand(4, 3)
    probs = {CLASSES: 0.9 * targets + 0.1 / 3, LENGTHS: shares}
    right, none, everything = torch.tensor([0, 0, 1, 0]), torch.zeros(4).long(), torch.full((4,), 2)
    decided = {
        (CLASSES, PROBABLE): right,
        (LENGTHS, PROBABLE): none,
        (LENGTHS, LONE): everything,
        (CLASSES, EVEN): right,
        (LENGTHS, EVEN): 1 - right,
    }
    return Heads("h", "toy", 3, probs, decided, targets, torch.tensor([0, 0, 1, 1]))


def test_classes_and_lengths_are_compared_on_the_same_rounds():
    figure = lengths_table([both_heads()])
    rows = records_by(figure, "head", "decision")
    assert {key: row["accuracy"] for key, row in rows.items()} == {
        (CLASSES, PROBABLE): 0.875,  # a label that is a chance is right that often
        (LENGTHS, PROBABLE): 0.625,
        (LENGTHS, LONE): 0.0,
        (CLASSES, EVEN): 0.875,
        (LENGTHS, EVEN): 0.125,
        (GAIN, PROBABLE): 0.25,
        (GAIN, LONE): 0.875,
        (GAIN, EVEN): 0.75,
        ("shares", PROBABLE): 0.625,
    }
    assert interval(rows[GAIN, PROBABLE], "accuracy")[1:] == [0.0, 0.5], "over the two prompts"
    known = -(0.625 * log(0.625) + 0.375 * log(0.375))
    loss = {key: row["log loss"] for key, row in rows.items()}
    assert loss[LENGTHS, PROBABLE] == pytest.approx(known) == loss["shares", PROBABLE]
    assert loss[GAIN, PROBABLE] == pytest.approx(loss[CLASSES, PROBABLE] - known)
    assert interval(rows[LENGTHS, LONE], "log loss") == [None] * 3
    assert figure.n == "2 prompts, 4 rounds of 3 draft tokens"
    lacks("predictor.predicts=lengths", lengths_table, [])


def of_ages(unit: str = "positions") -> Aged:
    """Fresh features know the class, stale ones the shares."""
    label = torch.tensor([0, 0, 1, 0])
    targets = torch.nn.functional.one_hot(label, 3).float()
    shares = torch.tensor([0.75, 0.25, 0.0]).expand(4, 3)
    sure = 0.9 * targets + 0.05 * (1 - targets)
    return Aged(
        *("h", "toy", 3, 0, unit),
        back={0: 0.0, 4: 6.0},
        probs={0: sure, 4: shares},
        decided={0: label, 4: torch.tensor([0, 0, 0, 1])},
        targets=targets,
        group=torch.tensor([0, 0, 1, 1]),
    )


def test_each_age_has_its_accuracy_and_log_loss_in_rounds_too():
    figure = feature_age([of_ages()])
    assert figure.column("age (positions)") == [0, 4] and figure.how_to_read == ""
    assert figure.column("accuracy") == [1.0, 0.5]
    assert figure.column("most frequent class") == [0.75, 0.75]
    entropy = -(0.75 * log(0.75) + 0.25 * log(0.25))
    assert figure.column("log loss") == pytest.approx([-log(0.9), entropy])
    assert figure.column("base rate, log loss") == pytest.approx([entropy, entropy])
    worse = figure.column("log loss above age 0")
    assert worse == pytest.approx([0.0, entropy + log(0.9)]), "of the same rounds"
    assert figure.n == "2 prompts, 4 rounds of 3 draft tokens" and "bootstrap" in figure.interval
    lacks("anchors.stride=1", feature_age, [])
    figure = feature_age([of_ages("rounds")])
    assert figure.column("age (rounds)") == [0, 4] and figure.name == "feature-age-rounds-h"
    assert figure.how_to_read == "Positions in a round, on average: toy 1.50."
    older = feature_age([replace(of_ages("rounds"), trained_age=1)])
    assert older.how_to_read.startswith("Trained on states of age 1, in rounds. Positions")


def specdecpp(depth: int, w_rej: float, loss: float) -> Checkpoint:
    stages = {"calibrated": {"log_loss": [loss, loss - 0.1, None]}}
    config: dict[str, Any] = {
        "predictor": "specdecpp",
        "settings": {"depth": depth, "w_rej": w_rej, "context": "mixed"},
        "metrics": {
            "reliability": {"train (test split)": {"token": stages}},
            "test": {"specdecpp": {"kl": 0.4, "ece": 0.02, "auroc": 0.7}},
        },
        "provenance": {"data": {"splits": {"test": {"prompts": 7, "rows": 2000}}}},
    }
    return Checkpoint(Path(f"ck/d{depth}w{w_rej}"), config)


def test_heads_are_ordered_by_their_settings():
    figure = sweep([specdecpp(3, 6.0, 0.6), specdecpp(0, 6.0, 0.7), specdecpp(0, 1.0, 0.8)])
    assert [row[2:4] for row in figure.rows] == [[0, 1.0], [0, 6.0], [3, 6.0]]
    assert figure.column("log loss") == [0.8, 0.7, 0.6]
    assert figure.column("log loss high") == [None] * 3
    assert figure.n == "7 prompts, 2,000 rows"
    lacks("predictor.depth=0,1,2,3,4", sweep, [specdecpp(3, 6.0, 0.6), specdecpp(3, 6.0, 0.5)])


@pytest.mark.slow
def test_pictures_are_drawn(tmp_path):
    for figure in (
        tsne(hidden(5.0)),
        tsne(with_lengths(hidden(5.0))),
        lengths_table([both_heads()]),
        feature_age([of_ages()]),
        feature_age([of_ages("rounds")]),
        sweep([specdecpp(3, 6.0, 0.6), specdecpp(0, 6.0, 0.7)]),
    ):
        drawn(figure, tmp_path)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Harvest:
    return described_as(write_harvest(tmp_path_factory.mktemp("home")))


def test_a_walk_goes_on_by_what_was_accepted_and_one_token():
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


def test_old_features_are_those_of_earlier_rounds(tmp_path, home):
    ours = checkpoint(tmp_path / "h", home.folder)
    predictor = load_predictor(ours.folder)
    (one,) = aged(ours, [home], "positions")
    records = read_inputs(home, predictor, "rounds", "test", predictor.columns)
    at = zip(records["group"].tolist(), records["anchor"].tolist(), strict=True)
    row = {key: number for number, key in enumerate(at)}
    kept = [key for key, n in row.items() if key[1] >= max(POSITIONS) and records["known"][n] >= 3]
    assert len(one.group) == len(kept) > 0 and list(one.probs) == list(POSITIONS)
    for age in (0, POSITIONS[-1]):
        wanted = records["inputs"][[row[group, anchor - age] for group, anchor in kept]].float()
        assert torch.allclose(one.probs[age], predictor.predict_proba(wanted))
    assert one.back == {age: age for age in POSITIONS}
    strided = described_as(home.folder, anchors={"stride": 4})
    assert aged(ours, [strided], "positions") == []

    (one,) = aged(ours, [home], "rounds")
    rows = rounds_back(records, 3)
    assert len(rows) == len(one.group) > 0 and one.back[0] == 0 and one.back[2] > one.back[1] > 1
    for place, age in enumerate((0, 1, 2)):
        wanted = predictor.predict_proba(records["inputs"][rows[:, place]].float())
        assert torch.allclose(one.probs[age], wanted)
    assert torch.equal(one.group, records["group"][rows[:, 0]])
    asked = {name: values[rows[:, 0]] for name, values in records.items()}
    assert torch.equal(one.targets, predictor.targets(predictor.samples(asked)))


def test_activations_are_those_of_both_heads_on_test_prompts(tmp_path, home):
    ours = checkpoint(tmp_path / "h", home.folder)
    both = [ours, checkpoint(tmp_path / "l", home.folder, predicts="lengths")]
    found = activations(ours, Artifacts(harvests=[home], checkpoints=both))
    assert list(found.features) == ["inputs", CLASSES, LENGTHS]
    x, made = found.features["inputs"], found.features[CLASSES]
    assert x.shape[1] == DIM + EMBEDDING and made.shape == (len(x), 64)
    head = load_predictor(ours.folder).head
    assert torch.allclose(head.layers[-1](made), head(x))
    assert len(found.label) == len(found.group) == len(x) <= 400
    assert len(found.group.unique()) == PROMPTS["test"]
    alone = activations(ours, Artifacts(harvests=[home], checkpoints=[ours]))
    assert list(alone.features) == ["inputs", CLASSES]
    bare = described_as(home.folder, features_stored=False)
    for harvested, words in (([bare], "hidden states"), ([], "predictor=hrad")):
        lacks(words, activations, ours, Artifacts(harvests=harvested, checkpoints=both))


def test_lengths_are_held_against_the_classes_they_belong_to(tmp_path, home):
    """Two prompts of the other harvest are those of `home`."""
    away = described_as(write_harvest(tmp_path / "away", names="other-", shared=2))
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
    alone = torch.tensor([0, 1, 1, 2])[said.argmax(1)]
    # no priors were divided into the last
    for decision, decided in ((PROBABLE, pooled.argmax(1)), (LONE, alone), (EVEN, alone)):
        assert torch.equal(one.decided[LENGTHS, decision], decided)
    assert torch.equal(one.targets, predictor.targets(samples))


def test_layers_are_compared_on_the_same_rounds_where_nothing_else_differs(tmp_path, monkeypatch):
    monkeypatch.setitem(harvests.INPUTS, "target_layers", [-2, -1])
    two_layers = described_as(write_harvest(tmp_path / "two"))

    def of_layers(name: str, layers: list[int], **settings: Any) -> Checkpoint:
        dim, folder = DIM // 2 * len(layers) + EMBEDDING, tmp_path / name
        made = {"gamma": 3, "context": context_of(two_layers.folder)}
        settings |= {"layers": layers}
        made |= {"inputs": Inputs((), layers, token=True), "settings": settings}
        write_checkpoint(folder, "hrad", dim, **made)
        return Checkpoint(folder, json.loads((folder / "config.json").read_text()))

    both, last = of_layers("both", [-2, -1]), of_layers("last", [-1])
    longer = of_layers("longer", [-1], dropout=0.1)
    lengths = of_layers("lengths", [-1], predicts="lengths")
    entry = next(entry for entry in FIGURES if entry.title == "H-RAD by the layers it reads")

    def built(*checkpoints: Checkpoint) -> list[Figure]:
        artifacts = Artifacts(harvests=[two_layers], checkpoints=checkpoints)
        return [build() for build in entry.builders(artifacts)]

    (figure,) = built(longer, lengths, both, last)
    assert figure.column("layers") == [1, 2] and figure.column("dataset") == ["two", "two"]
    assert figure.n.startswith(f"{PROMPTS['test']} prompts, ")
    losses = []
    for one in (load_predictor(last.folder), load_predictor(both.folder)):
        samples = read_samples(two_layers, one, "test")
        probs = one.predict_proba(samples["inputs"].float()).double()
        losses.append(log_loss(probs, one.targets(samples).double()))
    assert figure.column("log loss") == pytest.approx([float(x.mean()) for x in losses])
    gain = float((losses[1] - losses[0]).mean())
    assert figure.column("difference") == pytest.approx([0.0, gain])
    lacks(r"predictor\.layers=", built, both, longer, lengths)
    lacks("gen_data.py", by_layers, [both, last], Artifacts())
