"""A harvest with a published EAGLE draft holds what decoding with it would have drawn and read, and
replay is decode."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from decoding.models.loading import ModelPair
from decoding.models.mixed import mix_in
from decoding.sampling import Warp
from tests.helpers.models.eagles import FLAVOURS, SAYS, published_pair
from tests.invariant import test_eagle_harvest, test_harvest, test_plain_harvest

NAMES = ["each", "eagle1"]


def made(name: str) -> Callable[[], ModelPair]:
    return lambda: published_pair(FLAVOURS[name], None if name == "eagle1" else SAYS)


@pytest.mark.parametrize("name", NAMES)
def test_labels_are_those_of_one_round_at_a_time(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(test_plain_harvest, "tiny_pair", made(name))
    warps = Warp(0.9, top_k=20), Warp(1.1, top_p=0.95)
    test_plain_harvest.test_all_positions_at_once_give_the_labels_of_one_at_a_time(*warps)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("together", [1, 512])
def test_answers_do_not_depend_on_their_batch(
    name: str, together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("decoding.models.batched_lm.TOGETHER", together)
    test_harvest.test_an_answer_does_not_depend_on_its_batch(made(name)())


@pytest.mark.parametrize("name", NAMES)
def test_features_are_those_a_stop_rule_reads(name: str, tmp_path: Path) -> None:
    pair = made(name)()
    test_harvest.test_features_along_a_rollout_are_those_the_stop_rule_reads(
        pair, "paper", tmp_path
    )
    test_eagle_harvest.test_features_of_candidates_are_those_of_the_first_drafted_token(pair)


@pytest.mark.parametrize("name", NAMES)
def test_mixed_with_its_target_it_goes_on_from_a_cache_that_was_cut(name: str) -> None:
    pair, text = made(name)(), torch.arange(3, 12)
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


@pytest.mark.parametrize("name", NAMES)
def test_replay_is_decode(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = made(name)()
    assert test_eagle_harvest.accepted_in_replay(pair, tmp_path, monkeypatch) > 5
