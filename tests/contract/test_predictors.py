"""What every predictor in conf/predictor promises: it learns, calibrates, and comes back from disk
the same."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf

from data_gen.samples import inputs_of, read_inputs, read_samples
from data_gen.storage.dataset import Harvest
from decoding.stopping.confidence import Confidence
from decoding.stopping.hrad import HRADStop
from predictors import hrad
from predictors.base import Predictor, load_predictor, save_predictor, settings
from predictors.calibration import Calibration, balanced, calibrate, cross_entropy
from predictors.features.catalogue import FIXED
from predictors.hrad import HRAD, class_chances, class_of_length
from predictors.inputs import Inputs
from predictors.metrics import scores
from predictors.specdecpp import SpecDecPP
from predictors.survival import Survival
from predictors.training.batches import Items
from predictors.training.trainer import Trainer, logits_in_chunks
from runtime.errors import UserError
from runtime.files import replaced_folder
from tests.helpers.data.harvests import DIM, EMBEDDING, PAIR, WARP, write_harvest
from tests.helpers.training.checkpoints import save

CONF = Path(__file__).parents[2] / "conf"
NAMES = sorted(path.stem for path in (CONF / "predictor").glob("*.yaml"))
TRAINING = {"epochs": 8, "lr": 2e-2, "accumulate": 1}
CHANGED = {"value": {"inputs": ["draft_hidden"]}}  # what the labels of this harvest follow from
CONTEXT = {"pair": PAIR, "warp": WARP, "draft_warp": WARP, "gamma": 4}


@pytest.fixture(scope="module")
def harvest(tmp_path_factory: pytest.TempPathFactory) -> Harvest:
    return Harvest.open(write_harvest(tmp_path_factory.mktemp("harvest")))


def config(group: str, name: str) -> Any:
    return OmegaConf.load(CONF / group / f"{name}.yaml")


def fitted(predictor: Predictor, harvest: Harvest) -> Predictor:
    trainer = instantiate(OmegaConf.merge(config("trainer", predictor.name), TRAINING))
    rows = read_samples(harvest, predictor, "train")
    return predictor.fit(rows, inputs_of(harvest, predictor), trainer)


@pytest.fixture(scope="module", params=NAMES)
def trained(request: pytest.FixtureRequest, harvest: Harvest) -> Predictor:
    name = request.param
    return fitted(instantiate(config("predictor", name), **CHANGED.get(name, {})), harvest)


@pytest.fixture(scope="module")
def dim(trained: Predictor, harvest: Harvest) -> int:
    found = read_samples(harvest, trained, "train")["inputs"].shape[1]
    assert found == DIM + EMBEDDING * ("token" in trained.inputs.names)
    return found


@pytest.fixture
def checkpoint(trained: Predictor, dim: int, tmp_path: Path) -> Path:
    with replaced_folder(tmp_path / "checkpoint", "config.json") as folder:
        save_predictor(trained, folder, {**CONTEXT, "dim": dim})
    return tmp_path / "checkpoint"


def test_it_ranks_a_learnable_label(trained: Predictor, harvest: Harvest) -> None:
    test = read_samples(harvest, trained, "test")
    probs = torch.softmax(logits_in_chunks(trained.head, test["inputs"]), -1)
    assert scores(probs, trained.targets(test))["auroc"] > (0.85 if trained.name == "hrad" else 0.7)


METHODS = sorted(path.stem for path in (CONF / "calibration").glob("*.yaml"))


@pytest.mark.parametrize("method", METHODS)
def test_calibration_keeps_the_ranking_helps_on_its_split_and_comes_back_exact(
    trained: Predictor, dim: int, harvest: Harvest, tmp_path: Path, method: str
) -> None:
    records = read_samples(harvest, trained, "calibration")
    logits, targets = logits_in_chunks(trained.head, records["inputs"]), trained.targets(records)
    fit = instantiate(config("calibration", method).fit)
    found = calibrate(fit, logits, targets, records["group"], trained.offset)
    probs = found.apply(logits.double())
    assert cross_entropy(probs.log(), targets) <= cross_entropy(logits, targets) + 1e-9
    if len(trained.classes) == 2:
        assert probs[(logits[:, 1] - logits[:, 0]).argsort(), 1].diff().min() >= 0
    elif found.method in ("none", "offset", "temperature"):
        assert torch.equal(balanced(probs, found.log_prior).argmax(-1), logits.argmax(-1))
    whole = fit(logits, targets) if fit else Calibration()
    survival = Survival(0.9, 1 / 3, -0.1, 3, 2, 0.5, 0.4)
    for calibration in (whole, found):
        trained.calibration = replace(calibration, survival=survival)
        save_predictor(trained, tmp_path, {**CONTEXT, "dim": dim})
        loaded, x = load_predictor(tmp_path), torch.randn(50, dim)
        assert loaded.calibration == trained.calibration
        assert torch.equal(loaded.predict_proba(x), trained.predict_proba(x))
    trained.calibration = found


def test_round_trip_through_disk_is_exact(trained: Predictor, dim: int, checkpoint: Path) -> None:
    loaded, x = load_predictor(checkpoint), torch.randn(9, dim)
    probs = trained.predict_proba(x)
    assert torch.equal(loaded.predict_proba(x), probs)
    alone = torch.cat([loaded.predict_proba(row[None]) for row in x])
    assert torch.allclose(alone, probs, atol=1e-6)
    if len(trained.classes) == 2:
        assert probs.shape == (9,) and probs.min() >= 0 and probs.max() <= 1
    else:
        assert probs.shape == (9, len(trained.classes)) and probs.min() >= 0
        assert torch.allclose(probs.sum(-1), torch.ones(9))
    assert loaded == trained or loaded.inputs == trained.inputs
    assert loaded.calibration == trained.calibration
    assert {path.suffix for path in checkpoint.iterdir()} == {".json", ".md", ".safetensors"}


def test_same_seed_same_predictor(trained: Predictor, harvest: Harvest) -> None:
    again = fitted(type(trained)(**settings(trained)), harvest)
    assert all(map(torch.equal, trained.head.parameters(), again.head.parameters()))


def test_what_it_was_trained_for_is_accepted(
    trained: Predictor, dim: int, harvest: Harvest, checkpoint: Path, tmp_path: Path
) -> None:
    """A label that does not depend on gamma fits every gamma."""
    spec = inputs_of(harvest, trained)
    renamed = {**PAIR, "name": "another name"}
    expect = {"pair": renamed, "inputs": spec, "warp": WARP, "draft_warp": WARP, "gamma": 4}
    assert load_predictor(checkpoint, expect=expect).inputs == trained.inputs
    save_predictor(trained, tmp_path, {**CONTEXT, "dim": dim, "gamma": None})
    assert load_predictor(tmp_path, expect={"gamma": 9}).inputs == trained.inputs


@pytest.mark.parametrize(
    ("key", "expect"),
    [
        ("pair.draft", {"pair": {**PAIR, "draft": "other"}}),
        ("warp.top_k", {"warp": {**WARP, "top_k": 50}}),
        ("draft_warp.temperature", {"draft_warp": {**WARP, "temperature": 0.0}}),
        ("inputs.draft_hidden", {"inputs": Inputs([-2])}),
        ("gamma", {"gamma": 5}),
    ],
)
def test_anything_else_is_refused_by_key(
    checkpoint: Path, key: str, expect: dict[str, Any]
) -> None:
    says = rf"^stop.checkpoint: .*trained with {key}=.*python train.py"
    with pytest.raises(UserError, match=says) as refusal:
        load_predictor(checkpoint, expect=expect, key="stop.checkpoint")
    assert "\n" not in str(refusal.value)


class Recorder(Trainer):
    """Keeps what a predictor hands to the training loop instead of training."""

    def train(self, module: Any, items: Any, held_out: Any, *rest: Any, **keywords: Any) -> Any:
        self.items, self.held_out, self.weights = items, held_out, keywords.get("weights")
        return module


def test_rebalancing_sees_the_training_fold_only(
    harvest: Harvest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No synthetic row is held out, and none is made from a held-out prompt."""
    looked_at, real = list[torch.Tensor](), hrad.smote

    def spy(*given: Any) -> Any:
        looked_at.append(given[2])
        return real(*given)

    monkeypatch.setattr(hrad, "smote", spy)
    records = read_samples(harvest, HRAD(), "train")
    trainer = Recorder(epochs=1, batch_size=4, lr=0.1, schedule="plateau")
    HRAD().fit(records, Inputs((), [-1]), trainer)
    (kept,) = looked_at
    (held,) = set(records["group"].tolist()) - set(records["group"][kept].tolist())  # of 12 prompts
    rows = records["inputs"][records["group"] == held]
    assert torch.equal(everything(trainer.held_out), rows.float())
    assert torch.equal(
        everything(trainer.items)[: int(kept.sum())], records["inputs"][kept].float()
    )
    assert torch.bincount(trainer.items.y).unique().numel() == 1


def everything(items: Items) -> torch.Tensor:
    return items.inputs(torch.arange(len(items.y)))


def test_soft_labels_of_rounds_are_learned_as_they_are(harvest: Harvest) -> None:
    """No row is added, drawn oftener or smoothed, and no prior is divided out."""
    predictor = HRAD(labels="soft")
    records = read_samples(harvest, predictor, "train")
    trainer = Recorder(epochs=1, batch_size=4, lr=0.1, schedule="plateau")
    predictor.fit(records, Inputs((), [-1]), trainer)
    rows = torch.cat([trainer.items.y, trainer.held_out.y])
    assert torch.equal(rows.sort(0)[0], predictor.targets(records).sort(0)[0])
    assert trainer.weights is None and predictor.offset == ()
    assert torch.allclose(rows.sum(-1), torch.ones(len(rows))) and ((0 < rows) & (rows < 1)).any()


@pytest.mark.parametrize("labels", ["coins", "soft"])
def test_lengths_are_learned_like_classes(harvest: Harvest, tmp_path: Path, labels: Any) -> None:
    """The same rows, a label for each accepted length; no stop rule takes it for a class."""
    classes, lengths = HRAD(4, labels=labels), HRAD(4, "lengths", labels=labels)
    records = {one.predicts: read_samples(harvest, one, "train") for one in (classes, lengths)}
    label, length = (records[name]["label"] for name in ("classes", "lengths"))
    assert torch.equal(class_of_length(length, 4), label) and len(length.unique()) > 2
    known = lengths.targets(records["lengths"])
    assert known.shape == (len(length), 5)
    assert torch.allclose(class_chances(known), classes.targets(records["classes"]), atol=1e-6)
    trainer = Trainer(epochs=1, batch_size=16, lr=1e-3, schedule="plateau")
    lengths.fit(records["lengths"], Inputs((), [-1]), trainer)
    rows = records["lengths"]["inputs"][:7].float()
    hidden = lengths.head.activations(rows)
    assert hidden.shape == (7, 64) and (hidden >= 0).all()
    assert torch.equal(lengths.head.layers[-1](hidden), lengths.head(rows))
    save(lengths, tmp_path, rows.shape[1])
    assert load_predictor(tmp_path).classes == ("0", "1", "2", "3", "4")
    with pytest.raises(UserError, match="as none, some or all"):
        HRADStop(tmp_path, Confidence(0.2))


@pytest.mark.parametrize("age", [1, 2])
def test_older_states_are_those_of_the_rounds_before(harvest: Harvest, age: int) -> None:
    """Row by row: from a round to the one `age` rounds after it, while the response goes on."""
    predictor, fresh = HRAD(3, age=age), HRAD(3)
    records = read_inputs(harvest, fresh, "rounds", "train", fresh.columns)
    asked, read = list[int](), list[int]()
    for first in range(len(records["group"])):
        row = first
        for _ in range(age):
            row += min(int(records["accepted"][row]), 3) + 1
            if row >= len(records["group"]) or records["group"][row] != records["group"][first]:
                break
        else:
            asked, read = [*asked, row], [*read, first]
    found = read_samples(harvest, predictor, "train")
    expected = fresh.labelled({name: values[asked] for name, values in records.items()})
    assert len(asked) > 100 and torch.equal(found["label"], expected["label"])
    assert torch.equal(found["group"], expected["group"])
    assert torch.equal(found["inputs"], records["inputs"][read])


def test_older_states_need_a_round_at_every_position(harvest: Harvest) -> None:
    records = read_inputs(harvest, HRAD(3), "rounds", "train", HRAD.columns)
    gaps = {name: values[::2] for name, values in records.items()}
    with pytest.raises(UserError, match=r"^predictor\.age: .* anchors\.stride=1$"):
        HRAD(3, age=1).samples(gaps)
    assert len(HRAD(3).samples(gaps)["label"]) == len(gaps["group"])


def test_one_harvest_serves_every_gamma_up_to_its_own(harvest: Harvest) -> None:
    labels = {gamma: read_samples(harvest, HRAD(gamma), "train")["label"] for gamma in (1, 2, 4)}
    assert set(labels[1].tolist()) == {0, 2}, "one token: none or all"
    for gamma in (2, 4):
        assert torch.equal(labels[gamma] == 0, labels[1] == 0)
    fewer = (labels[2] == 2) & (labels[4] == 1)
    assert (labels[4] == 2).sum() == (labels[2] == 2).sum() - fewer.sum()
    says = r"^predictor\.gamma: 5 is more than the 4 tokens per round of .* gamma=5$"
    with pytest.raises(UserError, match=says):
        read_samples(harvest, HRAD(5), "train")


PATHS = ["q_stats", "q_path", "draft_before", "depth", "target_hidden", "history"]


@pytest.mark.parametrize(
    ("predictor", "dim"),
    [
        (SpecDecPP(inputs=["q_stats"]), DIM + FIXED["q_stats"]),
        (SpecDecPP(inputs=["token"]), DIM + EMBEDDING),
        (SpecDecPP(context="rollout", inputs=PATHS), 3 * DIM + sum(FIXED.values())),
        (SpecDecPP(context="rollout", inputs=["draft_before"], layers=[-1]), 2 * DIM),
        (HRAD(inputs=["history"]), DIM + EMBEDDING + FIXED["history"]),
        (HRAD(inputs=["history"], token=False), DIM + FIXED["history"]),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_they_are_learned_from_and_come_back(
    predictor: Predictor, dim: int, harvest: Harvest, tmp_path: Path
) -> None:
    rows, read = read_samples(harvest, predictor, "train"), inputs_of(harvest, predictor)
    assert rows["inputs"].shape[1] == dim and set(predictor.more.names) < set(read.names)  # type: ignore[attr-defined]
    predictor.fit(rows, read, Trainer(epochs=1, batch_size=4, lr=0.01, schedule="plateau"))
    context = {**CONTEXT, "gamma": None, "dim": dim}
    save_predictor(predictor, tmp_path, context)
    loaded, x = load_predictor(tmp_path), rows["inputs"][:9].float()
    assert torch.equal(loaded.predict_proba(x), predictor.predict_proba(x))
    assert loaded.inputs == predictor.inputs == inputs_of(harvest, loaded) == read
    assert settings(loaded) == settings(predictor)


def test_by_default_they_read_what_their_papers_read() -> None:
    for kind, reads in ((SpecDecPP, Inputs(None)), (HRAD, Inputs((), None, token=True))):
        assert kind().reads == reads and settings(kind())["inputs"] == []


@pytest.mark.parametrize(
    ("predictor", "says"),
    [
        (HRAD(inputs=["q_stats"]), "inputs that are there before a round, got q_stats"),
        (SpecDecPP(inputs=["history"]), "inputs that mixed records hold, got history"),
    ],
)
def test_what_is_not_there_is_refused(predictor: Predictor, says: str, harvest: Harvest) -> None:
    with pytest.raises(UserError, match=f"^predictor: expected {says}"):
        read_samples(harvest, predictor, "train")
    with pytest.raises(UserError, match=r"^predictor\.inputs: expected some of .*got \['logits'\]"):
        HRAD(inputs=["logits"])
