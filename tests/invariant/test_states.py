"""Models that keep states besides keys and values: cached equals uncached, a rollback of any length
a fresh start, greedy decoding `generate`.

Scans in chunks and steps of one token differ by rounding, for states are float32 whatever the
weights are: 5e-6 at most of logits that spread by 0.6; the tolerance is 2e-5."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers

from decoding.engines.serial import SerialEngine
from decoding.models.batched_lm import batch_of
from decoding.models.cached_lm import CachedLM
from decoding.models.loading import ModelPair
from decoding.models.mixed import mix_in
from decoding.models.recurrent import STATEFUL, RecurrentLM, cached
from decoding.pair import open_pair
from decoding.sampling import Sampler, Warp
from decoding.stopping.fixed import Fixed
from decoding.stopping.never import Never
from decoding.structures.chain import Chain
from decoding.structures.static_tree import StaticTree
from decoding.verifiers.rrs import RrsVerifier
from decoding.verifiers.token import TokenVerifier
from papers.plain_harvest import all_positions
from runtime.errors import UserError
from serving.generate import speculate
from tests.contract.enumeration import autoregressive_distribution, distribution_of, largest_error
from tests.helpers.models.stateful import KINDS, near, reference, stateful, uncached
from tests.helpers.models.tiny_pair import tiny_tokenizer
from tests.helpers.models.windowed import windowed
from tests.invariant.test_cached_lm import random_tokens
from tests.invariant.test_plain_harvest import SAMPLED, requests, with_one_by_one

pytestmark = pytest.mark.skipif(
    not hasattr(transformers.cache_utils, "DummyLayer"),
    reason="models that keep states need transformers 5.23",
)


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found.float(), expected, atol=2e-5, rtol=2e-5)


def opened(kind: str) -> RecurrentLM:
    lm = cached(stateful(kind))
    assert isinstance(lm, RecurrentLM)
    return lm


def test_every_type_is_tried() -> None:
    assert {stateful(kind).config.model_type for kind in KINDS} == STATEFUL


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.few(12)
def test_chunks_and_rollbacks_equal_one_uncached_call(kind: str, seed: int) -> None:
    """Rollbacks are to the snapshot, after it and before it."""
    lm, generator = opened(kind), torch.Generator().manual_seed(seed)
    tokens = random_tokens(45, seed)
    expected = uncached(kind, tokens)
    close(lm.forward(tokens[:9]).logits, expected[:9])
    while lm.length < len(tokens):
        if torch.rand((), generator=generator) < 0.4:
            lm.crop(int(torch.randint(lm.length // 2, lm.length + 1, (), generator=generator)))
        end = lm.length + int(torch.randint(1, 8, (), generator=generator))
        rows = slice(lm.length, min(end, len(tokens)))
        if torch.rand((), generator=generator) < 0.3:
            close(lm.forward(tokens[rows], logits="last").logits, expected[rows][-1:])
        else:
            close(lm.forward(tokens[rows]).logits, expected[rows])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.few(4)
def test_a_rollback_of_every_length(kind: str) -> None:
    """After a call of several rows, and after as many calls of one."""
    lm, text, other = opened(kind), random_tokens(14, 1), random_tokens(14, 2)
    for length in range(12):
        for steps in (False, True):
            lm.reset()
            lm.forward(text[:5], logits="none")
            wrong = other[5:12]
            for rows in wrong.split(1 if steps else len(wrong)):
                lm.forward(rows)
            lm.crop(length)
            kept = torch.cat([text[:5], wrong])[:length]
            found = lm.forward(text[length:]).logits
            close(found, uncached(kind, torch.cat([kept, text[length:]]))[length:])


@pytest.mark.parametrize("kind", KINDS)
def test_hidden_states_are_those_of_the_class(kind: str) -> None:
    """Also behind a rollback, where the rows before run again in the same call."""
    lm, text = opened(kind), random_tokens(20, 0)
    layers = list(range(-lm.hidden_states, 0))
    expected = uncached(kind, text, hidden=True)
    assert len(expected) == lm.hidden_states
    lm.record([1])
    lm.forward(text[:7], logits="none")
    found = lm.forward(text[7:15], hidden=layers).hidden
    assert found is not None
    close(found, expected[:, 7:15])
    lm.crop(11)
    last = lm.forward(text[11:13], hidden=layers, hidden_rows="last", logits="last")
    assert last.hidden is not None and last.hidden.shape[1] == len(last.logits) == 1
    close(last.hidden, expected[:, 12:13])
    close(lm.states[:13], expected[[1, -1], :13].transpose(0, 1))


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_of_a_row(kind: str) -> None:
    lm = opened(kind)
    lm.forward(random_tokens(12, 0))
    assert (lm.row_bytes > 0) is (kind != "Mamba2")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("gamma", [0, 1, 4])
@pytest.mark.few(6)
def test_greedy_decoding_is_generate(kind: str, gamma: int) -> None:
    prompt = random_tokens(9, 4)
    expected = reference(kind).generate(prompt[None], max_new_tokens=30, do_sample=False)
    pair = ModelPair(opened(kind), cached(near(kind)), tiny_tokenizer(), "stateful", ())
    engine = SerialEngine(pair, Chain(6), Fixed(gamma), TokenVerifier(), Warp(0.0), Warp(0.0))
    trace = engine.decode(prompt, 30, Sampler.seeded(0))
    assert trace.tokens == expected[0, 9:].tolist()
    accepted = sum(entry.accepted for entry in trace.rounds)
    drafted = sum(len(entry.draft_tokens) for entry in trace.rounds)
    assert not gamma or 0 < accepted < drafted


@pytest.mark.parametrize(
    ("kind", "draft"),
    [("Qwen3Next", "itself"), ("Mamba2", "itself"), ("FalconH1", "qwen2"), ("Lfm2", "qwen2")],
)
@pytest.mark.slow
def test_the_distribution_of_three_tokens_is_the_targets(kind: str, draft: str) -> None:
    """Every draw enumerated, with p and q that are right up to the rounding of float32."""
    small, prompt = {"vocab_size": 3}, (1, 2, 1)
    target = stateful(kind, **small)
    model = near(kind, **small) if draft == "itself" else windowed("Qwen2", 5, **small)
    pair = ModelPair(cached(target), cached(model), tiny_tokenizer(), "stateful", ())
    engine = SerialEngine(pair, Chain(2), Fixed(2), TokenVerifier(), Warp(0.3), Warp(0.3))

    def conditional(text: tuple[int, ...]) -> torch.Tensor:
        return Warp(0.3).probs(plain(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1])

    plain = stateful(kind, **small)
    with torch.no_grad():
        exact = autoregressive_distribution(conditional, 3, 3, prompt)
    found = distribution_of(lambda sampler: tuple(engine.decode(prompt, 3, sampler).tokens))
    assert largest_error(found, exact) < 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_equals_its_sequences_and_hands_over(kind: str) -> None:
    lm, lengths = opened(kind), (7, 0, 3, 12)
    texts = [random_tokens(length + 9, seed) for seed, length in enumerate(lengths)]
    batch, rows = batch_of(lm, [text[:-9] for text in texts], more=6), torch.arange(4)
    for step in range(6):
        if step == 3:
            rows = torch.tensor([1, 3])
            batch.keep(rows)
        tokens = torch.stack([texts[row][lengths[row] + step] for row in rows.tolist()])
        output = batch.step(tokens, [-2] if step == 4 else ())
        for place, row in enumerate(rows.tolist()):
            end = lengths[row] + step + 1
            close(output.logits[place], uncached(kind, texts[row][:end])[-1])
            if output.hidden is not None:
                close(output.hidden[0, place], uncached(kind, texts[row][:end], True)[-2, -1])
    for place, row in enumerate(rows.tolist()):
        batch.hand_over(place)
        assert lm.length == lengths[row] + 6
        close(lm.forward(texts[row][-3:]).logits, uncached(kind, texts[row])[-3:])
        lm.crop(4)
        close(lm.forward(texts[row][4:]).logits, uncached(kind, texts[row])[4:])


@pytest.mark.parametrize("kind", ["Qwen3Next", "FalconH1", "Lfm2", "Mamba2"])
def test_a_tree_is_refused(kind: str) -> None:
    lm = opened(kind)
    pair = ModelPair(opened(kind), lm, tiny_tokenizer(), "stateful", ())
    engine = SerialEngine(pair, StaticTree([0, 0, 1]), Never(), RrsVerifier(), Warp(), Warp())
    with pytest.raises(UserError, match=r"^pair: expected a draft of one path, .* Set structure="):
        engine.decode(random_tokens(5, 0), 5, Sampler.seeded(0))


def test_states_survive_leaving_inference_mode() -> None:
    lm, text = opened("Lfm2"), random_tokens(9, 0)
    with torch.inference_mode():
        lm.forward(text[:6])
    lm.crop(5)
    close(lm.forward(text[5:]).logits, uncached("Lfm2", text)[5:])


def test_a_mixture_and_rows_of_many_texts_are_refused() -> None:
    lm, other = opened("Lfm2"), CachedLM(windowed("Gemma3", 5))
    for draft, target in ((lm, other), (other, lm)):
        with pytest.raises(UserError, match=r"^pair\.draft_mix: expected 1, .* Write"):
            mix_in(draft, target, 0.5)
    rows = torch.zeros(2, dtype=torch.long), torch.arange(2), torch.eye(2, dtype=torch.bool)
    with pytest.raises(UserError, match=r"^pair: expected rows of one text, .* warp=greedy"):
        lm.forward_masked(*rows)


@pytest.mark.parametrize("kind", ["Qwen3Next", "FalconH1", "Lfm2", "Mamba2"])
@pytest.mark.few(1)
def test_a_greedy_harvest_labels_as_one_round_at_a_time_does(kind: str) -> None:
    """A target with states and a draft without."""
    draft = CachedLM(windowed("Qwen2", 5))
    pair = ModelPair(opened(kind), draft, tiny_tokenizer(), "stateful", ())
    agreement = with_one_by_one(pair, replace(SAMPLED, warp=Warp(0.0)))
    assert agreement.rounds == agreement.same_tokens == agreement.same_accepted >= 30
    assert agreement.difference < 1e-4


@pytest.mark.parametrize("sampled", [False, True])
def test_a_harvest_that_needs_many_texts_at_once_is_refused(sampled: bool) -> None:
    """Of rollouts of such a draft, and of verdicts of such a target that samples."""
    models = [opened("Lfm2"), CachedLM(windowed("Qwen2", 5))]
    target, draft = models if sampled else models[::-1]
    pair = ModelPair(target, draft, tiny_tokenizer(), "stateful", ())
    recipe = replace(SAMPLED, warp=SAMPLED.warp if sampled else Warp(0.0))
    with pytest.raises(UserError, match=r"^pair: expected rows of one text, .* warp=greedy"):
        all_positions(pair, requests(), recipe)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.few(4)
def test_it_speculates_inside_generate(kind: str) -> None:
    model, prompt = stateful(kind), random_tokens(9, 4)[None]
    inputs = {"max_new_tokens": 12, "do_sample": False}
    expected = model.generate(prompt, **inputs)
    found = model.generate(prompt, **inputs, custom_generate=speculate, draft=near(kind))
    assert torch.equal(found, expected)
    assert torch.equal(model.generate(prompt, **inputs), expected)  # left as it was


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.few(4)
def test_a_folder_is_loaded_and_decodes(kind: str, tmp_path: Path) -> None:
    model, prompt = stateful(kind), random_tokens(9, 4)
    expected = model.generate(prompt[None], max_new_tokens=12, do_sample=False)[0, 9:]
    model.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    pair = open_pair(str(tmp_path), str(tmp_path), dtype="float32")
    engine = SerialEngine(pair, Chain(4), Fixed(4), TokenVerifier(), Warp(0.0), Warp(0.0))
    assert engine.decode(prompt, 12, Sampler.seeded(0)).tokens == expected.tolist()


def test_others_take_the_code_of_keys_and_values() -> None:
    assert type(cached(windowed("Gemma3", 5))) is CachedLM
