"""A harvest with a draft that reads its target's states, ours or a published EAGLE draft, holds
what decoding with it would have drawn and read, and replay is decode."""

from collections.abc import Callable, Iterable
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from decoding.models.eagle.draft import FILE
from decoding.models.loading import ModelPair, load_pair, pair_identity
from decoding.models.mixed import mix_in
from decoding.pair import pair_settings
from decoding.sampling import Warp
from decoding.settings import Pair
from predictors.features.layers import side_by_side
from tests.helpers.data.datasets import some_requests
from tests.helpers.models.eagles import FLAVOURS, SAYS, published_pair
from tests.invariant import test_harvest, test_plain_harvest, test_replay
from tests.invariant.test_eagle_draft import LAYERS, eagle_pair, maps

WARPS = [
    (Warp(), Warp()),
    (Warp(0.9, top_k=20), Warp(1.1, top_p=0.95)),
    (Warp(0.0), Warp(0.0)),
    (Warp(), Warp(0.0)),
]
MAKERS: dict[str, Callable[[], ModelPair]] = {
    "maps": eagle_pair,
    "each": lambda: published_pair(FLAVOURS["each"], SAYS),
    "eagle1": lambda: published_pair(FLAVOURS["eagle1"], None),
}
SLOW = pytest.mark.slow
EVERY = pytest.mark.parametrize("name", [pytest.param("maps", marks=SLOW), "each", "eagle1"])


def of_each(ours: Iterable, others: Any) -> list:
    """Values for our draft, and one for each of the published ones."""
    own = (pytest.param("maps", value, marks=SLOW) for value in ours)
    return [*own, ("each", others), ("eagle1", others)]


@pytest.mark.parametrize(("name", "warps"), of_each(WARPS, WARPS[1]))
def test_labels_are_those_of_one_round_at_a_time(
    monkeypatch: pytest.MonkeyPatch, name: str, warps: tuple[Warp, Warp]
) -> None:
    monkeypatch.setattr(test_plain_harvest, "tiny_pair", MAKERS[name])
    test_plain_harvest.test_all_positions_at_once_give_the_labels_of_one_at_a_time(*warps)


@EVERY
@pytest.mark.parametrize("together", [1, 512])
def test_answers_do_not_depend_on_their_batch(
    name: str, together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("decoding.models.batched_lm.TOGETHER", together)
    test_harvest.test_an_answer_does_not_depend_on_its_batch(MAKERS[name]())


@pytest.mark.parametrize(("name", "order"), of_each(["paper", "code"], "paper"))
def test_features_of_rounds_are_those_a_stop_rule_reads(
    name: str, order: str, tmp_path: Path
) -> None:
    read = test_harvest.test_features_along_a_rollout_are_those_the_stop_rule_reads
    read(MAKERS[name](), order, tmp_path)  # type: ignore[arg-type]


@EVERY
@torch.no_grad()
def test_features_of_candidates_are_those_of_the_first_drafted_token(name: str) -> None:
    pair, recipe = MAKERS[name](), test_harvest.RECIPE
    ((request, said, row),) = test_harvest.labelled(pair, recipe, "mixed", some_requests()[:1])
    stored = test_harvest.bfloats(row["draft_hidden"], len(row["position"]))
    assert len(stored) > 5
    for position, token, feature in zip(row["position"], row["token"], stored, strict=True):
        text = torch.cat([request.tokens, said.response[:position]])
        pair.target.reset()
        pair.draft.reset()
        pair.target.forward(text[:-1])
        pair.draft.forward(text)
        read = {"hidden": recipe.layers.draft_layers}
        hidden = pair.draft.forward(token[None], torch.tensor([-1]), **read).hidden
        test_harvest.close(feature, side_by_side(hidden)[0])


@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.slow
def test_given_responses_make_the_same_records(
    greedy: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = test_harvest.GREEDY if greedy else test_harvest.RECIPE
    same = test_harvest.test_records_are_those_of_generated_responses
    same(eagle_pair(), recipe, 1, tmp_path, monkeypatch)


@pytest.mark.parametrize(("name", "least"), of_each([20], 5))
def test_replay_is_decode(name: str, least: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pair, accepted = MAKERS[name](), 0
    pair.eos_ids = (0, 31)
    monkeypatch.setattr(test_replay, "models", lambda: pair)
    table = test_replay.harvested.__wrapped__()  # of this pair, and not kept
    for rule, values in test_replay.RULES[1::5]:
        stop = test_replay.rule(rule, values)
        counts, traces = test_replay.replayed(table, stop), test_replay.decode(stop)
        test_replay.check_equal(counts, [traces[int(prompt)] for prompt in table.prompt_ids])
        accepted += int(counts["accepted"].sum())
    assert accepted > least


@pytest.mark.parametrize("name", ["each", "eagle1"])
def test_mixed_with_its_target_it_goes_on_from_a_cache_that_was_cut(name: str) -> None:
    pair, text = MAKERS[name](), torch.arange(3, 12)
    mix_in(pair.draft, pair.target, 0.6)
    pair.target.forward(text)
    whole = pair.draft.forward(text).logits
    held = pair.draft.held()
    pair.draft.crop(4)
    torch.testing.assert_close(pair.draft.forward(text[4:]).logits, whole[4:])
    pair.draft.load(*held)
    pair.draft.crop(8)
    torch.testing.assert_close(pair.draft.forward(text[8:]).logits, whole[8:])
    assert whole.isfinite().all(), "the target can say every token"


def save_maps(folder: Path, scale: float = 0.3) -> None:
    made = maps(scale).finished(torch.float32)
    tensors = {"from_states": made.from_states, "from_own": made.from_own}
    save_file(tensors, folder / FILE, {"layers": str(list(LAYERS))})


@pytest.fixture(scope="module")
def folder(tiny_pair_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the tiny pair with such a draft."""
    copied = copytree(tiny_pair_dir, tmp_path_factory.mktemp("reading") / "pair")
    save_maps(copied / "draft")
    return copied


def settings(folder: Path, **changed: str) -> Pair:
    folders = {side: str(folder / side) for side in ("target", "draft")}
    return pair_settings(**folders, name="tiny", **changed)


@pytest.mark.slow
def test_recomputed_features_equal_stored_ones(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    # a draft that reads its own states adds up what rounds otherwise
    pair = settings(folder, dtype="float64")
    folders = test_harvest.folders.__wrapped__(pair, tmp_path_factory)
    for predictor in test_harvest.PREDICTORS:
        test_harvest.test_recomputed_features_equal_stored_ones(folders, pair, predictor)


@pytest.mark.slow
def test_other_maps_are_another_draft(folder: Path, tiny_pair_dir: Path, tmp_path: Path) -> None:
    other = copytree(folder, tmp_path / "other")
    save_maps(other / "draft", 0.2)
    places = (folder, other, tiny_pair_dir)
    identities = [pair_identity(load_pair(settings(place))) for place in places]
    assert len({identity.pop("draft") for identity in identities}) == 3
    assert identities[0] == identities[1] == identities[2]
    again, narrow = settings(folder), settings(folder, draft_dtype="bfloat16")
    assert pair_identity(load_pair(again)) == pair_identity(load_pair(narrow))
