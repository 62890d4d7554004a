"""Models whose layers see a window of the text, far past it: cached equals uncached, a tree its
paths, a rollback a fresh start, a batch its sequences, greedy decoding `generate`."""

from dataclasses import replace

import pytest
import torch

from decoding.engines.serial import SerialEngine
from decoding.models.batched_lm import BatchedLM
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
from tests.helpers.models.tiny_pair import tiny_tokenizer
from tests.helpers.models.windowed import KINDS, uncached, windowed
from tests.invariant.test_cached_lm import VOCAB, path_to, random_parents, random_tokens
from tests.invariant.test_plain_harvest import SAMPLED, with_one_by_one

FEW = ("Gemma3", "Gemma4", "Mistral", "GptOss", "Llama4")


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found.float(), expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("window", [1, 5, 16])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.few(12)
def test_chunks_and_rollbacks_equal_one_uncached_call(kind: str, window: int) -> None:
    """The first call alone is longer than most windows; rollbacks go back over their edges."""
    lm, generator = CachedLM(windowed(kind, window)), torch.Generator().manual_seed(window)
    assert lm.max_length == 400
    tokens = random_tokens(45, window)
    expected = uncached(kind, window, tokens)
    close(lm.forward(tokens[:9]).logits, expected[:9])
    while lm.length < len(tokens):
        if torch.rand((), generator=generator) < 0.4:
            lm.crop(int(torch.randint(lm.length // 2, lm.length + 1, (), generator=generator)))
        end = lm.length + int(torch.randint(1, 8, (), generator=generator))
        rows = slice(lm.length, min(end, len(tokens)))
        close(lm.forward(tokens[rows]).logits, expected[rows])


@pytest.mark.parametrize(("window", "before"), [(1, 0), (3, 2), (5, 11), (8, 7)])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.few(16)
def test_a_tree_equals_its_paths_and_goes_on_after_a_rollback(
    kind: str, window: int, before: int
) -> None:
    """Windows lie by depth: a row's place in the cache is up to eleven beyond its position."""
    lm, generator = CachedLM(windowed(kind, window)), torch.Generator().manual_seed(before)
    prefix, nodes = random_tokens(before, 1), random_tokens(12, 2)
    parents = random_parents(12, generator)
    if before:
        lm.forward(prefix, logits="none")
    tree = lm.forward(nodes[:7], torch.tensor(parents[:7])).logits
    more = lm.forward(nodes[7:], torch.tensor(parents[7:]), extend=True).logits
    for row, found in enumerate([*tree, *more]):
        path = torch.cat([prefix, nodes[path_to(parents, row)]])
        close(found, uncached(kind, window, path)[-1])
    kept, after = path_to(parents, 11), random_tokens(9, 3)
    lm.keep_path(kept)
    text = torch.cat([prefix, nodes[kept], after])
    close(lm.forward(after).logits, uncached(kind, window, text)[-9:])


@pytest.mark.parametrize("window", [1, 5])
@pytest.mark.parametrize("kind", KINDS)
def test_a_padded_batch_equals_its_sequences_and_hands_over(kind: str, window: int) -> None:
    lm, lengths = CachedLM(windowed(kind, window)), (7, 0, 3, 12)
    texts = [random_tokens(length + 9, seed) for seed, length in enumerate(lengths)]
    expected = [uncached(kind, window, text) for text in texts]
    batch = BatchedLM(lm, [text[:-9] for text in texts], more=6)
    rows = torch.arange(4)
    for step in range(6):
        if step == 3:
            rows = torch.tensor([1, 3])
            batch.keep(rows)
        places = [lengths[row] + step for row in rows.tolist()]
        tokens = torch.stack([texts[row][t] for row, t in zip(rows, places, strict=True)])
        logits = batch.step(tokens).logits
        for found, row, t in zip(logits, rows.tolist(), places, strict=True):
            close(found, expected[row][t])
    for place, row in enumerate(rows.tolist()):
        batch.hand_over(place)
        assert lm.length == lengths[row] + 6
        close(lm.forward(texts[row][-3:]).logits, expected[row][-3:])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("structure", ["chain", "nothing", "tree"])
@pytest.mark.few(6)
def test_greedy_decoding_is_generate_far_past_the_window(kind: str, structure: str) -> None:
    """The prompt is longer than the window, and 30 tokens follow. The draft is the target with a
    longer window: it is right now and then."""
    prompt = random_tokens(9, 4)
    plain = windowed(kind, 5)
    plain.set_attn_implementation("eager")
    expected = plain.generate(prompt[None], max_new_tokens=30, do_sample=False)[0, 9:].tolist()
    pair = windowed_pair(kind)
    if structure == "tree":
        grown, stop, verifier = StaticTree([3, 2, 1]), Never(), RrsVerifier()
    else:
        grown, verifier = Chain(6), TokenVerifier()
        stop = Fixed(6 if structure == "chain" else 0)
    engine = SerialEngine(pair, grown, stop, verifier, Warp(0.0), Warp())
    trace = engine.decode(prompt, 30, Sampler.seeded(0))
    assert trace.tokens == expected


def windowed_pair(kind: str) -> ModelPair:
    target, draft = (CachedLM(windowed(kind, window)) for window in (5, 11))
    return ModelPair(target, draft, tiny_tokenizer(), "windowed", ())


@pytest.mark.parametrize("kind", FEW)
@pytest.mark.parametrize(("warp", "draft_warp"), [(Warp(), Warp()), (Warp(0.0), Warp(0.0))])
@pytest.mark.few(2)
def test_a_harvest_labels_as_one_round_at_a_time_does(
    kind: str, warp: Warp, draft_warp: Warp
) -> None:
    recipe = replace(SAMPLED, warp=warp, draft_warp=draft_warp)
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
    close(lm.forward(text[12:]).logits, uncached(kind, 4, text)[12:])
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
    expected = (0.5 * q + 0.5 * p)[8:].log()
    torch.testing.assert_close(draft.forward(text[8:]).logits, expected, atol=1e-4, rtol=1e-4)


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
    assert VOCAB == model.config.vocab_size


@pytest.mark.parametrize("types", ["full_attention", "sliding_attention"])
@pytest.mark.parametrize("kind", ["Mistral", "Mixtral", "Qwen3Moe", "Phi3", "Starcoder2"])
def test_types_of_layers_that_the_class_does_not_know_are_none(kind: str, types: str) -> None:
    """A config file may hold them: the window is that of every layer all the same."""
    model, text = windowed(kind, 5), random_tokens(20, 0)
    model.config.layer_types = ["sliding_attention", types, types]
    close(CachedLM(model).forward(text).logits, uncached(kind, 5, text))
    model.config.layer_types = [types] * 3
    lm = CachedLM(model)
    lm.forward(text[:9], logits="none")
    close(lm.forward(text[9:]).logits, uncached(kind, 5, text)[9:])


def test_a_window_of_none_is_none() -> None:
    for more in ({"sliding_window": None}, {"use_sliding_window": False}):
        model = windowed("Qwen2", 5, **{"layer_types": None, **more})
        lm, text = CachedLM(model), random_tokens(20, 0)
        assert lm._windows is None and lm.max_length == 400
        lm.forward(text[:9], logits="none")
        expected = model(input_ids=text[None], use_cache=False).logits[0, 9:]
        close(lm.forward(text[9:]).logits, expected.detach().float())
