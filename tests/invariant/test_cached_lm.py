"""Cached forwards equal uncached ones: random chunks and crops, trees path by path, masks row by
row."""

from copy import deepcopy

import pytest
import torch
from torch import nn
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from decoding.models.loading import CachedLM
from runtime.errors import UserError
from tests.helpers.models.tiny_pair import tiny_models

VOCAB = 61
SMALL = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=700,
    initializer_range=0.3,
)


def build(kind: str) -> PreTrainedModel:
    torch.manual_seed(0)
    if kind == "gemma2":
        return Gemma2ForCausalLM(Gemma2Config(**SMALL, sliding_window=650, query_pre_attn_scalar=8))
    if kind == "qwen2":
        return Qwen2ForCausalLM(Qwen2Config(**SMALL))
    return LlamaForCausalLM(LlamaConfig(**SMALL))


@pytest.fixture(params=["llama", "qwen2", "gemma2"])
def lm(request: pytest.FixtureRequest) -> CachedLM:
    return CachedLM(build(request.param))


@torch.no_grad()
def uncached(lm: CachedLM, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Reference without cache, transformers' eager attention: logits [n, V], hidden [n_layers + 1,
    n, H]."""
    model = type(lm.model)(deepcopy(lm.model.config))  # its own: it says which attention is used
    model.load_state_dict(lm.model.state_dict())
    model.set_attn_implementation("eager")
    result = model.eval()(input_ids=tokens[None], use_cache=False, output_hidden_states=True)
    return result.logits[0], torch.cat(result.hidden_states)


def random_tokens(n: int, seed: int) -> torch.Tensor:
    return torch.randint(0, VOCAB, (n,), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("seed", range(3))
def test_chunks_and_crops(lm: CachedLM, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    tokens = random_tokens(300, seed)  # beyond the first buffer, so it grows
    logits, hidden = uncached(lm, tokens)
    while lm.length < len(tokens):
        if lm.length and torch.rand((), generator=generator) < 0.3:
            lm.crop(int(torch.randint(lm.length // 2, lm.length + 1, (), generator=generator)))
        n = int(torch.randint(1, 60, (), generator=generator))
        rows = slice(lm.length, min(lm.length + n, len(tokens)))
        if rows.start == rows.stop:
            break
        output = lm.forward(tokens[rows], hidden=range(-len(hidden), 0))
        assert output.hidden is not None
        torch.testing.assert_close(output.logits, logits[rows], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(output.hidden, hidden[:, rows], atol=1e-4, rtol=1e-4)


def random_parents(n: int, generator: torch.Generator) -> list[int]:
    return [int(torch.randint(-1, row, (), generator=generator)) if row else -1 for row in range(n)]


def path_to(parents: list[int], row: int) -> list[int]:
    return (path_to(parents, parents[row]) if parents[row] >= 0 else []) + [row]


@pytest.mark.parametrize("seed", range(3))
def test_tree_equals_path_by_path_and_continues_after_keep_path(lm: CachedLM, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    prefix = random_tokens(int(torch.randint(0, 40, (), generator=generator)), seed)
    if len(prefix):
        lm.forward(prefix, logits="none")
    nodes = random_tokens(12, seed + 100)
    parents = random_parents(12, generator)
    tree = lm.forward(nodes, torch.tensor(parents)).logits
    for row in range(12):
        path = torch.cat([prefix, nodes[path_to(parents, row)]])
        torch.testing.assert_close(tree[row], uncached(lm, path)[0][-1], atol=1e-4, rtol=1e-4)
    kept = path_to(parents, 11)
    lm.keep_path(kept)
    assert lm.length == len(prefix) + len(kept)
    more = random_tokens(3, seed + 200)
    expected = uncached(lm, torch.cat([prefix, nodes[kept], more]))[0][-3:]
    torch.testing.assert_close(lm.forward(more).logits, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("seed", range(6))
def test_tree_grown_over_several_calls(lm: CachedLM, seed: int) -> None:
    """Random trees of random sizes on caches of random lengths, some beyond the first buffer."""
    generator = torch.Generator().manual_seed(seed)
    prefix = random_tokens(
        int(torch.randint(1, 20 if seed % 2 else 300, (), generator=generator)), seed
    )
    lm.forward(prefix, logits="none")
    size = int(torch.randint(2, 40, (), generator=generator))
    nodes, parents = random_tokens(size, seed + 100), random_parents(size, generator)
    rows: list[torch.Tensor] = []
    while len(rows) < size:
        part = slice(len(rows), len(rows) + int(torch.randint(1, 12, (), generator=generator)))
        rows += lm.forward(nodes[part], torch.tensor(parents[part]), extend=bool(rows)).logits
    for row in range(0, size, 3):
        path = torch.cat([prefix, nodes[path_to(parents, row)]])
        torch.testing.assert_close(rows[row], uncached(lm, path)[0][-1], atol=1e-4, rtol=1e-4)
    kept = path_to(parents, size - 1)
    lm.keep_path(kept)
    expected = uncached(lm, torch.cat([prefix, nodes[kept], nodes[:1]]))[0][-1:]
    torch.testing.assert_close(lm.forward(nodes[:1]).logits, expected, atol=1e-4, rtol=1e-4)


def test_masked_rows_continue_different_prefixes(lm: CachedLM) -> None:
    """What harvesting does: every row of one call hangs off a different cached position."""
    prefix = random_tokens(10, 1)
    lm.forward(prefix, logits="none")
    anchors, tokens = torch.tensor([2, 5, 9]), random_tokens(3, 2)
    visible = torch.cat(
        [torch.arange(10) <= anchors[:, None], torch.eye(3, dtype=torch.bool)], dim=1
    )
    logits = lm.forward_masked(tokens, anchors + 1, visible).logits
    for row, anchor in enumerate(anchors.tolist()):
        expected = uncached(lm, torch.cat([prefix[: anchor + 1], tokens[row : row + 1]]))[0][-1]
        torch.testing.assert_close(logits[row], expected, atol=1e-4, rtol=1e-4)


def test_cache_survives_leaving_inference_mode(lm: CachedLM) -> None:
    tokens = random_tokens(9, 0)
    with torch.inference_mode():
        lm.forward(tokens[:4])
    logits = lm.forward(tokens[4:]).logits
    torch.testing.assert_close(logits, uncached(lm, tokens)[0][4:], atol=1e-4, rtol=1e-4)


def test_logits_can_be_limited(lm: CachedLM) -> None:
    tokens = random_tokens(5, 0)
    everything = lm.forward(tokens).logits
    lm.crop(0)
    last = lm.forward(tokens, logits="last").logits
    torch.testing.assert_close(last, everything[-1:], atol=1e-5, rtol=1e-5)
    lm.crop(0)
    assert lm.forward(tokens, logits="none").logits.shape == (0, VOCAB)
    lm.crop(0)
    some = lm.forward(tokens, logits=[3, 0, 3]).logits
    torch.testing.assert_close(some, everything[[3, 0, 3]], atol=1e-5, rtol=1e-5)


def test_left_padded_batches_still_work_on_the_wrapped_model(lm: CachedLM) -> None:
    """Other code may batch on ``lm.model`` directly; our attention must respect its padding
    masks."""
    tokens = random_tokens(6, 3)
    padded = torch.stack([tokens, torch.cat([torch.zeros(2, dtype=torch.long), tokens[:4]])])
    mask = torch.tensor([[1] * 6, [0, 0, 1, 1, 1, 1]])
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        logits = lm.model(input_ids=padded, attention_mask=mask, position_ids=positions).logits
    torch.testing.assert_close(logits[1, -1], uncached(lm, tokens[:4])[0][-1], atol=1e-4, rtol=1e-4)


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
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert x.numel(), "rows"
            return super().forward(x)

    model = tiny_models()[0]
    head = Head(24, 32, bias=False, dtype=torch.float64)
    head.weight.__class__ = Quantised
    model.set_output_embeddings(head)
    lm, tokens = CachedLM(model), torch.tensor([3, 7, 1])
    assert lm.forward(tokens, logits="none").logits.shape == (0, 32)
    assert lm.forward(tokens[:1]).logits.shape == (1, 32)
