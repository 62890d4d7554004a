"""A harvest with a draft that reads its target's states holds what decoding with it would have
drawn and read."""

from pathlib import Path
from shutil import copytree

import pytest
import torch
from hydra import compose, initialize_config_dir
from safetensors.torch import save_file

from data_gen.records import label
from data_gen.room import ON_A_CORE
from data_gen.settings import HarvestSettings
from decoding.models.eagle.draft import FILE
from decoding.models.loading import ModelPair, load_pair, pair_identity
from decoding.sampling import Warp
from decoding.settings import Pair
from evaluation.replay.simulate import counts_of
from predictors.features.layers import side_by_side
from predictors.hrad import HRAD
from predictors.specdecpp import SpecDecPP
from tests.invariant import (
    test_harvest,
    test_plain_harvest,
    test_recompute,
    test_replay,
    test_teacher_forcing,
)
from tests.invariant.test_eagle_draft import LAYERS, eagle_pair, maps

WARPS = [
    (Warp(), Warp()),
    (Warp(0.9, top_k=20), Warp(1.1, top_p=0.95)),
    (Warp(0.0), Warp(0.0)),
    (Warp(), Warp(0.0)),
]


@pytest.fixture(scope="module")
def pair() -> ModelPair:
    return eagle_pair()


@pytest.mark.parametrize("warps", WARPS)
@pytest.mark.slow
def test_labels_are_those_of_one_round_at_a_time(
    monkeypatch: pytest.MonkeyPatch, warps: tuple[Warp, Warp]
) -> None:
    monkeypatch.setattr(test_plain_harvest, "tiny_pair", eagle_pair)
    test_plain_harvest.test_all_positions_at_once_give_the_labels_of_one_at_a_time(*warps)


@pytest.mark.parametrize("together", [1, 512])
@pytest.mark.slow
def test_answers_do_not_depend_on_their_batch(
    pair: ModelPair, together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("decoding.models.batched_lm.TOGETHER", together)
    test_harvest.test_an_answer_does_not_depend_on_its_batch(pair)


@pytest.mark.parametrize("order", ["paper", "code"])
@pytest.mark.slow
def test_features_of_rounds_are_those_a_stop_rule_reads(
    pair: ModelPair, order: str, tmp_path: Path
) -> None:
    test_harvest.test_features_along_a_rollout_are_those_the_stop_rule_reads(pair, order, tmp_path)


@torch.no_grad()
@pytest.mark.slow
def test_features_of_candidates_are_those_of_the_first_drafted_token(pair: ModelPair) -> None:
    recipe, request = test_harvest.RECIPE, test_harvest.some_requests()[0]
    answer = test_harvest.answers(pair, [request], recipe)[request.prompt_id]
    row = label(pair, [request], [answer], recipe, ON_A_CORE)[0]["mixed"]
    stored = (
        torch.from_numpy(row["draft_hidden"])
        .view(torch.bfloat16)
        .view(len(row["position"]), -1)
        .float()
    )
    assert len(stored) > 5
    for position, token, feature in zip(row["position"], row["token"], stored, strict=True):
        known = torch.cat([request.tokens, answer.distributions.response[:position]])
        pair.target.reset()
        pair.draft.reset()
        pair.target.forward(known[:-1])
        pair.draft.forward(known)
        hidden = pair.draft.forward(
            token[None], torch.tensor([-1]), hidden=recipe.layers.draft_layers
        ).hidden
        torch.testing.assert_close(feature, side_by_side(hidden)[0].float(), atol=1e-6, rtol=0.01)


@pytest.mark.parametrize(
    "recipe", [test_teacher_forcing.SAMPLED, test_teacher_forcing.GREEDY], ids=["sampled", "greedy"]
)
@pytest.mark.slow
def test_given_responses_make_the_same_records(
    pair: ModelPair, recipe: HarvestSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    test_teacher_forcing.test_records_are_those_of_generated_responses(
        pair, recipe, 1, tmp_path, monkeypatch
    )


@pytest.mark.slow
def test_replay_is_decode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert accepted_in_replay(eagle_pair(), tmp_path, monkeypatch) > 20


def accepted_in_replay(pair: ModelPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> float:
    """Tokens accepted, in replay as in decode."""
    pair.eos_ids = (0, 31)
    monkeypatch.setattr(test_replay, "models", lambda: pair)
    how = test_replay.recipe(test_replay.GREEDY, test_replay.MAX_NEW, test_replay.GAMMA)
    found, accepted = test_replay.harvested(test_replay.PROMPTS, how, tmp_path), 0
    for name, values in test_replay.RULES[1::5]:
        stop = test_replay.rule(name, values)
        counts = test_replay.replayed(found, stop, test_replay.GAMMA)
        traces = test_replay.decode(stop, test_replay.MAX_NEW, test_replay.GAMMA)
        for place, prompt in enumerate(found.prompt_ids):
            assert counts_of(counts, place) == test_replay.counted(traces[int(prompt)]), (
                name,
                values,
            )
            accepted += counts_of(counts, place)["accepted"]
    return accepted


def save_maps(folder: Path, scale: float = 0.3) -> None:
    made = maps(scale).finished(torch.float32)
    tensors = {"from_states": made.from_states, "from_own": made.from_own}
    save_file(tensors, folder / FILE, {"layers": str(list(LAYERS))})


@pytest.fixture(scope="module")
def folder(tiny_pair_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the tiny pair with such a draft."""
    found = copytree(tiny_pair_dir, tmp_path_factory.mktemp("reading") / "pair")
    save_maps(found / "draft")
    return found


def config(folder: Path, *more: str) -> Pair:
    folders = [f"pair.{side}={folder / side}" for side in ("target", "draft")]
    with initialize_config_dir(str(test_recompute.ROOT / "conf"), version_base="1.3"):
        return Pair.of(compose("train", [*folders, "pair.name=tiny", *more]).pair)


@pytest.mark.slow
def test_recomputed_features_equal_stored_ones(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    cfg = config(
        folder, "pair.dtype=float64"
    )  # a draft that reads its own states adds up what rounds otherwise
    folders = test_recompute.folders.__wrapped__(cfg, tmp_path_factory)
    for predictor in (SpecDecPP(), SpecDecPP(context="rollout"), HRAD(gamma=2)):
        test_recompute.test_recomputed_features_equal_stored_ones(folders, cfg, predictor)


@pytest.mark.slow
def test_other_maps_are_another_draft(folder: Path, tiny_pair_dir: Path, tmp_path: Path) -> None:
    other = copytree(folder, tmp_path / "other")
    save_maps(other / "draft", 0.2)
    identities = [
        pair_identity(load_pair(config(place))) for place in (folder, other, tiny_pair_dir)
    ]
    assert len({identity.pop("draft") for identity in identities}) == 3
    assert identities[0] == identities[1] == identities[2]
    again, narrow = (
        load_pair(config(folder)),
        load_pair(config(folder, "pair.draft_dtype=bfloat16")),
    )
    assert pair_identity(again) == pair_identity(narrow)
