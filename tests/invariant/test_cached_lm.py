"""Cached forwards equal uncached ones: random chunks and crops, trees path by path, masks row by
row, batches sequence by sequence."""

from copy import deepcopy
from functools import cache, partial

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from decoding.models.batched_lm import BatchedLM, _groups
from decoding.models.cached_lm import CachedLM
from decoding.models.kv_cache import SPARE, BufferCache
from decoding.sampling import Warp
from runtime.errors import UserError
from tests.helpers.device.device_report import ENGINES, pair_on
from tests.helpers.device.pretend_device import pretend
from tests.helpers.models.cached import (
    LENGTHS,
    VOCAB,
    build,
    check_batch,
    check_chunks_and_rollbacks,
    check_tree,
    close,
    random_tokens,
    without_cache,
)
from tests.helpers.models.tiny_pair import tiny_models, tiny_pair
from tests.invariant.test_pretend_device import decode as decoded


@pytest.fixture(params=["llama", "qwen2", "gemma2"])
def lm(request: pytest.FixtureRequest) -> CachedLM:
    return CachedLM(build(request.param))


@cache
def eager(lm: CachedLM) -> PreTrainedModel:
    model = type(lm.model)(deepcopy(lm.model.config))  # its own: it says which attention is used
    model.load_state_dict(lm.model.state_dict())
    model.set_attn_implementation("eager")
    return model.eval()


def uncached(lm: CachedLM, text: Tensor, hidden: bool = False) -> Tensor:
    """By transformers' own attention."""
    return without_cache(eager(lm), text, hidden)


@pytest.mark.parametrize("seed", range(3))
def test_chunks_and_rollbacks(lm: CachedLM, seed: int) -> None:
    """Beyond the first buffer, so it grows."""
    text = random_tokens(300, seed)
    check_chunks_and_rollbacks(lm, text, uncached(lm, text), seed, longest=60)


def test_hidden_states(lm: CachedLM) -> None:
    text = random_tokens(30, 0)
    found = [lm.forward(rows, hidden=range(-4, 0)).hidden for rows in text.split([20, 1, 9])]
    close(torch.cat(found, 1), uncached(lm, text, hidden=True))


@pytest.mark.parametrize(("before", "size"), [(0, 12), (17, 12), (3, 25), (290, 30)])
def test_a_tree_is_its_paths(lm: CachedLM, before: int, size: int) -> None:
    check_tree(lm, partial(uncached, lm), before, seed=size, size=size)


def test_a_batch_is_its_sequences(lm: CachedLM) -> None:
    states = lambda text: uncached(lm, text, hidden=True)[-3:]  # noqa: E731
    check_batch(lm, partial(uncached, lm), layers=(-3, -2, -1), states=states)


def test_a_prefill_in_groups_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    lm, tokens = CachedLM(build("llama")), torch.tensor([5, 6, 7, 8])
    prefixes = [random_tokens(length, seed) for seed, length in enumerate(LENGTHS)]
    found = []
    for together in (512, 1, 8, 14):
        monkeypatch.setattr("decoding.models.batched_lm.TOGETHER", together)
        found.append(BatchedLM(lm, prefixes, more=1).step(tokens).logits)
        close(found[-1], found[0])
    assert _groups(LENGTHS) == [[2, 0], [3]]
    assert _groups([20, 0, 30]) == [[0], [2]]
    assert _groups([4, 5, 5, 1]) == [[3, 0], [1, 2]]


def test_masked_rows_continue_different_prefixes(lm: CachedLM) -> None:
    """What harvesting does: every row of one call hangs off a different cached position."""
    prefix, anchors, tokens = random_tokens(10, 1), torch.tensor([2, 5, 9]), random_tokens(3, 2)
    lm.forward(prefix, logits="none")
    visible = torch.cat([torch.arange(10) <= anchors[:, None], torch.eye(3).bool()], dim=1)
    logits = lm.forward_masked(tokens, anchors + 1, visible).logits
    for row, anchor in enumerate(anchors.tolist()):
        text = torch.cat([prefix[: anchor + 1], tokens[row : row + 1]])
        close(logits[row], uncached(lm, text)[-1])


def test_cache_survives_leaving_inference_mode(lm: CachedLM) -> None:
    text = random_tokens(9, 0)
    with torch.inference_mode():
        lm.forward(text[:4])
    close(lm.forward(text[4:]).logits, uncached(lm, text)[4:])


def test_logits_can_be_limited(lm: CachedLM) -> None:
    text = random_tokens(5, 0)
    everything = lm.forward(text).logits
    for wanted, rows in (("last", [4]), ("none", []), ([3, 0, 3], [3, 0, 3])):
        lm.crop(0)
        found = lm.forward(text, logits=wanted).logits
        assert found.shape == (len(rows), VOCAB)
        close(found, everything[rows], 1e-5)


def test_left_padded_batches_still_work_on_the_wrapped_model(lm: CachedLM) -> None:
    """Other code may batch on ``lm.model`` directly; our attention must respect its padding
    masks."""
    text = random_tokens(6, 3)
    padded = torch.stack([text, torch.cat([torch.zeros(2, dtype=torch.long), text[:4]])])
    mask = torch.tensor([[1] * 6, [0, 0, 1, 1, 1, 1]])
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        logits = lm.model(input_ids=padded, attention_mask=mask, position_ids=positions).logits
    close(logits[1, -1], uncached(lm, text[:4])[-1])


def test_the_context_limit_is_enforced() -> None:
    lm = CachedLM(build("gemma2"))
    assert lm.max_length == 700
    with pytest.raises(UserError, match=r"pair\.max_length"):
        lm.forward(torch.zeros(701, dtype=torch.long))


def test_counters_and_embedding(lm: CachedLM) -> None:
    lm.forward(random_tokens(4, 0), logits="none")
    assert lm.forwards == 1 and lm.seconds > 0
    lm.reset()
    assert (lm.length, lm.forwards, lm.seconds) == (0, 0, 0.0)
    assert lm.embed(3).shape == (32,)


def test_an_output_layer_of_quantised_weights_is_never_asked_about_no_rows() -> None:
    """Quantisers that look for the largest input of a call find none."""

    class Quantised(nn.Parameter):
        pass

    class Head(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            assert x.numel(), "rows"
            return super().forward(x)

    model, head = tiny_models()[0], Head(24, 32, bias=False, dtype=torch.float64)
    head.weight.__class__ = Quantised
    model.set_output_embeddings(head)
    lm, tokens = CachedLM(model), torch.tensor([3, 7, 1])
    assert lm.forward(tokens, logits="none").logits.shape == (0, 32)
    assert lm.forward(tokens[:1]).logits.shape == (1, 32)


# Buffers have planned rows or spare ones, so that a request grows its cache once ------------------


def put(cache: BufferCache, rows: int) -> Tensor:
    states = torch.ones(1, 2, rows, 4)
    cache.update(states, states, 0)
    return cache.layers[0].keys


def test_planned_rows_are_allocated_once_and_no_more() -> None:
    cache = BufferCache(300)
    first = put(cache, 5)
    assert first.shape[2] == 300 and put(cache, 295) is first
    assert put(cache, 1).shape[2] == 301 + 301, "beyond the plan as without one"
    assert cache.layers[0].length == 301 and bool((cache.layers[0].keys[:, :, :301] == 1).all())


@pytest.mark.parametrize(("rows", "spare"), [(5, 256), (700, 700), (5000, SPARE)])
def test_others_have_spare_rows(rows: int, spare: int) -> None:
    cache = BufferCache()
    first = put(cache, rows)
    assert first.shape[2] == rows + spare
    assert put(cache, spare) is first and put(cache, 1) is not first


def test_a_decode_on_a_device_allocates_once_and_the_next_nothing() -> None:
    with pretend():
        pair = pair_on("cuda:0", "cuda:0")
        engine = ENGINES["chain x token"](pair, Warp())
        decoded(engine)
        buffers = [layer.keys for layer in pair.target._cache.layers]
        assert {buffer.shape[2] for buffer in buffers} <= {SPARE, *range(257, 300)}
        decoded(engine)
        after = [layer.keys for layer in pair.target._cache.layers]
        assert all(a is b for a, b in zip(after, buffers, strict=True))


def test_a_model_made_while_nothing_is_recorded_records() -> None:
    lm = tiny_pair().target
    lm.record([0])
    with lm.unrecorded():
        lm.forward(torch.tensor([1, 2]))
        other = lm.fresh()
    assert not len(lm.states)
    other.forward(torch.tensor([1, 2]))
    assert len(other.recorded(slice(0, 2))) == 2
