"""Small models, and what a cached model has to say whatever its layers: what one call without a
cache says, in chunks and after rollbacks, in trees, in batches, inside `generate` and from a
folder."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from decoding.engines.serial import SerialEngine
from decoding.models.batched_lm import batch_of
from decoding.models.cached_lm import CachedLM
from decoding.pair import open_pair
from decoding.sampling import Sampler, Warp
from decoding.stopping.fixed import Fixed
from decoding.structures.chain import Chain
from decoding.verifiers.token import TokenVerifier
from serving.generate import speculate
from tests.helpers.models.tiny_pair import tiny_tokenizer

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
LENGTHS = (7, 0, 3, 12)  # of the texts of a batch
Expected = Callable[[Tensor], Tensor]
"""A text [n] -> its logits [n, V], in one call without a cache."""


def build(kind: str) -> PreTrainedModel:
    torch.manual_seed(0)
    if kind == "gemma2":
        return Gemma2ForCausalLM(Gemma2Config(**SMALL, sliding_window=650, query_pre_attn_scalar=8))
    if kind == "qwen2":
        return Qwen2ForCausalLM(Qwen2Config(**SMALL))
    return LlamaForCausalLM(LlamaConfig(**SMALL))


@torch.no_grad()
def without_cache(model: PreTrainedModel, text: Tensor, hidden: bool = False) -> Tensor:
    """Logits [n, V] as the class itself computes them, in one call; or all hidden states
    [n_layers + 1, n, H]."""
    found = model(input_ids=text[None], use_cache=False, output_hidden_states=hidden)
    return torch.cat(found.hidden_states) if hidden else found.logits[0].float()


def random_tokens(n: int, seed: int, words: int = VOCAB) -> Tensor:
    return torch.randint(0, VOCAB, (n,), generator=torch.Generator().manual_seed(seed)) % words


def path_to(parents: list[int], row: int) -> list[int]:
    return (path_to(parents, parents[row]) if parents[row] >= 0 else []) + [row]


def close(found: Tensor, expected: Tensor, within: float = 1e-4) -> None:
    torch.testing.assert_close(found.float(), expected.float(), atol=within, rtol=within)


def check_chunks_and_rollbacks(
    lm: CachedLM, text: Tensor, logits: Tensor, seed: int, within: float = 1e-4, longest: int = 8
) -> None:
    """logits: [n, V], of the whole text. Now and then only the last row is asked for."""
    generator = torch.Generator().manual_seed(seed)
    close(lm.forward(text[:9]).logits, logits[:9], within)
    while lm.length < len(text):
        if torch.rand((), generator=generator) < 0.4:
            lm.crop(int(torch.randint(lm.length // 2, lm.length + 1, (), generator=generator)))
        end = lm.length + int(torch.randint(1, longest, (), generator=generator))
        rows = slice(lm.length, min(end, len(text)))
        if torch.rand((), generator=generator) < 0.3:
            close(lm.forward(text[rows], logits="last").logits, logits[rows][-1:], within)
        else:
            close(lm.forward(text[rows]).logits, logits[rows], within)


def check_tree(
    lm: CachedLM,
    expected: Expected,
    before: int,
    seed: int,
    within: float = 1e-4,
    size: int = 12,
    words: int = VOCAB,
) -> Tensor:
    """A random tree after `before` cached tokens, grown in calls of up to seven rows: its rows are
    those of its paths, and the text goes on from the last one. Returns that text."""
    generator = torch.Generator().manual_seed(seed)
    prefix, nodes, after = (random_tokens(n, seed + n, words) for n in (before, size, 9))
    draws = (torch.randint(-1, row, (), generator=generator) for row in range(1, size))
    parents, rows = [-1, *map(int, draws)], list[Tensor]()
    if before:
        lm.forward(prefix, logits="none")
    while len(rows) < size:
        part = slice(len(rows), len(rows) + int(torch.randint(1, 8, (), generator=generator)))
        rows += lm.forward(nodes[part], torch.tensor(parents[part]), extend=bool(rows)).logits
    for row in range(0, size, 1 if size < 20 else 3):
        text = torch.cat([prefix, nodes[path_to(parents, row)]])
        close(rows[row], expected(text)[-1], within)
    kept = path_to(parents, size - 1)
    lm.keep_path(kept)
    assert lm.length == before + len(kept)
    text = torch.cat([prefix, nodes[kept], after])
    close(lm.forward(after).logits, expected(text)[-9:], within)
    return text


def check_batch(
    lm: CachedLM,
    expected: Expected,
    within: float = 1e-4,
    words: int = VOCAB,
    layers: tuple[int, ...] = (),
    states: Expected | None = None,
) -> None:
    """Sequences of several lengths, two of which leave on the way: each step is that of a text on
    its own, and the single cache goes on from what it is handed. states: [L, n, H] of `layers`."""
    texts = [random_tokens(length + 9, seed, words) for seed, length in enumerate(LENGTHS)]
    batch, rows = batch_of(lm, [text[:-9] for text in texts], 6), torch.arange(4)
    whole = [expected(text) for text in texts]
    for step in range(6):
        if step == 3:
            rows = torch.tensor([1, 3])
            batch.keep(rows)
        places = [(row, LENGTHS[row] + step) for row in rows.tolist()]
        output = batch.step(torch.stack([texts[row][t] for row, t in places]), layers)
        for place, (row, t) in enumerate(places):
            close(output.logits[place], whole[row][t], within)
            if states is not None:
                close(output.hidden[:, place], states(texts[row])[:, t], within)
    for place, row in enumerate(rows.tolist()):
        batch.hand_over(place)
        assert lm.length == LENGTHS[row] + 6
        close(lm.forward(texts[row][-3:]).logits, whole[row][-3:], within)


def check_speculates(model: PreTrainedModel, draft: Any, prompt: Tensor) -> None:
    """Inside `generate`, which says the same before and afterwards."""
    asked = {"max_new_tokens": 12, "do_sample": False}
    expected = model.generate(prompt[None], **asked)
    found = model.generate(prompt[None], **asked, custom_generate=speculate, draft=draft)
    assert torch.equal(found, expected)
    assert torch.equal(model.generate(prompt[None], **asked), expected)


def check_folder(model: PreTrainedModel, folder: Path, prompt: Tensor) -> None:
    """Saved, loaded as target and draft, it decodes what `generate` says."""
    expected = model.generate(prompt[None], max_new_tokens=12, do_sample=False)[0, len(prompt) :]
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    pair = open_pair(str(folder), str(folder), dtype="float32")
    engine = SerialEngine(pair, Chain(4), Fixed(4), TokenVerifier(), Warp(0.0), Warp(0.0))
    assert engine.decode(prompt, 12, Sampler.seeded(0)).tokens == expected.tolist()
