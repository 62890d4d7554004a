"""Models whose layers see a window of the text, far past it: cached equals uncached, a tree its
paths, a rollback a fresh start, a batch its sequences, greedy decoding `generate`."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from decoding.engines.serial import SerialEngine
from decoding.models.cached_lm import CachedLM
from decoding.models.loading import ModelPair
from decoding.models.mixed import mix_in
from decoding.sampling import Sampler, Warp
from decoding.stopping.fixed import Fixed
from decoding.stopping.never import Never
from decoding.structures.chain import Chain
from decoding.structures.static_tree import StaticTree
from decoding.verifiers.rrs import RrsVerifier
from decoding.verifiers.token import TokenVerifier
from runtime.errors import UserError
from tests.helpers.models.cached import (
    check_batch,
    check_chunks_and_rollbacks,
    check_tree,
    close,
    random_tokens,
    without_cache,
)
from tests.helpers.models.tiny_pair import tiny_tokenizer
from tests.helpers.models.windowed import KINDS, uncached, windowed
from tests.invariant.test_plain_harvest import SAMPLED, with_one_by_one

FEW = ("Gemma3", "Gemma4", "Mistral", "GptOss", "Llama4")
WITHIN = 2e-5


@pytest.mark.parametrize("window", [1, 5, 16])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.few(12)
def test_chunks_and_rollbacks_equal_one_uncached_call(kind: str, window: int) -> None:
    """The first call alone is longer than most windows; rollbacks go back over their edges."""
    lm, text = CachedLM(windowed(kind, window)), random_tokens(45, window)
    assert lm.max_length == 400
    check_chunks_and_rollbacks(lm, text, uncached(kind, window, text), window, WITHIN)


@pytest.mark.parametrize(("window", "before"), [(1, 0), (3, 2), (5, 11), (8, 7)])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.few(16)
def test_a_tree_equals_its_paths_and_goes_on_after_a_rollback(
    kind: str, window: int, before: int
) -> None:
    """Windows lie by depth: a row's place in the cache is up to eleven beyond its position."""
    lm = CachedLM(windowed(kind, window))
    check_tree(lm, partial(uncached, kind, window), before, before, WITHIN)


@pytest.mark.parametrize("window", [1, 5])
@pytest.mark.parametrize("kind", KINDS)
def test_a_padded_batch_equals_its_sequences_and_hands_over(kind: str, window: int) -> None:
    check_batch(CachedLM(windowed(kind, window)), partial(uncached, kind, window), WITHIN)


def windowed_pair(kind: str) -> ModelPair:
    """The draft is the target with a longer window: it is right now and then."""
    target, draft = (CachedLM(windowed(kind, window)) for window in (5, 11))
    return ModelPair(target, draft, tiny_tokenizer(), "windowed", ())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "parts",
    [
        (Chain(6), Fixed(6), TokenVerifier()),
        (Chain(6), Fixed(0), TokenVerifier()),
        (StaticTree([3, 2, 1]), Never(), RrsVerifier()),
    ],
    ids=["chain", "nothing", "tree"],
)
@pytest.mark.few(6)
def test_greedy_decoding_is_generate_far_past_the_window(kind: str, parts: tuple) -> None:
    """The prompt is longer than the window, and 30 tokens follow."""
    prompt, plain = random_tokens(9, 4), windowed(kind, 5)
    plain.set_attn_implementation("eager")
    expected = plain.generate(prompt[None], max_new_tokens=30, do_sample=False)[0, 9:].tolist()
    engine = SerialEngine(windowed_pair(kind), *parts, Warp(0.0), Warp())
    assert engine.decode(prompt, 30, Sampler.seeded(0)).tokens == expected


@pytest.mark.parametrize("kind", FEW)
@pytest.mark.parametrize("warp", [Warp(), Warp(0.0)])
@pytest.mark.few(2)
def test_a_harvest_labels_as_one_round_at_a_time_does(kind: str, warp: Warp) -> None:
    recipe = replace(SAMPLED, warp=warp, draft_warp=warp)
    agreement = with_one_by_one(windowed_pair(kind), recipe)
    assert agreement.rounds == agreement.same_tokens == agreement.same_accepted >= 30
    assert agreement.difference < 1e-4


@pytest.mark.parametrize("kind", ["Gemma3", "Gemma4"])
def test_a_cache_is_loaded_again(kind: str) -> None:
    lm, text = CachedLM(windowed(kind, 4)), random_tokens(20, 0)
    lm.forward(text[:12])
    held = lm.held()
    lm.crop(6)
    lm.forward(random_tokens(9, 1))
    lm.load(*held)
    close(lm.forward(text[12:]).logits, uncached(kind, 4, text)[12:], WITHIN)
    assert lm.row_bytes == 8 + 2 * 8 * 16 * (3 if kind == "Gemma3" else 2)


@pytest.mark.parametrize("kind", ["Gemma3", "Gemma4"])
def test_windows_of_a_target_hold_for_what_is_mixed_with_it(kind: str) -> None:
    """One network reads the draft's windows and the target's from the same rows."""
    text = random_tokens(20, 0)
    target, draft = (CachedLM(windowed(kind, window)) for window in (3, 7))
    p, q = (uncached(kind, window, text).softmax(-1) for window in (3, 7))
    mix_in(draft, target, 0.5)
    draft.forward(text[:9])
    draft.crop(8)
    close(draft.forward(text[8:]).logits, (0.5 * q + 0.5 * p)[8:].log())


def test_a_text_within_its_windows_takes_the_code_of_full_attention() -> None:
    lm = CachedLM(windowed("Gemma3", 5), max_length=5)
    assert lm._windows is None and lm.cached_layers == 3
    lm.forward(random_tokens(5, 0))
    with pytest.raises(UserError, match=r"pair\.max_length"):
        lm.forward(random_tokens(1, 0))


def test_a_window_that_the_class_does_not_apply_is_the_longest_text() -> None:
    """Its config has one, its code makes no masks of it."""
    model = windowed("Mistral", 5)
    model.config.layer_types = ["chunked_attention"] * 3
    model.config.attention_chunk_size = 7
    assert CachedLM(model).max_length == 7


@pytest.mark.parametrize("types", ["full_attention", "sliding_attention"])
@pytest.mark.parametrize("kind", ["Mistral", "Mixtral", "Qwen3Moe", "Phi3", "Starcoder2"])
def test_types_of_layers_that_the_class_does_not_know_are_none(kind: str, types: str) -> None:
    """A config file may hold them: the window is that of every layer all the same."""
    model, text = windowed(kind, 5), random_tokens(20, 0)
    for first in ("sliding_attention", types):
        model.config.layer_types = [first, types, types]
        lm = CachedLM(model)
        found = torch.cat([lm.forward(rows).logits for rows in text.split([9, 11])])
        close(found, uncached(kind, 5, text), WITHIN)


@pytest.mark.parametrize("more", [{"sliding_window": None}, {"use_sliding_window": False}])
def test_a_window_of_none_is_none(more: dict) -> None:
    model, text = windowed("Qwen2", 5, **{"layer_types": None, **more}), random_tokens(20, 0)
    lm = CachedLM(model)
    assert lm._windows is None and lm.max_length == 400
    lm.forward(text[:9], logits="none")
    close(lm.forward(text[9:]).logits, without_cache(model, text)[9:], WITHIN)
