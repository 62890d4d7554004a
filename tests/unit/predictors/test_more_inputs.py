"""Published predictors, given more than their papers give them."""

from pathlib import Path

import pytest
import torch

from data_gen.samples import inputs_of, read_samples
from data_gen.storage.dataset import Harvest
from predictors.base import Predictor, load_predictor, save_predictor, settings
from predictors.features.catalogue import FIXED
from predictors.hrad import HRAD
from predictors.inputs import Inputs
from predictors.specdecpp import SpecDecPP
from predictors.training.trainer import Trainer
from runtime.errors import UserError
from tests.helpers.data.harvests import DIM, EMBEDDING, PAIR, WARP, write_harvest

PATHS = ["q_stats", "q_path", "draft_before", "depth", "target_hidden", "history"]


@pytest.fixture(scope="module")
def harvest(tmp_path_factory: pytest.TempPathFactory) -> Harvest:
    return Harvest.open(write_harvest(tmp_path_factory.mktemp("harvest")))


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
    context = {"pair": PAIR, "warp": WARP, "draft_warp": WARP, "gamma": None, "dim": dim}
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
